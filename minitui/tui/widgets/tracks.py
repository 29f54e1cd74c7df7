"""Draws spans of time (viewmodel/history/spans.py) as cells of a track, and the scale above the tracks.

A cell shows the span that fills the largest part of the cell. A moment, such as a preemption, is always shown. On the
track of a request, each prefill has a cell, too, unless a moment is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from textual import events

from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.rows import Row, Run, Runs, fit
from minitui.viewmodel.history.spans import LAUNCH_OR_WAIT, NOT_REPORTED, PERHAPS, Span

UNKNOWN = "unknown"  # a device that does not report its time
STEP = "step"  # the time between two arrivals
KERNELS, PAUSES = "kernels", "pauses"  # a device without, and with pauses between the kernels of a step
STYLES = {
    "commit": "host", "emit": "pool", "gate": "waiting", "plan": "running", "launch": "draft", "wait": "dim",
    LAUNCH_OR_WAIT: "dim", NOT_REPORTED: "dim",
    "idle": "dim", "gc": "bad", "delayed": "bad", "stop": "bad", "decode": "decode",
    "mixed": "prefill", "prefill": "prefill", "queued": "dim", "preempted": "bad", "finished": "good",
    "drafts": "draft", "stall": "bad", UNKNOWN: "dim", PERHAPS: "dim", STEP: "faint", KERNELS: "decode",
    PAUSES: "prefill",
}
PLAIN = ("dim", "faint")  # labels in these colours are drawn without a background
ROUNDING = 1e-6  # cells
TICK = 12  # cells: the least distance of two ticks of the scale
APART = 8  # cells: the least mean distance of two step numbers


class Scale(NamedTuple):
    """The visible part of the axis: `columns` cells of `ms` milliseconds each, from `left` on."""

    left: float
    ms: float
    columns: int

    @property
    def right(self) -> float:
        return self.left + self.columns * self.ms

    def column(self, place: float) -> int:
        """Returns the column of a place on the axis, which may be outside."""
        return int((place - self.left) // self.ms)


class AxisPanel(LinePanel):
    """Owns the scale and the cursor of tracks on an axis. The mouse drags the picture, and its wheel changes the scale.
    A subclass implements `move_to` and `zoom_by`."""

    cursor: float | None = None  # a place on the axis
    scale = Scale(0.0, 1.0, 1)
    label = 0  # cells for the names of the tracks
    _drag: tuple[int, float] | None = None  # where the mouse button was pressed, and the right edge then
    _dragged = False

    @property
    def cursor_column(self) -> int | None:
        """The column of the cursor, which may be out of sight; None without a cursor."""
        return None if self.cursor is None else self.scale.column(self.cursor)

    def place_at(self, column: int) -> float:
        """Returns the place on the axis in the middle of a column of the body."""
        return self.scale.left + (column - self.label + 0.5) * self.scale.ms

    def track_row(self, name: str, cells: list[Run], width: int, style: str = "dim") -> Runs:
        """Returns a track with its name."""
        return Row(fit(name, self.label), style).extend(cells).done(width)

    def move_to(self, right: float) -> None:
        """Show the part of the axis that ends at `right`, as far as there is one."""
        raise NotImplementedError

    def zoom_by(self, by: int, around: float | None) -> None:
        """Change the scale: finer if `by` is negative. The place `around` keeps its column."""
        raise NotImplementedError

    def action_pan(self, by: int) -> None:
        """Move the picture by half of its width."""
        self.move_to(self.scale.right + by * self.scale.columns * self.scale.ms / 2)

    def ends_drag(self) -> bool:
        """Returns True if a click is the end of a drag; asking a second time returns False."""
        dragged, self._dragged = self._dragged, False
        return dragged

    def on_mouse_down(self, event: events.MouseDown) -> None:
        if self.painted:
            self._drag, self._dragged = (event.x, self.scale.right), False
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._drag is not None and event.x != self._drag[0]:
            self._dragged = True
            self.move_to(self._drag[1] - (event.x - self._drag[0]) * self.scale.ms)

    def on_mouse_up(self, event: events.MouseUp) -> None:
        self._drag = None
        self.release_mouse()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._wheel(event, -1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._wheel(event, 1)

    def _wheel(self, event: events.MouseEvent, by: int) -> None:
        event.stop()
        if not self.painted:
            return
        if event.shift:
            self.move_to(self.scale.right + by * self.scale.columns * self.scale.ms / 8)
        else:
            self.zoom_by(by, self.place_at(event.x - 2))


def numbered(steps: Sequence[Span], scale: Scale) -> list[Span]:
    """Returns the steps whose numbers are shown: all, or every second, fifth, tenth …; each lasts until the next."""
    if len(steps) < 2:
        return list(steps)
    mean = (steps[-1].end - steps[0].begin) / len(steps) / scale.ms  # columns of a step
    k = next((k for k in (1, 2, 5, 10, 20, 50, 100, 200) if k * mean >= APART), 500)
    shown = [step for step in steps if step.step % k == 0]
    if k == 1 or not shown:
        return shown
    ends = [*(step.begin for step in shown[1:]), steps[-1].end]
    return [step._replace(end=end, ms=0.0) for step, end in zip(shown, ends, strict=True)]


def mark(kind: str, request: bool = False) -> str:
    """Returns the glyph of a span. `request`: on the track of a request, where "decode" is a line, as in the lanes."""
    g = glyphs()
    if request:
        return {"queued": g.queued, "prefill": g.prefill, "decode": g.decode, "drafts": g.gaining,
                "stall": g.stall, "preempted": g.preempted, "finished": g.finished}[kind]
    return {
        "commit": g.commit, "emit": g.emit, "gate": g.gate, "plan": g.plan, "launch": g.launch, "wait": g.wait,
        LAUNCH_OR_WAIT: g.not_reported, NOT_REPORTED: g.not_reported,
        "idle": " ", "gc": g.gc, "delayed": g.delayed, "stop": g.stop,
        "decode": g.busy, "mixed": g.prefill, "prefill": g.prefill, UNKNOWN: g.dash, STEP: " ",
        PERHAPS: g.perhaps, KERNELS: g.kernels, PAUSES: g.pauses,
    }[kind]


def track(
    spans: Sequence[Span], scale: Scale, cursor: int | None, labels: Callable[[Span], Sequence[str]],
    request: bool = False,
) -> list[Run]:
    """Returns the cells of a track. `labels`: the texts for a span, longest first; the first that fits is drawn."""
    runs: list[Run] = []
    for first, end, at in _cells(spans, scale, always="prefill" if request else ""):
        width = end - first
        if at is None:
            text, label, style = " " * width, "", "ink"
        else:
            span = spans[at]
            glyph, style = mark(span.kind, request), STYLES[span.kind]
            text = glyph * width
            label = next((text for text in labels(span) if len(text) < width), "")
            if span.kind == STEP:
                cut = not first and span.begin < scale.left - scale.ms / 2  # its begin is outside the picture
                label = ((glyphs().cut if cut else "│") + label)[:width]
            elif not label and runs and first and width > 1 and runs[-1][1] == style and glyph != " ":
                text = glyphs().edge + text[1:]
        label_style = "dim" if style in PLAIN else f"bold on-fill on {style}"
        for cells, cells_style in ((label, label_style), (text[len(label) :], style)):
            runs += _marked(cells, cells_style, first, cursor)
            first += len(cells)
    return runs


def _cells(spans: Sequence[Span], scale: Scale, always: str) -> list[tuple[int, int, int | None]]:
    """Returns (first column, end, index of the span shown there) for runs of cells; None: no span. `always`: spans of
    this kind have a cell, however short they are."""
    shown: list[int | None] = [None] * scale.columns
    filled = [0.0] * scale.columns
    for at, span in enumerate(spans):
        begin, end = (span.begin - scale.left) / scale.ms, (span.end - scale.left) / scale.ms
        if begin == end and abs(begin - scale.columns) < ROUNDING:  # a moment at the end of the scale, such as a finish
            begin = end = scale.columns - 1
        if begin >= scale.columns or end < 0:
            continue
        for x in range(max(0, int(begin)), min(scale.columns - 1, int(end)) + 1):
            amount = min(end, x + 1) - max(begin, x) if end > begin else 2.0  # a moment takes precedence
            if amount > filled[x]:
                shown[x], filled[x] = at, amount
    seen = set(shown)
    for at in [at for at, span in enumerate(spans) if span.kind == always and at not in seen]:
        span = spans[at]
        x = int(((span.begin + span.end) / 2 - scale.left) // scale.ms)  # the cell with its larger part
        if 0 <= x < scale.columns and filled[x] <= 1.0:
            shown[x] = at
    runs, first = [], 0
    for x in range(1, scale.columns + 1):
        if x == scale.columns or shown[x] != shown[first]:
            runs.append((first, x, shown[first]))
            first = x
    return runs


def _marked(text: str, style: str, first: int, cursor: int | None) -> list[Run]:
    """Returns a run; the cell at the cursor has the background of the selection."""
    if not text:
        return []
    if cursor is None or not first <= cursor < first + len(text):
        return [(text, style)]
    at = cursor - first
    ink = "bold ink" if " on " in style else style
    cells = ((text[:at], style), (text[at], f"{ink} on select"), (text[at + 1 :], style))
    return [cell for cell in cells if cell[0]]


def ruler(
    scale: Scale, cursor: int | None, words: str = "+{} ms", zero: float | None = None, least: float = 0.0
) -> list[Run]:
    """Returns the scale with its numbers: milliseconds from the left edge. `zero`: the place to count from, if it is
    not the left edge. `least`: the smallest distance of two numbers."""
    unit = next((unit for unit in UNITS if unit / scale.ms >= TICK and unit >= least), UNITS[-1])
    row = Row()
    before = 0.0 if zero is None else scale.left - zero  # from zero to the left edge
    for i in range(int(before // unit) + 1, int((before + scale.columns * scale.ms) / unit) + 1):
        x, text = round((i * unit - before) / scale.ms), f"│{words.format(number(i * unit))}"
        if row.width <= x <= scale.columns - len(text):
            row.to(x).add(text, "dim")
    runs = list(row.done(scale.columns))
    if cursor is None or not 0 <= cursor < scale.columns:
        return runs
    text = "".join(text for text, _ in runs)
    return [(text[:cursor], "dim"), (glyphs().unfolded, "bold accent"), (text[cursor + 1 :], "dim")]


def number(value: float) -> str:
    """Returns milliseconds without superfluous digits: 0.05, 1.5, 2,000."""
    return f"{value:,.3f}".rstrip("0").rstrip(".")


UNITS = tuple(round(digit * 10.0**power, 6) for power in range(-3, 6) for digit in (1, 2, 5))  # ms
SCALES = UNITS[: -len((1, 2, 5)) * 2]  # ms per column: from a microsecond on
