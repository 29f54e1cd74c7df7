"""Runs minitui's programs in a pseudo-terminal, to measure them."""

from __future__ import annotations

import os
import sys
import time
from typing import Protocol

import pexpect

SILENCE_S = 300.0  # a program without output for this long has hung; preparing a large load takes minutes
POLL_S = 0.005  # the longest time between two calls of Typist.press
MAX_READ = 1 << 16  # the most bytes of one read


class Typist(Protocol):
    """Presses keys and sees their effects."""

    def saw(self, data: bytes, now: float) -> None:
        """Receives what the program has written."""

    def press(self, terminal: int, now: float) -> None:
        """Writes a key into the terminal (a file descriptor) if the next key is due."""


def start_in_terminal(
    arguments: list[str], size: tuple[int, int], environment: dict[str, str] | None = None
) -> pexpect.spawn:
    """Starts `python -m ARGUMENTS` in a pseudo-terminal of columns × rows."""
    colours = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    return pexpect.spawn(
        sys.executable, ["-m", *arguments], dimensions=size[::-1], env={**os.environ, **colours, **(environment or {})}
    )


def read(terminal: pexpect.spawn, seconds: float) -> bytes:
    """Returns the next output; empty if none comes within `seconds`. Raises EOFError if the program has ended."""
    try:
        return terminal.read_nonblocking(MAX_READ, seconds)
    except pexpect.TIMEOUT:
        return b""
    except pexpect.EOF:
        raise EOFError from None


def run_in_terminal(
    arguments: list[str], size: tuple[int, int], environment: dict[str, str] | None = None, typist: Typist | None = None
) -> list[tuple[float, int]]:
    """Runs a program until it ends. Returns each output's time (time.monotonic) and number of bytes.

    Kills the program and raises TimeoutError after SILENCE_S without output."""
    terminal = start_in_terminal(arguments, size, environment)
    arrived: list[tuple[float, int]] = []
    last_output = time.monotonic()
    try:
        while True:
            data = read(terminal, POLL_S if typist is not None else SILENCE_S)
            now = time.monotonic()
            if typist is not None:
                typist.press(terminal.child_fd, now)
            if data:
                last_output = now
                arrived.append((now, len(data)))
                if typist is not None:
                    typist.saw(data, now)
            elif now - last_output >= SILENCE_S:
                raise TimeoutError(f"the measured program has been silent for {SILENCE_S:.0f} seconds")
    except EOFError:
        return arrived
    finally:
        terminal.close(force=True)
