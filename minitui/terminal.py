"""The terminal is given back as it was found, however the application ends.

Textual restores it after a normal exit and after an exception. Signals are ours: SIGTERM and SIGHUP ask the application
to close; if it has not within a few seconds, or at a second signal, the terminal is restored by hand and the process
ends. The engine's process ends by itself when this one does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

from engine.errors import EngineError

GRACE = 4.0  # seconds to close in good order

# Mouse reporting, bracketed paste, focus reporting, in-band resize, kitty keys, alternate screen; cursor and wrap on.
RESTORE = (
    "\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1016l\x1b[?2004l\x1b[?1004l\x1b[?2048l\x1b[<u"
    "\x1b[?1049l\x1b[?25h\x1b[?7h\x1b[0m"
)


class NoTerminal(EngineError):
    """The application cannot be shown: a matter of how it was asked for, hence exit code 2."""


def has_terminal() -> bool:
    """Can the application be used here? It reads keys from stdin and draws on stderr; a stdout that is a pipe means
    that text is wanted. A browser's driver (TEXTUAL_DRIVER, set by textual-serve) has a terminal of its own."""
    return bool(os.environ.get("TEXTUAL_DRIVER")) or all(map(_is_terminal, (sys.stdin, sys.stdout, sys.stderr)))


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


def need_terminal(what: str, instead: str) -> None:
    """Raise NoTerminal where there is none. `what` is the command, `instead` what to run in a pipe."""
    if not has_terminal():
        raise NoTerminal(f"{what} needs a terminal for stdin, stdout and stderr; in a pipe or a script use {instead}")


def takes_unicode(stream: Any) -> bool:
    """Has the encoding of the terminal's stream what the application draws with? If not (a locale without UTF-8), what
    it lacks becomes "?" from now on: a place each, and not the four to ten characters of a number."""
    if stream is None:  # a browser's driver has a stream of its own
        return True
    try:
        "·░▓█▄╭─│✓×…".encode(stream.encoding)
        return True
    except (UnicodeEncodeError, LookupError):
        stream.reconfigure(errors="replace")
        return False


@contextlib.contextmanager
def tolerant_input() -> Iterator[None]:
    """While this lasts, bytes that are no UTF-8 (a key of a terminal set to Latin-1, a stray byte on the line) become
    U+FFFD: Textual's reader of keys would end the application at the first of them."""
    from textual.drivers import linux_driver  # here: most of who asks for a terminal never draws

    original = linux_driver.getincrementaldecoder
    linux_driver.getincrementaldecoder = lambda encoding: partial(original(encoding), "replace")
    try:
        yield
    finally:
        linux_driver.getincrementaldecoder = original


class TerminalGuard:
    """Made before the application starts, it remembers how the terminal was; `install` once its loop runs."""

    def __init__(self) -> None:
        self.signal: int | None = None  # the one that ended us
        self._attributes: list[Any] | None = None
        with contextlib.suppress(termios.error, OSError, ValueError):
            self._attributes = termios.tcgetattr(sys.__stdin__.fileno())  # type: ignore[union-attr]

    def install(self, close: Callable[[int], object]) -> None:
        """From now on SIGTERM and SIGHUP call `close(exit code)`, in the main thread, between two bytecodes."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.signal is not None:
                self.force()
            self.signal = number
            timer = threading.Timer(GRACE, self.force)
            timer.daemon = True
            timer.start()
            close(128 + number)

        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, handle)

    def restore(self) -> None:
        """Write the terminal back to what it was; harmless when it already is, or is gone."""
        with contextlib.suppress(OSError, ValueError):
            fd = sys.__stderr__.fileno()  # type: ignore[union-attr]
            if os.isatty(fd):
                os.write(fd, RESTORE.encode())
        if self._attributes is not None:
            with contextlib.suppress(termios.error, OSError, ValueError):
                termios.tcsetattr(sys.__stdin__.fileno(), termios.TCSANOW, self._attributes)  # type: ignore[union-attr]

    def force(self) -> None:
        """Restore the terminal and end the process at once."""
        self.restore()
        os._exit(128 + (self.signal or 1))
