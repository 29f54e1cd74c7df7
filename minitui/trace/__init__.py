"""Traces: their file format, reading, checking and writing them, and the bundled recordings."""
