"""Two runs, as lessons show them: one above the other, or in two halves if a low panel has no room for all requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from minitui.tui.widgets.base import Picture
from minitui.tui.widgets.rows import Runs as Cells
from minitui.tui.widgets.side_by_side import UNITS, SideBySide
from minitui.tui.widgets.tracks import ruler
from minitui.viewmodel.compare.comparison import Comparison
from minitui.viewmodel.compare.runs import Run
from minitui.viewmodel.view import View

LABEL = 6  # cells of a lane's label in a half
GAP = 3  # cells between the halves
LEAST = 34  # cells: the narrowest half
HEADS = 3  # rows above the lanes of a half: the name of the run, the scale and the steps


class Runs(SideBySide):
    """Two runs. The arrow keys turn pages here, so the panel does not name its keys."""

    MORE = ""
    _halves = False  # the last picture had two halves

    def _draw(self, comparison: Comparison, width: int, height: int) -> Picture:
        runs, half = comparison.runs, (width - GAP) // 2
        most = max(len(run.lanes) for run in runs)
        above = 1 + 2 * len(runs) + sum(len(run.lanes) for run in runs)
        fits = len(runs) == 2 and most + HEADS <= height and half >= LEAST
        self._halves = fits and above > height and comparison.end("steps") > 0
        if not self._halves:
            return super()._draw(comparison, width, height)
        self.label = LABEL
        self._look(comparison, half - LABEL)
        self._kinds = set()
        first, second = (self._half(run, half) for run in runs)
        gap = " " * GAP
        rows: list[Cells] = [
            (*one, (gap, "ink"), *other) for one, other in zip_longest(first, second, fillvalue=((" " * half, "ink"),))
        ]
        self._rows = [None] * HEADS + list(range(most))
        title = f"{self.TITLE} · {UNITS[self.unit][1]}"
        signs = self._signs(width, height - len(rows), steps=True)
        return Picture(rows, title, [(self._column_text(), "ink")], signs)

    def _half(self, run: Run, half: int) -> list[Cells]:
        """Returns the rows of one run, `half` cells wide."""
        words, _ = UNITS[self.unit]
        scale = ruler(self.scale, None, words, 0.0, 1.0 if self.unit == "steps" else 0.0)
        return [
            self._head(run, half), self.track_row(self.unit, scale, half), self._steps(run, None, half),
            *(self._lane(run, at, None, 0, half) for at in range(len(run.lanes))),
        ]

    def clicked(self, view: View, column: int, row: int) -> None:
        """Choose a pair of requests; below each other, the runs also have a cursor."""
        if not self._halves:
            super().clicked(view, column, row)
        elif row < len(self._rows) and self._rows[row] is not None:
            self.chosen = self._rows[row]

    def _shown(self, lanes: int, room: int) -> Sequence[int]:
        """Returns the indices of the requests in sight: the first, the last and some between, because the last requests
        are those that wait."""
        if lanes <= room or room < 3:
            return super()._shown(lanes, room)
        return [round(i * (lanes - 1) / (room - 2)) for i in range(room - 1)]


class RunsInSteps(Runs):
    """Two runs on the clock of steps, which is the same on every machine."""

    TIMES = False
    unit = "steps"
