"""Reads models in GGUF, the format of llama.cpp: a file becomes a checkpoint directory, which is kept for later starts.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""
