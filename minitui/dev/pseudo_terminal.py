"""Our own programs in a terminal that nobody sees, to measure what they cost."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from typing import Protocol

SILENCE_S = 300.0  # after so long without output it is taken for dead; a large load takes its time to be made
GOODBYE_S = 10.0  # an application whose terminal has gone may take so long to end
LOOK_S = 0.005  # between two looks of a typist


class Typist(Protocol):
    """Presses keys, and sees what they do."""

    def saw(self, data: bytes, now: float) -> None:
        """The application has written this."""

    def press(self, terminal: int, now: float) -> None:
        """Write into its terminal, if it is time."""


def start_in_terminal(
    arguments: list[str], size: tuple[int, int], environment: dict[str, str] | None = None
) -> tuple[int, int]:
    """Start `python -m ARGUMENTS` in a pseudo-terminal of columns × rows: (process id, our end of the terminal)."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", **(environment or {})}
        os.execv(sys.executable, [sys.executable, "-m", *arguments])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    return pid, terminal


def run_in_terminal(
    arguments: list[str], size: tuple[int, int], environment: dict[str, str] | None = None, typist: Typist | None = None
) -> list[tuple[float, int]]:
    """The same until it ends; when it wrote (time.monotonic) and how many bytes. TimeoutError if it falls silent."""
    pid, terminal = start_in_terminal(arguments, size, environment)
    arrived: list[tuple[float, int]] = []
    heard = time.monotonic()
    try:
        while True:
            ready = select.select([terminal], [], [], LOOK_S if typist is not None else SILENCE_S)[0]
            now = time.monotonic()
            if typist is not None:
                typist.press(terminal, now)
            if not ready:
                if now - heard >= SILENCE_S:
                    raise TimeoutError(f"the application under measurement has been silent for {SILENCE_S:.0f} seconds")
                continue
            heard = now
            try:
                data = os.read(terminal, 1 << 16)
            except OSError:  # its end closed
                return arrived
            if not data:
                return arrived
            arrived.append((now, len(data)))
            if typist is not None:
                typist.saw(data, now)
    finally:
        os.close(terminal)  # if it still runs, this hangs up on it
        _await_end(pid)


def _await_end(pid: int) -> None:
    """Until it has ended; it is killed if that takes longer than GOODBYE_S."""
    deadline = time.monotonic() + GOODBYE_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(LOOK_S)
