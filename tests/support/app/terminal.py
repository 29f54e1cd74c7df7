"""A real pseudo-terminal with a screen in memory: what the user would see, and what is left when the program ends."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pyte

from tests.support.paths import ROOT

# Private modes that must be off at the end, and their names.
MODES = {
    "1049": "alternate screen",
    "1000": "mouse",
    "1003": "mouse motion",
    "1006": "mouse format",
    "2004": "bracketed paste",
    "1004": "focus",
}


class Terminal:
    """Runs `argv`; `screen()` is the text on it, `raw` every byte that came."""

    def __init__(self, argv: list[str], home: Path, columns: int = 120, rows: int = 36, **environment: str) -> None:
        env = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"}
        env |= {
            "MINITUI_DATA": str(home / "data"),
            "MINITUI_CONFIG": str(home / "settings.toml"),
            "OMP_NUM_THREADS": "1",
        }
        env["PYTHONPATH"] = str(ROOT)
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        self.process = pexpect.spawn(
            argv[0], argv[1:], env=env | environment, dimensions=(rows, columns), cwd=str(home)
        )
        self.process.delaybeforesend = None

    def pump(self, seconds: float = 0.05) -> bool:
        """Take in what comes for a while; False when it has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                data = self.process.read_nonblocking(65536, timeout=max(0.01, end - time.monotonic()))
            except pexpect.TIMEOUT:
                return True
            except pexpect.EOF:
                return False
            self.raw += data
            # pyte knows neither kitty's keyboard protocol nor modes asked for: they would show up as text.
            self._stream.feed(re.sub(rb"\x1b\[[<>=?][0-9;]*u|\x1b\[\?[0-9]+\$p", b"", data))
        return True

    def screen(self) -> str:
        """The text on the screen."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    def until(self, true: str | Callable[[str], object], seconds: float = 90) -> str:
        """Wait until a text, or whatever `true` says, is on the screen; the screen."""
        seen = true if callable(true) else lambda screen: true in screen
        end = time.monotonic() + seconds
        while True:
            alive = self.pump()
            if seen(self.screen()):
                return self.screen()
            assert alive and time.monotonic() < end, f"not seen within {seconds} s: {true}\n{self.screen()}"

    def type(self, text: str) -> None:
        """Send keys."""
        self.process.send(text)

    def ended(self, seconds: float = 90) -> int:
        """Wait for its end; the exit status, negative for a signal."""
        end = time.monotonic() + seconds
        while self.pump() and time.monotonic() < end:
            pass
        self.flags_at_end = self.flags()
        assert not self.process.isalive(), f"still running after {seconds} s\n{self.screen()}"
        return self.process.exitstatus if self.process.exitstatus is not None else -self.process.signalstatus

    def flags(self) -> int:
        """The local modes of the terminal: echo, line editing, signals."""
        return int(termios.tcgetattr(self.process.child_fd)[3])

    def left_on(self) -> list[str]:
        """Names of the modes that were switched on and not off again; and a hidden cursor."""
        text = self.raw.decode("utf-8", "replace")
        on = []
        for mode, name in {**MODES, "25": "hidden cursor"}.items():
            switches = re.findall(rf"\x1b\[\?{mode}([hl])", text)
            if switches and switches[-1] == ("l" if mode == "25" else "h"):
                on.append(name)
        return on

    def close(self) -> None:
        """End it at once if it still runs."""
        with contextlib.suppress(Exception):
            self.process.close(force=True)


def python(*arguments: str) -> list[str]:
    """This interpreter with arguments."""
    return [sys.executable, *arguments]
