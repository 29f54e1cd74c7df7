"""Scheduling, on the host: requests, blocks, the prefix tree and the step. This package never imports torch."""
