"""What the engine records of its decisions, and its state folded from those records."""
