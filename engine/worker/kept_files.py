"""The folder of kept weights (kept_weights.py): its place, its largest size, what is removed. Needs no torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

from engine.errors import EngineError

LIMIT = "MINITUI_KEPT_WEIGHTS_GB"  # the variable for the size of all files together; 0: keep none
DEFAULT_GB = 20.0
SUFFIX, UNFINISHED = ".weights", ".unfinished"
ABANDONED_S = 3600  # an unfinished file of this age belongs to a process that has ended


def directory() -> Path:
    """Returns the directory of the files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minitui" / "weights"


def kept_files() -> list[Path]:
    """Returns the files, the one that was used last at the end."""
    return sorted(directory().glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)


def limit_bytes() -> int:
    """Returns how many bytes the files may have together. Raises EngineError."""
    text = os.environ.get(LIMIT, "")
    try:
        limit = float(text) if text else DEFAULT_GB
        if not 0 <= limit < 1e6:
            raise ValueError
    except ValueError:
        raise EngineError(f"{LIMIT} is {text!r}: it must be a number of gigabytes; 0 keeps no weights") from None
    return round(limit * 1e9)


def make_room(folder: Path, room: int, path: Path) -> None:
    """Remove abandoned files, `path`, and as many of the files that were used longest ago as exceed `room` bytes."""
    for unfinished in folder.glob(f"*{UNFINISHED}"):
        if time.time() - unfinished.stat().st_mtime > ABANDONED_S:
            unfinished.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    files = kept_files()
    total = sum(file.stat().st_size for file in files)
    for file in files:
        if total <= room:
            break
        total -= file.stat().st_size
        file.unlink(missing_ok=True)


def forget() -> int:
    """Remove all files; return how many there were."""
    files = kept_files()
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)
