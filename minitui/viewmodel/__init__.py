"""What the panels show, folded from the engine's records. No Textual."""
