"""Detects a hanging engine process. A thread in the engine process sends heartbeats, and the client waits for them.

Heartbeats alone do not distinguish a hang from a long call: a C function that holds Python's lock (the import of torch,
the compilation of a kernel) stops the heartbeat thread, as SIGSTOP does. But such a call uses the processor or waits
for the disk, and the client can read both from the operating system. There are three cases:

    heartbeats arrive; the same task runs for LONG_S      a long task: the client shows the task's name
    no heartbeats; the process uses processor or disk     a long call: the client shows the name of the call's task
    no heartbeats, no processor, no disk for SILENCE_S    a hang: the client reports it; the engine can be restarted
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

BEAT_S = 1.0  # between two heartbeats
TICK_S = 0.5  # how often the client checks
LONG_S = 5.0  # tasks that take longer are reported
SILENCE_S = 5.0  # a process without a sign of life for this long seems to hang
WORKING_S = 0.1  # this much processor time is a sign of life; a wait for Python's lock uses less in SILENCE_S
STOPPED, ON_DISK = "Tt", "D"  # states of a process in /proc/PID/stat and in ps
IDLE = ""  # the task while the main thread waits for a command


class Heart:
    """In the engine process: sends the main thread's task and its duration every BEAT_S."""

    def __init__(self, send: Callable[[str, str, float, str], None]) -> None:
        self._send = send
        self.preparing = ""  # see Condition
        self._task = ("load", time.monotonic())
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def begin(self, task: str) -> None:
        """Record that the main thread begins `task`, which may be IDLE."""
        self._task = (task, time.monotonic())

    def beat(self) -> None:
        """Send a heartbeat now."""
        task, began = self._task
        self._send("beat", task, time.monotonic() - began, self.preparing)

    def _run(self) -> None:
        while True:
            self.beat()
            time.sleep(BEAT_S)


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition of the engine process. `hung`: a sentence that says why the process seems to hang; else empty."""

    task: str = IDLE  # load | step | start | the kind of a command
    task_s: float = 0.0  # duration of the task so far
    silent_s: float = 0.0  # time without a sign of life
    hung: str = ""
    preparing: str = ""  # what makes steps faster and is not ready yet, as a phrase; else empty

    @property
    def long(self) -> str:
        """A phrase about a long task, for the screen; empty if there is none. Loading reports its own progress."""
        if self.silent_s > 2 * BEAT_S or self.task in (IDLE, "load") or self.task_s < LONG_S:
            return ""
        name = "one step" if self.task == "step" else f"one command ({self.task})"
        return f"{name} has taken {self.task_s:.0f} s so far"


class Watch:
    """In the client: watches one process by its messages. While no messages arrive, it reads the processor time.
    Silence is counted in ticks of the client, so a client that was suspended does not report a hang when it
    continues."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._messages = 0  # compared by `tick`
        self._seen = 0  # messages at the last tick
        self._task, self._task_s, self._task_at = "load", 0.0, time.monotonic()
        self._silent = 0  # ticks
        self._cpu_s = 0.0
        self._hung = self._preparing = ""

    def heard(self) -> None:
        """Count a message."""
        self._messages += 1

    def beat(self, task: str, seconds: float, preparing: str = "") -> None:
        """Store a heartbeat."""
        self._task, self._task_s, self._task_at, self._preparing = task, seconds, time.monotonic(), preparing

    def tick(self) -> None:
        """Check the process; call this every TICK_S."""
        if self._messages != self._seen:
            self._seen, self._silent, self._hung = self._messages, 0, ""
            return
        self._silent += 1
        usage = look_at(self.pid)
        if self._silent == 1 or usage.state == ON_DISK or usage.cpu_s - self._cpu_s >= WORKING_S:
            self._silent, self._cpu_s = min(self._silent, 1), usage.cpu_s
        self._hung = self._sentence(usage.state) if self._silent * TICK_S >= SILENCE_S else ""

    def _sentence(self, state: str) -> str:
        stopped = bool(state) and state in STOPPED
        why = f"it is stopped, and kill -CONT {self.pid} continues it" if stopped else "it does not use the processor"
        return f"the engine's process {self.pid} has given no sign of life for {self._silent * TICK_S:.0f} s: {why}"

    @property
    def condition(self) -> Condition:
        task_s = self._task_s + time.monotonic() - self._task_at if self._task else 0.0
        return Condition(self._task, task_s, self._silent * TICK_S, self._hung, self._preparing)


class Usage(NamedTuple):
    state: str  # the first letter of the state in ps; empty if there is no such process
    cpu_s: float  # processor time of all threads


def look_at(pid: int) -> Usage:
    """Returns the state and the processor time of a process, from /proc, or from ps if there is no /proc."""
    with contextlib.suppress(OSError, ValueError, IndexError, subprocess.SubprocessError):
        if Path("/proc/self/stat").exists():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return Usage(fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
        command = ["ps", "-o", "state=,time=", "-p", str(pid)]
        state, used = subprocess.run(command, capture_output=True, text=True, timeout=1).stdout.split()
        days, _, clock = used.rpartition("-")
        seconds = 0.0
        for part in clock.split(":"):
            seconds = 60 * seconds + float(part)
        return Usage(state[0], 86400 * int(days or 0) + seconds)
    return Usage("", 0.0)
