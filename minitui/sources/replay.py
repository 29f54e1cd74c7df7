"""A Source that plays a trace: the application shows it like an engine, and the viewer controls the clock.

The recorded records get new numbers and times. The viewer controls the gate and slow motion, so the recorded gate and
pace records are left out, and the viewer's actions add new gate and pace records. A speed below 1 is slow motion, as
with a live engine: it delays the records after a step by a multiple of the step's time, and all other times are the
recorded ones. A speed above 1 makes the engine's time run faster.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from engine.core.gate import EVENTS, MAX_PACE, RUNNING, fulfils
from engine.errors import InvalidRequest
from engine.params import SamplingParams
from engine.trace.records import Record
from engine.trace.state import State
from minitui.sources.base import Progress, Source
from minitui.trace.bundled import is_bundled
from minitui.trace.reader import TraceReader

MIN_SPEED, MAX_SPEED = 1.0 / MAX_PACE, 1000.0
AT_ONCE = 20_000  # the largest number of records in one drain
STEPS_BEFORE = 200  # a seek begins this many steps earlier where possible, so that the panels have a history
CONTROL = ("gate", "pace")  # the kinds of records that the viewer's actions replace
GATE = 3  # the field of a `parts` record, counted from its step, with the time at the gate


class ReplaySource(Source):
    """Plays a trace. After `seek`, the caller must take a new `snapshot`."""

    def __init__(self, path: str | Path, speed: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.path = Path(path)
        self.speed = speed
        self.reader: TraceReader | None = None
        self._clock = clock
        self._part = 0  # index of the part of the trace that is played
        self._at = 0  # index of the next record in the part
        self._state: State | None = None  # the state after the records handed out so far
        self._seq = 0  # number of the last record handed out
        self._played = 0.0  # the position of the playhead, in seconds of play
        self._ticked = 0.0  # the time of the clock when the playhead last moved
        self._t = 0.0  # the engine's time at the last record handed out, in the replay
        self._was_closed = False  # the engine's gate in the recording
        self._ended_step = -1  # the last step handed out that has ended
        self._last_due = 0.0  # when the last record handed out was due, in seconds of play
        self._closed = False  # the viewer's gate
        self._allowed = 0  # steps that may still run through the closed gate
        self._in_step = False  # the last step handed out has not ended yet
        self._finishing = False  # the gate was closed within a step: the rest of that step is still handed out
        self._until: tuple[str, float] | None = None  # event of a run_until, and its limit in ms for "slow"
        self._cause = ""  # the event that ended a run_until; it is shown at the end of its step
        self._seek_to: tuple[int, int] | None = None  # target (part, record) of a seek: records before it are due now
        self._control: list[tuple[Any, ...]] = []  # gate and pace records for the next drain

    # ---- the methods of Source

    async def start(self, on_progress: Progress) -> None:
        """Read the trace. Raises TraceError."""
        on_progress({"stage": "trace", "done": 0, "total": 0, "text": f"reading {self.path.name}"})
        self.reader = await asyncio.to_thread(TraceReader, self.path)
        self.info = {**self.reader.info, "replay": str(self.path)}
        self.set_speed(self.speed)
        self._place(0, 0)
        self._ready.set()

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> NoReturn:
        raise InvalidRequest("a recording cannot answer; `minitui chat` starts an engine")

    async def control(self, verb: str, **arguments: Any) -> Any:
        """Do one of: pause | resume | step n= | run_until predicate= | pace factor= | speed factor= | seek step=."""
        if verb == "pause":
            self._gate("closed", "paused")
        elif verb == "resume":
            self._gate("open", "resumed")
        elif verb == "step":
            self._gate("closed", "stepping")
            self._allowed = int(arguments.get("n", 1))
        elif verb == "run_until":
            predicate = arguments["predicate"]
            if predicate["event"] not in EVENTS:
                raise InvalidRequest(f"run until {predicate['event']!r}: choose one of {', '.join(EVENTS)}", "event")
            self._gate("closed", f"{RUNNING}{predicate['event']}")
            self._until = (predicate["event"], predicate.get("ms", 0.0))
        elif verb == "pace":
            self.set_speed(_inverse(arguments["factor"]))
        elif verb == "speed":
            self.set_speed(arguments["factor"])
        elif verb == "seek":
            self.seek(arguments["step"])
        else:
            raise InvalidRequest(f"a recording does not support {verb!r}", "action")

    async def snapshot(self) -> dict[str, Any]:
        """Returns the state after the records handed out so far."""
        assert self._state is not None, "the replay has not been started"
        return self._state.snapshot()

    def drain_records(self) -> list[Record]:
        """Returns the records that are due by now."""
        if self.reader is None or self._state is None:
            return []
        out: list[Record] = []
        self._hand_out_control(out)
        self._advance_clock()
        while len(out) < AT_ONCE:
            record, due = self._next()
            if self._seek_to is not None and (record is None or (self._part, self._at) >= self._seek_to):
                self._arrive(out)
            if record is None or not self._is_due(due):
                break
            self._at += 1
            self._played = max(self._played, due)
            self._move_engine_time(due)
            if record[2] not in CONTROL:
                out.append(self._make(*_without_gate(record)))
            self._after(record, out)
        return out

    async def restart(self, on_progress: Progress) -> None:
        """Play from the beginning."""
        self._place(0, 0)

    async def close(self) -> None:
        """Does nothing: there is no process to end."""

    # ---- the player

    @property
    def trace(self) -> TraceReader:
        """The trace; available after `start`."""
        assert self.reader is not None, "the replay has not been started"
        return self.reader

    @property
    def played(self) -> float:
        """The position of the playhead, in seconds of play."""
        return self._played

    @property
    def step(self) -> int:
        """The last step handed out; -1 before `start`."""
        return self._state.step if self._state is not None else -1

    @property
    def pace(self) -> float:
        """The factor of slow motion; 1 if the replay is as fast as the engine was, or faster."""
        return max(1.0, round(1.0 / self.speed, 2))

    @property
    def ended(self) -> bool:
        """True if all records have been handed out."""
        return self.reader is not None and self._next()[0] is None

    @property
    def stopped(self) -> bool:
        """True if time does not pass: the replay is paused or at its end."""
        return self._closed or self.ended

    def set_speed(self, speed: float) -> None:
        """Set the speed: 1 is as fast as the engine was, 0.1 ten times slower. Raises InvalidRequest."""
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise InvalidRequest(f"the speed is {speed:g}: it must be from {MIN_SPEED:g} to {MAX_SPEED:g}", "factor")
        self._advance_clock()
        self.speed = speed
        if self._state is not None and self.pace != self._state.pace:
            self._control = [item for item in self._control if item[0] != "pace"] + [("pace", self.pace)]

    def seek(self, step: int) -> None:
        """Move the playhead to the end of `step`.

        The next snapshot is of an earlier step, because the panels need a history. The records from that step to `step`
        are due at once.
        """
        trace = self.trace
        step = max(trace.step_before, min(step, trace.last_step))
        target = trace.locate(step)
        begin = trace.part_of_step(max(trace.step_before, step - STEPS_BEFORE))
        self._place(begin, 0)
        self._seek_to = target if step > trace.step_before else (0, 0)
        self._until, self._allowed = None, 0
        # The records up to `step` are played with an open gate and without slow motion. `_arrive` restores both.
        assert self._state is not None
        self._state.gate, self._state.pace = "open", 1.0
        self._control.clear()

    def bookmark(self, text: str) -> None:
        """Bookmark the step at the playhead. The bookmark of a bundled trace is not saved."""
        if is_bundled(self.path):
            self.trace.bookmarks.append((self.step, text))
            self.trace.bookmarks.sort()
        else:
            self.trace.add_bookmark(self.step, text)

    def next_bookmark(self, direction: int) -> tuple[int, str] | None:
        """Returns the nearest bookmark after (1) or before (-1) the playhead."""
        marks = self.trace.bookmarks
        if direction > 0:
            return next((mark for mark in marks if mark[0] > self.step), None)
        return next((mark for mark in reversed(marks) if mark[0] < self.step), None)

    # ---- internal

    def _place(self, part: int, at: int) -> None:
        chosen = self.trace.part(part)
        self._part, self._at = part, at
        state = chosen.state
        # The next record's number leaves a gap after the last number handed out, so that the caller notices the jump.
        if self._state is not None:
            state.seq = max(self._seq + 2, state.seq)
        self._was_closed, self._ended_step = state.gate == "closed", state.step
        state.gate = "closed" if self._closed else "open"
        state.pace = self.pace
        self._state, self._seq = state, state.seq
        self._t = state.t
        self._in_step = self._finishing = False
        self._played = self._last_due = chosen.keyframe.played
        self._ticked = self._clock()
        self._seek_to = None

    def _next(self) -> tuple[Record | None, float]:
        trace = self.trace
        while self._at >= len(trace.part(self._part).records):
            if self._part + 1 >= len(trace.keyframes):
                return None, 0.0
            following = trace.keyframes[self._part + 1]
            at_end = trace.part(self._part).state.seq + len(trace.part(self._part).records)
            if following.seq != at_end:  # the recording has a gap: continue from the keyframe's state
                self._place(self._part + 1, 0)
            else:
                self._part, self._at = self._part + 1, 0
        part = trace.part(self._part)
        return part.records[self._at], part.due[self._at]

    def _advance_clock(self) -> None:
        now = self._clock()
        if not self._closed:
            self._played += (now - self._ticked) * self.speed
        self._ticked = now
        if self.ended:
            self._played = min(self._played, self.trace.seconds)

    def _move_engine_time(self, due: float) -> None:
        """Move the engine's time to the next record; recorded pauses are left out, except for a step that still ran."""
        assert self._state is not None
        if not self._was_closed or self._state.step > self._ended_step:
            self._t += due - self._last_due
        self._last_due = due

    def _is_due(self, due: float) -> bool:
        if self._seek_to is not None:
            return True
        if self._closed:
            return self._finishing or self._allowed > 0 or self._until is not None
        return due <= self._played

    def _arrive(self, out: list[Record]) -> None:
        """End a seek: restore the viewer's gate and pace."""
        self._seek_to = None
        self._played = self._last_due
        self._ticked = self._clock()
        if self._closed:
            self._control.append(("gate", "closed", "paused"))
        if self.pace != 1:
            self._control.append(("pace", self.pace))
        self._hand_out_control(out)

    def _hand_out_control(self, out: list[Record]) -> None:
        out += [self._make(kind, *fields) for kind, *fields in self._control]
        self._control.clear()

    def _make(self, kind: str, *fields: Any) -> Record:
        assert self._state is not None
        self._seq += 1
        record = (self._seq, self._t, kind, *fields)
        self._state.apply(record)
        return record

    def _after(self, record: Record, out: list[Record]) -> None:
        """Note a recorded gate; delay the records after a step in slow motion; count steps while the gate is closed,
        and end a run_until at its event."""
        assert self._state is not None
        ended = record[2] in ("time", "fail")
        if record[2] == "gate":
            self._was_closed = record[3] == "closed"
        elif ended:
            self._ended_step = record[3]
        if record[2] == "time" and self._state.gate == "open":
            self._t += record[7] / 1e3 * (self._state.pace - 1)
        self._in_step = not ended if ended or record[2] == "step" else self._in_step
        if self._finishing:
            self._finishing = not ended
            return
        if not self._closed:
            return
        if self._until is not None:
            event, slower_than = self._until
            cause = fulfils(record, event, slower_than)
            if cause:
                self._until, self._allowed = None, 1  # run to the end of this step
                self._cause = cause
        if ended and self._allowed > 0:
            self._allowed -= 1
            if self._cause:
                out.append(self._make("gate", "closed", self._cause))
                self._cause = ""

    def _gate(self, state: str, reason: str) -> None:
        self._advance_clock()
        closed, waited = state == "closed", self._until is not None
        self._allowed, self._until, self._cause = 0, None, ""
        if closed != self._closed or waited or reason.startswith(RUNNING):
            self._closed = closed
            self._finishing = closed and self._in_step  # a gate closes between two steps
            self._control.append(("gate", state, reason))


def _without_gate(record: Record) -> tuple[Any, ...]:
    """Returns the fields of a record after its time; a `parts` record without the time at the recorded gate."""
    kind, *fields = record[2:]
    if kind == "parts":
        fields[GATE] = 0
    return kind, *fields


def _inverse(factor: float) -> float:
    return 1.0 / factor if factor else math.inf
