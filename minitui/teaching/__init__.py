"""Demos and lessons: a small engine, a script that drives it, and what is said meanwhile."""
