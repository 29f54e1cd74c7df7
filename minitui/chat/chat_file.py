"""The SQLite file of the chats: opens it, updates its schema, runs statements.

`PRAGMA user_version` is the schema's version. MIGRATIONS[i] updates a file from version i to i + 1.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.errors import EngineError

MIGRATIONS = (
    """
    CREATE TABLE chats (
        id       TEXT PRIMARY KEY,
        title    TEXT NOT NULL,
        system   TEXT NOT NULL,
        parent   TEXT,                -- id of the chat that this one was forked from
        settings TEXT NOT NULL,       -- JSON: sampling
        created  REAL NOT NULL,
        closed   REAL                 -- time of closing; NULL: `minitui chat --resume` may reopen the chat
    );
    CREATE TABLE messages (
        chat     TEXT NOT NULL REFERENCES chats(id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        role     TEXT NOT NULL,       -- user | assistant
        text     TEXT NOT NULL,
        state    TEXT NOT NULL,       -- done | queued | running | cancelled | error
        error    TEXT NOT NULL,
        metrics  TEXT NOT NULL,       -- JSON from the engine; {} for a question
        created  REAL NOT NULL,
        PRIMARY KEY (chat, position)
    );
    """,
    # The token ids of a chat: a reopened chat continues with exactly these ids. They are valid for `model` only.
    """
    ALTER TABLE chats ADD COLUMN model TEXT NOT NULL DEFAULT '';
    ALTER TABLE chats ADD COLUMN ids BLOB NOT NULL DEFAULT x'';
    """,
    # The minitui process that opened the chat last (instance_lock.py). While that process runs, no other process may
    # write to the chat.
    """
    ALTER TABLE chats ADD COLUMN run TEXT NOT NULL DEFAULT '';
    """,
)

OPEN_S = 5.0  # longest wait while other processes open or close the file
PATIENCE_MS = 250  # longest wait while another process writes; saving blocks drawing, so a longer wait is visible


class StoreError(EngineError):
    """The chat file cannot be used; the message says what to do."""


class ChatFile:
    """An open chat file. Every statement is committed at once (except within `together`)."""

    def __init__(self, path: Path | str) -> None:
        """Opens or creates the file at `path` and updates its schema. ":memory:" uses memory instead of a file.

        Raises StoreError if the file is from a newer minitui or is not a database.
        """
        self.path = path
        end = time.monotonic() + OPEN_S
        try:
            while not self._open_file(last=time.monotonic() > end):
                time.sleep(0.01)
        except sqlite3.Error as error:
            raise StoreError(f"{path} cannot be used as a chat file: {error}. {_advice(error)}") from None

    def _open_file(self, last: bool) -> bool:
        """Opens the file. If another process has locked it, returns False, or raises on the `last` attempt."""
        # isolation_level=None: each statement is a transaction. WAL: readers in other processes do not block writers.
        self._db = sqlite3.connect(self.path, isolation_level=None, timeout=OPEN_S)
        try:
            self._db.execute("BEGIN IMMEDIATE")  # so that only one process creates the tables
            self._migrate()
            self._db.execute("COMMIT")
            self._db.execute("PRAGMA journal_mode = WAL")  # fails at once if the file is locked: it ignores the timeout
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.execute(f"PRAGMA busy_timeout = {PATIENCE_MS}")
            return True
        except sqlite3.Error as error:
            self._db.close()
            if last or getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            return False

    @property
    def version(self) -> int:
        """The schema's version, as written in the file."""
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def _migrate(self) -> None:
        if self.version > len(MIGRATIONS):
            raise StoreError(
                f"{self.path} has schema version {self.version}; this minitui supports up to {len(MIGRATIONS)}: "
                "update minitui, or set MINITUI_DATA to another directory."
            )
        for number in range(self.version, len(MIGRATIONS)):
            for statement in filter(str.strip, re.sub("--.*", "", MIGRATIONS[number]).split(";")):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {number + 1}")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Runs the statements of the block as one transaction: all are committed, or none."""
        self.run("BEGIN IMMEDIATE")
        try:
            yield
            self.run("COMMIT")
        finally:
            if self._db.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """Runs one statement; returns its rows."""
        try:
            return self._db.execute(sql, [_text(value) for value in values]).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"the chat file {self.path} cannot be used: {error}") from None

    def close(self) -> None:
        self._db.close()


def _text(value: Any) -> Any:
    """Returns a value that SQLite accepts. In text, "?" replaces lone surrogates: a server's error may contain them."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _advice(error: sqlite3.Error) -> str:
    """Returns a sentence that says what the user can do if the chat file cannot be opened."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    elsewhere = "set MINITUI_DATA to another directory"
    return {
        sqlite3.SQLITE_FULL: f"Free space on its disk, or {elsewhere}.",
        sqlite3.SQLITE_IOERR: f"Check whether its disk is full or broken, or {elsewhere}.",
        sqlite3.SQLITE_CANTOPEN: f"Make its directory writable, or {elsewhere}.",
        sqlite3.SQLITE_READONLY: f"Make the file and its directory writable, or {elsewhere}.",
        sqlite3.SQLITE_BUSY: "Another program has locked it: try again when that program has ended.",
    }.get(code, "Move this file away to start with an empty one.")
