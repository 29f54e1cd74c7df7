"""What a user types: one module for each command, or for a few that belong together."""
