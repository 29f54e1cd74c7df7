"""Keys, commands and the mouse: what reaches which action."""
