"""Curves: how does the time of a step grow with its size, on this machine and on a recorded one?"""

from __future__ import annotations

from itertools import pairwise
from math import log

from minitui.text import ms
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Runs, fit, wrapped
from minitui.viewmodel.board import Curve, Curves
from minitui.viewmodel.view import View

LABEL = 11  # cells: the name of a curve, or a tick of the scale
STYLES = ("bold accent", "owner-1", "owner-2")
LEAST_ROWS = 4  # of the drawing


class CostCurves(LinePanel):
    """Draws each curve with a sign of its own, and its numbers below."""

    TITLE = "Costs"

    def picture(self, view: View, width: int, height: int) -> Picture:
        board = view.board
        if not isinstance(board, Curves):
            return Picture(wrapped("no curve yet: the experiment has not run", "dim", width))
        room = max(1, (width - LABEL) // len(board.sizes))
        below = [_sizes(board, room, width), *(_numbers(board, i, room, width) for i in range(len(board.curves)))]
        rows = max(LEAST_ROWS, height - len(below))
        return Picture([*_drawing(board, rows, room, width), *below], board.title)


def sign(i: int) -> str:
    """Returns the sign of the curve number `i`."""
    g = glyphs()
    return (g.active, g.evictable, g.preempted)[i % 3]


def _sizes(board: Curves, room: int, width: int) -> Runs:
    row = Row(fit(board.unit, LABEL), "dim")
    for i, n in enumerate(board.sizes):
        row.right(f"{n}", LABEL + (i + 1) * room, "dim")
    return row.done(width)


def _numbers(board: Curves, at: int, room: int, width: int) -> Runs:
    curve, style = board.curves[at], STYLES[at % len(STYLES)]
    row = Row(fit(f"{sign(at)} {curve.name}", LABEL), style)
    for i, n in enumerate(board.sizes):
        value = curve.points.get(n)
        row.right(glyphs().dash if value is None else ms(value), LABEL + (i + 1) * room, "dim" if at else "bold ink")
    return row.done(width)


def _drawing(board: Curves, rows: int, room: int, width: int) -> list[Runs]:
    """Returns the curves as `rows` rows, the largest time at the top."""
    values = [value for curve in board.curves for value in curve.points.values() if value > 0]
    if not values:
        return [Row().done(width)] * rows
    least, most = log(min(values)), log(max(values))
    scale = (rows - 1) / ((most - least) or 1.0)
    cells: dict[tuple[int, int], tuple[str, str]] = {}  # (row from below, column) -> (glyph, style)
    for at in reversed(range(len(board.curves))):  # the first curve is drawn last, over the others
        places = _places(board.curves[at], board.sizes, room, least, scale)
        style = STYLES[at % len(STYLES)]
        for (x, y), (right, above) in pairwise(places):
            for column in range(x + 1, right):
                between = y + (above - y) * (column - x) / (right - x)
                cells.setdefault((round(between), column), (glyphs().middot, style))
        for x, y in places:
            cells[round(y), x] = (sign(at), style)
    ticks = {rows - 1: max(values), 0: min(values)}
    lines = []
    for y in reversed(range(rows)):
        row = Row(f"{ms(ticks[y])} ms" if y in ticks else "", "dim").to(LABEL - 1).add("│", "faint")
        for x in range(width - LABEL):
            row.add(*cells.get((y, x), (" ", "ink")))
        lines.append(row.done(width))
    return lines


def _places(curve: Curve, sizes: tuple[int, ...], room: int, least: float, scale: float) -> list[tuple[int, float]]:
    """Returns (column, row from below) of each point, by size."""
    return [
        ((i + 1) * room - 1, (log(curve.points[n]) - least) * scale)
        for i, n in enumerate(sizes)
        if curve.points.get(n, 0.0) > 0
    ]
