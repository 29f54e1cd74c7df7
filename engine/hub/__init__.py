"""Finds a model's files: in a directory, in the local Hugging Face cache, or on the hub, with a download."""
