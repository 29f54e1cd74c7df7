"""The large form of the timings: step time over steps, a histogram, and the slowest steps with their causes."""

from __future__ import annotations

import numpy as np

from minitui.text import ms, short
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.chart import LABEL, bars, scale_of
from minitui.tui.widgets.rows import Row, Run, Runs
from minitui.viewmodel.cost_models import CostModels
from minitui.viewmodel.step_row import StepRow
from minitui.viewmodel.step_times import StepTimes
from minitui.viewmodel.timing import why_briefly, why_slow

STYLES = ("decode", "prefill", "prefill-2")  # of step_times.KINDS
HISTOGRAM = 30  # cells
BESIDE_FROM = 72  # cells: a narrower panel has no histogram
LEAST = 4  # rows of the smallest chart


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
    head.add(f"time of a step: the median, up to the longest of {k}" if k > 1 else "time of each step", "dim")
    drawn = [head.done(room), *bars(longest, styles, scale, rows - 2, room, ms, solid=median, cursor=cursor)]
    first, last = f"{int(times.step[0]):,}", f"{int(times.step[-1]):,}"
    axis = Row("step", "dim").to(LABEL).add(first, "dim")
    drawn.append(axis.right(last, max(axis.width + len(last) + 1, LABEL + len(longest)), "dim").done(room))
    if not beside:
        return drawn
    gap: list[Run] = [("  ", "ink")]
    return [(*left, *gap, *right) for left, right in zip(drawn, _histogram(times, beside, rows), strict=True)]


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


def list_top(slowest: list[StepRow], chosen: int, rows: int) -> int:
    """Returns the index of the first step that a list of `rows` rows, one of them its heading, shows."""
    return max(0, min(chosen - rows + 2, len(slowest) - rows + 1))


def slow_steps(slowest: list[StepRow], models: CostModels, chosen: int, width: int, rows: int) -> list[Runs]:
    """Returns the list of the slowest steps. `chosen`: the index of the chosen one, which is always shown."""
    room, top = rows - 1, list_top(slowest, chosen, rows)
    head = Row(f"slowest {len(slowest)}", "dim").right("step", 20, "dim").right("ms", 29, "dim").to(31)
    drawn = [head.add("kind     why", "dim").done(width)]
    for i in range(top, min(len(slowest), top + room)):
        step = slowest[i]
        ground = " on select" if i == chosen else ""
        row = Row(f"{i + 1:>9}", "dim" + ground)
        for text, end in ((f"{step.step:,}", 20), (ms(step.took_ms or 0.0), 29)):
            row.to(end - len(text), " ", "ink" + ground).add(text, "bold ink" + ground)
        style = STYLES[("decode", "mixed", "prefill").index(step.kind)]
        row.to(31, " ", "ink" + ground).add(step.kind.ljust(9), style + ground)
        model = models.of(step.step)
        why = why_slow(step, model) or "expected time unknown: too few steps"
        if row.width + len(why) > width:
            why = why_briefly(step, model) or why
        drawn.append(row.add(why, "ink" + ground).to(width, " ", "ink" + ground).done(width))
    return drawn
