"""The engine in its own process: the server in it, the client outside, and the processes of other ranks."""
