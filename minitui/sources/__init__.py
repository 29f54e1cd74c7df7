"""Where the application gets its data: an engine process, a server, several servers or a recording."""
