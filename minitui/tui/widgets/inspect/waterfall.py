"""The waterfall: the work of host and device on an axis of time, and below it a track for each request.

The picture ends with the newest step until it is moved. It shows the same as the export for Perfetto: both draw the
spans of viewmodel/history/spans.py. Only the steps in sight are computed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

import numpy as np
from textual.binding import Binding

from minitui.text import duration, ms
from minitui.tui.glyphs import glyphs
from minitui.tui.theme import owner_style
from minitui.tui.widgets.base import Opened, Picture, neighbour, selected
from minitui.tui.widgets.inspect.step_bar import contents
from minitui.tui.widgets.inspect.timing_rows import limit_rows
from minitui.tui.widgets.rows import Row, Run, Runs, first_rows, fit, legend, named, runs_width
from minitui.tui.widgets.tracks import SCALES, STYLES, UNKNOWN, AxisPanel, Scale, mark, number, numbered, ruler, track
from minitui.viewmodel.explain.timing import why_slow
from minitui.viewmodel.history.lane import Lane
from minitui.viewmodel.history.spans import (
    HOST,
    LAUNCH_OR_WAIT,
    NOT_REPORTED,
    PERHAPS,
    REQUESTS,
    Span,
    Timeline,
    parts_of,
)
from minitui.viewmodel.history.steps import PARTS, StepRow, Steps
from minitui.viewmodel.view import View

MOST_STEPS = 200  # the most steps in sight
WHY_ROWS = 4  # of the cause of a step
LABEL = 11  # cells
NAME = 11  # cells for the name of a chat
NAMED = 110  # from this width on, the tracks of requests have names
STEPS_SHOWN = 4  # at the automatic scale, about this many steps are in sight
RECENT = 32  # steps that decide the automatic scale
ROOMY = 28  # a panel with this many rows has three rows for the host and three for the device
LOW = 16  # a panel with fewer rows leaves out empty tracks and parts without time


class Waterfall(AxisPanel):
    """Left and right move the cursor, [ and ] change the scale, page up and page down move the picture."""

    TITLE = "Waterfall"
    NEEDS_STATE = True
    BINDINGS: ClassVar = [
        Binding("left", "part(-1)", "part before", show=False, id="waterfall.left"),
        Binding("right", "part(1)", "part after", show=False, id="waterfall.right"),
        Binding("shift+left", "step(-1)", "step before", show=False, id="waterfall.before"),
        Binding("shift+right", "step(1)", "step after", show=False, id="waterfall.after"),
        Binding("pageup", "pan(-1)", "earlier", show=False, id="waterfall.earlier"),
        Binding("pagedown", "pan(1)", "later", show=False, id="waterfall.later"),
        Binding("left_square_bracket,plus", "zoom(-1)", "zoom in", show=False, id="waterfall.finer"),
        Binding("right_square_bracket,minus", "zoom(1)", "zoom out", show=False, id="waterfall.coarser"),
        Binding("end", "latest", "follow", show=False, id="waterfall.latest"),
        Binding("up", "choose(-1)", "request above", show=False, id="waterfall.up"),
        Binding("down", "choose(1)", "request below", show=False, id="waterfall.down"),
        Binding("enter", "open", "details", show=False, id="waterfall.open"),
        Binding("d", "details", "details of the step", show=False, id="waterfall.details"),
    ]

    right: float | None = None  # the right edge on the axis; None: follows the newest step
    chosen_ms: float | None = None  # the scale chosen by the user, in ms per column
    steps_in_sight = (0, -1)  # the first and the last
    host: Sequence[Span] = ()  # the spans in sight
    lanes: Sequence[Lane] = ()  # the requests on the screen
    step: int | None = None  # the step at the cursor
    _alive: Sequence[Lane] = ()  # all requests of the steps in sight
    _auto_ms = 0.0
    _lanes_row = 0
    _chosen: int | None = None  # the selected step at the last paint
    _horizon = -1

    # ---- the picture

    def picture(self, view: View, width: int, height: int) -> Picture:
        line = Timeline(view.history.steps, view.moment.horizon)
        if line.last < 0:
            return Picture([Row("no step is timed yet", "dim").done(width)])
        named = NAME if width >= NAMED else 0
        self.label = min(LABEL + named, width // 3)
        self._look(view, line, max(1, width - self.label))
        first, last = self.steps_in_sight
        scale, cursor = self.scale, self.cursor_column
        self.host = line.host(first, last)
        steps = line.arrivals(first, last)
        device = line.device(first, last)
        known = {span.step for span in device}
        device += [step._replace(kind=UNKNOWN) for step in steps if step.step not in known]
        rows = [self.track_row(f"{line.clock(scale.left) - view.history.origin:.3f} s", ruler(scale, cursor), width)]
        pauses = line.pauses(first, last)
        named_spans = (("steps", numbered(steps, scale)), ("host", self.host), ("device", device), ("pauses", pauses))
        for name, spans in named_spans if pauses or height >= LOW else named_spans[:-1]:
            rows.append(self.track_row(name, track(spans, scale, cursor, labels), width))
            if name in ("host", "device") and height >= ROOMY:
                bare = self.track_row("", track(spans, scale, cursor, lambda span: ()), width)
                rows[-1:] = [bare, rows[-1], bare]
        if self.cursor is not None:
            rows.append(at_cursor(self.cursor, scale.left, self.host, device, width))
        late = view.moment.since_result_ms
        if (row := view.history.steps.get(line.last if self.step is None else self.step)) is not None:
            seen = {span.kind for span in (*self.host, *device, *pauses)} if height < LOW else None
            room = height - len(rows) - len(view.timings.limits) - bool(late) - 1  # 1: of a request
            within = next((span for span in device if span.step == row.step and span.kind == PERHAPS), None)
            rows += figures(view, row, width, seen, room, within)
        rows += limit_rows(view.timings.limits, width)
        if late:
            rows.append(Row(f"no results for {duration(late)} so far", "bold bad").done(width))
        self._lanes_row = len(rows)
        rows += self._requests(view, line, named, max(0, height - len(rows)), width)
        note = [(f"1 column = {number(scale.ms)} ms", "ink"), *self.own_key("[ ] · d details")]
        if last - first + 1 >= MOST_STEPS:
            note.append((f" · the last {MOST_STEPS} steps", "dim"))
        note.append((" · follows" if self.right is None else " · end: follow", "dim"))
        hidden = len(self._alive) > len(self.lanes) == 1  # a single row has no line that counts the others
        title = f"{self.TITLE} · 1 of {len(self._alive)} requests" if hidden else self.TITLE
        return Picture(rows, title=title, brief=self.TITLE, note=note, legend=request_legend())

    def _look(self, view: View, line: Timeline, columns: int) -> None:
        """Choose the scale and the steps in sight."""
        if view.moment.exact and view.moment.horizon != self._horizon:  # the picture shows another moment
            self.right = self.cursor = self.step = None
        self._horizon = view.moment.horizon
        scale_ms = self.chosen_ms or self._automatic(view, line, columns)
        chosen = selected(view, "step")
        if chosen != self._chosen and chosen is not None and chosen != self.step:  # selected in another panel
            self.step, self.cursor = chosen, line.arrived(chosen)
            self.right = self.cursor + columns * scale_ms / 2
        self._chosen = chosen
        right = line.end if self.right is None else self.right
        self.scale = Scale(right - columns * scale_ms, scale_ms, columns)
        self.steps_in_sight = line.steps_between(self.scale.left, right, MOST_STEPS)

    def _automatic(self, view: View, line: Timeline, columns: int) -> float:
        took = view.history.steps.column("took")[view.history.steps.indices(line.last - RECENT + 1, line.last)]
        known = took[~np.isnan(took)]
        wanted = STEPS_SHOWN * float(np.median(known)) / columns if len(known) else 1.0
        # A finer scale is chosen only if it is much finer, so that the scale does not change back and forth.
        if not wanted <= self._auto_ms < 5 * wanted:
            self._auto_ms = next((scale for scale in SCALES if scale >= wanted), SCALES[-1])
        return self._auto_ms

    # ---- requests

    def _requests(self, view: View, line: Timeline, named: int, room: int, width: int) -> list[Runs]:
        first, last = self.steps_in_sight
        alive = [
            lane for lane in (*view.history.lanes.ended_since(first), *view.history.lanes.active.values())
            if lane.submitted_step <= last + 1 and view.moment.begun(lane)
        ]
        alive.sort(key=lambda lane: lane.id)
        hidden = max(0, len(alive) - room)
        counted = hidden > 0 and room > 1
        top = hidden + counted  # the newest requests are shown; a line counts the others
        chosen = selected(view, "request")
        at = next((i for i, lane in enumerate(alive) if lane.id == chosen), None)
        top = top if at is None else min(top, at)
        self._alive = alive
        self.lanes = alive[top : top + room - counted]
        rows = []
        for lane in self.lanes:
            lit, ink = lane.id in view.links.requests, owner_style(view.texts.colour(lane.request.group))
            name = view.texts.request(lane.id)
            if named:
                name = fit(name, self.label - named) + fit(view.texts.title(lane.request.group), named - 1)
            spans = line.request(lane, first, last)
            cells = track(spans, self.scale, self.cursor_column, request_labels, request=True)
            rows.append(self.track_row(name, cells, width, "bold accent" if lit else ink))
        if counted:
            others = len(alive) - len(self.lanes)
            rows.append(Row(f"+ {others} more requests: up and down show them", "dim").done(width))
        return rows

    # ---- keys and mouse

    def move_to(self, right: float) -> None:
        """Show the time before `right`; stop following the newest step."""
        line = Timeline(self.view.history.steps, self.view.moment.horizon)
        half = self.scale.columns * self.scale.ms / 2
        self.right = max(line.begin + half, min(right, line.end + half))
        self.repaint()

    def zoom_by(self, by: int, around: float | None) -> None:
        """Change the scale; the place `around` keeps its column. None: the right edge stays."""
        at = min(range(len(SCALES)), key=lambda i: abs(SCALES[i] - self.scale.ms))
        if by > 0 and self.steps_in_sight[1] - self.steps_in_sight[0] + 1 >= MOST_STEPS:
            return
        self.chosen_ms = SCALES[max(0, min(len(SCALES) - 1, at + by))]
        if around is not None and self.right is not None:
            self.right = around + (self.scale.right - around) * self.chosen_ms / self.scale.ms
        self.repaint()

    def action_zoom(self, by: int) -> None:
        visible = self.cursor is not None and self.scale.left <= self.cursor < self.scale.right
        self.zoom_by(by, self.cursor if visible else None)

    def clicked(self, view: View, column: int, row: int) -> None:
        if self.ends_drag():
            return
        if column >= self.label:
            self._set_cursor(self.place_at(column))
        if 0 <= (index := row - self._lanes_row) < len(self.lanes):
            view.select("request", self.lanes[index].id)

    def _set_cursor(self, place: float, step: int | None = None) -> None:
        """Move the cursor and select the step of the host's work there."""
        self.cursor = place
        if self.right is None:
            self.right = self.scale.right
        if not self.scale.left <= place < self.scale.right:
            self.right = place + self.scale.columns * self.scale.ms / 2
        span = covering(self.host, place)
        step = span.step if step is None and span is not None else step
        if step is not None and step in self.view.history.steps:
            self.step = self._chosen = step
            self.view.select("step", step)

    def action_part(self, by: int) -> None:
        """Move the cursor to the part of the host's work before or after it."""
        line = Timeline(self.view.history.steps, self.view.moment.horizon)
        place = self.scale.right if self.cursor is None else self.cursor
        first, last = line.steps_between(place - self.scale.ms, place + self.scale.ms, 8)
        spans = line.host(max(line.first, first - 1), min(line.last, last + 1))
        later = [span for span in spans if span.begin > place]
        before = [span for span in spans if span.begin < place]
        if later if by > 0 else before:
            span = later[0] if by > 0 else before[-1]
            self._set_cursor(span.begin, span.step)

    def action_step(self, by: int) -> None:
        """Move the cursor to the arrival of the step before or after."""
        line = Timeline(self.view.history.steps, self.view.moment.horizon)
        step = line.last if self.step is None else self.step + by
        row = self.view.history.steps.get(step)
        while row is not None and row.ended is None:  # a failed step has no times
            row = self.view.history.steps.get(row.step + by)
        if row is not None and row.step <= line.last:
            self._set_cursor(line.arrived(row.step), row.step)

    def action_latest(self) -> None:
        """Follow the newest step at the automatic scale; in the past, also return to now."""
        self.back_to_now()
        self.right = self.cursor = self.step = self.chosen_ms = None
        if selected(self.view, "step") is not None:
            self.view.select(None)

    def action_choose(self, by: int) -> None:
        if self.lanes:
            ids, first = [lane.id for lane in self._alive], self.lanes[-1 if by < 0 else 0].id
            self.view.select("request", neighbour(ids, selected(self.view, "request"), by, ids.index(first)))

    def action_details(self) -> None:
        step = Timeline(self.view.history.steps, self.view.moment.horizon).last if self.step is None else self.step
        if step in self.view.history.steps:
            self.view.select("step", step)
            self.post_message(Opened("step", step))


