"""Two runs on one clock: their lanes, figures and sentence are what the records say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from engine.core.engine import Engine
from engine.core.scheduler import SchedulerConfig
from engine.info import EngineInfo
from engine.params import SamplingParams
from engine.trace.records import Record, RecordLog
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
from minitui.viewmodel.compare.comparison import Comparison, key_of, settings_that_differ
from minitui.viewmodel.compare.runs import DRAFTS, STALL, Run, recorded_view
from minitui.viewmodel.view import View
from tests.engine.core.test_step_clock import Timed
from tests.support.records.golden import GOLDEN

LENGTHS = (3, 9, 4, 2, 8)


def played(
    monkeypatch: pytest.MonkeyPatch, pause_s: float = 0.0, idle_s: float = 0.0, stall_s: float = 0.0, **config: Any
) -> list[Record]:
    """Returns the records of five requests, two at a time, on a clock that moves only by the work of the engine."""
    runner = Timed(monkeypatch)
    log = RecordLog(clock=lambda: runner.now)
    engine = Engine(runner, SchedulerConfig(max_num_seqs=2, **config), overlap=False, log=log)
    for tokens in LENGTHS:
        engine.add_request(list(range(1, 30)), SamplingParams(max_tokens=tokens, ignore_eos=True), group="chat")
    while engine.has_work:
        engine.step()
        if engine.scheduler.step == 5:
            runner.now += stall_s
        if pause_s and engine.has_work:
            log.append("gate", "closed", "paused")
            log.held += pause_s
            runner.now += pause_s
            log.append("gate", "open", "resumed")
    if idle_s:
        runner.now += idle_s
        engine.add_request(list(range(1, 30)), SamplingParams(max_tokens=2, ignore_eos=True), group="chat")
        while engine.has_work:
            engine.step()
    return log.drain()


EMPTY = View().history.live.state.snapshot() | {"num_blocks": 65, "block_size": 16, "max_num_seqs": 2}


def viewed(records: list[Record], name: str = "") -> View:
    view = View()
    view.reset(EMPTY)
    view.fold(records)
    view.run_name = name
    return view


def compared(first: View, second: View, key: str = "") -> Comparison:
    second.earlier = first
    return Comparison.of(second, key)


def recorded(name: str) -> View:
    return recorded_view(TraceReader(GOLDEN if name == "golden" else bundled()[name]))


@pytest.mark.parametrize("name", ["golden", "h200-8b", "small-pool"])
def test_the_figures_of_a_run_are_counted_from_its_records(name: str) -> None:
    view = recorded(name)
    figures, records = Run(view).figures, [*TraceReader(GOLDEN if name == "golden" else bundled()[name]).records()]
    kinds = [record[2] for record in records]
    assert figures.requests == kinds.count("submit")
    assert figures.steps == kinds.count("step")
    assert figures.preemptions == kinds.count("preempt")
    assert figures.firsts == kinds.count("first")
    computed = sum(chunk[2] for r in records if r[2] == "step" for chunk in r[4])
    again = sum(n for lane in view.history.lanes.lanes.values() for _, n in lane.again)
    assert figures.computed <= computed - again and figures.computed + figures.cached == figures.prompt_tokens
    assert figures.evicted == sum(record[4] for record in records if record[2] == "evict")
    finished = {record[3]: record[5] for record in records if record[2] == "finish"}
    assert figures.finished == len(finished)
    if figures.finished == figures.requests:
        assert figures.replies == sum(finished.values())
    gaps = {
        row.id: view.history.tokens.stats(view.history.lanes.lanes[row.id], view.moment.horizon)
        for row in view.history.lanes.lanes.values()
    }
    assert figures.gap_longest == max(g.longest.ms for g in gaps.values() if g is not None and g.longest is not None)


@pytest.mark.parametrize("name", ["golden", "h200-8b", "small-pool"])
@pytest.mark.parametrize("unit", ["ms", "steps"])
def test_the_phases_of_a_request_follow_each_other_and_hold_its_tokens(name: str, unit: str) -> None:
    view = recorded(name)
    run = Run(view)
    for lane in run.lanes:
        spans = run.phases(unit, lane)
        assert all(a.end <= b.begin + 1e-9 for a, b in pairwise(spans))
        found = run.arrivals[lane.id]
        working = [span for span in spans if span.kind in ("prefill", "decode", DRAFTS, STALL)]
        for step in found.steps.tolist():
            end = run.clocks[unit].end_of(step)
            assert any(span.begin - 1e-6 <= end <= span.end + 1e-6 for span in working), (lane.id, step)
    end = run.clocks[unit].end
    assert run.written_by(unit, end) == run.figures.replies == sum(len(f) and f.last[-1] for f in run.arrivals.values())
    assert run.written_by(unit, -1.0) == 0


def test_pauses_do_not_move_the_clock_and_idle_time_is_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, paused = Run(viewed(played(monkeypatch))), Run(viewed(played(monkeypatch, pause_s=5.0)))
    assert paused.clocks["ms"].ends == pytest.approx(plain.clocks["ms"].ends)
    assert paused.figures.time == pytest.approx(plain.figures.time)
    assert paused.figures.gap_longest == pytest.approx(plain.figures.gap_longest)
    idle = Run(viewed(played(monkeypatch, idle_s=60.0))).clocks["ms"]
    n = len(plain.clocks["ms"].ends)
    assert idle.begins[n] - idle.ends[n - 1] == pytest.approx(1_000.0)


@pytest.mark.parametrize("name", ["golden", "h200-8b", "small-pool", "vllm-8b"])
def test_on_the_clock_each_step_takes_the_time_that_the_panels_show(name: str) -> None:
    """Also where steps overlap. A step does not include its own commit: its results have arrived before."""
    view = recorded(name)
    run, steps = Run(view), view.history.steps
    clock, followed = run.clocks["ms"], 0
    assert clock.begins[0] == 0.0 and (clock.begins[1:] >= clock.ends[:-1]).all()
    for step in range(run.first, run.last + 1):
        row = steps.get(step)
        assert row is not None and row.took_ms is not None
        begin, end = clock.begin_of(step), clock.end_of(step)
        assert end - begin == pytest.approx(row.took_ms, abs=0.002), step
        followed += begin == clock.end_of(step - 1)
    assert followed > 0 or name == "golden"


def test_static_and_continuous_batching_differ_in_steps_not_in_work(monkeypatch: pytest.MonkeyPatch) -> None:
    static = viewed(played(monkeypatch, policy="static"), "static batching")
    continuous = viewed(played(monkeypatch), "continuous batching")
    both = compared(static, continuous, key="steps")
    first, second = (run.figures for run in both.runs)
    assert (first.steps, second.steps) == (9 + 4 + 8, 3 + 4 + 2 + 8)
    assert first.replies == second.replies == sum(LENGTHS)
    assert both.unlike == ""
    words = f"the number of steps was {second.steps} instead of 21 ({second.steps / 21 - 1:+.0%})"
    assert both.sentence.startswith(f"With continuous batching, compared with static batching, {words}")
    waits = [run.doing("steps", 0.5) for run in both.runs]
    assert waits[0] == waits[1] == {"decode": 0, "prefill": 2, "queued": 3, "finished": 0}
    at = 3.5  # the first request has finished; only continuous batching gives its row to the third
    assert [run.doing("steps", at)["queued"] for run in both.runs] == [3, 2]
    assert [run.written_by("steps", at) for run in both.runs] == [6, 6]


def test_the_sentence_names_the_key_figure_the_time_and_what_got_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    one = viewed(played(monkeypatch), "a")
    same = compared(one, viewed(played(monkeypatch), "b"))
    assert Comparison([Run(one), Run(one)]).sentence == "No figure of the two runs differs."
    assert same.sentence.startswith("No figure of the two runs differs")
    changes = {one.quantity.name: one.change for one in same.differences}
    changes.pop("delayed", None)  # the host of this test may really have waited for a core
    assert {*changes.values()} == {"same"}
    slow = compared(viewed(played(monkeypatch, policy="static"), "a"), viewed(played(monkeypatch), "b"), key="computed")
    assert slow.sentence.startswith("With b, compared with a, the ")
    assert "number of prompt tokens" not in slow.sentence, "it did not change"
    fewer = viewed(played(monkeypatch)[:-40], "cut off")
    assert "Not finished: 0 requests of the first run" in compared(one, fewer).unlike


def test_a_kept_run_does_not_change_and_the_panel_finds_both(monkeypatch: pytest.MonkeyPatch) -> None:
    records = played(monkeypatch)
    view = viewed(records, "first")
    before = Run(view).figures
    view.keep_run()
    kept = Comparison.of(view)
    assert [run.name for run in kept.runs] == ["first"] and kept.shows(view), "the next run has not begun"
    view.reset(EMPTY)
    assert not kept.shows(view)
    view.run_name = "second"
    half = len(records) // 2
    view.fold(records[:half])
    both = Comparison.of(view)
    assert [run.name for run in both.runs] == ["first", "second"]
    assert both.runs[0].figures == before
    some = both.runs[1].figures
    assert some.steps < before.steps
    view.fold(records[half:])
    both.refresh()
    assert both.runs[1].figures == before
    assert both.shows(view)
    view.reset(EMPTY)
    both.refresh()
    assert both.runs[1].figures.steps == 0
    assert both.sentence == ""


def test_runs_of_different_work_are_not_compared_by_totals() -> None:
    small, large = recorded("small-pool"), recorded("h200-8b")
    both = compared(small, large, key="computed")
    assert both.unlike.startswith("The two runs did not do the same work: 4 and 64 requests; ")
    assert "time of the run" not in both.sentence
    assert "number of" not in both.sentence
    words = "With the second run, compared with the first run, the longest gap"
    assert words in compared(small, large, key="gap_longest").sentence


def test_the_setting_that_differs_names_the_figure_that_it_is_meant_to_change() -> None:
    off, on = (EngineInfo(model="m", prefix_caching=caching, num_blocks=96) for caching in (False, True))
    assert settings_that_differ([off, on]) == "prefix caching off and on"
    assert key_of([off, on]) == "computed"
    assert key_of([off, off]) == ""
    assert key_of([off, replace(on, num_blocks=24)]) == "", "two settings differ"
    target = replace(on, max_gap_ms=10.0)
    assert settings_that_differ([on, target]) == "target for gaps none and 10 ms"
    assert key_of([on, target]) == "gap_p99"
    drafts = EngineInfo(speculation={"method": "prompt-lookup", "tokens": 8}, overlap=False)
    assert key_of([EngineInfo(speculation={}, overlap=True), drafts]) == "steps"
    assert "speculation off and prompt-lookup" in settings_that_differ([EngineInfo(speculation={}), drafts])


def test_times_of_a_run_that_other_programs_delayed_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    static = viewed(played(monkeypatch, policy="static"), "static")
    both = compared(static, viewed(played(monkeypatch), "continuous"), key="steps")
    quiet, first = both.runs[1].figures, both.runs[0].figures
    both.runs[1]._figures, both.runs[0]._figures = replace(quiet, delayed=0.0), replace(first, delayed=0.0)
    assert "time of the run" in both.sentence and both.disturbed == ""
    both.runs[1]._figures = replace(quiet, delayed=0.0, first_p99=3 * (first.first_p99 or 1.0))
    assert ". In return, the time to first token (p99) was " in both.sentence and "(3.0 times)." in both.sentence
    both.runs[0]._figures = replace(first, delayed=first.time / 4)
    assert "time of the run" not in both.sentence and "number of steps" in both.sentence
    assert both.disturbed.startswith("Other programs used the core for ") and "(25%) of static:" in both.disturbed
