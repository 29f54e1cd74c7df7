"""Bar charts with a scale: one column per value, drawn in eighths of a cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.rows import Row, Runs

LABEL = 9  # cells for the scale
UNEVEN = 8.0  # from this ratio of the largest value to the median, the scale is logarithmic


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of a chart. `low` 0: linear from 0 to `high`; else logarithmic."""

    low: float
    high: float

    def height(self, values: np.ndarray) -> np.ndarray:
        """Returns the heights of bars, from 0 to 1."""
        if not self.low:
            return values / self.high
        return np.log(np.maximum(values, self.low) / self.low) / math.log(self.high / self.low)

    def value(self, height: float) -> float:
        """Returns the value of a bar of this height."""
        return self.high * height if not self.low else float(self.low * (self.high / self.low) ** height)


def scale_of(values: np.ndarray, usual: np.ndarray | None = None) -> Scale:
    """Returns the scale of a chart of these values, which may be NaN. `usual`: their median is the usual value."""
    known = values[~np.isnan(values)]
    usual = known if usual is None else usual[~np.isnan(usual)]
    high, median = float(known.max(initial=0.0)), float(np.median(usual)) if len(usual) else 0.0
    return Scale(median / 4 if median and high > UNEVEN * median else 0.0, max(high, 1e-6))


def bars(
    values: np.ndarray, styles: Sequence[str], scale: Scale, rows: int, width: int, label: Callable[[float], str],
    solid: np.ndarray | None = None, cursor: int | None = None,
) -> list[Runs]:
    """Returns the rows of a chart, with labels of the scale at the left. `values`: NaN for an empty column. `solid`:
    each bar is solid up to this value, and shaded from there to its end. `cursor`: the selected column."""
    g = glyphs()
    known = ~np.isnan(values)
    levels = np.where(known, np.clip(np.ceil(scale.height(np.where(known, values, 0.0)) * rows * 8), 1, rows * 8), 0)
    full = levels
    if solid is not None:
        full = np.where(known, np.ceil(scale.height(np.where(known, solid, 0.0)) * rows * 8), 0)
    tops, fulls = levels.astype(int).tolist(), full.astype(int).tolist()
    drawn: list[Runs] = []
    for y in range(rows, 0, -1):
        named = y in (1, rows, (rows + 1) // 2) and (y == rows or rows > 2)
        row = Row(label(scale.value(y / rows)).rjust(LABEL - 2) if named else "", "dim").to(LABEL)
        base = 8 * (y - 1)
        for x, top in enumerate(tops):
            part = min(8, top - base)
            if part <= 0:
                glyph = " "
            elif fulls[x] >= base + min(part, 4):
                glyph = g.spark[part - 1]
            else:
                glyph = g.prefill
            row.add(glyph, styles[x] + (" on select" if x == cursor else ""))
        drawn.append(row.done(width))
    return drawn
