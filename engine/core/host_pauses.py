"""Measures pauses that delay the host: garbage collections, other programs on the thread's core, SIGSTOP."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from typing import Any, NamedTuple

TASKS = "/proc/self/task"
SEARCH_EVERY = 64  # readings of the delays between two searches for new threads


class Pauses(NamedTuple):
    """The pauses in a period of time."""

    gc_s: float  # seconds of garbage collection, from `gc.callbacks`
    delayed_s: float | None  # seconds in which a thread was ready to run but another program used its core; of several
    #   threads that compute together, the longest delay. None: not read, or not available (needs Linux's schedstat)
    stops: int  # how often the process was stopped and continued; 0 if `watch_stops` was not called


NO_PAUSES = Pauses(0.0, None, 0)


class _Counts:
    gc_s = 0.0
    gc_began = 0.0
    stops = 0


def _on_gc(phase: str, _info: dict[str, Any]) -> None:
    if phase == "start":
        _Counts.gc_began = time.perf_counter()
    else:
        _Counts.gc_s += time.perf_counter() - _Counts.gc_began


def watch_stops() -> None:
    """Count how often this process is stopped and continued. Must be called in the main thread. An existing handler of
    SIGCONT is still called."""
    before = signal.getsignal(signal.SIGCONT)

    def continued(number: int, frame: Any) -> None:
        _Counts.stops += 1
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGCONT, continued)


class HostPauses:
    """Measures the pauses of the calling thread; with `computes`, also the delays of threads that compute with it."""

    def __init__(self, computes: bool) -> None:
        self._computes = computes
        self._files: dict[int, int] = {}  # thread id -> descriptor of the thread's schedstat file
        self._delays: dict[int, int] = {}  # thread id -> total delay in nanoseconds at the last reading
        self._readings = 0
        self.reading_s = 0.0  # how long the last reading of the delays took
        self._gc_s, self._stops = _Counts.gc_s, _Counts.stops
        if _on_gc not in gc.callbacks:
            gc.callbacks.append(_on_gc)

    def since_last(self, delays: bool = True) -> Pauses:
        """Returns the pauses since the last call. `delays`: also read the delays; `reading_s` is then the time that
        this took, and `delayed_s` covers the time since the last call that read them. Without `delays`, `delayed_s` is
        None."""
        if not delays and _Counts.gc_s == self._gc_s and _Counts.stops == self._stops:
            return NO_PAUSES
        delayed_s = self._read_delays() if delays else None
        pauses = Pauses(_Counts.gc_s - self._gc_s, delayed_s, _Counts.stops - self._stops)
        self._gc_s, self._stops = _Counts.gc_s, _Counts.stops
        return pauses

    def _search(self) -> None:
        """Open the schedstat files of new threads. Skip other Python threads, because they do not compute steps."""
        with contextlib.suppress(OSError):
            this_thread = threading.get_native_id()
            others = {thread.native_id for thread in threading.enumerate()} - {this_thread}
            found = {int(name) for name in os.listdir(TASKS)} - others if self._computes else {this_thread}
            for thread in found - self._files.keys():
                self._files[thread] = os.open(f"{TASKS}/{thread}/schedstat", os.O_RDONLY)

    def _read_delays(self) -> float | None:
        if self._readings % SEARCH_EVERY == 0:
            self._search()
        self._readings += 1
        begin, longest = time.perf_counter(), 0
        for thread, file in list(self._files.items()):
            try:
                delay = int(os.pread(file, 64, 0).split()[1])
            except (OSError, IndexError, ValueError):  # the thread has ended
                os.close(self._files.pop(thread))
                continue
            longest = max(longest, delay - self._delays.get(thread, delay))
            self._delays[thread] = delay
        self.reading_s = time.perf_counter() - begin
        return longest / 1e9 if self._files else None

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file)