# ---- texts


def labels(span: Span) -> list[str]:
    """Returns the texts of a span, the longest first."""
    if span.kind == "step":
        number = f"{span.step:,}"
        return [f"{number}  {duration(span.ms)}", number] if span.ms else [number]
    if span.kind in ("idle", "gate", "gc", "delayed"):
        return [f"{span.kind} {duration(span.ms)}", span.kind]
    if span.kind in (LAUNCH_OR_WAIT, NOT_REPORTED):
        return [span.kind, "?"]
    if span.kind in HOST or not span.tokens:
        return [f"{span.kind} {span.step:,}", span.kind]
    return [f"prefill +{span.tokens:,}", f"+{span.tokens:,}"]


def request_labels(span: Span) -> list[str]:
    return [f" +{span.tokens:,} ", f"+{span.tokens:,}"] if span.tokens else []


def request_legend(without: str = "") -> list[Run]:
    """Returns the meaning of the glyphs on the tracks of requests, except of the kind `without`."""
    kinds = (kind for kind in REQUESTS.values() if kind != without)
    return legend(*((mark(kind, request=True), STYLES[kind], kind) for kind in kinds))


def covering(spans: Sequence[Span], place: float) -> Span | None:
    """Returns the span at a place on the axis."""
    return next((span for span in spans if span.begin <= place < span.end), None)


