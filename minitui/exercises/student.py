"""Calls the function of a student, and says in a sentence what is wrong with it. This runs in a process of its own,
with limits that the kernel enforces (process.py). Here a fault of a call becomes a sentence with the line and the step.
It is no protection against attacks: the code has the rights of the person who runs it."""

from __future__ import annotations

import io
import reprlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from operator import index
from os import O_APPEND, O_CREAT, O_RDWR, O_TRUNC, O_WRONLY
from types import FrameType
from typing import Any

FILE = "<exercise>"  # the name of the student's file in tracebacks
SHORT = 160  # characters of a message or a value in a sentence
PRINTED = 4_000  # characters of what the code prints: the last ones are kept
NOT_ALLOWED = ("os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system", "os.kill", "os.killpg", "os.remove",
               "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "subprocess.Popen", "socket.connect", "socket.bind",
               "ctypes.dlopen", "shutil.rmtree")
ROOM = 256 << 20  # bytes that the code may take, beside what its process has taken before
GRACE_S = 0.5  # after a time limit, the code has this long to end before the kernel ends the process


class Broken(BaseException):
    """A rule is broken. The text is the sentence; `step`: the step in which it was, None: before the first. It is no
    Exception: the engine would take those of a launch for failures of the device, and go on."""

    def __init__(self, sentence: str, step: int | None = None) -> None:
        super().__init__(sentence)
        self.step = step


class TimeUp(BaseException):
    """A time limit has passed."""


class Forbidden(BaseException):
    """The code called something that exercises may not use. The text is its name."""


def short(text: str) -> str:
    """Returns a text in one short line."""
    line = " ".join(text.split())
    return line if len(line) <= SHORT else f"{line[:SHORT]}…"


def shown(value: object) -> str:
    """Returns a value in one short line."""
    try:
        return short(reprlib.repr(value))
    except Exception:
        return f"a {type(value).__name__}"


def whole(value: Any) -> int | None:
    """Returns a whole number as an int, also one of NumPy; None for anything else, and for True and False."""
    try:
        return None if isinstance(value, bool) else index(value)
    except TypeError:
        return None


def stable_hash(value: object) -> int:
    """The `hash` of the student's file. Raises ValueError for values whose hash is another one in each process."""
    for each in value if type(value) is tuple else (value,):
        if not isinstance(each, (int, float)):
            raise ValueError(f"hash of a {type(each).__name__} is different in each run of Python")
    return hash(value)


class Printed(io.TextIOBase):
    """Keeps the end of what is printed (`text`), and the end of what the last `step` that printed has printed
    (`latest`)."""

    def __init__(self, now: Callable[[], int | None]) -> None:
        """`now`: returns the step that the engine plans."""
        self.text = self.latest = ""
        self.step: int | None = None
        self.muted, self._now = False, now

    def write(self, text: str) -> int:
        step = self._now()
        if not self.muted:
            self.text = (self.text + text)[-PRINTED:]
            self.latest = ((self.latest if step == self.step else "") + text)[-PRINTED:]
            self.step = step
        return len(text)


class Student:
    """The function `name` of a student's file. `step`: returns the step that the engine plans."""

    def __init__(self, source: str, name: str) -> None:
        """Run the file. Raises Broken."""
        self.name = name
        self.step: Callable[[], int | None] = lambda: None
        self.printed = Printed(lambda: self.step())
        module: dict[str, Any] = {"__name__": "exercise", "hash": stable_hash}
        with self.watched("the file"):
            exec(compile(source, FILE, "exec", dont_inherit=True), module)
        self._function = module.get(name)
        if not callable(self._function):
            raise Broken(f"the file has no function {name!r}")

    def __call__(self, *arguments: object) -> Any:
        """Call the function. Raises Broken if it raises."""
        assert callable(self._function)
        with self.watched(f"`{self.name}`"):
            return self._function(*arguments)

    def broken(self, sentence: str) -> Broken:
        """Returns an error with the sentence "at step 12, …"."""
        step = self.step()
        return Broken(sentence if step is None else f"at step {step:,}, {sentence}", step)

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """Raises Broken for whatever is raised within, and keeps what is printed. `what`: the name of what runs."""
        try:
            with redirect_stdout(self.printed):
                yield
        except Broken:
            raise
        except SyntaxError as error:
            raise Broken(f"line {error.lineno}: {short(str(error.msg))}") from None
        except TimeUp as error:
            line = _line()
            raise self.broken(f"{what} did not end: {error}{line and f'; it was{line}'}") from None
        except Forbidden as error:
            words = f"{what} used {error}{_line()}: code of an exercise starts no process, opens no connection, and "
            raise self.broken(words + "changes no file") from None
        except MemoryError:
            raise self.broken(f"{what} used more memory than an exercise may use ({ROOM >> 20} MiB)") from None
        except SystemExit:
            raise self.broken(f"{what} called exit{_line()}") from None
        except BaseException as error:
            words = short(str(error))
            kind = type(error).__name__
            raise self.broken(f"{what} raised {kind}{_line()}{words and f': {words}'}") from None


def _line() -> str:
    """Returns " in line 14" for the current exception: the last line of the student's file in its traceback."""
    found = None
    trace = sys.exc_info()[2]
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FILE:
            found = trace.tb_lineno
        trace = trace.tb_next
    return "" if found is None else f" in line {found}"


# ---- the limits of a call


@contextmanager
def limited(cpu: float, seconds: float) -> Iterator[None]:
    """Let TimeUp be raised in the code that runs, after `cpu` seconds of processor time or `seconds` of time. Code that
    catches it is ended by the kernel after GRACE_S."""

    def up(signum: int, frame: FrameType | None) -> None:
        number = signal.Signals(signum)
        signal.signal(number, signal.SIG_DFL)
        signal.setitimer(timers[number], GRACE_S)
        limit = f"{cpu:g} s of processor time" if number == signal.SIGVTALRM else f"{seconds:g} s"
        raise TimeUp(f"a run may take {limit}")

    timers = {signal.SIGVTALRM: signal.ITIMER_VIRTUAL, signal.SIGALRM: signal.ITIMER_REAL}
    for number in timers:
        signal.signal(number, up)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        for number, timer in timers.items():
            signal.setitimer(timer, 0.0)
            signal.signal(number, signal.SIG_DFL)


def forbid() -> None:
    """Let this process start no processes and change no files, for good: what would do so raises Forbidden."""

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in NOT_ALLOWED:
            raise Forbidden(event)
        if event == "open":
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            if flags & (O_WRONLY | O_RDWR | O_APPEND | O_CREAT | O_TRUNC):
                raise Forbidden("open for writing")

    sys.addaudithook(audit)
