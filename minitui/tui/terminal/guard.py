"""Restores the terminal whenever the application ends.

Textual restores it after a normal exit and after an exception; this file does so after signals. A signal that would
end the process (CLOSE) asks the application to close. After GRACE seconds, or at a second signal, the terminal is
restored here and the process ends. At a signal that also dumps core (DUMP), the terminal is restored before the dump.
At SIGTSTP the shell gets the terminal; at SIGCONT the application takes it back. The engine's process ends by itself
when this process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from engine.errors import EngineError

if TYPE_CHECKING:
    from textual.app import App
    from textual.drivers.linux_driver import LinuxDriver

GRACE = 4.0  # seconds to close normally
ATTEMPTS = 100  # number of attempts to take the terminal back


def _available(names: str) -> tuple[signal.Signals, ...]:
    """Returns the signals of `names` that this platform has."""
    return tuple(signal.Signals[name] for name in names.split() if name in signal.Signals.__members__)


# SIGPIPE and SIGXFSZ are in neither list, because Python ignores them.
CLOSE = _available(
    "SIGTERM SIGHUP SIGINT SIGUSR1 SIGUSR2 SIGALRM SIGVTALRM SIGPROF SIGIO SIGPWR SIGSTKFLT SIGRTMIN SIGRTMAX"
)
DUMP = _available("SIGQUIT SIGABRT SIGXCPU SIGSYS SIGTRAP")

# Switches off synchronised output, mouse reporting, bracketed paste, focus reporting, in-band resize, kitty keys and
# the alternate screen; switches on the cursor and wrapping.
RESTORE = (
    "\x1b[?2026l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1016l\x1b[?2004l\x1b[?1004l\x1b[?2048l"
    "\x1b[<u\x1b[?1049l\x1b[?25h\x1b[?7h\x1b[0m"
)


class NoTerminal(EngineError):
    """Raised if the application has no terminal. It is a usage error: the exit code is 2."""


def has_terminal() -> bool:
    """Returns True if the application has a terminal to run in. The application reads keys from stdin and draws on
    stderr. If stdout is a pipe, the user wants text instead. The driver for browsers (TEXTUAL_DRIVER, set by
    textual-serve) has its own terminal."""
    streams = sys.stdin, sys.stdout, sys.stderr
    return bool(os.environ.get("TEXTUAL_DRIVER")) or all(stream is not None and stream.isatty() for stream in streams)


def need_terminal(what: str, instead: str) -> None:
    """Raise NoTerminal if there is no terminal. `what` is the command, `instead` the command to run in a pipe."""
    if not has_terminal():
        raise NoTerminal(f"{what} needs a terminal for stdin, stdout and stderr; in a pipe or a script use {instead}")


def takes_unicode(stream: Any) -> bool:
    """Returns True if the stream's encoding has our glyphs. If not, makes the stream write "?" for missing characters.
    Encodings without our glyphs come from a locale without UTF-8. A "?" takes one cell. An escaped number, Python's
    default, takes four to ten cells and breaks the layout."""
    if stream is None:  # the driver for browsers has its own stream
        return True
    try:
        "·░▓█▄╭─│✓×…".encode(stream.encoding)
        return True
    except (UnicodeEncodeError, LookupError):
        stream.reconfigure(errors="replace")
        return False


@contextlib.contextmanager
def tolerant_input() -> Iterator[None]:
    """In this context, input bytes that are not UTF-8 (a key of a Latin-1 terminal, a stray byte) become U+FFFD.
    Outside this context, the first such byte makes Textual's key reader end the application."""
    from textual.drivers import linux_driver  # imported here: most commands that import this file never draw

    original = linux_driver.getincrementaldecoder
    linux_driver.getincrementaldecoder = lambda encoding: partial(original(encoding), "replace")
    try:
        yield
    finally:
        linux_driver.getincrementaldecoder = original


