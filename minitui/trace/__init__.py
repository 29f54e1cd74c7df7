"""Traces: the file format, reading and checking it, writing it, and the bundled recordings."""
