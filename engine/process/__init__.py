"""The engine in a process of its own: the server in it, the client outside, the processes of ranks."""
