"""The engine in its own process: the server inside it, the client outside it, and the processes of other ranks."""
