"""Attention and the kernels, on a CPU, in an interpreter, or only compiled."""
