"""Keeps on disk what takes long to make: unpacked GGUF files, rounded weights, machine code.

    ~/.cache/minitui/<cache>/<entry>/   the files of an entry, and ENTRY: size, digest and stamp of each file

The name of an entry contains a hash of all that its contents depend on, so an entry never changes. It is written beside
its place, forced to the disk and renamed; of two writers the second takes the entry of the first. Each use compares the
files with ENTRY. An entry that differs is removed, and its owner makes it again.

A digest reads at 1 to 2 GB/s and core: 4 s for the 8 GB of an 8B model on two cores. So a file of SMALL bytes or more
is read for its digest only if its stamp has changed, as in git's index. The stamp (inode, size, times of change) shows
each write by a program; a bit that the disk itself loses is only found in smaller files, such as machine code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import EngineError

ENTRY = "entry.json"
PIECE = 4 << 20  # bytes that a thread reads at once
SMALL = 64 << 20  # bytes; smaller files are read for their digest at each use
UNFINISHED, REMOVED = ".unfinished-", ".removed-"  # the beginnings of names of folders that are no entries
ABANDONED_S = 3600  # an unfinished entry to which nothing was written for so long belongs to a process that has ended
IN_USE_S = 600  # an engine that starts may read an entry for so long after it found it
MOST_TRIES = 10  # of writers that take turns with others that remove
WRITABLE_BY_OTHERS = 0o022


class Damaged(Exception):
    """An entry was not what had been written. It is removed."""


@dataclass(frozen=True)
class Cache:
    """The entries of one kind."""

    name: str
    gigabytes: float  # of all entries together
    variable: str = ""  # an environment variable that replaces `gigabytes`
    private: bool = False  # its contents are executed: nothing is used if another user may write to the folder
    needed: bool = False  # an engine cannot start without its entry: the limit is only for the other entries

    @property
    def folder(self) -> Path:
        """Raises FileNotFoundError if this user has no home."""
        try:
            return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minitui" / self.name
        except RuntimeError as error:
            raise FileNotFoundError(errno.ENOENT, str(error)) from None

    def entry_name(self, label: str, *contents: Any) -> str:
        """Returns the name of an entry. `label`: for people; `contents`: all that the contents depend on."""
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", label)[:64].lstrip(".")
        return f"{readable}-{hashlib.sha256(repr(contents).encode()).hexdigest()[:24]}"

    def limit(self) -> int:
        """Returns how many bytes the entries may have together; 0: nothing is kept. Raises EngineError."""
        text = os.environ.get(self.variable, "") if self.variable else ""
        try:
            limit = float(text) if text else self.gigabytes
            if not 0 <= limit < 1e6:
                raise ValueError
        except ValueError:
            raise EngineError(f"{self.variable} is {text!r}: it must be a number of gigabytes; 0 keeps none") from None
        return round(limit * 1e9)

    def entries(self) -> list[Path]:
        """Returns the entries, the one that was used last at the end."""
        with suppress(OSError):
            found = [(path.lstat().st_mtime, path) for path in self.folder.iterdir()]
            return [path for _, path in sorted(found) if not path.name.startswith((UNFINISHED, REMOVED))]
        return []

    def find(self, name: str) -> Path | None:
        """Returns the folder of an entry, whose files are whole; None if there is none. Raises Damaged."""
        try:
            entry = self.folder / name
            examined = entry.stat().st_ino
            if self.private and not _only_ours(entry.parent):
                return None
        except OSError:
            return None
        try:
            _check(entry)
        except (OSError, ValueError) as error:
            try:
                if entry.stat().st_ino != examined:
                    return self.find(name)  # another process has written it again
            except FileNotFoundError:
                return None  # another process has removed it
            with suppress(OSError):
                _remove(entry)
            raise Damaged(f"{entry} is damaged ({error})") from error
        with suppress(OSError):  # a cache that this user may only read
            os.utime(entry)
        return entry

    def keep(self, name: str, write: Callable[[Path], object], size: int) -> Path:
        """Returns a new entry of about `size` bytes, whose files `write` makes in the folder that it gets. Raises
        OSError, with the reason, if it cannot be kept."""
        folder = self.folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.private and not _only_ours(folder):
            raise PermissionError(errno.EACCES, "other users may write to it")
        self._make_room(size)
        place = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder))
        try:
            write(place)
            _seal(place, name)
            return self._publish(place, folder / name)
        finally:
            shutil.rmtree(place, ignore_errors=True)  # nothing is there if all went well

    def remove(self, name: str) -> None:
        """Remove an entry. Raises OSError."""
        _remove(self.folder / name)

    def remove_all(self) -> int:
        """Remove all entries; return how many there were."""
        entries = self.entries()
        for entry in entries:
            _remove(entry)
        return len(entries)

    def _publish(self, place: Path, entry: Path) -> Path:
        for _ in range(MOST_TRIES):
            try:
                place.replace(entry)
            except OSError:  # another writer was faster, or its entry is damaged
                with suppress(Damaged):
                    if self.find(entry.name) is not None:
                        return entry
            else:
                _to_disk(entry.parent)
                return entry
        raise FileExistsError(errno.EEXIST, f"{entry} cannot be replaced")

    def _make_room(self, size: int) -> None:
        """Remove abandoned entries, and those used longest ago until `size` bytes have room. Raises OSError."""
        now, folder = time.time(), self.folder
        for path in folder.iterdir():
            if path.name.startswith((UNFINISHED, REMOVED)) and now - _last_change(path) > ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)
        limit, share = self.limit(), 1 if self.needed else 2  # what no start needs leaves half of the disk's room
        if size > limit and not self.needed:
            raise OSError(errno.EFBIG, f"it takes {_gb(size)}, and {self.variable or 'its limit'} allows {_gb(limit)}")
        entries = self.entries()
        total = sum(map(size_of, entries))
        for entry in entries:
            if total + size <= limit and size * share <= shutil.disk_usage(folder).free:
                return
            if self.needed and entry.exists() and now - entry.stat().st_mtime < IN_USE_S:
                break
            total -= size_of(entry)
            _remove(entry)
        free = shutil.disk_usage(folder).free
        if size * share > free:
            half = ", of which half stays free" if share == 2 else ""
            raise OSError(errno.ENOSPC, f"it takes {_gb(size)}, and {_gb(free)} are free there{half}")


ROUNDED = Cache("weights", 20.0, "MINITUI_KEPT_WEIGHTS_GB")  # engine/worker/weights/load_model.py
UNPACKED = Cache("gguf", 100.0, "MINITUI_UNPACKED_GGUF_GB", needed=True)  # engine/gguf/checkpoint.py
COMPILED = Cache("kernels", 0.01, private=True)  # engine/kernels/cpu/machine_code.py; about 50 KB each


def digest(path: Path) -> str:
    """Returns the digest of a file: SHA-256 of the SHA-256s of its pieces, which several threads read."""
    with path.open("rb") as file:

        def of_piece(begin: int) -> bytes:
            return hashlib.sha256(os.pread(file.fileno(), PIECE, begin)).digest()

        begins = range(0, os.fstat(file.fileno()).st_size, PIECE)
        if len(begins) < 2:
            pieces = [of_piece(begin) for begin in begins]
        else:
            with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
                pieces = list(threads.map(of_piece, begins))
    return hashlib.sha256(b"".join(pieces)).hexdigest()


def _seal(place: Path, name: str) -> None:
    """Write ENTRY, and force all files to the disk: the entry's name must not be there before its contents."""
    files = {}
    for path in sorted(place.iterdir()):
        _to_disk(path)
        files[path.name] = {"digest": digest(path), "stamp": _stamp(path)}
    _write_entry(place, {"name": name, "files": files})
    _to_disk(place)


