"""Chats, independent of the terminal: conversations, prompts, answers, and the chat file."""
