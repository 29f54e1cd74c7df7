"""Recordings, simulated loads, and views and panels over them."""
