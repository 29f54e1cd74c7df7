"""Families, checkpoints and weights."""