def _write_entry(entry: Path, contents: dict[str, Any]) -> None:
    new = entry / f"{UNFINISHED}{os.getpid()}"
    new.write_text(json.dumps(contents))
    _to_disk(new)
    new.replace(entry / ENTRY)


def _check(entry: Path) -> None:
    """Raises OSError or ValueError if an entry is not what was written."""
    try:
        found = json.loads((entry / ENTRY).read_bytes())
        name, files = found["name"], found["files"]
        written = {str(file): (each["digest"], list(each["stamp"])) for file, each in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{ENTRY} cannot be read") from None
    if name != entry.name:
        raise ValueError("it belongs to something else")
    if others := {path.name for path in entry.iterdir() if not path.name.startswith(UNFINISHED)} - {ENTRY, *written}:
        raise ValueError(f"it has a file {min(others)}, which is not its own")
    changed = False
    for file, (expected, stamp) in written.items():
        now = _stamp(entry / file)
        if now[1] != stamp[1]:
            raise ValueError(f"{file} has {now[1]:,} bytes instead of {stamp[1]:,}")
        if (now != stamp or now[1] < SMALL) and digest(entry / file) != expected:
            raise ValueError(f"the contents of {file} have changed")
        changed |= now != stamp
        files[file]["stamp"] = now
    if changed:  # a copied or restored cache
        with suppress(OSError):
            _write_entry(entry, found)


def _stamp(path: Path) -> list[int]:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is not a regular file")
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _only_ours(folder: Path) -> bool:
    """Returns True if only this user can make or change files in the folder."""
    status = folder.lstat()  # a link could lead to a folder of another user
    others = status.st_mode & WRITABLE_BY_OTHERS
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not others


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot do this with folders
            raise
    finally:
        os.close(descriptor)


def _remove(entry: Path) -> None:
    """Remove an entry, or an older version's file; no process can find a part of it. Raises OSError."""
    if not entry.is_dir() or entry.is_symlink():
        entry.unlink(missing_ok=True)
        return
    aside = Path(tempfile.mkdtemp(prefix=REMOVED, dir=entry.parent))
    with suppress(FileNotFoundError):  # another process removed it
        entry.replace(aside)
    shutil.rmtree(aside, ignore_errors=True)


def size_of(entry: Path) -> int:
    """Returns the bytes of an entry."""
    return sum(size for size, _ in _files(entry))


def _last_change(entry: Path) -> float:
    return max((changed for _, changed in _files(entry)), default=0.0)


def _files(entry: Path) -> list[tuple[int, float]]:
    """Returns the sizes and the times of change of an entry and its files."""
    found, paths = [], [entry]
    with suppress(OSError):  # a file of an older version, or another process removes it
        paths += entry.iterdir()
    for path in paths:
        with suppress(FileNotFoundError):
            status = path.lstat()
            found.append((status.st_size, status.st_mtime))
    return found


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
