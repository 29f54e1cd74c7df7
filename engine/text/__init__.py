"""Stages 1 and 7: text to token ids and back, chat templates, and grammars."""
