"""Paged attention: the interface, its backends, and the tensors of the KV cache."""
