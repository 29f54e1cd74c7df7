"""Kernels compiled for other cards or run by an interpreter, and ranks as threads."""
