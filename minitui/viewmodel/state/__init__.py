"""The engine's state as a view keeps it: annotated, at any moment, and the tree in display order."""
