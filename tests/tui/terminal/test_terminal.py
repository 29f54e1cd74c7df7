"""The terminal is given back as it was, however the application ends: in a real pseudo-terminal."""

from __future__ import annotations

import io
import os
import signal
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from minitui.tui.terminal.guard import takes_unicode
from tests.support.app.terminal import Terminal, python

READY = "256 blocks of 16"


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(python("-m", "tests.support.app.pty_host"), tmp_path)
    terminal.until(READY)
    assert terminal.left_on()  # it does take the terminal over
    assert not terminal.flags() & termios.ICANON
    yield terminal
    terminal.close()


def assert_restored(terminal: Terminal) -> None:
    assert terminal.left_on() == []
    assert terminal.flags_at_end & termios.ICANON
    assert terminal.flags_at_end & termios.ECHO


def test_after_q_the_terminal_is_as_it_was(app: Terminal):
    app.process.send(b"caf\xe9 \xff\xc3 \xc3\xbc")  # of a terminal that is not set to UTF-8
    app.until("caf\ufffd \ufffd\ufffd ü")
    app.type("\x1b")
    app.until(" KEYS ")
    app.type("q")
    assert app.ended() == 0
    assert_restored(app)


def test_ctrl_c_asks_once_and_quits_at_the_second(app: Terminal):
    app.type("\x03")
    app.until("ctrl+c again quits")
    app.type("\x03")
    assert app.ended() == 0
    assert_restored(app)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGHUP, 129), (signal.SIGUSR1, 138), (signal.SIGINT, 130), (signal.SIGABRT, -6)]
)
def test_a_signal_closes_it_in_good_order(app: Terminal, number: signal.Signals, status: int):
    """Also those that would end the process, and those that dump core."""
    os.kill(app.process.pid, number)
    assert app.ended() == status
    assert_restored(app)


def test_a_signal_in_the_middle_of_an_answer_closes_it_too(app: Terminal):
    app.type("What is a block table?\r")
    app.until("maps positions")
    os.kill(app.process.pid, signal.SIGTERM)
    assert app.ended() == 128 + signal.SIGTERM
    assert_restored(app)


def test_two_signals_end_it_at_once_even_while_it_hangs(tmp_path: Path):
    terminal = Terminal(python("-m", "tests.support.app.pty_host", "--hang"), tmp_path)
    terminal.until(READY)
    terminal.type("x\r")  # its event loop stands still now
    terminal.pump(0.5)
    os.kill(terminal.process.pid, signal.SIGTERM)
    terminal.pump(0.3)
    os.kill(terminal.process.pid, signal.SIGTERM)
    assert terminal.ended() == 128 + signal.SIGTERM
    assert_restored(terminal)


def test_a_terminal_without_unicode_is_drawn_in_ascii_and_nothing_takes_more_places():
    latin, written = io.TextIOWrapper(io.BytesIO(), "latin-1", errors="backslashreplace"), "a·█日"
    assert not takes_unicode(latin)
    latin.write(written)
    latin.flush()
    assert latin.buffer.getvalue() == b"a\xb7??"
    assert takes_unicode(io.TextIOWrapper(io.BytesIO(), "utf-8")) and takes_unicode(None)


def test_a_crash_gives_the_terminal_back(tmp_path: Path):
    terminal = Terminal(python("-m", "tests.support.app.pty_host", "--crash"), tmp_path)
    terminal.until(READY)
    terminal.type("x\r")
    assert terminal.ended() == 1
    assert_restored(terminal)
    assert b"RuntimeError: crash on purpose" in terminal.raw
    assert "─ locals ─" not in terminal.raw.decode()  # the command line makes a sentence of it, and a log


def test_ctrl_z_gives_the_shell_back_and_fg_returns_to_the_chat(tmp_path: Path):
    shell = Terminal(["bash", "--norc", "--noprofile", "-i"], tmp_path, PS1="shell$ ", HISTFILE="")
    shell.until("shell$")
    shell.type("bind 'set enable-bracketed-paste off'\r")
    shell.type(" ".join(python("-m", "tests.support.app.pty_host")) + "\r")
    shell.until(READY)
    shell.type("half a ques")
    shell.until("half a ques")
    shell.type("\x1a")
    shell.until("Stopped")
    assert shell.left_on() == []
    shell.type("echo alive\r")
    shell.until("alive")
    shell.type("fg\r")
    shell.until(lambda screen: READY in screen and "half a ques" in screen)
    shell.type("tion\r")
    shell.until("maps positions")
    shell.type("\x03")
    shell.until("ctrl+c again quits")
    shell.type("\x03")
    shell.pump(1.0)
    shell.type("echo back-$((1+1))\r")
    shell.until("back-2")
    assert shell.left_on() == []
    shell.close()


def test_nothing_is_written_after_the_last_restore(tmp_path: Path):
    code = "import os; from minitui.tui.terminal.guard import TerminalGuard; TerminalGuard().restore(last=True); "
    terminal = Terminal(python("-c", code + "os.write(2, b'LATE')"), tmp_path)
    assert terminal.ended() == 0
    assert b"\x1b[?1049l" in terminal.raw and b"LATE" not in terminal.raw


def test_a_signal_before_the_first_picture_restores_the_terminal(tmp_path: Path):
    terminal = Terminal(python("-m", "tests.support.app.pty_host", "--slow-mount"), tmp_path)
    end = time.monotonic() + 60
    while not terminal.left_on():
        assert terminal.pump() and time.monotonic() < end
    os.kill(terminal.process.pid, signal.SIGTERM)
    assert terminal.ended() == 128 + signal.SIGTERM
    assert_restored(terminal)


def test_an_application_that_was_continued_can_be_quit(app: Terminal):
    for stopped in (True, False, True):
        if stopped:
            os.kill(app.process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, app.process.pid, os.WSTOPPED | os.WNOWAIT)
        seen = app.raw.count(b"\x1b[?1049h")
        os.kill(app.process.pid, signal.SIGCONT)
        app.until(lambda screen, seen=seen: READY in screen and app.raw.count(b"\x1b[?1049h") > seen)
    app.type("half a ques")
    app.until("half a ques")
    app.type("\x03")
    app.until("ctrl+c again quits")
    app.type("\x03")
    assert app.ended() == 0
    assert_restored(app)


def test_a_stopped_application_that_is_killed_ends_with_the_terminal_restored(app: Terminal):
    app.type("\x1a")
    os.waitid(os.P_PID, app.process.pid, os.WSTOPPED | os.WNOWAIT)
    os.kill(app.process.pid, signal.SIGTERM)  # what a shell's `kill %1` sends
    os.kill(app.process.pid, signal.SIGCONT)
    assert app.ended() == 128 + signal.SIGTERM
    assert_restored(app)
