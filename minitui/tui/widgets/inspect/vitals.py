"""Vitals: is the engine healthy? Six figures, each with a sparkline of its recent history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minitui.text import ms
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Runs
from minitui.viewmodel.history.rates import BUCKET
from minitui.viewmodel.view import View


@dataclass(frozen=True, slots=True)
class Vital:
    """A figure with its unit and history. `top`: the value drawn at full height; 0: the maximum of the history."""

    label: str
    value: str
    units: tuple[str, ...]  # longest first; the first that fits is shown
    series: Sequence[float] | np.ndarray
    style: str
    top: float = 0.0


def vitals(view: View, n: int) -> list[Vital]:
    """Returns the six figures, each with `n` buckets of history."""
    shown = view.moment.shown
    # When paused, in the past or in slow motion, also show the last bucket, which is not full yet.
    filling = view.moment.exact or view.moment.slowed

    def series(name: str, n: int = n) -> np.ndarray:
        return view.moment.recent(name, n, filling)

    free, active, shared, _cached = shown.counts
    total = max(1, shown.total)
    hit_rate = f"{100 * view.moment.reused.hit_rate:.1f}" if view.moment.reused.hit_rate is not None else glyphs().dash
    when, minute = (
        view.moment.since_begin,
        view.moment.reused_lately.hit_rate if view.moment.knows_the_last_minute else None,
    )
    since = [f"% of prompt tokens {when}, {100 * minute:.1f} % in 60 s"] if minute is not None else []
    since += [f"% of prompt tokens {when}", f"% {when}"]
    held = 100 * (active + shared) / total
    median = view.timings.median_ms
    waiting = len(shown.state.queue)
    running = sum(r.state == "running" for r in shown.state.requests.values())
    per_row = f"{view.timings.per_row:.1f} per row and step"
    with_drafts = (f"tok/s, {per_row}", f"tok/s, {view.timings.per_row:.1f} per step") if view.timings.drafted else ()
    return [
        Vital("decode", f"{view.moment.speed('decode'):,.0f}", (*with_drafts, "tok/s"),
              series("decode") / BUCKET, "decode"),
        Vital("prefill", f"{view.moment.speed('prefill'):,.0f}", ("tok/s",),
              series("prefill") / BUCKET, "prefill"),
        Vital("running", f"{running:,}", (f"+{waiting} waiting", f"+{waiting} wait", f"+{waiting}"),
              series("running"), "running"),
        Vital("hit rate", hit_rate, (*since, "%"),
              _rolling(series("cached", n + 20), series("missed", n + 20), n), "hit", top=1.0),
        Vital("pool", "<1" if 0 < 1 - free / total < 0.01 else f"{100 * (1 - free / total):.0f}",
              (f"% used, {held:.0f} % held", f"% · {held:.0f} % held", "%"),
              series("used"), "pool", top=1.0),
        Vital("step", ms(median) if median else glyphs().dash, _step_units(view), series("worst_ms"), "step"),
    ]


def _step_units(view: View) -> tuple[str, ...]:
    t = view.timings
    if t.ranks == 1:
        return "ms median", "ms"
    share = f"{100 * t.comm_share:.0f} %"
    return f"ms median, {share} exchange", f"ms, {share} comm.", "ms"


def _rolling(cached: np.ndarray, computed: np.ndarray, n: int) -> list[float]:
    """Returns `n` hit rates, each over the five seconds up to its bucket; without prompts, the rate before it."""
    values: list[float] = []
    sums = np.cumsum(cached), np.cumsum(cached + computed)
    rate = 0.0
    for i in range(len(cached) - n, len(cached)):
        start = max(0, i - 20)
        prompt_tokens = sums[1][i] - sums[1][start]
        rate = (sums[0][i] - sums[0][start]) / prompt_tokens if prompt_tokens else rate
        values.append(rate)
    return values


def spark(values: Sequence[float] | np.ndarray, top: float = 0.0) -> str:
    """Returns one character per value: a space for zero, a full bar for `top` (0: the largest value)."""
    levels = glyphs().spark
    top = top or max(values, default=0.0)
    if top <= 0:
        return " " * len(values)
    most = len(levels) - 1
    return "".join(" " if v <= 0 else levels[min(most, int(v / top * most + 0.5))] for v in values)


class Vitals(LinePanel, can_focus=False):
    """The figures in two lines; a wide panel also shows their history. A panel of five rows or more has a frame, and
    the figures are one below the other."""

    TITLE = "Engine"
    NEEDS_STATE = True
    FRAME = "none"
    DEFAULT_CSS = "Vitals { height: 2; }"

    def framed(self, view: View, width: int, height: int) -> list[Runs]:
        self.frame = "box" if height >= 5 else "none"
        return super().framed(view, width, height)

    def picture(self, view: View, width: int, height: int) -> Picture:
        if self.frame == "box":
            return Picture(self._column(view, width, height), note=[(f"1 bar = {BUCKET:g} s", "dim")])
        if width < 96:
            return Picture(self._figures(view, width))
        cell = width // 6
        room = cell - 2
        head, bars = Row(), Row()
        for i, vital in enumerate(vitals(view, room)):
            at = i * cell + 1
            head.to(at).extend(_head(vital, room))
            bars.to(at).add(spark(vital.series, vital.top), vital.style)
        return Picture([head.done(width), bars.done(width)])

    def _figures(self, view: View, width: int) -> list[Runs]:
        """Returns two lines of three figures, without their history."""
        chosen, cell = vitals(view, 1), width // 3
        rows: list[Runs] = []
        for line in (chosen[:3], chosen[3:]):
            row = Row()
            for i, vital in enumerate(line):
                row.to(i * cell + 1).extend(_head(vital, cell - 2))
            rows.append(row.done(width))
        return rows

    def _column(self, view: View, width: int, height: int) -> list[Runs]:
        chosen = vitals(view, width)
        order = [chosen[0], chosen[3], chosen[5], chosen[2], chosen[4], chosen[1]][: max(1, height // 2)]
        rows: list[Runs] = []
        for vital in order:
            rows.append(Row().extend(_head(vital, width)).done(width))
            rows.append(Row(spark(vital.series, vital.top), vital.style).done(width))
        return rows


def _head(vital: Vital, room: int) -> Runs:
    row = Row(vital.label, "dim").to(9 if room >= 30 else len(vital.label) + 1).add(vital.value, "bold ink")
    unit = next((unit for unit in vital.units if row.width + 1 + len(unit) <= room), "")
    return row.add(" " + unit if unit else "", "dim").done(room)
