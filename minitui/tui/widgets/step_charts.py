"""The large form of the timings: step time over steps, a histogram, and the slowest steps with their causes."""

from __future__ import annotations

import numpy as np

from minitui.text import ms, short
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.cause import cause_within
from minitui.tui.widgets.chart import LABEL, bars, scale_of
from minitui.tui.widgets.rows import Row, Run, Runs, fitting
from minitui.viewmodel.explain.timing import StepTimes, usual_words
from minitui.viewmodel.history.steps import StepRow
from minitui.viewmodel.view import View

STYLES = ("decode", "prefill", "prefill-2")  # of step_times.KINDS
HISTOGRAM = 30  # cells
BESIDE_FROM = 72  # cells: a narrower panel has no histogram
LEAST = 4  # rows of the smallest chart
KIND = 9  # cells
DEVICE_FROM = 100  # cells: the list of a narrower panel has no device times


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


def up_down() -> str:
    """Returns the keys that choose a step of the list, in words."""
    return "↑ ↓" if glyphs().rule != "-" else "^ v"


def list_top(slowest: list[StepRow], chosen: int, rows: int) -> int:
    """Returns the index of the first step that a list of `rows` rows, one of them its heading, shows."""
    return max(0, min(chosen - rows + 2, len(slowest) - rows + 1))


def room_for_why(view: View, width: int) -> int:
    """Returns the cells for the cause of a step in its row of the list."""
    return width - _ends(view, width)[-1] - 2 - KIND


def _ends(view: View, width: int) -> tuple[int, ...]:
    """Returns where the columns of figures end: step, took and, in a wide panel, device."""
    return (20, 29, 38) if view.timings.device_ms is not None and width >= DEVICE_FROM else (20, 29)


def slow_steps(
    slowest: list[StepRow], view: View, at: int, chosen: bool, width: int, rows: int, among: int
) -> list[Runs]:
    """Returns the list of the slowest steps, with the step at index `at`. `chosen`: it is highlighted. `among`: they
    are the slowest ones of so many steps. The heading says so, and how many do not fit."""
    room, top, ends = rows - 1, list_top(slowest, at, rows), _ends(view, width)
    head = Row(f"slowest {len(slowest)}", "dim")
    for name, end in zip(("step", "took ms", "device"), ends, strict=False):
        head.right(name, end, "dim")
    head.to(ends[-1] + 2).add("kind".ljust(KIND) + "why", "dim")
    last, hidden = f"of the last {among:,} steps", len(slowest) - room
    more = f"+{hidden} more: {up_down()}" if hidden > 0 else ""
    told = [f"{last} · {more}", f"of {among:,} steps · {more}", more] if more else [last, f"of {among:,} steps"]
    head.right(fitting(width - head.width - 2, *told, ""), width, "dim")
    drawn = [head.done(width)]
    for i in range(top, min(len(slowest), top + room)):
        step = slowest[i]
        ground = " on select" if chosen and i == at else ""
        row = Row(f"{i + 1:>9}", "dim" + ground)
        device = glyphs().dash if step.device_ms is None else ms(step.device_ms)
        for text, end in zip((f"{step.step:,}", ms(step.took_ms or 0.0), device), ends, strict=False):
            row.to(end - len(text), " ", "ink" + ground).add(text, "bold ink" + ground)
        style = STYLES[("decode", "mixed", "prefill").index(step.kind)]
        row.to(ends[-1] + 2, " ", "ink" + ground).add(step.kind.ljust(KIND), style + ground)
        model = view.models.of(step.step)
        usual = usual_words(step, model)
        fits = 0 < len(usual) <= width - row.width
        why = usual if fits else cause_within(step, model, width - row.width) or "expected time unknown"
        drawn.append(row.add(why, "ink" + ground).to(width, " ", "ink" + ground).done(width))
    return drawn