def at_cursor(place: float, left: float, host: Sequence[Span], device: Sequence[Span], width: int) -> Runs:
    """Returns the row that says what host and device do at the cursor."""
    row = Row("cursor ", "accent").add(f"+{ms(place - left)} ms", "bold accent")
    for name, spans in (("host", host), ("device", device)):
        span = covering(spans, place)
        text = "no work" if span is None else "unknown" if span.kind == UNKNOWN else f"{span.kind} {span.step:,}, "
        row.add(f" · {name} ", "dim").add(text)
        if span is not None and span.kind != UNKNOWN:
            row.add(duration(span.ms), "bold ink")
    return row.done(width)


def figures(
    view: View, row: StepRow, width: int, seen: Collection[str] | None, room: int, within: Span | None,
) -> list[Runs]:
    """Returns the rows with the times of a step's parts. They are also the legend of the tracks. `seen`: the kinds of
    the spans in sight; parts of other kinds are left out if they took no time. None: no part is left out. `room`: rows;
    with too few, the end of the cause is left out. `within`: the device began the step at a moment of this span; None:
    its begin is known, or unknown."""
    head = Row(f"step {row.step:,}", "bold ink").extend(named(view, "  " + contents(view, row)))
    if row.took_ms is not None:
        head.add("  took ", "dim").add(duration(row.took_ms), "bold ink")
    model = view.models.of(row.step)
    why = view.texts.labelled(why_slow(row, model, always=True))
    if head.width + len(why) + 3 > width:
        why = view.texts.labelled(why_slow(row, model))
    if why and head.width + len(why) + 3 <= width:
        head.extend(named(view, f" ({why})", "dim"))
        why = ""
    rows: list[Runs] = []
    flow = Row()
    marks = None if seen is None else {mark(kind) for kind in seen}
    for glyph, style, name, value in _entries(row, view.history.steps, within):
        if marks is not None and glyph not in marks and value in ("0", glyphs().dash):
            continue
        entry = [(glyph, style), (f" {name} ", "dim"), (value, "ink")]
        if flow.width and flow.width + 2 + runs_width(entry) > width:
            rows.append(flow.done(width))
            flow = Row()
        flow.add("  " if flow.width else "").extend(entry)
    rows.append(flow.done(width))
    most = max(1, min(WHY_ROWS, room - 1 - len(rows)))
    return [head.done(width), *first_rows(why, "dim", width, most, "d: details"), *rows]


