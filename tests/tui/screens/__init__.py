"""Whole screens and applications, driven as a user drives them."""
