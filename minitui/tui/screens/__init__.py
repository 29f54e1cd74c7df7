"""The screens and dialogs of the application."""
