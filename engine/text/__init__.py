"""Stages 1 and 6: text to token ids and back, chat templates, and grammars."""
