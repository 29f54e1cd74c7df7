"""Servers under test, servers that are pretended, and what is sent to them."""
