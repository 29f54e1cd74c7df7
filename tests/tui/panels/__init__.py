"""What single panels draw, compared with the view."""
