"""Which minitui runs now. Each holds a lock on a file of its own beside the chat file for as long as it lives.

The system gives a lock back however its holder ends, and knows nothing of it after a restart; a process id would have
to be taken on trust, and means nothing in another container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from pathlib import Path

YOUNG_S = 60.0  # a file may be made and not locked yet: only older ones are tidied away


class Presence:
    """This minitui, for the others: `id` names it, until `end`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.id = uuid.uuid4().hex[:12]
        self._tidy()
        self._path = self._file_of(self.id)
        self._held = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody is known to run
            fcntl.flock(self._held, fcntl.LOCK_EX)

    def _file_of(self, id: str) -> Path:
        return self._folder / f"open-{id}.lock"

    def runs(self, id: str) -> bool:
        """Is the minitui of this id, another than this, running?"""
        return id != self.id and bool(id) and _is_held(self._file_of(id))

    def _tidy(self) -> None:
        """Take away what those who crashed have left."""
        for path in self._folder.glob("open-*.lock"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > YOUNG_S and not _is_held(path):
                    path.unlink()

    def end(self) -> None:
        """It runs no longer."""
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
