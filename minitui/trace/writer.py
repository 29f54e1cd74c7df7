"""Writes a trace file in a thread of its own: the engine does not wait for compression or for the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import queue
import stat
import threading
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from engine.trace.kind import seq_of
from engine.trace.state import State
from minitui.trace.lines import GZIP, LONGEST_LINE, TraceError, snapshot_json

LEVEL = 2  # zlib's level: a third of the default level's time, but a fifth more bytes
MAX_WAITING = 4000  # the most items queued for the writer thread
FLUSH, _CLOSE = object(), object()


class TraceWriter:
    """A thread that writes queued items: a line, a list of records, (played, state), or (decode, ids).

    FLUSH writes what is queued to the file, so that it survives if the process is killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.closed = False
        try:
            self._file = _open_locked(path)
        except BlockingIOError:
            raise TraceError(f"{path} is being written by another recording; name another file with --record") from None
        except OSError as error:
            raise TraceError(f"{path} cannot be written: {error.strerror}; name another file with --record") from None
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._failure: OSError | None = None
        self._member: Any = None
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """Queue an item. Raises TraceError if an earlier item could not be written."""
        self._check()
        if self._queue.qsize() > MAX_WAITING:
            raise TraceError(f"{self.path} cannot be written as fast as the engine runs: the recording ends here")
        self._queue.put(item)

    def close(self) -> None:
        """Write everything and close the file."""
        if self.closed:
            return
        self.closed = True
        self._queue.put(_CLOSE)
        self._thread.join()
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise TraceError(f"{self.path} cannot be written: {self._failure.strerror}")

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not _CLOSE:
                self._take(item)
            self._end_member()
            self._file.close()  # writes the buffered rest, which may fail
        except OSError as error:
            self._failure = error
            with contextlib.suppress(OSError):
                self._file.close()

    def _take(self, item: Any) -> None:
        if item is FLUSH:
            if self._member is not None:
                self._file.write(self._member.flush(zlib.Z_SYNC_FLUSH))
                self._file.flush()
        elif isinstance(item, str):
            self._line(item)
        elif isinstance(item, list):
            rows = [[round(t, 6), *rest] for _seq, t, *rest in item]
            self._line(json.dumps(["r", seq_of(item[0]), rows], separators=(",", ":")))
        elif isinstance(item[1], State):
            self._keyframe(*item)
        else:
            decode, ids = item
            self._line(json.dumps(["w", [[token, decode(token).decode("latin-1")] for token in ids]]))

    def _keyframe(self, played: float, state: State) -> None:
        """Start a new gzip member with a keyframe."""
        self._end_member()
        snapshot = "".join(snapshot_json(state.snapshot()))  # piece by piece, so that other threads can run
        self._line(f'["k",{state.seq},{state.step},{round(played, 6)},{snapshot}]')

    def _line(self, line: str) -> None:
        data = line.encode() + b"\n"
        if len(data) > LONGEST_LINE:
            sizes = f"a line of {len(data) >> 20} MiB; readers accept {LONGEST_LINE >> 20} MiB"
            raise OSError(errno.EFBIG, f"the engine's state needs {sizes}; the recording ends here")
        if self._member is None:
            self._member = zlib.compressobj(LEVEL, zlib.DEFLATED, GZIP)
        self._file.write(self._member.compress(data))

    def _end_member(self) -> None:
        if self._member is not None:
            self._file.write(self._member.flush())
            self._member = None


def _open_locked(path: Path) -> BinaryIO:
    """Returns an empty file. Raises BlockingIOError if another recording writes it, or OSError."""
    # Without O_NONBLOCK, `open` of a FIFO would wait for a reader.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
    try:
        os.set_blocking(descriptor, True)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if isinstance(error, BlockingIOError):
                    raise  # else: this file system has no locks
            os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "wb")
