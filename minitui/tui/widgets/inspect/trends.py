"""Trends: are first tokens, token gaps, cache hits, pool and queue getting better or worse? One chart for each."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from textual.binding import Binding

from minitui.text import count, ms, short
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.chart import LABEL, Scale, bars, scale_of
from minitui.tui.widgets.inspect.timeline import JumpRequested
from minitui.tui.widgets.rows import Row, Run, Runs, fitting, legend
from minitui.viewmodel.history.rates import BUCKET
from minitui.viewmodel.history.trends import METRICS, SPANS, Metric, Series, shortest_span
from minitui.viewmodel.view import View

STYLES = {
    "first token": "prefill",
    "token gaps": "decode",
    "hit of a prompt": "hit",
    "pool": "pool",
    "queue": "waiting",
}
TICKS = 5  # the most times below a chart


class TrendCharts(LinePanel):
    """Left and right move the cursor, up and down change the span, Enter goes back in time to the cursor."""

    TITLE = "Trends"
    NEEDS_STATE = True
    BINDINGS: ClassVar = [
        Binding("left", "move(-1)", "earlier", show=False, id="trends.left"),
        Binding("right", "move(1)", "later", show=False, id="trends.right"),
        Binding("pageup", "move(-10)", "ten columns earlier", show=False, id="trends.pageup"),
        Binding("pagedown", "move(10)", "ten columns later", show=False, id="trends.pagedown"),
        Binding("up", "span(1)", "longer span", show=False, id="trends.up"),
        Binding("down", "span(-1)", "shorter span", show=False, id="trends.down"),
        Binding("home", "latest", "without cursor", show=False, id="trends.latest"),
        Binding("enter", "jump", "go back in time to the cursor", show=False, id="trends.jump"),
    ]

    span = SPANS[0]
    back: int | None = None  # the cursor, in columns before the last; None: no cursor
    _chosen = False  # the user chose the span
    _ends: np.ndarray
    _columns = 1
    _wide = 1  # cells of a column

    def picture(self, view: View, width: int, height: int) -> Picture:
        now, live = (view.moment.bucket * BUCKET, False) if view.moment.travel_text else (view.history.rates.now, True)
        if not self._chosen:
            self.span = shortest_span(now)
        columns = max(1, width - LABEL)
        each, more = divmod(max(0, height - 1), len(METRICS))  # rows of a chart; the first `more` charts have one more
        rows: list[Runs] = []
        cursor = None
        for i, metric in enumerate(METRICS):
            series, whole = view.history.trends.series(metric.name, self.span, columns, now, live)
            self._ends, self._columns = series.end, len(series.end)
            self._wide = max(1, columns // self._columns)
            if self.back is not None:
                self.back = min(self.back, self._columns - 1)
                cursor = self._columns - 1 - self.back
            rate = view.moment.reused.hit_rate
            level = {
                "pool": 100 * view.moment.shown.used, "queue": len(view.moment.shown.state.queue),
                "hit of a prompt": None if rate is None else 100 * rate,
            }.get(metric.name)
            rows += self._chart(metric, series, whole, level, max(0, each + (i < more) - 1), width, cursor)
        rows.append(self._axis(now, width, cursor))
        g = glyphs()
        note: list[Run] = [(_name(self.span), "ink"), *self.own_key("← → cursor · ↑ ↓ span · enter jump")]
        key = legend((g.busy, "ink", "p50"), (g.prefill, "ink", "up to p99"))
        return Picture(rows[:height], note=note, legend=[*key, ("  hits: p1, up to p50", "dim")])

    def _chart(
        self, metric: Metric, series: Series, whole: tuple[float, float, int], level: float | None, rows: int,
        width: int, cursor: int | None,
    ) -> list[Runs]:
        """Returns the rows of a chart. `level`: the value of a level at the moment of the picture; of hits, the hit
        rate, which counts all prompt tokens together."""
        p50, tail, count = whole if cursor is None else series.at(cursor)
        row = Row(metric.name, "bold ink")
        if level is not None and metric.level and cursor is None:
            row.add("  now ", "dim").add(f"{_number(metric, level)} {metric.unit}".rstrip(), "ink")
        for name, value in (("p50", p50), (f"p{metric.tail}", tail)):
            text = glyphs().dash if np.isnan(value) else f"{_number(metric, value)} {metric.unit}".rstrip()
            row.add(f"  {name} ", "dim").add(text, "ink")
        if not metric.level:
            row.add(f"  of {short(count)}", "dim")
        if level is not None and not metric.level and cursor is None:
            rate = f"{level:.1f} %"
            row.add(fitting(width - row.width, f"  hit rate of all {rate}", f"  hit rate {rate}", ""), "ink")
        low, high = (series.p50, series.tail) if metric.tail > 50 else (series.tail, series.p50)
        scale = Scale(0.0, 100.0) if metric.unit == "%" else scale_of(high, low)
        if metric.name == "queue":
            scale = Scale(scale.low, max(1.0, scale.high, level or 0.0))
        if scale.low:
            row.add(fitting(width - row.width, "  log scale", "  log", ""), "dim")
        shown = np.where(high > 0, high, np.nan)  # zero is an empty column
        shown, low = np.repeat(shown, self._wide), np.repeat(low, self._wide)
        drawn = bars(
            shown, [STYLES[metric.name]] * len(shown), scale, rows, width, lambda value: _mark(metric, value),
            solid=low, cursor=None if cursor is None else cursor * self._wide,
        )
        return [row.done(width), *drawn]

    def _axis(self, now: float, width: int, cursor: int | None) -> Runs:
        """Returns the times below the columns, as minutes and seconds before the end of the picture."""
        row = Row("time", "dim").to(LABEL)
        step = next(span for span in (1, 2, *SPANS[1:]) if span * TICKS >= self.span)
        ages = [float(age) for age in range(self.span - self.span % step, 0, -step)]
        if cursor is not None:
            ages = [now - float(self._ends[cursor])]
        for age in ages:
            x = cursor if cursor is not None else int(np.searchsorted(self._ends, now - age, "right"))
            text, at = _ago(age), LABEL + x * self._wide
            if at >= row.width and at + len(text) <= LABEL + self._columns * self._wide - 5:
                row.to(at).add(text, "bold accent" if x == cursor else "dim")
        return row.right("now", LABEL + self._columns * self._wide, "dim").done(width)

    # ---- keys and the mouse

    def clicked(self, view: View, column: int, row: int) -> None:
        at = (column - LABEL) // self._wide
        if 0 <= at < self._columns:
            self.back = self._columns - 1 - at

    def action_move(self, by: int) -> None:
        at = 0 if self.back is None else self.back - by
        self.back = max(0, min(self._columns - 1, at))

    def action_span(self, by: int) -> None:
        self._chosen = True
        self.span = SPANS[max(0, min(len(SPANS) - 1, SPANS.index(self.span) + by))]
        self.back = None

    def action_latest(self) -> None:
        self.back = None

    def action_jump(self) -> None:
        """Go back in time to the last step of the column under the cursor."""
        if self.back is None:
            return
        step = self.view.history.steps.before_bucket(int(self._ends[self._columns - 1 - self.back] / BUCKET))
        if step is None:
            self.app.notify("no step of this time is kept", markup=False)
        else:
            self.post_message(JumpRequested(step))


def _number(metric: Metric, value: float) -> str:
    return ms(value) if metric.unit == "ms" else short(value)


def _mark(metric: Metric, value: float) -> str:
    """Returns a value of the scale; empty for a fraction of a small number of requests."""
    whole = bool(metric.unit) or value >= 10 or value == round(value)
    return _number(metric, value) if whole else ""


def _name(span: int) -> str:
    """Returns the name of a span: "30 seconds", "5 minutes", "2 hours"."""
    unit, seconds = next(unit for unit in (("hour", 3600), ("minute", 60), ("second", 1)) if span >= unit[1])
    return count(span // seconds, unit)


def _ago(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"-{minutes}:{rest:02d}"
