"""The axis of time, in milliseconds, on which the waterfall and the export for Perfetto draw spans.

The axis is the engine's time, except that long delays by pauses and slow motion, and long times without work, are
shortened (GATE_SHOWN, IDLE_SHOWN in steps.py). `Span.ms` is the time that the engine measured.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from minitui.viewmodel.history.steps import StepRow, Steps


class Span(NamedTuple):
    """Something that lasted from `begin` to `end`, in ms on the axis; "stop", "preempted" and "finished" are moments.

    `kind`: one of HOST, PAUSES or REQUESTS; for the device "decode", "mixed", "prefill" or "perhaps"; "step"
    for a whole step.
    """

    kind: str
    step: int  # the step that the work is for
    begin: float
    end: float
    ms: float  # the measured time; the span is shorter if the axis is shortened or a neighbour covers a part
    tokens: int = 0  # prompt tokens of a chunk


class Axis:
    """The places of a history of steps, up to step `horizon`, on the axis of time."""

    def __init__(self, steps: Steps, horizon: int) -> None:
        self.steps = steps
        self._known: dict[int, StepRow | None] = {}
        self.first = max(steps.first, 0)
        last = self._timed_before(horizon + 1)
        self.last = -1 if last is None else last.step  # the last step whose times are known; -1: none

    def row(self, step: int) -> StepRow | None:
        """Returns a step; None if it is not kept."""
        if step not in self._known:
            self._known[step] = self.steps.get(step)
        return self._known[step]

    @property
    def end(self) -> float:
        """The end of the last step; 0 without steps."""
        row = self.row(self.last)
        return 0.0 if row is None else ended(row)

    @property
    def begin(self) -> float:
        """The begin of the first step that is kept; 0 without steps."""
        row = self.row(self.first)
        return 0.0 if row is None else self.planned(self.first) - (row.plan_ms or 0.0)

    def at(self, t: float) -> float:
        """Returns the place of an engine time, in seconds, on the axis."""
        return self._place(t, self.steps.since(t, self.steps.last)) if self.steps.last >= 0 else t * 1e3

    def clock(self, place: float) -> float:
        """Returns the engine time, in seconds, of a place on the axis: with the time that the axis leaves out."""
        kept = range(self.first, self.last + 1)
        row = self.row(max(self.first, self.first + bisect_right(kept, place, key=self.planned) - 1))
        return (place + (0.0 if row is None else row.cut_ms)) / 1e3

    def planned(self, step: int) -> float:
        """Returns the moment at which a kept step was planned. Before the first step: its moment; later: the end."""
        step = max(step, self.first)
        row = self.row(step)
        return self.end if row is None else self._place(row.t, step)

    def _place(self, t: float, step: int) -> float:
        """Returns the place of an engine time; `step`: the first step that was planned at `t` or later."""
        before, row = self._timed_before(step), self.row(step)
        while before is not None and t < (before.ended or 0.0):  # planned while earlier steps ran
            before, row = self._timed_before(before.step), before
        while row is not None and row.ended is None and row.step < self.last:  # a failed step has no times
            row = self.row(row.step + 1)
        place = t * 1e3
        if row is None or row.ended is None or before is None:
            known = row or before
            return place - (0.0 if known is None else known.cut_ms)
        if row.t < (before.ended or 0.0):  # between the ends of both steps, the axis has one slope
            share = (t - (before.ended or 0.0)) / max(row.ended - (before.ended or 0.0), 1e-9)
            return ended(before) + share * (ended(row) - ended(before))
        # In a shortened time, the axis stands still until the step begins.
        return max(place - row.cut_ms, min(place - before.cut_ms, arrival(row) - (row.wall_ms or 0.0)))

    def arrived(self, step: int) -> float:
        """Returns the moment at which a step's results arrived; of an unknown step, as `planned`."""
        row = self.row(step)
        return self.planned(step) if row is None or row.ended is None else arrival(row)

    def steps_between(self, begin: float, end: float, most: int) -> tuple[int, int]:
        """Returns the first and the last step with spans between two places; only the last `most` of these steps."""
        kept = range(self.first, self.last + 1)
        last = min(self.last, self.first + bisect_right(kept, end, key=self.planned) + 1)
        first = self.first + bisect_right(kept, begin, key=self.planned) - 2
        return max(first, self.first, last - most + 1), last

    def _timed_before(self, step: int) -> StepRow | None:
        """Returns the last step before `step` whose times are known. A failed step has no times."""
        row = self.row(step - 1)
        while row is not None and row.ended is None:
            row = self.row(row.step - 1)
        return row

    def rows(self, first: int, last: int) -> Iterator[tuple[StepRow | None, StepRow]]:
        """Yields (the timed step before, the step) for the timed steps from `first` to `last`."""
        before = self._timed_before(first)
        for step in range(first, min(last, self.last) + 1):
            row = self.row(step)
            if row is not None and row.ended is not None:
                yield before, row
                before = row


def ended(row: StepRow) -> float:
    """Returns the end of a timed step: its commit."""
    return (row.ended or 0.0) * 1e3 - row.cut_ms


def arrival(row: StepRow) -> float:
    """Returns the moment at which the results of a timed step arrived on the host."""
    return ended(row) - (row.commit_ms or 0.0)
