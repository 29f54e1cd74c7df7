"""Our own programs in a terminal that nobody sees, to measure what they cost."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time

SILENCE_S = 120.0  # after so long without output it is taken for dead


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
    arguments: list[str], size: tuple[int, int], environment: dict[str, str] | None = None
) -> list[tuple[float, int]]:
    """The same until it ends; when it wrote (time.monotonic) and how many bytes. TimeoutError if it falls silent."""
    pid, terminal = start_in_terminal(arguments, size, environment)
    arrived: list[tuple[float, int]] = []
    try:
        while True:
            if not select.select([terminal], [], [], SILENCE_S)[0]:
                raise TimeoutError(f"the application under measurement has been silent for {SILENCE_S:.0f} seconds")
            try:
                data = os.read(terminal, 1 << 16)
            except OSError:  # its end closed
                return arrived
            if not data:
                return arrived
            arrived.append((time.monotonic(), len(data)))
    finally:
        os.close(terminal)  # if it still runs, this hangs up on it
        os.waitpid(pid, 0)
