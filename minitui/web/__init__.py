"""The application in a browser: a tab for each viewer, or one application that many watch."""
