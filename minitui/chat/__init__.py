"""Chats without a terminal: conversations, prompts, answers, and the chat file."""
