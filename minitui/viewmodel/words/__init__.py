"""What the panels, `minitui tail` and the exports say, in sentences."""
