"""Two runs side by side: their figures, and the differences between them."""
