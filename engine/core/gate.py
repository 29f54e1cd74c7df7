"""The gate between steps: it pauses the engine, allows n steps, waits for an event, or slows the steps down.

The engine's loop calls `allows()` before each step, `committed()` after each step and `settle()` after each command.
The gate does not influence what a step contains: requests can be added and aborted while the gate is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import InvalidRequest
from engine.trace.kind import Record, kind_of, named
from engine.trace.records import CLEARED, RecordLog

MAX_PACE = 1000.0
# An event of "run until" -> the kind of record that can report it, and a function of the record, with its fields as
# attributes, and of the limit of a slow step in ms. It returns a phrase for the screen, or "" if it is not the event.
EVENTS: dict[str, tuple[str, Callable[[Any, float], str]]] = {
    "admission": ("admit", lambda r, _: f"r{r.request} was admitted"),
    "prefill": ("step", lambda r, _: f"step {r.step} prefills r{r.prefills[0][0]}" if r.prefills else ""),
    "hit": ("match", lambda r, _: f"r{r.request} took {r.tokens} tokens from the tree" if r.tokens else ""),
    "eviction": (
        "evict", lambda r, _: f"{r.blocks} blocks of node {r.node} were evicted" if r.reason != CLEARED else ""
    ),
    "preemption": ("preempt", lambda r, _: f"r{r.request} was preempted"),
    "finish": ("finish", lambda r, _: f"r{r.request} finished: {r.reason}"),
    "slow": ("time", lambda r, ms: f"step {r.step} took more than {ms:g} ms" if r.wall_ms > ms else ""),
}
RUNNING = "running until "  # a gate that waits for an event has this reason, followed by the event's name


class Gate:
    """If the gate is open, steps run freely. If it is closed, only steps that `step` or `run_until` allows run."""

    def __init__(self, log: RecordLog) -> None:
        self._log = log
        self.state = "open"
        self.pace = 1.0
        self.last_wall_s = 0.0  # duration of the last step, before slow motion stretches it
        self._allowed = 0
        self._until: str | None = None
        self._slower_than_ms = 0.0
        self._cause = ""  # the event that ended the wait, as a phrase for the screen; empty until then

    @property
    def free_running(self) -> bool:
        """True if steps may overlap: the gate is open and slow motion is off."""
        return self.state == "open" and self.pace == 1.0

    def allows(self) -> bool:
        """True if the next step may run now."""
        return self.state == "open" or self._allowed > 0 or (self._until is not None and not self._cause)

    @property
    def stretch_s(self) -> float:
        """Seconds to wait after the last step, so that step and wait together take `pace` times the step's duration."""
        return (self.pace - 1.0) * self.last_wall_s if self.pace > 1.0 else 0.0

    def pause(self) -> None:
        self._set("closed", "paused")

    def resume(self) -> None:
        self._set("open", "resumed")

    def step(self, n: int = 1) -> None:
        """Close the gate if it is open, and let `n` steps through."""
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= 1_000_000:
            raise InvalidRequest(f"the number of steps is {n!r:.40}: it must be whole, from 1 to 1,000,000", "n")
        if self.state == "open" or self._until is not None:
            self._set("closed", "stepping")
        self._allowed = n

    def run_until(self, event: str, slower_than_ms: float = 0.0) -> None:
        """Let steps through until `event` (a key of EVENTS) happens; then let no more steps through. `slower_than_ms`:
        the event "slow" happens when a step takes more milliseconds than this."""
        if not isinstance(event, str) or event not in EVENTS:
            raise InvalidRequest(f"there is no event {event!r:.80}: the events are {', '.join(EVENTS)}", "event")
        if not _is_number(slower_than_ms) or not slower_than_ms >= 0:
            raise InvalidRequest(f"the limit of a slow step is {slower_than_ms!r:.40} ms: it must be 0 or more", "ms")
        self._set("closed", f"{RUNNING}{event}", always=True)
        self._until, self._slower_than_ms = event, float(slower_than_ms)
        self._log.watch = self._see

    def set_pace(self, factor: float) -> None:
        """Stretch every step to `factor` times its real duration; 1 is full speed."""
        if not _is_number(factor) or not 1.0 <= factor <= MAX_PACE:
            raise InvalidRequest(f"the pace is {factor!r:.40}: it must be from 1 to {MAX_PACE:g}", "factor")
        if factor != self.pace:
            self.pace = float(factor)
            self._log.append("pace", self.pace)

    def committed(self, wall_s: float) -> None:
        """Count a step that was committed after `wall_s` seconds of work."""
        self.last_wall_s = wall_s
        if self.state == "open":
            return
        if self._allowed > 0:
            self._allowed -= 1
        self.settle()

    def settle(self) -> None:
        """If the awaited event has happened, record why the gate stays closed. Call this between two steps."""
        if self._cause:
            cause, self._cause, self._until = self._cause, "", None
            self._log.append("gate", "closed", cause)

    def _see(self, record: Record) -> None:
        """Compare a new record with the event. The step in which the event happens still completes."""
        assert self._until is not None
        if cause := fulfils(record, self._until, self._slower_than_ms):
            self._cause, self._log.watch = cause, None

    def _set(self, state: str, reason: str, always: bool = False) -> None:
        """Set the state and cancel all allowed steps. Write a record if something changed, or if `always`."""
        changed = always or state != self.state or self._until is not None
        self._allowed, self._until, self._cause, self._log.watch = 0, None, "", None
        if changed:
            self.state = state
            self._log.append("gate", state, reason)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def fulfils(record: Record, event: str, slower_than_ms: float = 0.0) -> str:
    """Returns a phrase for the screen if this record reports `event` (a key of EVENTS); else an empty string."""
    kind, phrase = EVENTS[event]
    return phrase(named(record), slower_than_ms) if kind_of(record) == kind else ""
