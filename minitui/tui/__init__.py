"""The terminal application: all modules that need Textual."""
