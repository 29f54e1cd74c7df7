"""Batch lanes: which requests waited, and which ran? A row is a request; a column is k steps, the newest at the right.

A cell shows one phase. If several occur in the column's steps, the first in this order has priority: preempted,
finished, prefill, decode, waiting. A row above the requests shows the duration of the slowest step of each column.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from textual.binding import Binding

from minitui.text import ms
from minitui.tui.glyphs import glyphs
from minitui.tui.theme import owner_style
from minitui.tui.widgets.base import LinePanel, Picture, Thing, neighbour, selected
from minitui.tui.widgets.inspect.vitals import spark
from minitui.tui.widgets.rows import Row, Run, Runs, clip, fit, fitting, legend, runs_width
from minitui.viewmodel.explain.stalls import Stall, worst_stall
from minitui.viewmodel.history.lane import DECODING, FINISHED, GAINING, NOTHING, PREEMPTED, PREFILLING, QUEUED, Lane
from minitui.viewmodel.history.lanes import LaneRows
from minitui.viewmodel.view import View

SPAN_SECONDS = 10.0
SETTLED_S = 5.0  # the heights of moving panels stay for so long
STALL_SECONDS = 1.0  # between two searches for the worst stall
STALL, STALL_WORDS = PREEMPTED + 1, PREEMPTED + 2  # codes of cells, besides those of lanes
STEPS_PER_COLUMN = (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500)
STYLES = {
    NOTHING: "ink", QUEUED: "dim", DECODING: "decode", GAINING: "draft", PREFILLING: "prefill", FINISHED: "good",
    PREEMPTED: "bad", STALL: "bad", STALL_WORDS: "bold on-fill on bad",
}
WORDS = {PREFILLING: "prefill", DECODING: "decode", QUEUED: "waits", PREEMPTED: "preempted", FINISHED: "done"}


class BatchLanes(LinePanel):
    """Up and down choose a request, left and right a step; [ and ] set the steps per column; PageUp/PageDown scroll."""

    TITLE = "Batch lanes"
    NEEDS_STATE = True
    BINDINGS: ClassVar = [
        Binding("up", "choose(-1)", "request above", show=False, id="lanes.up"),
        Binding("down", "choose(1)", "request below", show=False, id="lanes.down"),
        Binding("left", "step(-1)", "step before", show=False, id="lanes.left"),
        Binding("right", "step(1)", "step after", show=False, id="lanes.right"),
        Binding("pageup", "scroll(-1)", "earlier", show=False, id="lanes.earlier"),
        Binding("pagedown", "scroll(1)", "later", show=False, id="lanes.later"),
        Binding("left_square_bracket", "zoom(-1)", "fewer steps per column", show=False, id="lanes.finer"),
        Binding("right_square_bracket", "zoom(1)", "more steps per column", show=False, id="lanes.coarser"),
        Binding("end", "latest", "now", show=False, id="lanes.latest"),
        Binding("enter", "open", "details", show=False, id="lanes.open"),
    ]

    def __init__(self, *, id: str | None = None, frame: str | None = None) -> None:
        super().__init__(id=id, frame=frame)
        self.k = 1
        self.fixed_k: int | None = None  # the k chosen by the user
        self.back = 0  # number of columns scrolled back
        self.first_step = 0  # the first step of the leftmost column
        self.columns = 0
        self.label = 5  # cells for the labels at the left
        self.rows = LaneRows()
        self.stall: Stall | None = None  # the worst one in sight
        self._stall_of: object = None  # what it was computed for
        self._says_why = False  # its cause is beside it
        self._sized = 0.0  # when a moving picture got its rows

    def picture(self, view: View, width: int, height: int) -> Picture:
        named = width >= 84
        lanes = view.history.lanes
        newest = [lanes.newest, *lanes.active]
        widest = max(len(view.texts.request(id)) for id in newest)
        self.label = max(9, widest + 4) + (11 if named else 0)
        self.columns = max(1, width - self.label)
        horizon = view.moment.horizon
        self._choose_k(view, horizon)
        last_column = horizon // self.k - self.back
        self.first_step = (last_column - self.columns + 1) * self.k
        end = min(horizon, self.first_step + self.k * self.columns - 1)
        needs = 5 + len(lanes.active) + lanes.number_ended(self.first_step, end)
        if view.moment.still:
            self.wanted = needs
        elif not 0 <= view.moment.now - self._sized < SETTLED_S and not needs <= self.wanted < 2 * needs:
            self._sized, self.wanted = view.moment.now, needs + needs // 2 if self._sized else 0
        scale = (self.back, self.k)
        self.rows.place(lanes, max(0, height - 3), self.first_step, end, scale, selected(view, "request"))
        self._find_stall(view, end)
        self._says_why = False
        rows: list[Runs] = [self._scale(view, width, horizon), self._slowest(view, width, horizon)]
        rows += [self._row(view, slot, width, horizon, named) for slot in self.rows.slots]
        rows.append(self._rest(view, width, end))
        steps = "1 column = 1 step" if self.k == 1 else f"1 column = {self.k} steps"
        note = [(steps, "ink"), *self.own_key("[ ]")]
        title = "Batch lanes · requests over steps"
        return Picture(rows, title=title, brief=self.TITLE, note=note, legend=self._legend(view, width))

    def _legend(self, view: View, width: int) -> list[Run]:
        marks = _marks()
        lanes = view.history.lanes.lanes
        left_out = -1 if any(lanes[id].preemptions for slot in self.rows.slots for id in slot) else PREEMPTED
        entries = [(marks[code], STYLES[code], word) for code, word in WORDS.items() if code != left_out]
        if any(lane.gains for lane in view.history.lanes.active.values()):
            entries.append((glyphs().gaining, "draft", "drafts accepted"))
        if self.stall is not None:
            entries.insert(0, (glyphs().busy, "bad", "longest gap"))
        if any(len(slot) > 1 for slot in self.rows.slots):
            with_note = legend(("+2", "ink", "2 finished before"), *entries)
            if runs_width(with_note) <= width - 4:
                return with_note
        return legend(*entries)

    def _find_stall(self, view: View, end: int) -> None:
        """Find the worst stall in sight, of a moving picture once in STALL_SECONDS."""
        if view.moment.still:
            of: object = (end, self.first_step, view.history.live.state.seq, tuple(map(tuple, self.rows.slots)))
        else:
            of = int(view.moment.now / STALL_SECONDS)
        if of == self._stall_of:
            return
        self._stall_of = of
        known = view.history.lanes.lanes
        lanes = (known[id] for slot in self.rows.slots for id in slot if view.moment.begun(known[id]))
        self.stall = worst_stall(view, lanes, max(0, self.first_step), end)

    def _choose_k(self, view: View, horizon: int) -> None:
        if self.fixed_k is not None:
            self.k = self.fixed_k
            return
        if view.moment.exact and view.history.steps.last - view.history.steps.first < self.columns:
            self.k = 1
            return
        last = view.history.steps.get(horizon)
        if last is None:
            return
        steps = last.step - view.history.steps.since(last.t - SPAN_SECONDS, last.step) + 1
        needed_k = next((k for k in STEPS_PER_COLUMN if k * self.columns >= steps), STEPS_PER_COLUMN[-1])
        # In a moving picture, choose a smaller k only if all steps clearly fit: the scale must not jump to and fro.
        shrinks = 2.5 * needed_k < self.k and steps < 0.8 * needed_k * self.columns
        if view.moment.still or needed_k > self.k or shrinks:
            self.k = needed_k

    def _scale(self, view: View, width: int, horizon: int) -> Runs:
        """Returns the time scale: how many seconds ago the steps of some columns ended."""
        row = Row("time", "dim").to(self.label)
        last = view.history.steps.get(min(horizon, self.first_step + self.k * self.columns - 1))
        if last is None:
            return row.done(width)
        now = f"step {last.step:,}"
        marks: list[tuple[int, str]] = []
        for seconds in (60, 30, 20, 10, 5, 2, 1):
            step = view.history.steps.since(last.t - seconds, last.step)
            if step <= max(view.history.steps.first, 0):
                continue
            column = (step - self.first_step) // self.k
            if 0 <= column < self.columns - len(now) - 6 and all(abs(column - at) > 6 for at, _ in marks):
                marks.append((column, f"-{seconds} s"))
        for column, text in sorted(marks):
            if self.label + column >= row.width:
                row.to(self.label + column).add(text, "dim")
        return row.right(now, width, "dim").done(width)

    def _slowest(self, view: View, width: int, horizon: int) -> Runs:
        """Returns the slowest step of each column as a sparkline."""
        steps = view.history.steps
        at = steps.indices(self.first_step, min(horizon, self.first_step + self.k * self.columns - 1))
        row = Row("duration" if self.label < 18 else "duration of step", "dim").to(self.label)
        if not len(at):
            return row.done(width)
        took = np.nan_to_num(steps.column("took")[at])
        column = (steps.column("step")[at] - self.first_step) // self.k
        worst = np.zeros(self.columns)
        np.maximum.at(worst, column, took)
        return row.add(spark(worst), "step").done(width)

    def _row(self, view: View, slot: list[int], width: int, horizon: int, named: bool) -> Runs:
        """Returns one row with the phases of its requests. The label names the selected request, or else the
        last request of the row, and gives the number of other requests. The name of each other finished request follows
        its end, if there is room."""
        lanes = view.history.lanes.lanes
        seen = [lanes[id] for id in slot if lanes[id].submitted_step <= horizon + 1 and view.moment.begun(lanes[id])]
        if not seen:
            return Row().done(width)
        owner = next((lane for lane in reversed(seen) if lane.id in view.links.requests), seen[-1])
        lit = owner.id in view.links.requests
        live = owner.finish_step > horizon
        ink = owner_style(view.texts.colour(owner.request.group))
        label = Row(view.texts.request(owner.id), ("bold underline " if lit else "bold " if live else "") + ink)
        if len(seen) > 1:
            label.add(f" +{len(seen) - 1}", "dim")
        if named:
            label.to(self.label - 11).add(fit(view.texts.title(owner.request.group), 10), "ink" if lit else "dim")
        row = Row().extend(label.done(self.label, "select" if lit else ""))
        cells = [(NOTHING, False)] * self.columns
        for lane in seen:
            lit = lane.id in view.links.requests
            for code, columns in lane.pieces(self.first_step, self.k, self.columns, horizon):
                for x in columns:
                    if code > cells[x][0]:
                        cells[x] = (code, lit)
        if view.links.step is not None:
            x = (view.links.step - self.first_step) // self.k
            if 0 <= x < self.columns:
                cells[x] = (cells[x][0], True)
        names = self._names(view, cells, [lane for lane in seen if lane is not owner and lane.finish_step <= horizon])
        if self.stall is not None and self.stall.lane.id in slot:
            cells, names = self._with_stall(cells, names, self.stall, view.texts.labelled(self.stall.words))
        marks = _marks()
        start = 0
        for x in range(1, self.columns + 1):
            if x < self.columns and cells[x] == cells[start] and x not in names and start not in names:
                continue
            if x < self.columns and start in names and x - start < len(names[start]):
                continue
            code, lit = cells[start]
            text = names.get(start) or marks[code] * (x - start)
            style = STYLES[code] if start not in names or code == STALL_WORDS else "dim"
            row.add(text, style + (" on select" if lit else ""))
            start = x
        return row.done(width)

    def _names(self, view: View, cells: list[tuple[int, bool]], ended: list[Lane]) -> dict[int, str]:
        """Returns {column after the request's end: name of the request} for requests that are not in the label."""
        names = {}
        for lane in ended:
            at, name = (lane.finish_step - self.first_step) // self.k + 1, view.texts.request(lane.id)
            if at > 0 and at + len(name) < self.columns and {*cells[at : at + len(name) + 1]} == {(NOTHING, False)}:
                names[at] = name
        return names

    def _with_stall(
        self, cells: list[tuple[int, bool]], names: dict[int, str], stall: Stall, whole: str
    ) -> tuple[list[tuple[int, bool]], dict[int, str]]:
        """Returns the cells with those of the stall marked, and the names with its words beside it, `whole` or only its
        length, where these hide no other sign than decodes."""
        first, last = ((step - self.first_step) // self.k for step in (stall.gap.since + 1, stall.gap.step))
        if last < 0 or first >= self.columns:
            return cells, names
        first, last = max(0, first), min(last, self.columns - 1)
        cells = list(cells)
        for x in range(first, last + 1):
            if cells[x][0] not in (PREFILLING, PREEMPTED, FINISHED) or x == first == last:
                cells[x] = (STALL, cells[x][1])
        for words in (whole, whole.partition(":")[0]):
            words = f" {words} "
            for at in (last + 1, first - len(words)):
                there = cells[at : at + len(words)] if at >= 0 else []
                if len(there) == len(words) and {code for code, _ in there} <= {DECODING, GAINING, NOTHING}:
                    cells[at : at + len(words)] = [(STALL_WORDS, lit) for _, lit in there]
                    self._says_why = ":" in words
                    kept = {x: name for x, name in names.items() if x + len(name) <= at or x >= at + len(words)}
                    return cells, kept | {at: words}
        return cells, names

    def _rest(self, view: View, width: int, end: int) -> Runs:
        """Returns the last row: the number of requests without a row, by phase."""
        shown = {id for slot in self.rows.slots for id in slot}
        requests = view.moment.shown.state.requests
        lanes = view.history.lanes.lanes
        hidden = [r for id, r in requests.items() if id not in shown and lanes[id].submitted_step <= end + 1]
        decoding = sum(r.joined_at >= 0 for r in hidden)
        waiting = sum(r.state != "running" for r in hidden)
        ended = view.history.lanes.number_ended(self.first_step, end)
        ended -= sum(self.first_step <= view.history.lanes.lanes[id].finish_step <= end for id in shown)
        if end == view.moment.horizon:  # steps overlap: a request may have finished while the next steps were planned
            later = [lane for lane in view.history.lanes.ended_since(end + 1) if lane.id not in shown]
            ended += sum(lane.id not in requests and view.moment.begun(lane) for lane in later)
        prefilling = len(hidden) - decoding - waiting
        steady = all(lanes[r.id].steady(self.first_step, end) for r in hidden if r.joined_at >= 0)
        decode = "decode throughout" if steady else "decoding"
        counts = ((decoding, decode), (prefilling, "prefilling"), (waiting, "waiting"), (ended, "done"))
        row = Row()
        if parts := [f"{n:,} {word}" for n, word in counts if n]:
            texts = ("+ " + ", ".join(parts), "+ " + ", ".join(part.removesuffix("ing") for part in parts))
            row.add(fitting(width, *texts), "dim")
        took = view.history.steps.column("took")[view.history.steps.indices(self.first_step, end)]
        took = took[took > 0]
        if self.stall is not None and not self._says_why:
            text = view.texts.labelled(f"r{self.stall.lane.id}: {self.stall.words}")
            if row.width + len(text) + 3 > width >= len(text):
                row = Row()
            row.right(clip(text, max(1, width - row.width - 3 * bool(row.width))), width, "bad")
        elif len(took):
            text = f"duration of these steps: {ms(took.min())} to {ms(took.max())} ms"
            if row.width + len(text) + 3 <= width:
                row.right(text, width, "dim")
        return row.done(width)

    # ---- selection and scale

    def pointed(self, view: View, column: int, row: int) -> Thing | None:
        index = row - 2
        slot = self.rows.slots[index] if 0 <= index < len(self.rows.slots) else None
        return ("request", self._request_at(view, slot, column)) if slot else None

    def clicked(self, view: View, column: int, row: int) -> None:
        if row < 2 and column >= self.label:
            self._select_step(view, self.first_step + (column - self.label) * self.k)
        else:
            super().clicked(view, column, row)

    def _request_at(self, view: View, slot: list[int], column: int) -> int:
        """Returns the request of a row that was waiting or running in a column; if none was, the row's last request."""
        step = self.first_step + (column - self.label) * self.k
        lanes = view.history.lanes.lanes
        here = [id for id in slot if lanes[id].submitted_step <= step + self.k and lanes[id].finish_step >= step]
        return here[-1] if here and column >= self.label else slot[-1]

    def action_choose(self, by: int) -> None:
        if rows := [slot for slot in self.rows.slots if slot]:
            chosen = next((slot for slot in rows if selected(self.view, "request") in slot), None)
            self.view.select("request", neighbour(rows, chosen, by, -1 if by < 0 else 0)[-1])

    def action_step(self, by: int) -> None:
        chosen = selected(self.view, "step")
        step = self.view.moment.horizon if chosen is None else chosen + by * self.k
        self._select_step(self.view, step)

    def _select_step(self, view: View, step: int) -> None:
        step = max(max(view.history.steps.first, 0), min(view.moment.horizon, step))
        if step in view.history.steps:
            view.select("step", step)

    def action_scroll(self, by: int) -> None:
        self.back = max(0, self.back - by * max(1, self.columns // 2))
        kept = (self.view.moment.horizon - max(self.view.history.steps.first, 0)) // self.k
        self.back = min(self.back, max(0, kept - self.columns // 2))

    def action_zoom(self, by: int) -> None:
        at = STEPS_PER_COLUMN.index(self.k) if self.k in STEPS_PER_COLUMN else 0
        self.fixed_k = STEPS_PER_COLUMN[max(0, min(len(STEPS_PER_COLUMN) - 1, at + by))]

    def action_latest(self) -> None:
        self.back_to_now()
        self.back, self.fixed_k = 0, None


def _marks() -> dict[int, str]:
    g = glyphs()
    return {
        STALL: g.busy, STALL_WORDS: " ",
        NOTHING: " ", QUEUED: g.queued, DECODING: g.decode, GAINING: g.gaining, PREFILLING: g.prefill,
        FINISHED: g.finished, PREEMPTED: g.preempted,
    }
