"""Finds out which minitui processes are running: each holds a lock on its own file beside the chat file.

The kernel releases the lock when the process ends, also after a crash. A process id would be less safe: it can be
reused, and is unknown in another container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from pathlib import Path

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
