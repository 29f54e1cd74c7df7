"""Known bugs, kept as patches: each must turn a test red. `python -m tests.mutations` tries them all."""
