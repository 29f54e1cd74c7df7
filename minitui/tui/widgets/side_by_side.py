"""Two runs side by side: the lanes of both, one below the other, on one clock with one cursor.

The panel shows the run of its view, and above it `view.earlier` (see View.keep_run).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10
from typing import ClassVar

from textual.binding import Binding

from minitui.text import count, duration, ms
from minitui.tui.glyphs import glyphs
from minitui.tui.theme import owner_style
from minitui.tui.widgets.base import Picture
from minitui.tui.widgets.inspect.waterfall import request_legend
from minitui.tui.widgets.rows import Row, Run, Runs, clean, fit, legend, runs_width
from minitui.tui.widgets.rows import cells as width_of
from minitui.tui.widgets.tracks import STYLES, AxisPanel, Scale, mark, number, ruler, track
from minitui.viewmodel.compare.comparison import Comparison
from minitui.viewmodel.compare.runs import DRAFTS, STALL
from minitui.viewmodel.compare.runs import Run as OneRun
from minitui.viewmodel.history.spans import Span
from minitui.viewmodel.view import View

LABEL, NAME = 8, 11  # cells of a lane's label: the request, and the name of its chat
NAMED = 110  # from this width on, the lanes have names
SIZES = (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0, 10.0)  # widths of a picture that grows, times 10^n
LEGEND_ROWS = 3  # of the legend, if it is below the picture
ROOMY = 12  # with fewer rows, the steps are left out
MOST_ZOOM = 1 << 16
UNITS = {"ms": ("{} ms", "clock: time, the same for both runs"), "steps": ("{} steps", "clock: steps")}
SOMETIMES = {DRAFTS: "drafts accepted", STALL: "longest gap"}  # shown in the legend only if they occur
DOING = {"decode": "decode", "prefill": "prefill", "queued": "wait", "finished": "done"}
NO_RUN = "no step yet"


class SideBySide(AxisPanel):
    """Left and right move the cursor, [ and ] change the scale, k changes the clock, up and down choose a request."""

    TITLE = "Two runs"
    MORE = ": up and down show them"  # after the number of the requests that are not in sight
    TIMES = True  # the line above a run has its time, speed and longest gap
    BINDINGS: ClassVar = [
        Binding("left", "move(-1)", "cursor left", show=False, id="runs.left"),
        Binding("right", "move(1)", "cursor right", show=False, id="runs.right"),
        Binding("pageup", "pan(-1)", "earlier", show=False, id="runs.earlier"),
        Binding("pagedown", "pan(1)", "later", show=False, id="runs.later"),
        Binding("left_square_bracket,plus", "zoom(-1)", "zoom in", show=False, id="runs.finer"),
        Binding("right_square_bracket,minus", "zoom(1)", "zoom out", show=False, id="runs.coarser"),
        Binding("end,home", "whole", "the whole runs", show=False, id="runs.whole"),
        Binding("up", "choose(-1)", "request above", show=False, id="runs.up"),
        Binding("down", "choose(1)", "request below", show=False, id="runs.down"),
        Binding("k", "clock", "time or steps", show=False, id="runs.clock"),
    ]

    comparison: Comparison | None = None
    unit = "ms"
    chosen: int | None = None  # the index of a request
    zoom = 1  # the whole width shows 1/zoom of the longer run
    left = 0.0
    _drawn: tuple[object, Picture] | None = None  # what the last picture shows, and the picture
    _kinds: set[str]  # the kinds of phases of the requests in sight
    _rows: list[int | None]  # the index of the request in each row of the picture

    def picture(self, view: View, width: int, height: int) -> Picture:
        comparison = self.compared(view)
        shown = (
            tuple((run.moment, id(run.view.texts.group_names)) for run in comparison.runs), width, height, self.unit,
            self.cursor, self.chosen, self.zoom, self.left, self.has_focus, glyphs(),
        )
        if self._drawn is None or self._drawn[0] != shown:  # a run of 30,000 steps takes 50 ms to draw
            self._drawn = shown, self._draw(comparison, width, height)
        return self._drawn[1]

    def _draw(self, comparison: Comparison, width: int, height: int) -> Picture:
        if not comparison.end("steps"):
            return Picture([Row(NO_RUN, "dim").done(width)])
        named = NAME if width >= NAMED else 0
        self.label = min(LABEL + named, width // 3)
        self._look(comparison, max(1, width - self.label))
        words, title = UNITS[self.unit]
        cursor = self.cursor_column
        scale = ruler(self.scale, cursor, words, 0.0, 1.0 if self.unit == "steps" else 0.0)
        at = self.unit if self.cursor is None else _place(self.cursor, self.unit)
        rows = [self.track_row(at, scale, width, "dim" if cursor is None else "bold accent")]
        self._rows, self._kinds = [None], set()
        feet = [self._at_cursor(run, width) for run in comparison.runs] if self.cursor is not None else []
        heads = 2 if height >= ROOMY else 1  # rows above the lanes of a run
        rooms = _shared_out([len(run.lanes) for run in comparison.runs], height - 1 - len(feet), heads)
        for run, room in zip(comparison.runs, rooms, strict=True):
            shown = self._shown(len(run.lanes), room)
            rows += [self._head(run, width), self._steps(run, cursor, width)][:heads]
            rows += [self._lane(run, at, cursor, named, width) for at in shown]
            self._rows += [*[None] * heads, *shown]
            if len(shown) < min(len(run.lanes), room):
                others = len(run.lanes) - len(shown)
                rows.append(Row(f"+ {count(others, 'more request')}{self.MORE}", "dim").done(width))
                self._rows.append(None)
        room = height - len(rows) - len(feet)
        rows += [Row().done(width)] * room
        note: list[Run] = [(self._column_text(), "ink"), *self.own_key("[ ] zoom · k clock")]
        return Picture(rows + feet, f"{self.TITLE} · {title}", note, self._signs(width, room, heads > 1))

    def _signs(self, width: int, room: int, steps: bool) -> list[Run]:
        """Returns the legend. `room`: empty rows below the picture; `steps`: the picture has the row of steps."""
        signs = request_legend(without="" if "preempted" in self._kinds else "preempted")
        for kind, words in SOMETIMES.items():
            if kind in self._kinds:
                signs = [*legend((mark(kind, request=True), STYLES[kind], words)), ("  ", "dim"), *signs]
        if not steps:
            return signs
        keys = [[*signs, ("  ", "dim"), *part] for part in _step_legends()]
        if room > LEGEND_ROWS:
            return keys[0]
        return next((key for key in keys if runs_width(key) <= width - 2), keys[-1])

    def compared(self, view: View) -> Comparison:
        """Returns the comparison of the view's runs, up to date."""
        if self.comparison is None or not self.comparison.shows(view):
            self.comparison = Comparison.of(view)
            self.cursor = self.chosen = None
            self.zoom, self.left = 1, 0.0
        else:
            self.comparison.refresh()
        return self.comparison

    # ---- the clock

    def _look(self, comparison: Comparison, columns: int) -> None:
        """Choose the scale: the longer run fills the width."""
        whole = _rounded_up(comparison.end(self.unit)) if self.unit == "ms" else comparison.end("steps")
        each = whole / columns / self.zoom
        if self.unit == "steps" and each < 1:
            each = 1 / floor(1 / each)  # a step has whole columns
        self.left = max(0.0, min(self.left, whole - columns * each))
        self.scale = Scale(self.left, each, columns)

    def _column_text(self) -> str:
        each = self.scale.ms
        if self.unit == "ms":
            return f"1 column = {ms(each)} ms"
        if each < 1:
            return f"1 step = {count(round(1 / each), 'column')}"
        return f"1 column = {number(round(each, 1))} steps" if each > 1 else "1 column = 1 step"

    # ---- rows

    def _shown(self, lanes: int, room: int) -> Sequence[int]:
        """Returns the indices of the requests in sight. The chosen one is always in sight."""
        if lanes <= room:
            return range(lanes)
        room = max(0, room - 1)  # a row counts the others
        top = 0 if self.chosen is None else max(0, min(self.chosen - room // 2, lanes - room))
        return range(top, top + room)

    def _head(self, run: OneRun, width: int) -> Runs:
        figures = run.figures
        row = Row(clean(run.name) or "this run", "bold accent")
        parts = [duration(figures.time)] if self.TIMES else []
        parts.append(count(figures.steps, "step"))
        if figures.tok_s and self.TIMES:
            parts.append(f"{figures.tok_s:,.0f} tok/s")
        if figures.longest is not None and self.TIMES:
            parts.append(f"longest gap {ms(figures.longest.ms)} ms ({run.view.texts.request(figures.longest.request)})")
        parts.append(f"{figures.computed:,} prompt tokens computed")
        for part in parts:
            if row.width + len(part) + 3 <= width:
                row.add(f" {glyphs().middot} ", "dim").add(part)
        return row.done(width)

    def _steps(self, run: OneRun, cursor: int | None, width: int) -> Runs:
        spans = run.steps_between(self.unit, self.scale.left, self.scale.right)
        if self.unit == "steps" and self.scale.ms > 1:  # several steps are a column: a prompt is shown in any case
            spans = [span if span.kind == "decode" else span._replace(end=span.begin) for span in spans]
        return self.track_row("steps", track(spans, self.scale, cursor, _no_labels), width)

    def _lane(self, run: OneRun, at: int, cursor: int | None, named: int, width: int) -> Runs:
        lit = at == self.chosen
        lane = run.lanes[at]
        name = run.view.texts.request(lane.id)
        if named:
            group = run.view.texts.title(lane.request.group)
            name = fit(name, self.label - named) + fit(clean(group), named - 1, glyphs().dots)
        phases = run.phases(self.unit, lane)
        self._kinds.update(span.kind for span in phases)
        cells = track(phases, self.scale, cursor, _no_labels, request=True)
        ink = "bold accent on select" if lit else owner_style(run.view.texts.colour(lane.request.group))
        return self.track_row(name, cells, width, ink)

    def _at_cursor(self, run: OneRun, width: int) -> Runs:
        """Returns what a run does at the cursor."""
        assert self.cursor is not None and self.comparison is not None
        place, widest = self.cursor, max(width_of(run.name) for run in self.comparison.runs)
        row = Row(fit(clean(run.name), min(20, widest), glyphs().dots) + "  ", "accent")
        step = run.clocks[self.unit].step_at(place)
        found = None if step is None else run.view.history.steps.get(step)
        if found is not None:
            row.add(f"step {found.step:,} ").add(f"({count(found.tokens, 'token')}", "dim")
            row.add(f", {duration(found.took_ms)})" if found.took_ms is not None else ")", "dim")
        else:
            row.add("has ended" if place >= run.clocks[self.unit].end else "no step")
        doing = run.doing(self.unit, place)
        for part in (
            ", ".join(f"{doing[kind]} {word}" for kind, word in DOING.items() if doing[kind]),
            f"{run.written_by(self.unit, place):,} of {count(run.figures.replies, 'token')}",
        ):
            row.add(f" {glyphs().middot} ", "dim").add(part)
        return row.done(width)

    # ---- keys and the mouse

    def _moved(self, place: float) -> None:
        """Set the cursor, and keep it in sight."""
        assert self.comparison is not None
        each, columns = self.scale.ms, self.scale.columns
        self.cursor = max(0.0, min(place, self.comparison.end(self.unit)))
        if not self.scale.left <= self.cursor < self.scale.right:
            self.left = self.cursor - columns * each / 2
        self.repaint()

    def action_move(self, columns: int) -> None:
        """Move the cursor by columns; the first time, it appears in the middle."""
        if self.cursor is None:
            self._moved(self.scale.left + (self.scale.columns // 2 + 0.5) * self.scale.ms)
        else:
            self._moved(self.cursor + columns * self.scale.ms)

    def move_to(self, right: float) -> None:
        self.left = right - self.scale.columns * self.scale.ms
        self.repaint()

    def action_zoom(self, by: int) -> None:
        """Show half or twice the time; the cursor keeps its column."""
        self.zoom_by(by, self.cursor)

    def zoom_by(self, by: int, around: float | None) -> None:
        before, around = self.zoom, (self.scale.left + self.scale.right) / 2 if around is None else around
        self.zoom = min(MOST_ZOOM, before * 2) if by < 0 else max(1, before // 2)
        self.left = around - (around - self.scale.left) * before / self.zoom
        self.repaint()

    def action_whole(self) -> None:
        self.zoom, self.left, self.cursor = 1, 0.0, None
        self.repaint()

    def action_choose(self, by: int) -> None:
        """Choose a pair of requests above or below; beyond the ends, none."""
        if self.comparison is not None:
            most = max(len(run.lanes) for run in self.comparison.runs)
            at = (0 if by > 0 else most - 1) if self.chosen is None else self.chosen + by
            self.chosen = at if 0 <= at < most else None

    def action_clock(self) -> None:
        self.unit = "steps" if self.unit == "ms" else "ms"
        self.action_whole()

    def clicked(self, view: View, column: int, row: int) -> None:
        if self.ends_drag():
            return
        if column >= self.label:
            self._moved(self.place_at(column))
        if row < len(self._rows) and self._rows[row] is not None:
            self.chosen = self._rows[row]


def _shared_out(lanes: list[int], height: int, heads: int) -> list[int]:
    """Returns how many rows the lanes of each run get, beside `heads` rows above them. A short list gives rows away."""
    rooms, left = [0] * len(lanes), max(0, height - heads * len(lanes))
    for n, at in enumerate(sorted(range(len(lanes)), key=lambda i: lanes[i])):
        rooms[at] = min(lanes[at], left // (len(lanes) - n))
        left -= rooms[at]
    return rooms


def _place(place: float, unit: str) -> str:
    """Returns a place on the clock, in a few cells."""
    if unit == "steps":
        return f"+{int(place):,}"
    return f"{place:,.1f}" if place < 100 else f"{place:,.0f}" if place < 100_000 else f"{place / 1e3:,.0f} s"


def _step_legends() -> tuple[list[Run], ...]:
    """Returns the meaning of the glyphs on the row of steps; the shorter ones leave out what the requests have, too."""
    style, edge = STYLES["decode"], (glyphs().edge, STYLES["decode"], "next step")
    prompt = (mark("prefill"), STYLES["prefill"], "step with a prompt")
    short = (mark("decode"), style, "decodes only")
    return legend((mark("decode"), style, "step of decodes only"), prompt, edge), legend(short, edge), legend(short)


def _no_labels(span: Span) -> list[str]:
    return []


def _rounded_up(value: float) -> float:
    """Returns the next of SIZES times a power of 10, so that a growing picture changes its scale seldom."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next((size * power for size in SIZES if size * power >= value * (1 - 1e-9)), 10 * power)
