"""The panels and bars of the screens, each of which paints rows of styled text."""
