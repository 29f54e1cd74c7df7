"""Timings: why are steps slow?

The panel shows percentiles for each kind of step, the slowest step and its cause, the parts of the last time to first
token, and the work of host and device in the last few steps. A large panel shows charts and the slowest steps instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from textual.binding import Binding

from minitui.text import ms, short
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Opened, Picture, neighbour
from minitui.tui.widgets.chart import LABEL, bars, scale_of
from minitui.tui.widgets.inspect.host_device import host_and_device, means_row
from minitui.tui.widgets.inspect.step_bar import cause_within
from minitui.tui.widgets.inspect.timeline import JumpRequested
from minitui.tui.widgets.inspect.timing_rows import (
    KINDS,
    drafts_row,
    exchange_row,
    first_token_row,
    kind_rows,
    limit_rows,
    slowest_rows,
)
from minitui.tui.widgets.rows import Row, Run, Runs, clip, first_rows, fitting, legend, named
from minitui.viewmodel.explain.timing import StepTimes, Timings, rows_of, step_times, usual_words, why_slow
from minitui.viewmodel.history.steps import StepRow
from minitui.viewmodel.view import View

STYLES = ("decode", "prefill", "prefill-2")  # of step_times.KINDS
HISTOGRAM = 30  # cells
BESIDE_FROM = 72  # cells: a narrower panel has no histogram
LEAST_CHART = 4  # rows of the smallest chart
KIND = 9  # cells
ENDS = (20, 29)  # where the list's columns of figures end: step, took


def charts(times: StepTimes, width: int, rows: int, chosen: int | None) -> list[Runs]:
    """Returns the chart of step times with the histogram beside it. `chosen`: a step whose column is marked."""
    beside = HISTOGRAM if width >= BESIDE_FROM else 0
    room = width - beside - bool(beside) * 2
    k, longest, median, slowest = times.columns(max(1, room - LABEL))
    scale = scale_of(longest, median)
    at = np.flatnonzero(times.step == chosen)
    cursor = int(at[0]) // k if len(at) else None
    styles = [STYLES[int(times.kind[i])] for i in slowest]
    head = Row("ms, log" if scale.low else "ms", "dim").to(LABEL)
    head.add(_heading(k, room - head.width), "dim")
    drawn = [head.done(room), *bars(longest, styles, scale, rows - 2, room, ms, solid=median, cursor=cursor)]
    first, last = f"{int(times.step[0]):,}", f"{int(times.step[-1]):,}"
    axis = Row("step", "dim").to(LABEL).add(first, "dim")
    drawn.append(axis.right(last, max(axis.width + len(last) + 1, LABEL + len(longest)), "dim").done(room))
    if not beside:
        return drawn
    gap: list[Run] = [("  ", "ink")]
    return [(*left, *gap, *right) for left, right in zip(drawn, _histogram(times, beside, rows), strict=True)]


def _heading(k: int, width: int) -> str:
    """Returns what the columns of the chart show: `k` steps each."""
    if k == 1:
        return "took"
    whole = f"took: the median, up to the longest of {k} steps"
    return fitting(width, whole, f"took: median and longest of {k}", "took")


def _histogram(times: StepTimes, width: int, rows: int) -> list[Runs]:
    drawn = [Row("up to", "dim").right("steps", width, "dim").done(width)]
    bins = times.histogram(rows - 1)
    most = max(sum(counts) for _, counts in bins)
    room = width - LABEL - 7
    for limit, counts in bins:
        row = Row(ms(limit).rjust(LABEL - 2), "dim").to(LABEL)
        total = sum(counts)
        cells = max(1, round(total / most * room)) if total else 0
        begin = seen = 0
        for count, style in zip(counts, STYLES, strict=True):
            seen += count
            end = round(cells * seen / total) if total else 0
            row.add(glyphs().busy * (end - begin), style)
            begin = end
        drawn.append(row.right(short(total) if total else "", width, "dim").done(width))
    return [*drawn, *[Row().done(width)] * (rows - len(drawn))]


def list_top(slowest: Sequence[StepRow], chosen: int, rows: int) -> int:
    """Returns the index of the first step that a list of `rows` rows, one of them its heading, shows."""
    return max(0, min(chosen - rows + 2, len(slowest) - rows + 1))


def room_for_why(width: int) -> int:
    """Returns the cells for the cause of a step in its row of the list."""
    return width - ENDS[-1] - 2 - KIND


def slow_steps(
    slowest: Sequence[StepRow], view: View, at: int, chosen: bool, width: int, rows: int, among: int
) -> list[Runs]:
    """Returns the list of the slowest steps, with the step at index `at`. `chosen`: it is highlighted. `among`: they
    are the slowest ones of a number of steps. The heading says so, and how many do not fit."""
    room, top = rows - 1, list_top(slowest, at, rows)
    head = Row(f"slowest {len(slowest)}", "dim")
    for name, end in zip(("step", "took ms"), ENDS, strict=True):
        head.right(name, end, "dim")
    head.to(ENDS[-1] + 2).add("kind".ljust(KIND) + "why", "dim")
    last, hidden = f"of the last {among:,} steps", len(slowest) - room
    more = f"+{hidden} more: ↑ ↓" if hidden > 0 else ""
    told = [f"{last} · {more}", f"of {among:,} steps · {more}", more] if more else [last, f"of {among:,} steps"]
    head.right(fitting(width - head.width - 2, *told, ""), width, "dim")
    drawn = [head.done(width)]
    for i in range(top, min(len(slowest), top + room)):
        step = slowest[i]
        row = Row(f"{i + 1:>9}", "dim")
        for text, end in zip((f"{step.step:,}", ms(step.took_ms or 0.0)), ENDS, strict=True):
            row.right(text, end, "bold ink")
        row.to(ENDS[-1] + 2).add(step.kind.ljust(KIND), STYLES[("decode", "mixed", "prefill").index(step.kind)])
        usual = usual_words(step, view.models.of(step.step))
        fits = 0 < len(usual) <= width - row.width
        why = usual if fits else cause_within(view, step, width - row.width) or "expected time unknown"
        drawn.append(row.extend(named(view, why)).done(width, "select" if chosen and i == at else ""))
    return drawn


LARGE_FROM = 15  # rows: a panel of this height shows the charts and the slowest steps
WHOLE_LIST = 9  # rows: the tracks are left out of a panel with fewer for the list
FOOT = 3  # rows for the whole cause of a step
LEAST_LIST = 4  # free rows that a list without charts needs in a smaller panel
SLOWEST = 10
SPANS = (200, 1_000, 5_000, 32_768)  # the numbers of steps that the large form can show


class StepTimings(LinePanel):
    """The panel of timings. Enter opens the details of the slowest step."""

    TITLE = "Timings"
    NEEDS_STATE = True
    BINDINGS: ClassVar = [
        Binding("enter", "open", "open the slowest step, or go to the chosen one", show=False, id="timings.open"),
        Binding("d", "details", "all details of the chosen step", show=False, id="timings.details"),
        Binding("up", "choose(-1)", "slower step", show=False, id="timings.up"),
        Binding("down", "choose(1)", "faster step", show=False, id="timings.down"),
        Binding("left", "span(1)", "more steps", show=False, id="timings.left"),
        Binding("right", "span(-1)", "fewer steps", show=False, id="timings.right"),
    ]

    def nothing_yet(self, view: View, width: int) -> Picture:
        rows = [Row(clip(line, width), "dim").done(width) for line in view.history.phases()]
        return Picture(rows, "Start: the time of each phase") if rows else super().nothing_yet(view, width)

    times: StepTimes | None = None  # the steps of the charts and of the list; None: only the slowest is shown
    slowest: Sequence[StepRow] = ()
    chosen: int | None = None  # a step of `slowest`; None: no row is chosen
    span = 1  # index in SPANS
    _list_row = _listed = 0  # where the list begins, and its rows with the heading
    _slowest_rows = range(0)  # the rows about the slowest step, if there is no list

    def picture(self, view: View, width: int, height: int) -> Picture:
        t = view.timings
        rows = kind_rows(t, width)
        more = [first_token_row(view, width)]
        if t.drafted:
            more.append(drafts_row(t, width))
        if t.ranks > 1:
            more.append(exchange_row(t, width))
        rest = height - len(rows) - len(more) - len(t.limits)
        self.times = None
        if rest >= 2 + LEAST_LIST:
            times = step_times(view.history.steps, view.moment.horizon, SPANS[self.span])
            self.times = times if len(times.took) else None
        if self.times is None:
            return self._small(view, rows, more, width, height)
        if height >= LARGE_FROM:
            return self._large(self.times, view, [*rows, *more], width, height)
        rows += more
        tracks = height >= len(rows) + 2 + WHOLE_LIST
        if tracks:
            rows += host_and_device(view, width)
        rows += limit_rows(t.limits, width)
        self._list(self.times, view, rows, width, height - len(rows))
        return self._framed(t, rows, tracks, "↑ ↓ choose · enter jump · d details")

    def _small(self, view: View, kinds: list[Runs], more: list[Runs], width: int, height: int) -> Picture:
        """Returns the picture without the list of the slowest steps. What is least important is left out first: the
        kinds without steps, the tracks, the first token, the rows after it, then the means of host and device."""
        t = view.timings
        limits = limit_rows(t.limits, width)
        if len(kinds) + 1 + len(more) + 2 + len(limits) > height:
            used = [getattr(t, name).steps for _, name, _ in KINDS]
            kinds = [kinds[0], *(row for row, steps in zip(kinds[1:], used, strict=True) if steps)]
        more = more[max(0, len(more) + len(kinds) + len(limits) + 2 - height) :]
        spare = height - len(kinds) - len(more) - len(limits)
        slowest = slowest_rows(view, width, max(1, spare if spare < 4 else spare - 2))
        self._slowest_rows = range(len(kinds), len(kinds) + len(slowest))
        spare -= len(slowest)
        tracks = host_and_device(view, width) if spare >= 2 else [means_row(t, width)] * (spare == 1)
        rows = [*kinds, *slowest, *more, *tracks, *limits]
        return self._framed(t, rows[:height], len(tracks) == 2, "d details of the slowest")

    def _framed(self, t: Timings, rows: list[Runs], tracks: bool, keys: str) -> Picture:
        g = glyphs()
        key = legend(
            (g.commit, "host", "plan, launch, commit"), (g.busy, "decode", "decode"),
            (g.prefill, "prefill", "with prefill"),
        )
        note = self.own_key(keys, first=True) if t.slowest is not None else []
        return Picture(rows, title=_title(t), note=note, legend=key if tracks and t.device_ms is not None else [])

    def _large(self, times: StepTimes, view: View, rows: list[Runs], width: int, height: int) -> Picture:
        """Returns the picture with the charts and the list of the slowest steps."""
        rows += limit_rows(view.timings.limits, width, reasons=True)
        rest = height - len(rows)
        self._choose_slowest(times, view)
        # The longest foot: the choice of another step then moves no row of the list.
        foot = max(len(self._foot(step, view, width)) for step in self.slowest)
        listed = min(len(self.slowest) + 1 + foot, max(4 + foot, rest // 3))
        if rest - listed >= LEAST_CHART:
            rows += charts(times, width, rest - listed, self.slowest[self._at].step)
        else:
            listed = rest
        self._list(times, view, rows, width, listed)
        g = glyphs()
        keys = self.own_key("← → · ↑ ↓ choose · enter jump · d details")
        note: list[Run] = [(f"charts: {len(times.took):,} steps", "ink"), *keys]
        key = legend((g.busy, "decode", "decode"), (g.busy, "prefill", "mixed"), (g.busy, "prefill-2", "prefill"))
        key.append(("  ░ up to the longest", "dim"))
        return Picture(rows[:height], title=_title(view.timings), note=note, legend=key)

    def _choose_slowest(self, times: StepTimes, view: View) -> None:
        self.slowest = rows_of(view.history.steps, times.slowest(SLOWEST))
        if all(row.step != self.chosen for row in self.slowest):
            self.chosen = None

    @property
    def _at(self) -> int:
        """The index of the chosen step in `slowest`; 0 without a choice."""
        return next((i for i, row in enumerate(self.slowest) if row.step == self.chosen), 0)

    def _list(self, times: StepTimes, view: View, rows: list[Runs], width: int, height: int) -> None:
        """Add the list of the slowest steps to the rows, and below it the whole cause of the chosen step."""
        self._choose_slowest(times, view)
        foot = self._foot(self.slowest[self._at], view, width, max(0, min(FOOT, height - 2)))
        self._list_row, self._listed = len(rows), height - len(foot)
        is_chosen, among = self.chosen is not None, len(times.took)
        listed = slow_steps(self.slowest, view, self._at, is_chosen, width, self._listed, among)
        rows += [*listed, *[Row().done(width)] * (self._listed - len(listed)), *foot]

    def _foot(self, step: StepRow, view: View, width: int, most: int = FOOT) -> list[Runs]:
        """Returns at most `most` rows with the cause of a step, if its row of the list has not all of it."""
        why = view.texts.labelled(why_slow(step, view.models.of(step.step)))
        if len(why) <= room_for_why(width):
            return []
        return first_rows(f"step {step.step:,}: {why}", "ink", width, most, "d: details")

    def clicked(self, view: View, column: int, row: int) -> None:
        if self.times is not None:
            index = row - self._list_row - 1 + list_top(self.slowest, self._at, self._listed)
            if self._list_row < row < self._list_row + self._listed and 0 <= index < len(self.slowest):
                chosen, self.chosen = self.chosen, self.slowest[index].step
                if chosen == self.chosen:
                    self.action_open()
        elif row in self._slowest_rows and view.timings.slowest is not None:
            view.select("step", view.timings.slowest.step)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Allow a choice of steps only where a list shows them."""
        listed = self.times is not None or action not in ("choose", "span")
        return listed and super().check_action(action, parameters)

    def action_choose(self, by: int) -> None:
        if self.times is not None:
            self.chosen = neighbour([row.step for row in self.slowest], self.chosen, by)

    def action_span(self, by: int) -> None:
        self.span = max(0, min(len(SPANS) - 1, self.span + by))

    def action_open(self) -> None:
        """Open the details of the slowest step; in the large form, go back in time to the chosen step."""
        if self.times is not None:
            self.chosen = self.slowest[self._at].step
            self.view.select("step", self.chosen)
            self.post_message(JumpRequested(self.chosen))
            return
        self.action_details()

    def action_details(self) -> None:
        slowest = self.slowest[self._at] if self.times is not None else self.view.timings.slowest
        if slowest is not None:
            self.view.select("step", slowest.step)
            self.post_message(Opened("step", slowest.step))


def _title(t: Timings) -> str:
    """Returns the title, with the steps that the table is about."""
    return f"Timings · {t.steps:,} steps in {t.seconds:.1f} s" if t.steps else "Timings"
