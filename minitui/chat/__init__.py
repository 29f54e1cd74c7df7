"""Conversations, without a terminal: sessions, their prompts, and the file that keeps them."""
