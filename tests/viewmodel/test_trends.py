"""Trends: percentiles of two hours in memory of fixed size."""

from __future__ import annotations

import numpy as np
import pytest

from engine.trace.state import State
from minitui.dev.panel import stress_view
from minitui.dev.simulator import CLASSROOM, Load, Stress
from minitui.viewmodel.model import View
from minitui.viewmodel.trends import METRICS, SPANS, Trends, shortest_span


@pytest.mark.parametrize("span", SPANS)
def test_percentiles_are_numpys_within_three_percent(span: int) -> None:
    trends, rng = Trends(), np.random.default_rng(span)
    values = rng.lognormal(3.0, 1.0, 4_000)
    for i, value in enumerate(values):
        trends.advance(span * i / len(values))
        trends.add("token gaps", float(value))
    _, (p50, p99, count) = trends.series("token gaps", span, 60, span * (1 - 1e-9), live=True)
    assert count == len(values)
    assert p50 == pytest.approx(np.percentile(values, 50), rel=0.035)
    assert p99 == pytest.approx(np.percentile(values, 99), rel=0.035)


def test_a_column_has_the_values_of_its_time_and_a_level_lasts() -> None:
    trends = Trends()
    for second, (pool, first) in enumerate([(10, 100.0), (20, None), (None, 300.0), (40, 400.0)]):
        trends.advance(second)
        if pool is not None:
            trends.add("pool", pool)
        if first is not None:
            trends.add("first token", first)
    pool, _ = trends.series("pool", 60, 60, 3.5, live=True)
    assert pool.p50[-4:].tolist() == [10, 20, 20, 40] and np.isnan(pool.p50[:-4]).all()
    first, _ = trends.series("first token", 60, 60, 3.5, live=True)
    assert first.count[-4:].tolist() == [1, 0, 1, 1] and np.isnan(first.p50[-3])
    past, (p50, _, _) = trends.series("pool", 60, 60, 2.5, live=False)
    assert past.p50[-2:].tolist() == [10, 20] and p50 == 10, "in the past, later values are not known"


def test_levels_are_the_same_however_many_records_are_folded_at_once() -> None:
    """A seek folds many seconds at once. Each picture of the pool and the queue must still have their history."""
    stress = Stress(CLASSROOM)
    stress.run(8.0)
    records = stress.drain()
    at_once, in_frames = View(), View()
    for view, size in ((at_once, len(records)), (in_frames, 40)):
        view.reset(State(CLASSROOM.blocks + 1, CLASSROOM.block_size, CLASSROOM.budget, CLASSROOM.rows).snapshot())
        for begin in range(0, len(records), size):
            view.fold(records[begin : begin + size])
    assert at_once.live.state.snapshot() == in_frames.live.state.snapshot()
    for name in ("pool", "queue"):
        found, _ = at_once.trends.series(name, 15, 60, at_once.rates.now, live=True)
        expected, _ = in_frames.trends.series(name, 15, 60, in_frames.rates.now, live=True)
        known = ~np.isnan(expected.p50)
        assert known.sum() > 25 and np.isnan(found.p50[known]).sum() <= 1
        assert np.nanmean(np.abs(found.p50[known] - expected.p50[known])) <= 0.05 * np.nanmax(expected.p50)
    for level in ("running", "used"):
        assert (at_once.rates.series(level, 24, at_once.bucket) > 0).mean() > 0.9


def test_gaps_across_a_preemption_are_counted() -> None:
    """Each request has one gap less than tokens."""
    tight = Load(blocks=40, chats=6, rows=6, budget=48, context=480, reply=(60, 160), turns=3, think=0.05, paste=0.3)
    _, view = stress_view(tight, 10.0, frames=100)
    lanes = view.lanes.lanes.values()
    expected = [view.tokens.stats(lane, view.horizon) for lane in lanes]
    assert any(lane.preemptions for lane in lanes) and view.steps.first == 0
    _, (_, p99, count) = view.trends.series("token gaps", 60, 60, view.rates.now, live=True)
    assert count == sum(stats.count for stats in expected if stats is not None)
    gaps = np.concatenate([np.diff(view.tokens.arrivals(lane, view.horizon).at) * 1e3 for lane in lanes])
    assert p99 == pytest.approx(np.percentile(gaps, 99, method="higher"), rel=0.04)


@pytest.mark.parametrize(("now", "span"), [(3.0, 15), (15.0, 15), (16.0, 60), (900.0, 1800), (9_000.0, 7200)])
def test_the_first_picture_shows_the_whole_run(now: float, span: int) -> None:
    assert shortest_span(now) == span


def test_two_hours_are_kept_and_older_values_are_forgotten() -> None:
    trends = Trends()
    for t in range(0, 3 * 3600, 10):
        trends.advance(t)
        trends.add("queue", t // 3600)
    series, (_, _, count) = trends.series("queue", 7200, 240, 3 * 3600 - 1.0, live=True)
    assert count == 720 and set(series.p50.round().tolist()) == {1.0, 2.0}


def test_the_records_of_a_run_fill_every_trend() -> None:
    _, view = stress_view(CLASSROOM, 10.0, frames=50)
    found = {m.name: view.trends.series(m.name, 60, 60, view.rates.now, live=True)[1] for m in METRICS}
    assert found["first token"][2] == len(view.first_tokens.items)
    assert view.trends.series("first token", 15, 60, view.rates.now, live=True)[0].count.size == 60
    steps = view.steps
    gaps = [steps.gap_ms(step) for step in range(1, steps.last + 1)]
    weights = [steps.decoded(step) for step in range(1, steps.last + 1)]
    counts = [n if gap is not None else 0 for gap, n in zip(gaps, weights, strict=True)]
    known = np.repeat([gap or 0.0 for gap in gaps], counts)
    assert found["token gaps"][2] == len(known)
    assert found["token gaps"][1] == pytest.approx(np.percentile(known, 99), rel=0.05)
    assert 0 < found["hit rate"][0] <= 100 and 0 < found["pool"][0] <= 100
