"""Trends: percentiles of two hours in memory of fixed size."""

from __future__ import annotations

import numpy as np
import pytest

from minitui.dev.panel import stress_view
from minitui.dev.simulator import CLASSROOM
from minitui.text import short
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
from minitui.tui.widgets.inspect.trends import TrendCharts
from minitui.tui.widgets.rows import plain
from minitui.viewmodel.history.trends import METRICS, SPANS, Trends, shortest_span
from minitui.viewmodel.view import View
from tests.support.records.views import TIGHT, percentiles


@pytest.mark.parametrize(("samples", "exact"), [(4_096, 1e-9), (100, 0.035)])
@pytest.mark.parametrize("span", SPANS)
def test_percentiles_are_numpys_exactly_or_within_three_percent(span: int, samples: int, exact: float) -> None:
    trends, rng, columns = Trends(samples=samples), np.random.default_rng(span), 4 if span == 3 else 5
    values, weights = rng.lognormal(3.0, 1.0, 1_000), rng.integers(1, 5, 1_000)
    times = np.linspace(0.0, span * (1 - 1e-9), len(values))
    for now, value, weight in zip(times.tolist(), values.tolist(), weights.tolist(), strict=True):
        trends.advance(now)
        trends.add("token gaps", value, weight)
    series, (p50, p99, count) = trends.series("token gaps", span, columns, times[-1], live=True)
    assert count == weights.sum() == series.count.sum()
    every = np.repeat(values, weights)
    assert (p50, p99) == pytest.approx(percentiles(every), rel=exact)
    of_column = np.minimum((times / span * columns + 1e-9).astype(int), columns - 1)
    for column in range(columns):
        mine = np.repeat(values[of_column == column], weights[of_column == column])
        assert series.at(column)[:2] == pytest.approx(percentiles(mine), rel=2 * exact)


@pytest.mark.parametrize("values", [[3.52, 5.4, 5.56, 21.1], [699.0] * 3, [0.01, 0.02]])
def test_percentiles_of_few_values_are_values(values: list[float]) -> None:
    trends = Trends()
    for value in values:
        trends.add("first token", value)
    series, (p50, p99, n) = trends.series("first token", 15, 60, 0.1, live=True)
    assert p50 in values and p99 == max(values) and n == len(values)
    assert (p50, p99) == pytest.approx(percentiles(values)) and series.at(-1) == (p50, p99, n)


def test_a_column_has_the_values_of_its_time_and_a_level_lasts() -> None:
    trends = Trends()
    for second, (pool, first) in enumerate([(10, 100.0), (20, None), (None, 300.0), (40, 400.0)]):
        trends.advance(second)
        if pool is not None:
            trends.level("pool", pool)
        if first is not None:
            trends.add("first token", first)
    pool, _ = trends.series("pool", 60, 60, 3.5, live=True)
    assert pool.p50[-4:].tolist() == [10, 20, 20, 40] and np.isnan(pool.p50[:-4]).all()
    first, _ = trends.series("first token", 60, 60, 3.5, live=True)
    assert first.count[-4:].tolist() == [1, 0, 1, 1] and np.isnan(first.p50[-3])
    past, (p50, _, _) = trends.series("pool", 60, 60, 2.5, live=False)
    assert past.p50[-2:].tolist() == [10, 20] and p50 == 10, "in the past, later values are not known"


def test_a_level_is_rounded_once() -> None:
    """12 of 256 blocks are 4.69 %: "now 5 %" and "p50 4 %" of the same pool would contradict each other."""
    trends = Trends()
    for now, blocks in ((0.0, 11), (0.1, 12), (2.0, 13)):
        trends.advance(now)
        trends.level("pool", 100 * blocks / 256)
    p50, _, _ = trends.series("pool", SPANS[0], 60, 2.0, live=True)[1]
    assert short(p50) == short(100 * 12 / 256) == "5"


