"""The times of many steps: columns of a chart, a histogram by kind of step, and the slowest steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from minitui.viewmodel.step_row import StepRow
from minitui.viewmodel.steps import Steps

KINDS = ("decode", "mixed", "prefill")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The timed steps of a range. All times are in ms."""

    step: np.ndarray  # numbers
    took: np.ndarray  # StepRow.took_ms
    kind: np.ndarray  # indices in KINDS

    def slowest(self, n: int) -> list[int]:
        """Returns the numbers of the `n` slowest steps, the slowest first."""
        order = np.argsort(-self.took, kind="stable")[:n]
        return [int(step) for step in self.step[order]]

    def columns(self, most: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """Returns (steps per column, the longest time, the median, the index of the slowest step) of at most `most`
        columns, oldest first."""
        k = max(1, math.ceil(len(self.took) / most))
        begins = np.arange(0, len(self.took), k)
        parts = [self.took[begin : begin + k] for begin in begins]
        longest = np.array([part.max() for part in parts])
        median = np.array([np.median(part) for part in parts])
        return k, longest, median, np.array([begin + part.argmax() for begin, part in zip(begins, parts, strict=True)])

    def histogram(self, rows: int) -> list[tuple[float, list[int]]]:
        """Returns at most `rows` bins of equal ratio as (upper limit, number of steps of each of KINDS)."""
        low, high = float(self.took.min()), float(self.took.max())
        if not high > low > 0:
            return [(high, [int((self.kind == kind).sum()) for kind in range(len(KINDS))])]
        edges = np.geomspace(low, high, rows + 1)
        at = np.clip(np.searchsorted(edges, self.took, "right") - 1, 0, rows - 1)
        counts = np.bincount(at * len(KINDS) + self.kind, minlength=rows * len(KINDS)).reshape(rows, len(KINDS))
        return [(float(edges[i + 1]), counts[i].tolist()) for i in range(rows)]


def step_times(steps: Steps, horizon: int, count: int) -> StepTimes:
    """Returns the times of the timed steps among the last `count` steps up to step `horizon`."""
    at = steps.indices(horizon - count + 1, horizon)
    at = at[~np.isnan(steps.column("wall")[at])]
    prefilled, decodes = steps.prefilled(at), steps.column("decodes")[at]
    kind = np.where(prefilled == 0, 0, np.where(decodes > 0, 1, 2))
    return StepTimes(steps.column("step")[at], steps.column("took")[at], kind)


def rows_of(steps: Steps, numbers: list[int]) -> list[StepRow]:
    """Returns the rows of these steps; steps that are no longer kept are left out."""
    return [row for row in map(steps.get, numbers) if row is not None]
