"""`minitui bench --url`: sends requests to an OpenAI-compatible server and measures its answers."""
