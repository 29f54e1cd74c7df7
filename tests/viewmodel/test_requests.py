"""The tokens of requests, their gaps and the causes of these, against the tokens that the engine really emitted."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from engine.text.output import Delta, OutputProcessor
from engine.trace.records import Record
from engine.trace.state import State
from minitui.viewmodel.history import tokens as tokens_module
from minitui.viewmodel.history.steps import Steps
from minitui.viewmodel.history.tokens import TokenTimes
from minitui.viewmodel.requests import Requests
from minitui.viewmodel.view import View
from tests.engine.core.test_scheduler_simulation import Load
from tests.support.records.views import percentiles

SEEDS = range(5)
ROUNDED = 0.02  # ms: each part of a step is recorded to the microsecond


@dataclass
class Truth:
    """A random run: its records, and what the engine emitted at each commit."""

    snapshots: list[dict[str, Any]] = field(default_factory=list)  # at the start, and at moments during the run
    records: list[Record] = field(default_factory=list)
    emitted: dict[int, list[int]] = field(default_factory=dict)  # request -> the step of each of its tokens
    arrived: dict[int, float] = field(default_factory=dict)  # step -> when its tokens arrived, in seconds
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)  # request -> what its client was told at the end
    load: Any = None

    def view(self, start: int = 0, capacity: int = 32_768, seed: int = 0) -> View:
        """The view that followed the run from a snapshot on, in batches of random sizes."""
        view, rng = View(), random.Random(seed)
        view.reset(self.snapshots[start])
        view.history.steps = Steps(capacity)
        view.history.steps.adopt(view.history.live.state)
        view.history.tokens = TokenTimes(view.history.steps, view.history.lanes)
        records = [record for record in self.records if record[0] > view.history.live.state.seq]
        while records:
            n = rng.randrange(1, 40)
            view.fold(records[:n])
            view.frame(0.0)
            records = records[n:]
        return view


@cache
def played(seed: int, kind: str) -> Truth:
    """Runs a random load: requests of many lengths, few blocks, aborts, and one of: overlap, failing steps, drafts."""
    truth, delay = Truth(), {"sync": 0, "overlap": 1, "failures": 1, "drafts": 0}[kind]
    load = Load(seed, delay, failures=kind == "failures", drafts=6 if kind == "drafts" else 0)
    truth.load = load
    engine = load.engine
    truth.snapshots.append(engine.snapshot())
    commit, append = engine.committer.commit, engine.log.append

    def noted(scheduled: Any, result: Any) -> Any:
        items = commit(scheduled, result)
        for item in items:
            if item.token_id is not None:
                truth.emitted.setdefault(item.request.id, []).append(scheduled.plan.step)
        return items

    def kept(kind: str, *fields: Any) -> int:
        seq = append(kind, *fields)
        truth.records.append((seq, engine.log.t, kind, *fields))
        return seq

    engine.committer.commit, engine.log.append = noted, kept  # type: ignore[method-assign]
    record = engine.clock.record

    def clocked(times: Any, plan: Any, *results: Any) -> float:
        truth.arrived[plan.step] = times.arrived
        return record(times, plan, *results)

    engine.clock.record = clocked  # type: ignore[assignment]
    outputs = OutputProcessor(None, engine)
    step, add, abort = engine.step, engine.add_request, engine.abort

    def told(deltas: list[Delta]) -> None:
        truth.metrics |= {delta.request_id: delta.metrics for delta in deltas if delta.metrics is not None}

    def stepped() -> Any:
        if engine.scheduler.running and len(truth.snapshots) < 4 and load.random.random() < 0.05:
            truth.snapshots.append(engine.snapshot())
        emitted = step()
        told(outputs.process(emitted))
        return emitted

    def added(*args: Any, **settings: Any) -> Any:
        request = add(*args, **settings)
        outputs.open(request)
        return request

    def aborted(request: int) -> bool:
        if (last := outputs.close(request, "abort")) is not None:
            told([last])
        return abort(request)

    engine.step, engine.add_request, engine.abort = stepped, added, aborted  # type: ignore[method-assign]
    load.run(check_every=1_000)
    return truth


def gaps_of(steps: list[int], arrived: dict[int, float]) -> list[float]:
    """The gaps between the steps that gave tokens, in ms."""
    return [(arrived[b] - arrived[a]) * 1e3 for a, b in pairwise(steps) if a != b]


def kinds(records: list[Record]) -> set[str]:
    return {record[2] for record in records}


@pytest.mark.parametrize("kind", ["sync", "overlap", "failures", "drafts"])
def test_tokens_and_gaps_are_those_that_the_engine_emitted(kind: str) -> None:
    seen: set[str] = set()
    for seed in SEEDS:
        truth = played(seed, kind)
        seen |= kinds(truth.records)
        arrived, view = truth.arrived, truth.view()
        for request in truth.load.requests:
            lane = view.history.lanes.lanes[request.id]
            expected = truth.emitted.get(request.id, [])
            found = view.history.tokens.arrivals(lane, view.moment.horizon)
            assert [s for s, a, b in zip(found.steps, found.first, found.last, strict=True) for _ in range(a, b + 1)] \
                == expected, (seed, request.id)
            assert found.first.tolist() == [expected.index(step) + 1 for step in dict.fromkeys(expected)]
            stats, gaps = view.history.tokens.stats(lane, view.moment.horizon), gaps_of(expected, arrived)
            assert stats is not None and (stats.tokens, stats.count) == (len(expected), len(gaps))
            if gaps:
                assert stats.longest is not None and stats.longest.ms == pytest.approx(max(gaps), abs=ROUNDED)
                assert [stats.p50, stats.p99] == pytest.approx(percentiles(gaps).tolist(), abs=ROUNDED)
                at = expected.index(stats.longest.step)
                assert (stats.longest.token, stats.longest.since) == (at + 1, expected[at - 1])
    assert {"sync": "preempt", "overlap": "preempt", "failures": "requeue", "drafts": "accept"}[kind] in seen


@pytest.mark.parametrize("kind", ["sync", "overlap", "failures", "drafts"])
def test_the_client_is_told_the_same_speed_and_first_token_as_the_panels_show(kind: str) -> None:
    compared = 0
    for seed in SEEDS:
        truth = played(seed, kind)
        view = truth.view(seed=seed)
        for request in truth.load.requests:
            lane, told = view.history.lanes.lanes[request.id], truth.metrics[request.id]
            row = Requests().of(view, lane)
            assert row.gaps is not None and row.gaps.tokens == told["output_tokens"] == lane.output_tokens
            assert (row.gaps.tok_s or 0.0) == told["decode_tok_s"], (seed, request.id)
            if row.gaps.tokens:
                assert (row.queue_ms, row.prefill_ms, row.first_ms) == tuple(
                    told[key] for key in ("queue_ms", "prefill_ms", "ttft_ms")
                )
            compared += row.gaps.tok_s is not None
    assert compared > 30


@pytest.mark.parametrize("kind", ["overlap", "drafts"])
def test_a_history_that_begins_in_the_middle_numbers_the_tokens_as_the_reply_does(kind: str) -> None:
    checked = 0
    for seed in SEEDS:
        truth = played(seed, kind)
        for start in range(1, len(truth.snapshots)):
            view = truth.view(start)
            for request in truth.load.requests:
                lane = view.history.lanes.lanes.get(request.id)
                expected = truth.emitted.get(request.id, [])
                if lane is None or not expected:
                    continue
                found = view.history.tokens.arrivals(lane, view.moment.horizon)
                for step, first, last in zip(found.steps, found.first, found.last, strict=True):
                    assert expected[first - 1 : last] == [step] * (last - first + 1), (seed, request.id)
                    checked += lane.submitted is None
    assert checked > 100


@pytest.mark.parametrize("kind", ["overlap", "drafts"])
def test_tokens_of_steps_that_are_no_longer_kept_still_count(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "LEAVING", 4)
    left = 0
    for seed in SEEDS:
        truth = played(seed, kind)
        arrived, view = truth.arrived, truth.view(capacity=16)
        for lane in view.history.lanes.lanes.values():
            expected = truth.emitted.get(lane.id, [])
            stats, gaps = view.history.tokens.stats(lane, view.moment.horizon), gaps_of(expected, arrived)
            assert stats is not None and (stats.tokens, stats.count) == (len(expected), len(gaps)), (seed, lane.id)
            left += lane.earlier is not None
            if gaps:
                assert stats.longest is not None and stats.longest.ms == pytest.approx(max(gaps), abs=ROUNDED)
                seconds = arrived[expected[-1]] - arrived[expected[0]]
                assert stats.tok_s is not None
                after = len(expected) - expected.count(expected[0])
                assert after / stats.tok_s == pytest.approx(seconds, abs=ROUNDED / 1e3)
        assert all(len(lane.taken) <= 2 * 16 and len(lane.spans) < 60 for lane in view.history.lanes.active.values())
    assert left > 5


@pytest.mark.parametrize("kind", ["sync", "overlap", "failures", "drafts"])
def test_tokens_computed_again_and_blocks_are_those_of_the_state(kind: str) -> None:
    again_somewhere = 0
    for seed in SEEDS:
        truth = played(seed, kind)
        state, had, again, blocks = State.from_snapshot(truth.snapshots[0]), {}, {}, {}
        for record in truth.records:
            if record[2] in ("preempt", "requeue", "finish"):
                request = state.requests[record[3]]
                had[request.id] = max(had.get(request.id, 0), state.computed(request))
                blocks[request.id] = len(request.table)
            elif record[2] == "step":
                for id, start, n, _ in record[4]:
                    again[id] = again.get(id, 0) + len(range(start, min(start + n, had.get(id, 0))))
            state.apply(record)
        figures = {row.id: row for row in Requests().figures(truth.view())}
        for request in truth.load.requests[-200:]:
            row = figures[request.id]
            assert (row.request.preemptions, row.recomputed_tokens) == (request.preemptions, again.get(request.id, 0))
            assert (row.blocks, row.request.cached_tokens) == (blocks[request.id], request.cached_tokens)
            assert (row.live, row.request.prompt_tokens) == (False, request.prompt_len)
            assert row.state == request.finish_reason.partition(":")[0]
            again_somewhere += row.recomputed_tokens
    assert again_somewhere > 0


@pytest.mark.parametrize("kind", ["overlap", "drafts"])
def test_in_the_past_the_figures_are_those_of_that_moment(kind: str) -> None:
    """Every figure in the past equals the figure of a view that has folded only the records up to this moment."""
    compared = 0
    for seed in (1, 4):
        truth = played(seed, kind)
        view, rng = truth.view(), random.Random(seed)
        for step in rng.sample(range(view.history.steps.last), min(8, view.history.steps.last)):
            if not view.travel_to(step) or view.moment.horizon != step:
                continue
            end = view.moment.shown.state.seq
            then = Truth(truth.snapshots, [record for record in truth.records if record[0] <= end]).view()
            then.history.live.state.gate = "closed"  # a picture that is exact
            found = {row.id: row for row in Requests().figures(view)}
            for row in Requests().figures(then):
                if row.first_ms is None or row.state == "waits":
                    continue  # the time in the queue until now: only known in the present
                assert found[row.id] == row, (seed, step, row.id)
                assert found[row.id].request.cached_tokens == row.request.cached_tokens
                assert found[row.id].request.preemptions == row.request.preemptions
                compared += 1
            view.moment.present()
    assert compared > 50
