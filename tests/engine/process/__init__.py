"""The engine's process, and its files on disk."""
