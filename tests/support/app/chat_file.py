"""The chat file as a test reads it."""

from __future__ import annotations

from minitui.chat.conversation import Session
from minitui.chat.store import Store


def open_chats(store: Store) -> list[Session]:
    """The chats that were not closed and have a message, oldest first."""
    chats = [store.load(found.id) for found in reversed(store.search()) if not found.closed]
    return [chat for chat in chats if chat is not None]
