"""The chat file: one SQLite database in the data directory. A question is saved before it is sent. An answer is saved
about once a second while tokens arrive, and when it ends. A crash loses about a second of each answer."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import sqlite3
import time
import uuid
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from minitui.chat.conversation import Message, Sampling, Session
from minitui.chat.describe import describe_answer

# `PRAGMA user_version` is the schema's version. MIGRATIONS[i] updates a file from version i to i + 1.
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
    # The minitui process that opened the chat last (Presence). While that process runs, no other process may
    # write to the chat.
    """
    ALTER TABLE chats ADD COLUMN run TEXT NOT NULL DEFAULT '';
    """,
)

# What is read of the tables. SQLite keeps any type in any column: the casts are for a file that was edited by hand.
WHEN = "min(max(CAST(created AS REAL), 0.0), 253370764800.0)"  # up to the year 9999
CHAT = (
    "id, CAST(title AS TEXT), CAST(system AS TEXT), CAST(parent AS TEXT), CAST(settings AS TEXT), "
    f"{WHEN}, CAST(model AS TEXT), CAST(ids AS BLOB)"
)
MESSAGE = (
    "CAST(role AS TEXT), CAST(text AS TEXT), CAST(state AS TEXT), CAST(error AS TEXT), CAST(metrics AS TEXT), " + WHEN
)
OPEN_S = 5.0  # longest wait while other processes open or close the file
PATIENCE_MS = 250  # longest wait while another process writes; saving blocks drawing, so a longer wait is visible


class StoreError(EngineError):
    """The chat file cannot be used; the message says what to do."""


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


YOUNG_S = 60.0  # younger files are kept: their process may not have locked them yet


class Presence:
    """The lock of this process, held until `end`. `id` identifies the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.id = uuid.uuid4().hex[:12]
        self._tidy()
        self._path = self._file_of(self.id)
        self._held = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        with contextlib.suppress(OSError):  # without locks in the file system, no process counts as running
            fcntl.flock(self._held, fcntl.LOCK_EX)

    def _file_of(self, id: str) -> Path:
        return self._folder / f"open-{id}.lock"

    def runs(self, id: str) -> bool:
        """Returns True if another minitui process with this id is running."""
        return id != self.id and bool(id) and _is_held(self._file_of(id))

    def _tidy(self) -> None:
        """Deletes the files of crashed processes."""
        for path in self._folder.glob("open-*.lock"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > YOUNG_S and not _is_held(path):
                    path.unlink()

    def end(self) -> None:
        """Deletes the file and releases the lock."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._held)


def _is_held(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)


@dataclass
class Reopened:
    """The reopened chats, and how many other chats are not closed."""

    chats: list[Session]
    others: int  # other chats that are not open in another minitui
    elsewhere: int  # other chats that are open in another minitui


@dataclass
class Found:
    """A chat that matches a search."""

    id: str
    title: str
    created: float
    closed: bool
    parent: str | None
    messages: int
    line: str  # a line that contains one of the words; else the last line


class Store:
    """The chat file. Every method commits before it returns (except within `together`), and raises StoreError if
    the file cannot be read or written. Saving takes well under a millisecond."""

    def __init__(self, path: Path | str) -> None:
        """Opens or creates the file at `path` and updates its schema. ":memory:" uses memory instead of a file. Raises
        StoreError if the file is from a newer minitui or is not a database."""
        self.path = path
        self._presence: Presence | None = None
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

    @property
    def _own_lock(self) -> Presence | None:
        """The lock of this process, taken at the first use: pure readers need no lock. None for ":memory:"."""
        if self._presence is None and str(self.path) != ":memory:":
            try:
                self._presence = Presence(Path(self.path).parent)
            except OSError as error:
                raise StoreError(f"no file can be created beside the chat file {self.path}: {error.strerror}") from None
        return self._presence

    def save_chat(self, chat: Session) -> None:
        """Inserts or updates the chat's row, without its messages. The chat then belongs to this process: `claim` an
        existing chat first."""
        self.run(
            "INSERT INTO chats (id, title, system, parent, settings, created, model, ids, run) "
            "VALUES (?,?,?,?,?,?,?,?,?) "
            "ON CONFLICT (id) DO UPDATE SET title=excluded.title, system=excluded.system, settings=excluded.settings, "
            "model=excluded.model, ids=excluded.ids, run=excluded.run, closed=NULL",
            (
                chat.id, chat.title, chat.system, chat.parent, json.dumps(vars(chat.sampling)), chat.created,
                chat.ids_model, array("i", chat.ids).tobytes(), self._own_lock.id if self._own_lock else "",
            ),
        )

    def claim(self, chat: str) -> bool:
        """Makes the chat belong to this process; returns False if it is open in another minitui."""
        with self.together():
            rows = self.run("SELECT run FROM chats WHERE id = ? AND closed IS NULL", (chat,))
            if rows and self._own_lock and self._own_lock.runs(rows[0][0]):
                return False
            self.run("UPDATE chats SET run = ? WHERE id = ?", (self._own_lock.id if self._own_lock else "", chat))
        return True

    def save_message(self, chat: str, position: int, message: Message) -> None:
        """Inserts or replaces message `position` (from 0) of a saved chat."""
        self.run(
            "INSERT OR REPLACE INTO messages VALUES (?,?,?,?,?,?,?,?)",
            (
                chat, position, message.role, message.text, message.state, message.error,
                json.dumps(message.metrics), message.created,
            ),
        )

    def truncate(self, chat: str, count: int) -> None:
        """Keeps the first `count` messages and deletes the others."""
        self.run("DELETE FROM messages WHERE chat = ? AND position >= ?", (chat, count))

    def close_chat(self, chat: str) -> None:
        """Marks a chat as closed: it stays in the file, but `take_over` leaves it out."""
        self.run("UPDATE chats SET closed = ? WHERE id = ?", (time.time(), chat))

    def take_over(self, most: int) -> Reopened:
        """Claims the chats that an ended minitui process left open, at most `most`; returns them, the oldest first. If
        several processes have ended, takes the chats of the process that saved the newest message."""
        with self.together():
            own = self._own_lock
            rows = self.run(
                f"SELECT {CHAT}, CAST(run AS TEXT) FROM chats "
                "WHERE closed IS NULL AND EXISTS (SELECT 1 FROM messages WHERE chat = chats.id) ORDER BY created, rowid"
            )
            running = {run for run in {row[-1] for row in rows} if own and own.runs(run)}  # ids of running processes
            free = [row for row in rows if row[-1] not in running]
            used = dict(self.run(f"SELECT chat, max({WHEN}) FROM messages GROUP BY chat"))
            newest = sorted(free, key=lambda row: used[row[0]], reverse=True)
            chosen = [row for row in newest if row[-1] == newest[0][-1]][:most]
            for row in chosen:
                self.run("UPDATE chats SET run = ? WHERE id = ?", (own.id if own else "", row[0]))
        chats = [self._chat(*row[:-1]) for row in free if row in chosen]
        return Reopened(chats, len(free) - len(chats), len(rows) - len(free))

    def load(self, id: str) -> Session | None:
        """Returns the chat with this id, or the only chat whose id begins with `id` (3 characters or more). Returns
        None if there is no such chat, or more than one."""
        rows = self.run(
            f"SELECT {CHAT} FROM chats WHERE id = ?1 "
            "OR (length(?1) > 2 AND substr(id, 1, length(?1)) = ?1) ORDER BY id = ?1 DESC LIMIT 2",
            (id,),
        )
        if not rows or (len(rows) > 1 and rows[0][0] != id):
            return None
        return self._chat(*rows[0])

    def _chat(
        self, id: str, title: str, system: str, parent: str | None, settings: str, created: float, model: str,
        ids: bytes,
    ) -> Session:
        """Returns the chat of a row with its messages; leaves out damaged settings, metrics and ids."""
        known = {name: value for name, value in _object(settings).items() if name in Sampling.__dataclass_fields__}
        rows = self.run(
            f"SELECT {MESSAGE} FROM messages WHERE chat = ? ORDER BY position", (id,)
        )
        messages = [
            _readable(Message(role, text, state, error, _object(metrics), created))
            for role, text, state, error, metrics, created in rows
        ]
        return Session(
            id, title, system, Sampling(**known), messages, _ids(ids), model, parent, named=True, created=created
        )

    def search(self, words: str = "", most: int = 200) -> list[Found]:
        """Returns the chats whose title or messages contain every word, in upper or lower case; newest first."""
        wanted = words.split()
        rows = self.run(
            f"SELECT id, CAST(title AS TEXT), {WHEN}, closed, CAST(parent AS TEXT) FROM chats WHERE "
            "EXISTS (SELECT 1 FROM messages WHERE chat = chats.id) ORDER BY created DESC, rowid DESC"
        )
        found: list[Found] = []
        for id, title, created, closed, parent in rows:
            if len(found) == most:
                break
            said = self.run("SELECT CAST(text AS TEXT) FROM messages WHERE chat = ? ORDER BY position", (id,))
            texts = [text for (text,) in said]
            searched = "\n".join([title, *texts]).lower()  # not in SQL: LIKE ignores case only in ASCII
            if all(word.lower() in searched for word in wanted):
                found.append(Found(id, title, created, closed is not None, parent, len(texts), _line(texts, wanted)))
        return found

    def close(self) -> None:
        """Closes the file and releases its open chats to other processes."""
        self._db.close()
        if self._presence is not None:
            self._presence.end()
            self._presence = None


def _line(texts: list[str], words: list[str]) -> str:
    """Returns a line that contains one of the words, cut to begin shortly before the word; else the last line."""
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


def _readable(message: Message) -> Message:
    """Returns the message without its metrics if the line under an answer cannot be made of them."""
    try:
        describe_answer(message)
        if replica := message.metrics.get("replica"):
            str.encode(replica["url"])
    except (AttributeError, KeyError, TypeError, ValueError):
        message.metrics = {}
    return message


def _object(text: str) -> dict[str, Any]:
    """Returns the JSON object in `text`; {} if `text` is not a JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
