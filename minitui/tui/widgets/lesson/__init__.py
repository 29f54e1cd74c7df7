"""The panels of the lessons, and their text."""
