"""Runs a task in a separate process with limits of time and memory: chat templates, the compilation of grammars, and
what students write (minitui/exercises).

A task may be a program from elsewhere, and no check in Python can interrupt a long call into C or Rust. So the process
is killed when it exceeds a limit, and the next request starts it again. It also ends when its parent ends.
engine/text/limited_child.py is the other side.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from engine.errors import EngineError
from engine.text.limited_child import HEAD

PIECE = 1 << 16  # bytes that are read at once
START_SECONDS = 60.0  # for the interpreter to start, on a busy machine
TIMEOUT = (TimeoutError, BlockingIOError)  # the second: of a socket with a limit of the system
RESTS_S = 10.0  # after a request that took longer than `patience`
# In this context, `ask` waits for so many seconds only, or raises TakesLonger. 0: for an answer, within the limits.
patience: ContextVar[float] = ContextVar("patience", default=0.0)
TIMEOUTS = (-signal.SIGALRM, -signal.SIGPROF)  # exit codes of a process that a timer has ended


class Limits(NamedTuple):
    """The limits of one request."""

    seconds: float  # of time, the start of the process excluded
    memory: int  # bytes of address space
    longest: int  # bytes of an answer
    cpu_seconds: float = 0.0  # of processor time; 0: no limit


class LimitExceeded(Exception):
    """The request has no answer. The text is a predicate: "did not end within 5 seconds"."""


class TakesLonger(Exception):
    """The request would take longer than `patience`: ask again without it."""


class LimitedProcess:
    """A process that answers requests, one at a time. Its methods may be called from any thread."""

    def __init__(self, script: str, task: str, setup: Callable[[], bytes], limits: Limits) -> None:
        """The process is not started yet. `script`: the name of its file in this directory, or a whole path. `task`:
        what it does, for errors: "renders chat templates". `setup`: returns what the process receives before its first
        request."""
        self._script, self._task, self._setup, self._limits = Path(__file__).parent / script, task, setup, limits
        self._turn = threading.Lock()
        self._starting = threading.Lock()
        self._process: _Process | None = None
        self._stops = 0
        self._rests_until = 0.0  # until then, no request is made with `patience`

    def start(self) -> None:
        """Start the process without waiting for it, so that the first answer is fast."""
        self._running()

    def stop(self) -> None:
        """End the process: running and waiting requests raise LimitExceeded. A later request starts it again."""
        self._stops += 1
        self.end()

    def end(self) -> None:
        """End the process, between two requests. The next request starts it again."""
        if (process := self._process) is not None:
            process.end()

    def ask(self, request: bytes) -> tuple[bytes, bytes]:
        """Send a request; return the kind and the contents of the answer. Raises LimitExceeded, and EngineError if the
        process cannot be started; TakesLonger with `patience`."""
        if seconds := patience.get():
            return self._ask_at_once(request, seconds)
        stops = self._stops
        with self._turn:
            if self._stops != stops:
                raise LimitExceeded("was stopped")
            process = None
            try:
                process = self._running()
                process.prepare(self._setup)
                return process.ask(request)
            except BaseException as error:
                self.end()  # a late answer would be read as the answer to the next request
                if isinstance(error, TIMEOUT):
                    raise LimitExceeded(f"did not end within {self._limits.seconds:g} seconds") from None
                if not isinstance(error, (OSError, EOFError)):
                    raise
                if self._stops != stops:
                    raise LimitExceeded("was stopped") from None
                if process is not None and process.status in TIMEOUTS:
                    limit = self._limits.cpu_seconds
                    kind = f"{limit:g} seconds of processor time" if limit else f"{self._limits.seconds:g} seconds"
                    raise LimitExceeded(f"did not end within {kind}") from None
                code = None if process is None else process.status
                if code is None or code in (-signal.SIGKILL, -signal.SIGABRT):
                    why = "probably because memory ran out"
                else:
                    why = f"exit code {code}" if code >= 0 else f"{signal.strsignal(-code)}"
                raise LimitExceeded(f"ended its process ({why})") from None

    def _ask_at_once(self, request: bytes, seconds: float) -> tuple[bytes, bytes]:
        process, now = self._process, time.monotonic()
        if process is None or now < self._rests_until or not process.idle or not self._turn.acquire(blocking=False):
            raise TakesLonger
        try:
            return process.ask_at_once(request, seconds)
        except TIMEOUT:
            self._rests_until = now + RESTS_S
            raise TakesLonger from None
        except (OSError, EOFError):
            self.end()
            raise TakesLonger from None
        finally:
            self._turn.release()

    def _running(self) -> _Process:
        with self._starting:
            if self._process is None or self._process.ended:
                self.end()
                self._process = _Process(self._script, self._task, self._limits)
            return self._process


class _Process:
    """The child process and the socket to it."""

    def __init__(self, script: Path, task: str, limits: Limits) -> None:
        ours, theirs = socket.socketpair()
        pipe, lifeline = os.pipe()  # carries no data: its closing ends the child when this process ends
        # The timers of the child are a second line of defence, except for the limit of processor time.
        numbers = (limits.seconds + 1, limits.cpu_seconds, limits.memory, limits.longest, pipe)
        # One thread: each thread of a pool would take address space.
        path = os.pathsep.join(os.path.abspath(each) for each in sys.path)
        environment = {**os.environ, "PYTHONPATH": path, "RAYON_NUM_THREADS": "1"}
        with theirs:
            try:
                # -P: do not import from the script's directory. start_new_session: ctrl+c does not reach the child.
                self._child = subprocess.Popen(
                    [sys.executable, "-P", str(script), *map(str, numbers)], pass_fds=[pipe], env=environment,
                    stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                )
            except OSError as error:
                ours.close()
                os.close(lifeline)
                raise EngineError(f"the process that {task} could not be started: {error.strerror}") from None
            finally:
                os.close(pipe)
        self._socket, self._task, self._limits = ours, task, limits
        self._prepared = False
        self._pending: bytes | None = None  # a request whose answer was not received
        self.end = weakref.finalize(self, _kill, self._child, ours, lifeline)

    @property
    def ended(self) -> bool:
        """True once the process can no longer be used."""
        return not self.end.alive or self._child.poll() is not None

    @property
    def idle(self) -> bool:
        """True if the process can begin a request now."""
        return self._prepared and self._pending is None and not self.ended

    @property
    def status(self) -> int | None:
        """The exit code of the ended process."""
        return self._child.poll()

    def prepare(self, setup: Callable[[], bytes]) -> None:
        """Wait until the process runs and send it the setup. Raises EngineError."""
        if self._prepared:
            return
        self._wait_at_most(START_SECONDS)
        try:
            self._receive()
        except TIMEOUT:
            raise EngineError(f"the process that {self._task} did not start within {START_SECONDS:g} seconds") from None
        except EOFError:
            if not self.end.alive:  # this process has ended the child
                raise
            raise EngineError(f"the process that {self._task} did not start (exit code {self._child.wait()})") from None
        self._wait_at_most(self._limits.seconds)
        self._send(setup())
        self._prepared = True

    def ask(self, request: bytes) -> tuple[bytes, bytes]:
        """Send a request; return the kind and the contents of the answer. Raises TIMEOUT, EOFError, OSError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            answer = self._receive()
            if pending == request:
                return answer
        self._send(request)
        return self._receive()

    def ask_at_once(self, request: bytes, seconds: float) -> tuple[bytes, bytes]:
        """As `ask`; but if no answer arrives within `seconds`, raise TIMEOUT and leave it to the next `ask`."""
        self._send(request)
        self._pending = request
        self._wait_at_most(seconds)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        finally:
            self._wait_at_most(self._limits.seconds)
        self._pending = None
        return self._receive()

    def _wait_at_most(self, seconds: float) -> None:
        """Limit the wait of each call. The system's limit: with Python's, a call is two system calls, and after each of
        them this thread waits for Python's lock while another thread computes."""
        self._seconds = seconds
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *divmod(int(seconds * 1e6), 10**6)))

    def _send(self, contents: bytes) -> None:
        self._socket.sendall(HEAD.pack(b" ", len(contents)) + contents)

    def _receive(self) -> tuple[bytes, bytes]:
        self._until = time.monotonic() + self._seconds
        frame = self._read(bytearray(), HEAD.size)
        kind, length = HEAD.unpack_from(frame)
        if length > self._limits.longest:
            raise EOFError
        return kind, bytes(self._read(frame, HEAD.size + length)[HEAD.size :])

    def _read(self, frame: bytearray, length: int) -> bytearray:
        """Read until the frame has this length. Usually the first piece is the whole frame."""
        while len(frame) < length:
            # After the deadline, what has arrived counts: this process may have been paused (Ctrl+Z) meanwhile.
            late = time.monotonic() > self._until
            if not (part := self._socket.recv(PIECE, socket.MSG_DONTWAIT if late else 0)):
                raise EOFError
            frame += part
        return frame


def _kill(child: subprocess.Popen[bytes], connection: socket.socket, lifeline: int) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # wakes a waiting thread
    if child.returncode is None:  # not waited for yet: the number is still its own
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)  # with what it has started: it leads a group of its own
    child.wait()
    connection.close()
    os.close(lifeline)
