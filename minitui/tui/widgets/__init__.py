"""The panels and bars of the screens. Each panel or bar paints rows of styled text."""
