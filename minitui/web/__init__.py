"""The application in a browser: one for each tab, or one that many viewers watch."""
