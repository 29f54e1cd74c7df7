"""Traces: the file format, reading and checking it, writing it, and the recordings that come along."""
