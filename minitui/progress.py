"""Shows a status line on stderr, for example while a model loads, and measures the phases of a start."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from minitui.visible import PlainStream, visible_line


class Status:
    """A status line, which each call overwrites. Nothing is written if the file is not a terminal."""

    def __init__(self, file: TextIO) -> None:
        # The unfiltered stream: our own escape sequences must reach the terminal.
        self._file = file.stream if isinstance(file, PlainStream) else file
        self._shown = False

    def __call__(self, progress: dict[str, Any]) -> None:
        if not self._file.isatty():
            return
        done, total = progress.get("done") or 0, progress.get("total") or 0
        share = f" {done / total:4.0%}" if total else ""
        text = visible_line(str(progress.get("text") or progress.get("stage") or ""))
        self._file.write(f"\r\x1b[2K{text}{share}")
        self._file.flush()
        self._shown = True

    def clear(self) -> None:
        """Erases the line."""
        if self._shown:
            self._file.write("\r\x1b[2K")
            self._file.flush()
            self._shown = False

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


class Phases:
    """How long each phase of a start took."""

    def __init__(
        self, first: str, clock: Callable[[], float] = time.perf_counter, age_s: float | None = None
    ) -> None:
        """`age_s`: the first phase began so many seconds ago; None: with the process."""
        self._clock = clock
        self._begun = [(first, clock() - (process_age_s() if age_s is None else age_s))]  # each, and when it began

    def begin(self, name: str) -> None:
        """End a phase and begin the next one."""
        if name != self._begun[-1][0]:
            self._begun.append((name, self._clock()))

    def __call__(self, progress: dict[str, Any]) -> None:
        """Begin a phase if this progress differs from the one before in more than numbers and what follows them."""
        text = visible_line(str(progress.get("text") or progress.get("stage") or ""))
        self.begin(re.split(r":? [\d(]", text)[0])

    def report(self) -> list[str]:
        """Returns a table as lines of text: the milliseconds of each phase until now, and of all."""
        ends = [began for _, began in self._begun[1:]] + [self._clock()]
        rows = [(end - began, name) for (name, began), end in zip(self._begun, ends, strict=True)]
        return [f"{seconds * 1e3:9,.0f} ms  {name}" for seconds, name in [*rows, (ends[-1] - self._begun[0][1], "all")]]


def process_age_s() -> float:
    """Returns the seconds since this process began; where the system does not tell, its processor time."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.process_time()
