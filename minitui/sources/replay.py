"""A Source that plays a trace: the application shows it like an engine, and the viewer controls the clock.

The records have new numbers, and are otherwise handed out as they were recorded, with the recorded pauses and slow
motion. So the panels show at each step what they showed during the recording. Whether the replay is paused, and its
speed, are no records: `paused` and `speed` tell them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from engine.core.gate import EVENTS, MAX_PACE, fulfils
from engine.errors import InvalidRequest
from engine.params import SamplingParams
from engine.trace.kind import Record, kind_of
from engine.trace.state import State
from minitui.sources.base import Progress, Source
from minitui.trace.bundled import is_bundled
from minitui.trace.reader import TraceReader

MIN_SPEED, MAX_SPEED = 1.0 / MAX_PACE, 1000.0
AT_ONCE = 20_000  # the largest number of records in one drain
STEPS_BEFORE = 1_200  # a seek begins this many steps earlier, or more: causes need the costs of 1,000 steps before
RECORDS_BEFORE = 50_000  # a seek begins this many records earlier, or more: the panels then have all that they had


class ReplaySource(Source):
    """Plays a trace. After `seek`, the caller must take a new `snapshot`."""

    missing = "the recording is being read"

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
        self.played = 0.0  # the position of the playhead, in seconds of play
        self._ticked = 0.0  # the time of the clock when the playhead last moved
        self.paused = False  # records are handed out only for steps that the viewer asked for
        self._allowed = 0  # steps that are still handed out although the replay is paused
        self._in_step = False  # the last step handed out has not ended yet
        self._finishing = False  # paused within a step: the rest of that step is still handed out
        self._until: tuple[str, float] | None = None  # event of a run_until, and its limit in ms for "slow"
        self.cause = ""  # the event that ended the last run_until
        self._seek_to: tuple[int, int] | None = None  # target (part, record) of a seek: records before it are due now

    # ---- the methods of Source

    async def start(self, on_progress: Progress) -> None:
        """Read the trace. Raises TraceError."""
        on_progress({"stage": "trace", "done": 0, "total": 0, "text": f"reading {self.path.name}"})
        self.reader = await asyncio.to_thread(TraceReader, self.path)
        self.info = self.reader.info
        self.set_speed(self.speed)
        self._place(0, 0)
        self._ready.set()

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> NoReturn:
        raise InvalidRequest("a recording cannot answer; `minitui chat` starts an engine")

    async def control(self, verb: str, **arguments: Any) -> Any:
        """Do one of: pause | resume | step n= | run_until predicate= | pace factor= | speed factor= | seek step=. The
        result of "seek" is that of `seek`."""
        if verb == "pause":
            self.set_paused(True)
        elif verb == "resume":
            self.set_paused(False)
        elif verb == "step":
            self.set_paused(True)
            self._allowed = int(arguments.get("n", 1))
        elif verb == "run_until":
            predicate = arguments["predicate"]
            if predicate["event"] not in EVENTS:
                raise InvalidRequest(f"run until {predicate['event']!r}: choose one of {', '.join(EVENTS)}", "event")
            self.set_paused(True)
            self._until = (predicate["event"], predicate.get("ms", 0.0))
        elif verb == "pace":
            self.set_speed(1.0 / arguments["factor"] if arguments["factor"] else math.inf)
        elif verb == "speed":
            self.set_speed(arguments["factor"])
        elif verb == "seek":
            return self.seek(arguments["step"])
        else:
            raise InvalidRequest(f"a recording does not support {verb!r}", "action")
        return None

    async def snapshot(self) -> dict[str, Any]:
        """Returns the state after the records handed out so far."""
        assert self._state is not None, "the replay has not been started"
        return self._state.snapshot()

    def recorded(self) -> tuple[dict[str, Any], Iterator[Record]] | None:
        return None if self._part else (self.trace.part(0).snapshot, self.trace.records())

    def drain_records(self) -> list[Record]:
        """Returns the records that are due by now."""
        if self.reader is None or self._state is None:
            return []
        out: list[Record] = []
        self._advance_clock()
        while len(out) < AT_ONCE:
            record, due = self._next()
            if self._seek_to is not None and (record is None or (self._part, self._at) >= self._seek_to):
                self._seek_to, self._ticked = None, self._clock()
            if record is None or not self._is_due(due):
                break
            self._at += 1
            self.played = max(self.played, due)
            self._seq += 1
            _, *rest = record
            out.append((self._seq, *rest))
            self._state.apply(out[-1])
            self._after(record)
        return out

    async def restart(self, on_progress: Progress) -> None:
        """Play from the beginning."""
        self._place(0, 0)

    # ---- the player

    @property
    def trace(self) -> TraceReader:
        """The trace; available after `start`."""
        assert self.reader is not None, "the replay has not been started"
        return self.reader

    @property
    def step(self) -> int:
        """The last step handed out; -1 before `start`."""
        return self._state.step if self._state is not None else -1

    @property
    def until(self) -> str:
        """The event that the replay runs to; empty if it does not run to an event."""
        return self._until[0] if self._until is not None else ""

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
        return self.paused or self.ended

    def set_paused(self, paused: bool) -> None:
        """Pause between two steps, or go on; a run_until ends."""
        self._advance_clock()
        self._allowed, self._until, self.cause = 0, None, ""
        if paused != self.paused:
            self.paused = paused
            self._finishing = paused and self._in_step

    def set_speed(self, speed: float) -> None:
        """Set the speed: 1 is as fast as the engine was, 0.1 ten times slower. Raises InvalidRequest."""
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise InvalidRequest(f"the speed is {speed:g}: it must be from {MIN_SPEED:g} to {MAX_SPEED:g}", "factor")
        self._advance_clock()
        self.speed = speed

    def seek(self, step: int) -> bool:
        """Move the playhead to the end of `step`. Returns True if the caller must take a new snapshot. The snapshot is
        of an earlier step, because the panels need a history. The records from that step to `step` are due at once. If
        only a few records are missing up to `step`, they are due at once, without a new snapshot."""
        trace = self.trace
        step = max(trace.step_before, min(step, trace.last_step))
        target = trace.locate(step)
        self._until, self._allowed, self._finishing = None, 0, False
        at = trace.number(*target)
        if 0 <= at - trace.number(self._part, self._at) <= RECORDS_BEFORE:
            self._seek_to = target
            return False
        begin = trace.part_of_step(max(trace.step_before, step - STEPS_BEFORE))
        while begin and at - trace.keyframes[begin].seq < RECORDS_BEFORE:
            begin -= 1
        self._place(begin, 0)
        self._seek_to = target if step > trace.step_before else (0, 0)
        return True

    def bookmark(self, step: int, text: str) -> None:
        """Bookmark a step. The bookmark of a bundled trace is not saved."""
        if is_bundled(self.path):
            self.trace.bookmarks.append((step, text))
            self.trace.bookmarks.sort()
        else:
            self.trace.add_bookmark(step, text)

    def next_bookmark(self, step: int, direction: int) -> tuple[int, str] | None:
        """Returns the nearest bookmark after (1) or before (-1) a step."""
        marks = self.trace.bookmarks
        if direction > 0:
            return next((mark for mark in marks if mark[0] > step), None)
        return next((mark for mark in reversed(marks) if mark[0] < step), None)

    # ---- internal

    def _place(self, part: int, at: int) -> None:
        chosen = self.trace.part(part)
        self._part, self._at = part, at
        state = chosen.state
        # The next record's number leaves a gap after the last number handed out, so that the caller notices the jump.
        if self._state is not None:
            state.seq = max(self._seq + 2, state.seq)
        self._state, self._seq = state, state.seq
        self._in_step = self._finishing = False
        self.played = chosen.keyframe.played
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
        if not self.paused:
            self.played += (now - self._ticked) * self.speed
        self._ticked = now
        if self.ended:
            self.played = min(self.played, self.trace.seconds)

    def _is_due(self, due: float) -> bool:
        if self._seek_to is not None:
            return True
        if self.paused:
            return self._finishing or self._allowed > 0 or self._until is not None
        return due <= self.played

    def _after(self, record: Record) -> None:
        """While the replay is paused, count steps, and end a run_until at its event."""
        kind = kind_of(record)
        ended = kind in ("time", "fail")
        self._in_step = not ended if ended or kind == "step" else self._in_step
        if self._finishing:
            self._finishing = not ended
            return
        if not self.paused or self._seek_to is not None:
            return
        if self._until is not None:
            cause = fulfils(record, *self._until)
            if cause:
                self._until, self._allowed = None, 1  # run to the end of this step
                self.cause = cause
        if ended and self._allowed > 0:
            self._allowed -= 1
