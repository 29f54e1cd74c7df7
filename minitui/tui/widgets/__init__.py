"""The panels and bars of the screens. Each paints rows of styled text."""
