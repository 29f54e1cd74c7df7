"""The terminal is given back as it was found, however the application ends.

Textual restores it after a normal exit and after an exception. Signals are ours. Those that end a process (CLOSE) ask
the application to close; if it has not within a few seconds, or at a second signal, the terminal is restored by hand
and the process ends. Those that also dump core (DUMP) restore the terminal and do so. SIGTSTP and SIGCONT give the
terminal to the shell and take it again. The engine's process ends by itself when this one does.
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

GRACE = 4.0  # seconds to close in good order
ATTEMPTS = 100  # to take the terminal again


def _those_of(names: str) -> tuple[signal.Signals, ...]:
    """The signals that this platform has; Python itself ignores SIGPIPE and SIGXFSZ."""
    return tuple(signal.Signals[name] for name in names.split() if name in signal.Signals.__members__)


CLOSE = _those_of(
    "SIGTERM SIGHUP SIGINT SIGUSR1 SIGUSR2 SIGALRM SIGVTALRM SIGPROF SIGIO SIGPWR SIGSTKFLT SIGRTMIN SIGRTMAX"
)
DUMP = _those_of("SIGQUIT SIGABRT SIGXCPU SIGSYS SIGTRAP")

# A half-drawn frame, mouse reporting, bracketed paste, focus reporting, in-band resize, kitty keys, alternate screen:
# off. Cursor and wrap: on.
RESTORE = (
    "\x1b[?2026l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1016l\x1b[?2004l\x1b[?1004l\x1b[?2048l"
    "\x1b[<u\x1b[?1049l\x1b[?25h\x1b[?7h\x1b[0m"
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
    """Made before the application starts, it remembers how the terminal was. It owns the signals while the application
    runs (`watching`); `attach` tells it whom they concern, once the event loop runs."""

    def __init__(self) -> None:
        self.signal: int | None = None  # the one that ended us
        self._app: App[int] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._away = False  # is application mode off while the shell has the terminal?
        self._stopped = False  # a SIGCONT has come that is not handled yet
        self._attributes: list[Any] | None = None
        with contextlib.suppress(termios.error, OSError, ValueError):
            self._attributes = termios.tcgetattr(sys.__stdin__.fileno())  # type: ignore[union-attr]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts no signal ends the process before the terminal is restored; it is restored at the end."""
        before = self._take_signals()
        try:
            yield
        finally:
            self._app = self._loop = None
            self.restore()
            for number, handler in before.items():
                signal.signal(number, handler)

    def attach(self, app: App[int]) -> None:
        """From now on signals close `app`, and stop and continue it. Call it in the running event loop."""
        self._app, self._loop = app, asyncio.get_running_loop()
        self._take_signals()  # Textual's driver for browsers has put its own in their place
        if app._driver is not None and app._driver.can_suspend:  # instead of Textual's handlers
            signal.signal(signal.SIGTSTP, lambda *_: self._in_loop(self._suspend))
            signal.signal(signal.SIGCONT, self._woken)

    def _take_signals(self) -> dict[signal.Signals, Any]:
        """Returns the handlers that there were."""
        before = {number: signal.signal(number, self._die) for number in DUMP}
        return before | {number: signal.signal(number, self._end) for number in CLOSE}

    def _in_loop(self, call: Callable[[], object]) -> None:
        # A handler runs between two bytecodes, anywhere: Textual's queues may just be locked by the code below it.
        if self._loop is not None:
            self._loop.call_soon_threadsafe(call)

    # ---- the end

    def _end(self, number: int, frame: FrameType | None) -> None:
        """Close the application in good order; at once at a second signal, or before there is a loop."""
        app = self._app
        if self.signal is not None or app is None:
            self.signal = self.signal or number
            self.force()
        self.signal = number
        timer = threading.Timer(GRACE, self.force)
        timer.daemon = True
        timer.start()
        self._in_loop(partial(app.exit, return_code=128 + number))

    def _die(self, number: int, frame: FrameType | None) -> None:
        """Die of the signal, with its core dump, in a terminal that is restored."""
        self.restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def restore(self) -> None:
        """Write the terminal back to what it was; harmless when it already is, or is gone."""
        with contextlib.suppress(OSError, ValueError):
            fd = sys.__stderr__.fileno()  # type: ignore[union-attr]
            if os.isatty(fd):
                os.write(fd, RESTORE.encode())
        if self._attributes is not None:
            with contextlib.suppress(termios.error, OSError, ValueError):
                termios.tcsetattr(sys.__stdin__.fileno(), termios.TCSANOW, self._attributes)  # type: ignore[union-attr]

    def force(self) -> NoReturn:
        """Restore the terminal and end the process at once."""
        self.restore()
        os._exit(128 + (self.signal or 1))

    # ---- stop and continue

    def _woken(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True
        self._in_loop(self._continue)

    def _suspend(self) -> None:
        """ctrl+z, `kill -TSTP`: give the terminal to the shell, stop, and take it again when continued."""
        if (driver := self._driver()) is not None:
            self._away = True
            driver.suspend_application_mode()
            os.kill(os.getpid(), signal.SIGSTOP)
            self._continue()  # now: what is drawn before would wait for the writer that has ended

    def _continue(self) -> None:
        """Take the terminal again. After SIGSTOP application mode still runs: it ends before it starts again, because a
        second thread that reads keys would outlive the application."""
        driver = self._driver()
        if driver is None or not self._stopped:
            return
        self._stopped = False
        if not self._away:
            driver.suspend_application_mode()
        for _ in range(ATTEMPTS):  # in the background each of them stops the process until it is continued
            driver.start_application_mode()
            if driver._key_thread is not None and driver._key_thread.is_alive():
                break
        else:
            self.force()  # there is no terminal any more
        self._away = False
        driver._app.refresh(layout=True)  # the shell has drawn over it

    def _driver(self) -> LinuxDriver | None:
        """The driver that may be stopped and continued: an application that closes is left alone."""
        app = self._app
        if app is None or (app._exit and not self._away):
            return None
        return cast("LinuxDriver", app._driver)
