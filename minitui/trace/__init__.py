"""Trace files: their format, how they are read, checked and written, and the bundled recordings."""
