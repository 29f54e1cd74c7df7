"""The sources of the application's data: an engine process, a server, several servers, or a recording."""
