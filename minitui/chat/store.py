"""Chats on disk: one SQLite file under the XDG data directory.

A user's message is saved before its answer is asked for; an answer every second or so while it is written, and when it
ends, however it ends. So a crash loses at most the last second of one answer.

`PRAGMA user_version` is the schema's version; MIGRATIONS[i] takes a file from version i to i + 1.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from minitui.chat.instance_lock import Presence

MIGRATIONS = (
    """
    CREATE TABLE chats (
        id       TEXT PRIMARY KEY,
        title    TEXT NOT NULL,
        system   TEXT NOT NULL,
        parent   TEXT,                -- the chat it was forked from
        settings TEXT NOT NULL,       -- JSON: sampling
        created  REAL NOT NULL,
        closed   REAL                 -- NULL: may come back with `minitui chat --resume`
    );
    CREATE TABLE messages (
        chat     TEXT NOT NULL REFERENCES chats(id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        role     TEXT NOT NULL,       -- user | assistant
        text     TEXT NOT NULL,
        state    TEXT NOT NULL,       -- done | queued | running | cancelled | error
        error    TEXT NOT NULL,
        metrics  TEXT NOT NULL,       -- JSON, as the engine gave them; {} for a user's
        created  REAL NOT NULL,
        PRIMARY KEY (chat, position)
    );
    """,
    # The ids a chat was made of, so that a conversation taken up again is token-exact; only valid for `model`.
    """
    ALTER TABLE chats ADD COLUMN model TEXT NOT NULL DEFAULT '';
    ALTER TABLE chats ADD COLUMN ids BLOB NOT NULL DEFAULT x'';
    """,
    # Which minitui had it open last; as long as that runs, the chat is its own.
    """
    ALTER TABLE chats ADD COLUMN run TEXT NOT NULL DEFAULT '';
    """,
)


BEGIN_S = 5.0  # for others that begin or end at the same moment
PATIENCE_MS = 250  # for another minitui that is just writing: longer would be felt, for whoever saves also draws


def _text(value: Any) -> Any:
    """A value as SQLite takes it: a lone surrogate, as a server's error may hold, is no text."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


class StoreError(EngineError):
    """A chat file that cannot be used, and the way out."""


@dataclass
class StoredMessage:
    """One row of `messages`."""

    role: str
    text: str
    state: str = "done"
    error: str = ""
    metrics: dict[str, Any] | None = None
    created: float = 0.0


@dataclass
class StoredChat:
    """One row of `chats` with its messages in order."""

    id: str
    title: str
    system: str
    parent: str | None
    settings: dict[str, Any]
    created: float
    model: str
    ids: list[int]
    messages: list[StoredMessage]


@dataclass
class Left:
    """What was left open. `others` were, too, but not when a minitui was last used, or there are too many of them;
    `elsewhere` are open in another one, which runs."""

    chats: list[StoredChat]
    others: int
    elsewhere: int


@dataclass
class Found:
    """A chat of the file that fits what was searched for."""

    id: str
    title: str
    created: float
    closed: bool
    parent: str | None
    messages: int
    line: str  # where the words stand, or the last thing said


class Store:
    """The chat file. Every method commits before it returns, but for those called within `together`; a call takes well
    under a millisecond, and raises StoreError when the file cannot be read or written."""

    def __init__(self, path: Path | str) -> None:
        """Open or create the file at `path` (":memory:" for none) and bring its schema up to date.

        Raises StoreError if the file is of a newer minitui or no database.
        """
        self.path = path
        self._presence: Presence | None = None
        end = time.monotonic() + BEGIN_S
        try:
            while not self._begin(last=time.monotonic() > end):
                time.sleep(0.01)
        except sqlite3.Error as error:
            raise StoreError(f"{path} cannot be used as a chat file: {error}. {_way_out(error)}") from None

    def _begin(self, last: bool) -> bool:
        """Open the file; False if another minitui that begins or ends holds it, unless this is the `last` attempt."""
        # Autocommit: one statement, one transaction. WAL: a reader beside us (another minitui) never blocks.
        self._db = sqlite3.connect(self.path, isolation_level=None, timeout=BEGIN_S)
        try:
            self._db.execute("BEGIN IMMEDIATE")  # of two that begin at once the second finds a finished file
            self._migrate()
            self._db.execute("COMMIT")
            self._db.execute("PRAGMA journal_mode = WAL")  # does not wait for a lock, whatever the timeout
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

    @property
    def _here(self) -> Presence | None:
        """This minitui among others; None where the chats are in memory. Whoever only reads need not be known."""
        if self._presence is None and str(self.path) != ":memory:":
            try:
                self._presence = Presence(Path(self.path).parent)
            except OSError as error:
                raise StoreError(f"no file can be made beside the chat file {self.path}: {error.strerror}") from None
        return self._presence

    def _migrate(self) -> None:
        if self.version > len(MIGRATIONS):
            raise StoreError(
                f"{self.path} has schema version {self.version}; this minitui knows up to {len(MIGRATIONS)}: "
                "use a newer one, or set MINITUI_DATA to another directory."
            )
        for number in range(self.version, len(MIGRATIONS)):
            for statement in filter(str.strip, re.sub("--.*", "", MIGRATIONS[number]).split(";")):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {number + 1}")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What is done within is in the file as a whole, or not at all."""
        self._run("BEGIN IMMEDIATE")
        try:
            yield
            self._run("COMMIT")
        finally:
            if self._db.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")

    def _run(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._db.execute(sql, [_text(value) for value in values]).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"the chat file {self.path} cannot be used: {error}") from None

    def save_chat(self, chat: StoredChat) -> None:
        """Insert the chat or bring its row up to date; its messages are saved by `save_message`. It is this minitui's
        from now on: one that was in the file before must be `claim`ed first."""
        self._run(
            "INSERT INTO chats (id, title, system, parent, settings, created, model, ids, run) "
            "VALUES (?,?,?,?,?,?,?,?,?) "
            "ON CONFLICT (id) DO UPDATE SET title=excluded.title, system=excluded.system, settings=excluded.settings, "
            "model=excluded.model, ids=excluded.ids, run=excluded.run, closed=NULL",
            (
                chat.id,
                chat.title,
                chat.system,
                chat.parent,
                json.dumps(chat.settings),
                chat.created or time.time(),
                chat.model,
                array("i", chat.ids).tobytes(),
                self._here.id if self._here else "",
            ),
        )

    def claim(self, chat: str) -> bool:
        """Make a chat this minitui's own; False if another that runs has it open."""
        with self.together():
            rows = self._run("SELECT run FROM chats WHERE id = ? AND closed IS NULL", (chat,))
            if rows and self._here and self._here.runs(rows[0][0]):
                return False
            self._run("UPDATE chats SET run = ? WHERE id = ?", (self._here.id if self._here else "", chat))
        return True

    def save_message(self, chat: str, position: int, message: StoredMessage) -> None:
        """Insert or replace message `position` (0 is the first) of a chat that has been saved."""
        self._run(
            "INSERT OR REPLACE INTO messages VALUES (?,?,?,?,?,?,?,?)",
            (
                chat,
                position,
                message.role,
                message.text,
                message.state,
                message.error,
                json.dumps(message.metrics or {}),
                message.created or time.time(),
            ),
        )

    def truncate(self, chat: str, count: int) -> None:
        """Forget the messages from position `count` on (an answer asked for again)."""
        self._run("DELETE FROM messages WHERE chat = ? AND position >= ?", (chat, count))

    def close_chat(self, chat: str) -> None:
        """Mark a chat as closed: kept, but not restored."""
        self._run("UPDATE chats SET closed = ? WHERE id = ?", (time.time(), chat))

    def open_chats(self) -> list[StoredChat]:
        """The chats that were not closed and hold a message, oldest first, with their messages."""
        return [self._chat(*row[:-1]) for row in self._open()]

    def _open(self) -> list[Any]:
        return self._run(
            "SELECT id, title, system, parent, settings, created, model, ids, run FROM chats "
            "WHERE closed IS NULL AND EXISTS (SELECT 1 FROM messages WHERE chat = chats.id) ORDER BY created, rowid"
        )

    def take_over(self, most: int) -> Left:
        """Claim the chats that were open in the minitui in which something was asked last, the `most` that were used
        last; oldest first."""
        with self.together():
            here, rows = self._here, self._open()
            running = {run for run in {row[-1] for row in rows} if here and here.runs(run)}
            free = [row for row in rows if row[-1] not in running]
            used = dict(self._run("SELECT chat, max(created) FROM messages GROUP BY chat"))
            newest = sorted(free, key=lambda row: used[row[0]], reverse=True)
            left = [row for row in newest if row[-1] == newest[0][-1]][:most]
            for row in left:
                self._run("UPDATE chats SET run = ? WHERE id = ?", (here.id if here else "", row[0]))
        chats = [self._chat(*row[:-1]) for row in free if row in left]
        return Left(chats, len(free) - len(chats), len(rows) - len(free))

    def load(self, id: str) -> StoredChat | None:
        """One chat with its messages, closed or not; an unambiguous beginning of its id will do. None: no such chat."""
        rows = self._run(
            "SELECT id, title, system, parent, settings, created, model, ids FROM chats WHERE id = ?1 "
            "OR (length(?1) > 2 AND substr(id, 1, length(?1)) = ?1) ORDER BY id = ?1 DESC LIMIT 2",
            (id,),
        )
        if not rows or (len(rows) > 1 and rows[0][0] != id):
            return None
        return self._chat(*rows[0])

    def _chat(
        self,
        id: str,
        title: str,
        system: str,
        parent: str | None,
        settings: str,
        created: float,
        model: str,
        ids: bytes,
    ) -> StoredChat:
        """A chat from its row; what is damaged in it, but for what was said, is left out."""
        return StoredChat(id, title, system, parent, _object(settings), created, model, _ids(ids), self._messages(id))

    def search(self, words: str = "", most: int = 200) -> list[Found]:
        """The chats in whose title or messages every word occurs (small and capital letters alike), newest first."""
        wanted = words.split()
        rows = self._run(
            "SELECT id, title, created, closed, parent FROM chats WHERE "
            "EXISTS (SELECT 1 FROM messages WHERE chat = chats.id) ORDER BY created DESC, rowid DESC"
        )
        found: list[Found] = []
        for id, title, created, closed, parent in rows:
            if len(found) == most:
                break
            texts = [text for (text,) in self._run("SELECT text FROM messages WHERE chat = ? ORDER BY position", (id,))]
            said = "\n".join([title, *texts]).lower()  # LIKE knows the capitals of ASCII only
            if all(word.lower() in said for word in wanted):
                found.append(Found(id, title, created, closed is not None, parent, len(texts), _line(texts, wanted)))
        return found

    def _messages(self, chat: str) -> list[StoredMessage]:
        rows = self._run(
            "SELECT role, text, state, error, metrics, created FROM messages WHERE chat = ? ORDER BY position", (chat,)
        )
        return [
            StoredMessage(role, text, state, error, _object(metrics), created)
            for role, text, state, error, metrics, created in rows
        ]

    def close(self) -> None:
        """Close the file; what is open in it may be taken over by others."""
        self._db.close()
        if self._presence is not None:
            self._presence.end()
            self._presence = None


def _way_out(error: sqlite3.Error) -> str:
    """What the user can do about a chat file that cannot be opened."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    elsewhere = "set MINITUI_DATA to another directory"
    return {
        sqlite3.SQLITE_FULL: f"Make room on its disk, or {elsewhere}.",
        sqlite3.SQLITE_IOERR: f"Look whether its disk is full or broken, or {elsewhere}.",
        sqlite3.SQLITE_CANTOPEN: f"Allow writing to its directory, or {elsewhere}.",
        sqlite3.SQLITE_READONLY: f"Allow writing to it and its directory, or {elsewhere}.",
        sqlite3.SQLITE_BUSY: "Another program holds it: try again when that has ended.",
    }.get(code, "Move it away to start afresh.")


def _line(texts: list[str], words: list[str]) -> str:
    """The line in which the first of the words that occurs stands, from a little before it; else the last one said."""
    for word in words:
        for text in texts:
            at = text.lower().find(word.lower())
            if at >= 0:
                begin = max(text.rfind("\n", 0, at) + 1, at - 30)
                cut = "…" if begin and text[begin - 1] != "\n" else ""
                return cut + text[begin:].split("\n")[0].strip()
    return next((line.strip() for text in reversed(texts) for line in text.split("\n") if line.strip()), "")


def _ids(blob: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(blob if len(blob) % ids.itemsize == 0 else b"")
    return ids.tolist()


def _object(text: str) -> dict[str, Any]:
    """A JSON object; empty if the text is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
