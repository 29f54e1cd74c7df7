"""Scheduling, on the host: requests, blocks, the prefix tree and the step. It never imports torch."""
