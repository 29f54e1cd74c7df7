"""What the application attaches to: an engine here, a server, several servers, a recording."""
