"""Starts the watcher process and sends it messages, without ever waiting for it. Runs inside vLLM. A message is a tuple
that `marshal` can write; its length precedes it. If the watcher reads too slowly, messages wait in memory, up to
MOST_WAITING bytes. Then messages are dropped, and `lost` is set until the waiting messages are sent."""

from __future__ import annotations

import contextlib
import fcntl
import marshal
import os
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

MOST_WAITING = 32 << 20
PIPE_SIZE = 1 << 20
LENGTH = 4  # bytes of the length before each message
VERSION = 2  # of marshal's format: later versions look up each object, to write it once


GAVE_REASON = b"!"  # what a watcher writes before it ends, if it has logged why


class Pipe:
    """The connection to a watcher process. Raises OSError when the watcher has ended."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: added to the variables of this process."""
        self.lost = False
        self._reason_given = False
        self._unsent: list[bytes] = []  # since the last flush
        self._waiting: deque[bytes | memoryview] = deque()
        self._size = 0
        reader, self._out = os.pipe()
        self._back, asks = os.pipe()  # the watcher writes a byte when it needs a whole state
        for end in (self._out, self._back):
            os.set_blocking(end, False)
        with contextlib.suppress(OSError, AttributeError):  # above the user's limit, or not Linux
            fcntl.fcntl(self._out, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        path = os.pathsep.join(place for place in sys.path if place)  # vLLM may have been started with another path
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "minitui.vllm.watcher", str(reader), str(asks)],
                pass_fds=(reader, asks), stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **(environment or {})},
            )
        except OSError:
            self._close_ends()
            raise
        finally:
            os.close(reader)
            os.close(asks)
        # A copy of the pipe in a forked process would keep the watcher waiting after this process is killed.
        copy = weakref.WeakMethod(self._close_ends)
        os.register_at_fork(after_in_child=lambda: (close := copy()) and close())

    def send(self, message: tuple[Any, ...]) -> None:
        """Encode a message; the next flush sends it."""
        if not self.lost:
            data = marshal.dumps(message, VERSION)
            self._unsent += (len(data).to_bytes(LENGTH, "little"), data)

    def flush(self) -> None:
        """Send the messages, or keep them until the watcher has room for them, or drop them."""
        if self.lost:
            self._send_waiting()
            return
        if not self._unsent:
            return
        frame, sent = b"".join(self._unsent), 0
        self._unsent.clear()
        if not self._waiting or self._send_waiting():
            with contextlib.suppress(BlockingIOError):
                sent = os.write(self._out, frame)
        if sent < len(frame):
            self._keep(memoryview(frame)[sent:])

    def recover(self) -> bool:
        """Returns True if messages were lost and the watcher now reads again: the next message is not dropped."""
        if not self.lost or not self._send_waiting():
            return False
        self.lost = False
        return True

    def _keep(self, frame: bytes | memoryview) -> None:
        self._waiting.append(frame)
        self._size += len(frame)
        if self._size > MOST_WAITING:
            while len(self._waiting) > 1:  # the first may have been sent in part
                self._size -= len(self._waiting.pop())
            self.lost = True

    def _send_waiting(self) -> bool:
        """Send what is waiting; returns True when nothing is left."""
        while self._waiting:
            frame = self._waiting[0]
            try:
                sent = os.write(self._out, frame)
            except BlockingIOError:
                return False
            self._size -= sent
            if sent < len(frame):
                self._waiting[0] = memoryview(frame)[sent:]
                return False
            self._waiting.popleft()
        return True

    def asked(self) -> bool:
        """Returns True if the watcher has asked for a whole state since the last call."""
        self._process.poll()  # it started the watcher and ended; this removes it from the process table
        try:
            asks = os.read(self._back, 64)
        except OSError:
            return False
        self._reason_given = self._reason_given or GAVE_REASON in asks
        return bool(asks)

    @property
    def reason_given(self) -> bool:
        """True if the watcher has logged why it ended."""
        self.asked()
        return self._reason_given

    def close(self) -> None:
        """Close the connection: the watcher finishes its recording and ends."""
        self._close_ends()
        self._process.poll()

    def _close_ends(self) -> None:
        ends, self._out, self._back = (self._out, self._back), -1, -1
        for end in ends:
            if end >= 0:
                os.close(end)
