"""Reads a config.json of Hugging Face, as transformers 5 does, into a ModelConfig."""
