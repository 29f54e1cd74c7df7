"""Records of the engine's decisions, and the engine's state computed from them."""
