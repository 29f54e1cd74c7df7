"""Experts: which experts compute the most tokens? Each layer with experts is a row, each expert a cell."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from textual.binding import Binding

from minitui.text import count
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Run, Runs, legend, wrapped
from minitui.viewmodel.history.experts import ExpertLoad
from minitui.viewmodel.view import View

LABEL = 5  # cells for the name of a layer
FIGURE = 6  # cells for the hottest expert's load, in multiples of the mean
MEAN = 3  # level of the bar for the layer's mean load; the bar for twice the mean is two levels higher
COLD, HOT = 0.5, 2.0  # multiples of the mean; a cell is dim at COLD or less, bright at HOT or more
TOP = 4  # number of experts in the last row


class ExpertMap(LinePanel):
    """Up and down choose a layer; the last row names its hottest experts."""

    TITLE = "Experts"
    NEEDS_STATE = True
    BINDINGS: ClassVar = [
        Binding("up", "layer(-1)", "layer before", show=False, id="experts.up"),
        Binding("down", "layer(1)", "layer after", show=False, id="experts.down"),
    ]

    chosen = 0  # index of the chosen layer
    _first = 0  # index of the first layer shown
    _shown = 0  # number of layers shown
    _last = 0  # index of the last layer

    def picture(self, view: View, width: int, height: int) -> Picture:
        load = view.history.experts.at(view.moment.horizon)
        if load is None:
            known = view.history.experts.known
            text = "no step yet" if known else "this model has no experts, or no step has used them yet"
            return Picture(wrapped(text, "dim", width))
        self._last = len(load.layers) - 1
        self.chosen = min(self.chosen, self._last)
        relative = load.relative
        room = max(1, height - 1)
        self._shown = min(room, len(load.layers))
        self._first = min(max(self._first, self.chosen - self._shown + 1), self.chosen, len(load.layers) - self._shown)
        rows = [
            self._layer(load.layers[at], relative[at], self._experts_per_cell(load, width), width, at == self.chosen)
            for at in range(self._first, self._first + self._shown)
        ]
        if height > 1:
            rows.append(self._named(load, width))
        span = f" of the last {load.seconds:.1f} s" if load.seconds >= 0.05 else ""
        notes = []
        if (each := self._experts_per_cell(load, width)) > 1:
            notes.append(f"{each} experts per cell")
        if self._shown < len(load.layers):
            notes.append(f"{self._first + 1}-{self._first + self._shown} of {len(load.layers)} layers")
        note: list[Run] = [("  ".join(notes), "dim")] if notes else []
        return Picture(rows, title=f"Experts · tokens{span}", note=note, legend=self._legend())

    @staticmethod
    def _experts_per_cell(load: ExpertLoad, width: int) -> int:
        return -(-load.tokens.shape[1] // max(1, width - LABEL - FIGURE))

    def _legend(self) -> list[Run]:
        g = glyphs()
        return legend(
            (g.free, "faint", "none"), (g.spark[MEAN - 2], "dim", "half"), (g.spark[MEAN], "host", "the mean"),
            (g.spark[MEAN + 2], "prefill", "twice"),
        )

    def _layer(self, layer: int, relative: np.ndarray, each: int, width: int, chosen: bool) -> Runs:
        """Returns a layer's row. Each cell shows the highest load of `each` experts."""
        g = glyphs()
        row = Row(f"L{layer}", "bold accent" if chosen else "dim").to(LABEL)
        padded = np.append(relative, np.zeros(-len(relative) % each))
        cells = padded.reshape(-1, each).max(1)
        wide = max(1, min(3, (width - LABEL - FIGURE) // len(cells)))
        with np.errstate(divide="ignore"):
            levels = np.clip(np.rint(MEAN + 2 * np.log2(cells)), 0, len(g.spark) - 1).astype(int)
        for value, level in zip(cells.tolist(), levels.tolist(), strict=True):
            if value == 0:
                row.add(g.free * wide, "faint")
            else:
                row.add(g.spark[level] * wide, "prefill" if value >= HOT else "dim" if value <= COLD else "host")
        return row.right(f"{g.times}{relative.max():.1f}", width, "ink" if chosen else "dim").done(width)

    def _named(self, load: ExpertLoad, width: int) -> Runs:
        """Returns a row with the hottest experts of the chosen layer."""
        tokens = load.tokens[self.chosen]
        total = int(tokens.sum())
        row = Row(f"layer {load.layers[self.chosen]}: ", "bold ink")
        if not total:
            return row.add("no tokens", "dim").done(width)
        for expert in np.argsort(-tokens, kind="stable")[:TOP].tolist():
            text = f"e{expert} {100 * tokens[expert] / total:.1f} %  "
            if tokens[expert] and row.width + len(text) <= width:
                row.add(text, "ink")
        idle = int((tokens == 0).sum())
        none = f"{idle} of {len(tokens)} experts got none" if idle else f"all {len(tokens)} experts got some"
        tail = f"of {count(total, 'token')}; {none}"
        if row.width + len(tail) <= width:
            row.add(tail, "dim")
        return row.done(width)

    def clicked(self, view: View, column: int, row: int) -> None:
        if row < self._shown:
            self.chosen = self._first + row

    def action_layer(self, by: int) -> None:
        self.chosen = max(0, min(self._last, self.chosen + by))
