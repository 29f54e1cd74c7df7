"""Saves chats in the chat file, and retries when the file cannot be written."""

from __future__ import annotations

import time
from collections.abc import Callable

from minitui.chat.chat_file import StoreError
from minitui.chat.conversation import Session
from minitui.chat.store import Store

RETRY_S = 5.0


class Saver:
    """Writes chats to `store`; does nothing if `store` is None. If the file cannot be written, `unsaved` keeps
    the chats until a later attempt succeeds."""

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self.unsaved: dict[str, Session] = {}  # by id
        self.error = ""  # the reason why chats could not be saved
        self.on_unsaved: Callable[[str], None] = lambda sentence: None  # called once, not at failed retries
        self._retry_at = 0.0

    def save(self, session: Session, last: bool = False, everything: bool = False) -> None:
        """Saves the chat's row; with `last` also its last message, with `everything` all its messages."""
        if self.store is None or not session.messages:
            return
        if self.unsaved:
            self.unsaved[session.id] = session
            if time.monotonic() < self._retry_at:
                return
        try:
            for waiting in list(self.unsaved.values()):
                self._write(self.store, waiting, 0)
                del self.unsaved[waiting.id]
            self._write(self.store, session, 0 if everything else len(session.messages) - (1 if last else 0))
        except StoreError as error:
            self._failed(session, error)

    def close_chat(self, session: Session) -> None:
        """Marks the chat as closed in the file."""
        if self.store is None or not session.messages:  # empty chats are not in the file
            return
        session.closed = True
        try:
            self.store.close_chat(session.id)
        except StoreError as error:
            self._failed(session, error)

    def retry_now(self) -> None:
        """Tries to save the unsaved chats at once, even if RETRY_S has not passed."""
        if self.unsaved:
            self._retry_at = 0.0
            self.save(next(iter(self.unsaved.values())))

    def _failed(self, session: Session, error: StoreError) -> None:
        self._retry_at = time.monotonic() + RETRY_S
        self.error, failing = str(error), bool(self.unsaved)
        self.unsaved[session.id] = session
        if not failing:
            self.on_unsaved(f"{error}. Chats continue, and are saved as soon as possible.")

    def _write(self, store: Store, session: Session, first: int) -> None:
        """Writes the chat and its messages from position `first` on. If `first` is 0, also deletes removed messages."""
        with store.file.together():
            store.save_chat(session)
            for position, message in list(enumerate(session.messages))[first:]:
                store.save_message(session.id, position, message)
            if first == 0:
                store.truncate(session.id, len(session.messages))
            if session.closed:
                store.close_chat(session.id)
