"""Saves chats in the chat file, and retries when the file cannot be written."""

from __future__ import annotations

import time
from collections.abc import Callable

from minitui.chat.conversation import Session
from minitui.chat.store import Store, StoredChat, StoredMessage, StoreError

RETRY_S = 5.0


class Saver:
    """Writes chats to `store`; does nothing without one. A failing file does not block: `unsaved` holds the chats that
    it lacks, and they are saved as soon as it can be written again."""

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self.unsaved: dict[str, Session] = {}  # by id
        self.error = ""  # why they are unsaved
        self.on_unsaved: Callable[[str], None] = lambda sentence: None  # called each time that saving starts to fail
        self._retry_at = 0.0

    def save(self, session: Session, last: bool = False, everything: bool = False) -> None:
        """Saves the chat, with its last message or all of them."""
        if self.store is None or not session.messages:
            return
        if self.unsaved:
            self.unsaved[session.id] = session
            if time.monotonic() < self._retry_at:
                return
        try:
            for lacking in list(self.unsaved.values()):
                self._write(self.store, lacking, 0)
                del self.unsaved[lacking.id]
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
        """Tries once more to save what is unsaved."""
        if self.unsaved:
            self._retry_at = 0.0
            self.save(next(iter(self.unsaved.values())))

    def _failed(self, session: Session, error: StoreError) -> None:
        self._retry_at = time.monotonic() + RETRY_S
        self.error, known = str(error), bool(self.unsaved)
        self.unsaved[session.id] = session
        if not known:
            self.on_unsaved(f"{error}. Chats continue, and are saved as soon as possible.")

    def _write(self, store: Store, session: Session, first: int) -> None:
        """Writes the chat and its messages from `first` on; from 0, it also deletes messages that are no more."""
        with store.together():
            store.save_chat(
                StoredChat(
                    session.id, session.title, session.system, session.parent, dict(vars(session.sampling)),
                    session.created, session.spelled_by, session.ids, [],
                )
            )  # fmt: skip
            for position, m in list(enumerate(session.messages))[first:]:
                store.save_message(
                    session.id, position, StoredMessage(m.role, m.text, m.state, m.error, m.metrics, m.created)
                )
            if first == 0:
                store.truncate(session.id, len(session.messages))
            if session.closed:
                store.close_chat(session.id)
