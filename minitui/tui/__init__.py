"""The application: everything that needs Textual."""
