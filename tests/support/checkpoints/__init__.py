"""Checkpoints, quantised files and templates that tests write."""