class TerminalGuard:
    """Saves the state of the terminal. In the context `watching`, it handles signals and restores the terminal. Create
    the guard before the application starts. Call `attach` with the application when the event loop runs."""

    def __init__(self) -> None:
        self.signal: int | None = None  # the signal that ended the application
        self._app: App[int] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._suspended = False  # application mode is off: the shell has the terminal
        self._continued = False  # a SIGCONT has arrived and is not handled yet
        self._attributes: list[Any] | None = None
        with contextlib.suppress(termios.error, OSError, ValueError):
            self._attributes = termios.tcgetattr(sys.__stdin__.fileno())  # type: ignore[union-attr]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """In this context, no signal ends the process before the terminal is restored. The end of the context restores
        the terminal too."""
        before = self._take_signals()
        try:
            yield
        finally:
            self._app = self._loop = None
            self.restore()
            for number, handler in before.items():
                signal.signal(number, handler)

    def attach(self, app: App[int]) -> None:
        """Let signals close, stop and continue `app` from now on. Call this in the running event loop."""
        self._app, self._loop = app, asyncio.get_running_loop()
        self._take_signals()  # again: Textual's driver for browsers has replaced our handlers
        if app._driver is not None and app._driver.can_suspend:  # our handlers replace Textual's
            signal.signal(signal.SIGTSTP, lambda *_: self._in_loop(self._suspend))
            signal.signal(signal.SIGCONT, self._on_continue)

    def _take_signals(self) -> dict[signal.Signals, Any]:
        """Install our signal handlers. Returns the previous handlers."""
        before = {number: signal.signal(number, self._dump) for number in DUMP}
        return before | {number: signal.signal(number, self._close) for number in CLOSE}

    def _in_loop(self, call: Callable[[], object]) -> None:
        # A signal handler must not make the call itself: it can interrupt code that holds a lock of Textual's queues.
        if self._loop is not None:
            self._loop.call_soon_threadsafe(call)

    # ---- end of the application

    def _close(self, number: int, frame: FrameType | None) -> None:
        """Close the application normally. At a second signal, or before the event loop runs, call `force`."""
        app = self._app
        if self.signal is not None or app is None:
            self.signal = self.signal or number
            self.force()
        self.signal = number
        timer = threading.Timer(GRACE, self.force)
        timer.daemon = True
        timer.start()
        self._in_loop(partial(app.exit, return_code=128 + number))

    def _dump(self, number: int, frame: FrameType | None) -> None:
        """Restore the terminal, then let the signal end the process with its core dump."""
        self.restore(last=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def restore(self, last: bool = False) -> None:
        """Restore the terminal. Has no effect if the terminal is restored already or does not exist any more. `last`:
        the process ends now. Output that still waits in Textual's writer thread is dropped, because it could turn mouse
        reporting on again."""
        with contextlib.suppress(OSError, ValueError):
            fd = sys.__stderr__.fileno()  # type: ignore[union-attr]
            if os.isatty(fd):
                terminal = os.dup(fd)
                if last:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
                os.write(terminal, RESTORE.encode())
                os.close(terminal)
        if self._attributes is not None:
            with contextlib.suppress(termios.error, OSError, ValueError):
                termios.tcsetattr(sys.__stdin__.fileno(), termios.TCSANOW, self._attributes)  # type: ignore[union-attr]

    def force(self) -> NoReturn:
        """Restore the terminal and end the process at once."""
        self.restore(last=True)
        os._exit(128 + (self.signal or 1))

    # ---- stop and continue

    def _on_continue(self, number: int, frame: FrameType | None) -> None:
        self._continued = True
        self._in_loop(self._continue)

    def _suspend(self) -> None:
        """Give the terminal to the shell and stop this process (ctrl+z, `kill -TSTP`). Then take the terminal back."""
        if (driver := self._driver()) is not None:
            self._suspended = True
            driver.suspend_application_mode()
            os.kill(os.getpid(), signal.SIGSTOP)
            self._continue()  # before any drawing: drawing would wait for Textual's writer thread, which has ended

    def _continue(self) -> None:
        """Take the terminal back. After a SIGSTOP from outside, application mode is still on. It must be switched off
        first: otherwise a second thread would read keys, and this thread would not end with the application."""
        driver = self._driver()
        if driver is None or not self._continued:
            return
        self._continued = False
        if not self._suspended:
            driver.suspend_application_mode()
        for _ in range(ATTEMPTS):  # in the background, each attempt stops the process until the next SIGCONT
            driver.start_application_mode()
            if driver._key_thread is not None and driver._key_thread.is_alive():
                break
        else:
            self.force()  # the terminal does not exist any more
        self._suspended = False
        driver._app.refresh(layout=True)  # the shell has drawn on the screen

    def _driver(self) -> LinuxDriver | None:
        """Returns Textual's driver; None if there is no application or it is closing."""
        app = self._app
        if app is None or (app._exit and not self._suspended):
            return None
        return cast("LinuxDriver", app._driver)
