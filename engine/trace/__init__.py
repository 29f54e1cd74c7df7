"""Records of the engine's decisions, and its state folded from them."""
