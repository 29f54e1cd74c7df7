"""The chat file: one SQLite database in the data directory.

A question is saved before it is sent. An answer is saved about once a second while tokens arrive, and when it ends. A
crash loses about a second of each answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minitui.chat.chat_file import ChatFile, StoreError
from minitui.chat.conversation import Message, Sampling, Session

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
    """The chat file. Every method commits before it returns (except within `file.together`), and raises StoreError if
    the file cannot be read or written. Saving takes well under a millisecond."""

    def __init__(self, path: Path | str) -> None:
        """Opens or creates the file at `path` and updates its schema. ":memory:" uses memory instead of a file.

        Raises StoreError if the file is from a newer minitui or is not a database.
        """
        self.path = path
        self.file = ChatFile(path)
        self._presence: Presence | None = None

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
        self.file.run(
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
        with self.file.together():
            rows = self.file.run("SELECT run FROM chats WHERE id = ? AND closed IS NULL", (chat,))
            if rows and self._own_lock and self._own_lock.runs(rows[0][0]):
                return False
            self.file.run("UPDATE chats SET run = ? WHERE id = ?", (self._own_lock.id if self._own_lock else "", chat))
        return True

    def save_message(self, chat: str, position: int, message: Message) -> None:
        """Inserts or replaces message `position` (from 0) of a saved chat."""
        self.file.run(
            "INSERT OR REPLACE INTO messages VALUES (?,?,?,?,?,?,?,?)",
            (
                chat, position, message.role, message.text, message.state, message.error,
                json.dumps(message.metrics), message.created,
            ),
        )

    def truncate(self, chat: str, count: int) -> None:
        """Keeps the first `count` messages and deletes the others."""
        self.file.run("DELETE FROM messages WHERE chat = ? AND position >= ?", (chat, count))

    def close_chat(self, chat: str) -> None:
        """Marks a chat as closed: it stays in the file, but `take_over` leaves it out."""
        self.file.run("UPDATE chats SET closed = ? WHERE id = ?", (time.time(), chat))

    def take_over(self, most: int) -> Reopened:
        """Claims the chats that an ended minitui process left open, at most `most`; returns them, the oldest first.

        If several processes have ended, takes the chats of the process that saved the newest message.
        """
        with self.file.together():
            own = self._own_lock
            rows = self.file.run(
                "SELECT id, title, system, parent, settings, created, model, ids, run FROM chats "
                "WHERE closed IS NULL AND EXISTS (SELECT 1 FROM messages WHERE chat = chats.id) ORDER BY created, rowid"
            )
            running = {run for run in {row[-1] for row in rows} if own and own.runs(run)}  # ids of running processes
            free = [row for row in rows if row[-1] not in running]
            used = dict(self.file.run("SELECT chat, max(created) FROM messages GROUP BY chat"))
            newest = sorted(free, key=lambda row: used[row[0]], reverse=True)
            chosen = [row for row in newest if row[-1] == newest[0][-1]][:most]
            for row in chosen:
                self.file.run("UPDATE chats SET run = ? WHERE id = ?", (own.id if own else "", row[0]))
        chats = [self._chat(*row[:-1]) for row in free if row in chosen]
        return Reopened(chats, len(free) - len(chats), len(rows) - len(free))

    def load(self, id: str) -> Session | None:
        """Returns the chat with this id, or the only chat whose id begins with `id` (3 characters or more).

        Returns None if there is no such chat, or more than one.
        """
        rows = self.file.run(
            "SELECT id, title, system, parent, settings, created, model, ids FROM chats WHERE id = ?1 "
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
        rows = self.file.run(
            "SELECT role, text, state, error, metrics, created FROM messages WHERE chat = ? ORDER BY position", (id,)
        )
        messages = [
            Message(role, text, state, error, _object(metrics), created)
            for role, text, state, error, metrics, created in rows
        ]
        return Session(
            id, title, system, Sampling(**known), messages, _ids(ids), model, parent, named=True, created=created
        )

    def search(self, words: str = "", most: int = 200) -> list[Found]:
        """Returns the chats whose title or messages contain every word, in upper or lower case; newest first."""
        wanted = words.split()
        rows = self.file.run(
            "SELECT id, title, created, closed, parent FROM chats WHERE "
            "EXISTS (SELECT 1 FROM messages WHERE chat = chats.id) ORDER BY created DESC, rowid DESC"
        )
        found: list[Found] = []
        for id, title, created, closed, parent in rows:
            if len(found) == most:
                break
            said = self.file.run("SELECT text FROM messages WHERE chat = ? ORDER BY position", (id,))
            texts = [text for (text,) in said]
            searched = "\n".join([title, *texts]).lower()  # not in SQL: LIKE ignores case only in ASCII
            if all(word.lower() in searched for word in wanted):
                found.append(Found(id, title, created, closed is not None, parent, len(texts), _line(texts, wanted)))
        return found

    def close(self) -> None:
        """Closes the file and releases its open chats to other processes."""
        self.file.close()
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


def _object(text: str) -> dict[str, Any]:
    """Returns the JSON object in `text`; {} if `text` is not a JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