def test_a_level_counts_for_the_time_that_it_lasts() -> None:
    """A peak of the queue has left the picture when the queue is empty again, also without further records."""
    trends = Trends()
    for now, waiting in ((0.0, 0), (2.0, 40), (2.1, 7), (3.0, 0)):
        trends.advance(now)
        trends.level("queue", waiting)
    series, (p50, p99, _) = trends.series("queue", 15, 60, 12.0, live=True)
    assert (p50, p99) == (0, 7), "40 requests waited for less than one hundredth of the time"
    assert np.nanmax(series.tail) == pytest.approx(40, rel=0.03) and np.nanmax(series.tail[-36:]) == 0
    minute, _ = trends.series("queue", 60, 60, 90.5, live=True)
    assert set(minute.tail.tolist()) == {0.0}, "idle time counts, although there are no records"


def test_the_queue_counts_each_step_however_many_records_are_folded_at_once() -> None:
    """In the small pool, two requests wait in 7 steps of 159: more than one hundredth of the time."""
    reader = TraceReader(bundled()["small-pool"])
    records, tails = list(reader.records()), []
    for size in (1, 40, len(records)):
        view = View()
        view.reset(reader.part(0).snapshot)
        for begin in range(0, len(records), size):
            view.fold(records[begin : begin + size])
        series, (_, p99, _) = view.history.trends.series("queue", 15, 60, view.history.rates.now, live=True)
        assert p99 >= 2
        tails.append(series.tail[-3:].tolist())
    assert tails[0] == tails[1] == tails[2]
    rows = [plain(row) for row in TrendCharts().drawn(view, 120, 32)]
    head = next(i for i, row in enumerate(rows) if row.startswith("│ queue "))
    marks = [row[1:9].strip() for row in rows[head + 1 : head + 5]]
    assert marks[0] == "2" and set(marks) <= {"2", "1", ""}, "a scale of requests has no fractions"


def test_gaps_across_a_preemption_are_counted() -> None:
    """Each request has one gap less than tokens."""
    _, view = stress_view(TIGHT, 10.0, frames=100)
    lanes = view.history.lanes.lanes.values()
    expected = [view.history.tokens.stats(lane, view.moment.horizon) for lane in lanes]
    assert any(lane.preemptions for lane in lanes) and view.history.steps.first == 0
    _, (_, p99, count) = view.history.trends.series("token gaps", 60, 60, view.history.rates.now, live=True)
    assert count == sum(stats.count for stats in expected if stats is not None)
    gaps = np.concatenate([np.diff(view.history.tokens.arrivals(lane, view.moment.horizon).at) * 1e3 for lane in lanes])
    assert p99 == pytest.approx(np.percentile(gaps, 99, method="higher"), rel=0.04)


@pytest.mark.parametrize(("now", "span"), [(3.0, 3), (15.0, 15), (16.0, 30), (900.0, 1800), (9_000.0, 7200)])
def test_the_first_picture_shows_the_whole_run(now: float, span: int) -> None:
    assert shortest_span(now) == span


def test_the_records_of_a_run_fill_every_trend() -> None:
    _, view = stress_view(CLASSROOM, 10.0, frames=50)
    found = {m.name: view.history.trends.series(m.name, 60, 60, view.history.rates.now, live=True)[1] for m in METRICS}
    assert found["first token"][2] == len(view.history.first_tokens.items)
    assert view.history.trends.series("first token", 15, 60, view.history.rates.now, live=True)[0].count.size == 60
    steps = view.history.steps
    gaps = [steps.gap_ms(step) for step in range(1, steps.last + 1)]
    weights = [steps.decoded(step) for step in range(1, steps.last + 1)]
    counts = [n if gap is not None else 0 for gap, n in zip(gaps, weights, strict=True)]
    known = np.repeat([gap or 0.0 for gap in gaps], counts)
    assert found["token gaps"][2] == len(known)
    assert found["token gaps"][1] == pytest.approx(np.percentile(known, 99), rel=0.05)
    assert 0 < found["hit of a prompt"][0] <= 100 and 0 < found["pool"][0] <= 100
