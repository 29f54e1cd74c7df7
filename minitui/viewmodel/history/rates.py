"""Rates: sums of tokens in short buckets of working time, in memory of fixed size."""

from __future__ import annotations

from array import array

import numpy as np

from minitui.viewmodel.history.steps import STEPS_KEPT

BUCKET = 0.25  # seconds
BUCKETS_KEPT = 2048


class Rates:
    """Sums per quarter of a second of working time. Working time stops while the engine is paused and excludes the
    delay of slow motion, so pauses and slow motion do not lower the rates."""

    # Of new requests, "cached" prompt tokens came from the cache and "missed" were computed. "resumed": the tokens that
    # requests took from the cache again after a preemption. "prefill": all tokens of prompts and of resumed requests.
    SUMS = ("decode", "prefill", "cached", "missed", "resumed")
    LEVELS = ("running", "used")  # each bucket keeps the last value
    MARKED = (*SUMS, "worst_ms")
    TOTALS = ("cached", "missed", "resumed")  # also summed since the history began

    def __init__(self) -> None:
        names = (*self.SUMS, *self.LEVELS, "worst_ms")
        self._columns = {name: array("d", [0.0]) * BUCKETS_KEPT for name in names}
        # What the bucket being filled had at the end of each step: other steps end later in the same bucket.
        totals = [f"total {name}" for name in self.TOTALS]
        self._marks = {name: array("d", [0.0]) * STEPS_KEPT for name in (*self.MARKED, *totals, "now")}
        self.totals = dict.fromkeys(totals, 0.0)
        self.now = 0.0  # working time since the history began, in seconds
        self.t = 0.0  # the engine time up to which working time is counted
        self._stretched = 0.0  # seconds of slow motion still to be excluded
        self._planned = 0.0  # seconds by which slow motion delays the next step, if it delays it as planned
        self._closed = False  # the gate is closed: the engine is paused
        self._pace = 1.0
        self.bucket = 0  # the bucket being filled
        self._slot = 0  # the index of `bucket` in the columns

    def reset(self, t: float, closed: bool, pace: float) -> None:
        """Set the engine time, gate and pace from which the rates start."""
        self.t, self._closed, self._pace = t, closed, pace

    def advance(self, t: float) -> None:
        """Advance working time to engine time `t`."""
        elapsed = t - self.t
        if elapsed <= 0:
            return
        self.t = t
        if self._closed:
            return
        if self._stretched:
            excluded = min(elapsed, self._stretched)
            self._stretched -= excluded
            elapsed -= excluded
        self._add_working_time(elapsed)

    def rest_of_bucket(self, t: float) -> float:
        """Returns the seconds from engine time `t` to the end of its bucket, if there is no pause until then."""
        elapsed = 0.0 if self._closed else max(0.0, t - self.t - self._stretched)
        return BUCKET - (self.now + elapsed) % BUCKET

    def _add_working_time(self, seconds: float) -> None:
        self.now += seconds
        bucket = int(self.now / BUCKET)
        if bucket == self.bucket:
            return
        columns, before = self._columns, self._slot
        for new in range(max(self.bucket + 1, bucket - BUCKETS_KEPT + 1), bucket + 1):
            slot = new % BUCKETS_KEPT
            for name in (*self.SUMS, "worst_ms"):
                columns[name][slot] = 0.0
            for name in self.LEVELS:
                columns[name][slot] = columns[name][before]
        self.bucket, self._slot = bucket, bucket % BUCKETS_KEPT

    def add(self, name: str, value: float) -> None:
        self._columns[name][self._slot] += value
        if name in self.TOTALS:
            self.totals[f"total {name}"] += value

    def level(self, name: str, value: float) -> None:
        self._columns[name][self._slot] = value

    def add_step(self, decodes: int, prefill: int, missed: int) -> None:
        """Count a planned step: its tokens of answers, of prompts, and of prompts of new requests."""
        columns, slot = self._columns, self._slot
        columns["decode"][slot] += decodes
        if prefill:
            columns["prefill"][slot] += prefill
            self.add("missed", missed)

    def add_durations(self, took_ms: float, wall_ms: float, delayed_ms: float | None) -> None:
        """Count the durations of a finished step. `delayed_ms`: how long slow motion or a pause delayed the step."""
        worst = self._columns["worst_ms"]
        worst[self._slot] = max(took_ms, worst[self._slot])
        if self._planned and delayed_ms is not None:  # a sleep takes longer than planned
            self._stretched += max(0.0, delayed_ms / 1e3 - self._planned)
        self._planned = 0.0
        if self._closed:
            self._add_working_time(wall_ms / 1e3)
        elif self._pace > 1:
            self._planned = wall_ms / 1e3 * (self._pace - 1)
            self._stretched += self._planned

    def mark(self, step: int) -> None:
        """Note that a step has ended now."""
        i = step % STEPS_KEPT
        for name in self.MARKED:
            self._marks[name][i] = self._columns[name][self._slot]
        for name, total in self.totals.items():
            self._marks[name][i] = total
        self._marks["now"][i] = self.now

    def marked(self, step: int) -> dict[str, float]:
        """Returns what the bucket in which a step ended had at the end of the step, for each name of MARKED; the
        totals then, as "total cached"; and "now": the working time at the end of the step."""
        return {name: marks[step % STEPS_KEPT] for name, marks in self._marks.items()}

    def gate(self, closed: bool) -> None:
        self._closed, self._planned = closed, 0.0

    def pace(self, factor: float) -> None:
        self._pace = factor

    def series(self, name: str, n: int, end: int | None = None) -> np.ndarray:
        """Returns the `n` buckets before bucket `end`, oldest first; 0 for missing buckets. Without `end`, returns the
        buckets before the bucket that is being filled."""
        end = self.bucket if end is None else min(end, self.bucket + 1)
        n = min(n, BUCKETS_KEPT - 1)
        first = end - n
        values = np.zeros(n)
        start = max(first, 0, self.bucket - BUCKETS_KEPT + 1)
        if end > start:
            column = np.frombuffer(self._columns[name])
            values[start - first :] = column[np.arange(start, end) % BUCKETS_KEPT]
        return values

    def per_second(self, name: str, seconds: float = 1.0, end: int | None = None) -> float:
        """Returns the mean per second over the last `seconds`, in complete buckets before `end`."""
        end = self.bucket if end is None else end
        n = min(max(1, round(seconds / BUCKET)), max(1, end))
        return float(self.series(name, n, end).sum() / (n * BUCKET))
