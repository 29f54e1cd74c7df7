"""Experts: which of them are hot? A row for each layer that has experts, a cell for each expert."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from textual.binding import Binding

from minitui.tui.theme import glyphs
from minitui.tui.widgets.base import LinePanel, Picture, paragraphs
from minitui.tui.widgets.rows import Row, Run, Runs
from minitui.viewmodel.experts import ExpertLoad
from minitui.viewmodel.model import View

LABEL = 5
FIGURE = 6  # the hottest expert's share, in means
MEAN = 3  # the level of an expert that gets as much as the mean; each doubling is two levels more
COLD, HOT = 0.5, 2.0
TOP = 4  # experts that are named


class ExpertMap(LinePanel):
    """Up and down choose a layer, whose hottest experts are named below."""

    TITLE = "Experts"
    help_text = paragraphs("""\
A mixture of experts has many small MLPs in the place of one, and a router that sends each token to a few of them. Each
row is a layer, each cell an expert, its height what it got in the last moments: the middle is the mean of its layer,
two levels more are twice as much, a dot is nothing. The figure at the right is the hottest expert's share, in means.

A decode step reads the weights of every expert that any token of the batch wants, so a skewed router makes small
batches cheap; on several GPUs, or in a large prefill, everybody waits for the hottest.""")
    BINDINGS: ClassVar = [
        Binding("up", "layer(-1)", "layer before", show=False, id="experts.up"),
        Binding("down", "layer(1)", "layer after", show=False, id="experts.down"),
    ]

    def __init__(self, *, id: str | None = None, frame: str | None = None) -> None:
        super().__init__(id=id, frame=frame)
        self.chosen = 0  # row of the load
        self._first = 0  # row shown first
        self._shown = self._last = 0

    def picture(self, view: View, width: int, height: int) -> Picture:
        load = view.experts.at(view.horizon)
        if load is None:
            text = "no step yet" if view.experts.known else "no layer of this model has experts, or none has run yet"
            return Picture([Row(text, "dim").done(width)])
        self._last = len(load.layers) - 1
        self.chosen = min(self.chosen, self._last)
        relative = load.relative
        room = max(1, height - 1)
        self._shown = min(room, len(load.layers))
        self._first = min(max(self._first, self.chosen - self._shown + 1), self.chosen, len(load.layers) - self._shown)
        rows = [
            self._layer(load.layers[at], relative[at], self._experts_a_cell(load, width), width, at == self.chosen)
            for at in range(self._first, self._first + self._shown)
        ]
        if height > 1:
            rows.append(self._named(load, width))
        span = f" of the last {load.seconds:.1f} s" if load.seconds >= 0.05 else ""
        notes = []
        if (each := self._experts_a_cell(load, width)) > 1:
            notes.append(f"{each} experts a cell")
        if self._shown < len(load.layers):
            notes.append(f"{self._first + 1}-{self._first + self._shown} of {len(load.layers)} layers")
        note: list[Run] = [("  ".join(notes), "dim")] if notes else []
        return Picture(rows, title=f"Experts · tokens{span}", note=note, legend=self._legend())

    @staticmethod
    def _experts_a_cell(load: ExpertLoad, width: int) -> int:
        return -(-load.tokens.shape[1] // max(1, width - LABEL - FIGURE))

    def _legend(self) -> list[Run]:
        g = glyphs()
        return [
            (g.free, "faint"), (" none  ", "dim"), (g.spark[MEAN - 2], "dim"), (" half  ", "dim"),
            (g.spark[MEAN], "hit"), (" the mean  ", "dim"), (g.spark[MEAN + 2], "prefill"), (" twice", "dim"),
        ]  # fmt: skip

    def _layer(self, layer: int, relative: np.ndarray, each: int, width: int, chosen: bool) -> Runs:
        """`each` experts in a cell: the hottest stands for all."""
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
                row.add(g.spark[level] * wide, "prefill" if value >= HOT else "dim" if value <= COLD else "hit")
        return row.right(f"{g.times}{relative.max():.1f}", width, "ink" if chosen else "dim").done(width)

    def _named(self, load: ExpertLoad, width: int) -> Runs:
        """The chosen layer in words."""
        tokens = load.tokens[self.chosen]
        total = int(tokens.sum())
        row = Row(f"layer {load.layers[self.chosen]}: ", "bold ink")
        if not total:
            return row.add("no token", "dim").done(width)
        for expert in np.argsort(-tokens, kind="stable")[:TOP].tolist():
            text = f"e{expert} {100 * tokens[expert] / total:.1f} %  "
            if tokens[expert] and row.width + len(text) <= width:
                row.add(text, "ink")
        idle = int((tokens == 0).sum())
        tail = f"of {total:,}; {idle} of {len(tokens)} experts got none"
        if row.width + len(tail) <= width:
            row.add(tail, "dim")
        return row.done(width)

    def clicked(self, view: View, column: int, row: int) -> None:
        if row < self._shown:
            self.chosen = self._first + row

    def action_layer(self, by: int) -> None:
        """Choose another layer."""
        self.chosen = max(0, min(self._last, self.chosen + by))
        self.repaint()
