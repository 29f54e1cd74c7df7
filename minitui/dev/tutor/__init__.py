"""Trains and evaluates the bundled model; its corpus."""
