"""Panels about servers: several replicas, and servers that are no minitui."""
