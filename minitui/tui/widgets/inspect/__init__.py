"""The panels of the inspect screen."""