def _entries(row: StepRow, steps: Steps, within: Span | None) -> list[tuple[str, str, str, str]]:
    """Returns (glyph, style, name, value in ms) of each part, and of what is not a part of the step's duration."""
    parts = row.parts
    shown = {(part.kind, part.name(row.step)): part.ms for part in parts_of(steps, row)}
    others = {"gate": None if parts is None else parts.gate, NOT_REPORTED: 0.0}
    for kind in (*PARTS, NOT_REPORTED):  # the legend has every glyph
        if not any(known == kind for known, _ in shown):
            shown[kind, kind] = others.get(kind)
    entries = [(mark(kind), STYLES[kind], name, _value(value)) for (kind, name), value in shown.items()]
    device = "prefill" if row.chunks else "decode"
    entries.append((mark(device), STYLES[device], f"device ({row.kind})", _value(row.device_ms)))
    if within is not None:
        entries.append((mark(PERHAPS), STYLES[PERHAPS], "began within", ms(within.end - within.begin)))
    for name in ("gc", "delayed"):
        entries.append((mark(name), STYLES[name], name, _value(None if parts is None else getattr(parts, name))))
    stops = glyphs().dash if parts is None else f"{parts.stops}"
    return [*entries, (mark("stop"), STYLES["stop"], "stops", stops)]


def _value(value: float | None) -> str:
    return glyphs().dash if value is None else "0" if value == 0 else ms(value)
