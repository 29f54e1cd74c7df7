"""The folder of kept weights (kept_weights.py): its place, its files, its largest size. Needs no torch.

The name of a file contains a hash of what its weights depend on: the files of the checkpoint (path, size, time of
change), the model, the kind of weights.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from pathlib import Path

from engine.errors import EngineError
from engine.files import checkpoint_files
from engine.model.config import ModelConfig

LIMIT = "MINITUI_KEPT_WEIGHTS_GB"  # the variable for the size of all files together; 0: keep none
DEFAULT_GB = 20.0
KINDS = ("int8", "int4")  # of engine/worker/quantised.py; other weights are read as quickly from the checkpoint
REVISION = 2  # increases when the parameters of a decoder, their order or their contents change
SUFFIX, UNFINISHED = ".weights", ".unfinished"
ABANDONED_S = 3600  # an unfinished file of this age belongs to a process that has ended


def directory() -> Path:
    """Returns the directory of the files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minitui" / "weights"


def file_of(name: str, checkpoint: Path, model: ModelConfig, kind: str) -> Path:
    """Returns the file for a checkpoint's weights of this kind. `name`: of the model, to be read by people."""
    resolved = [path.resolve() for path in checkpoint_files(checkpoint)]
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in resolved]
    key = hashlib.sha256(repr((REVISION, files, model, kind)).encode()).hexdigest()[:24]
    label = re.sub(r"[^A-Za-z0-9.]+", "-", Path(name).name)[:64]
    return directory() / f"{label}-{kind}-{key}{SUFFIX}"


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
