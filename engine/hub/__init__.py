"""Finds a model's files in a directory or in the local Hugging Face cache, or downloads them from the hub."""
