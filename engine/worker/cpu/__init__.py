"""Steps on a CPU."""
