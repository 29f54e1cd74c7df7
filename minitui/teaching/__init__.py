"""Demos and lessons: scripts that drive a small engine and explain what it does."""
