"""What lies below the screens: the terminal itself, and Textual's insides."""
