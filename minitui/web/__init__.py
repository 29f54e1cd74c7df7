"""The application in a browser: one application for each tab, or one application that many viewers watch."""
