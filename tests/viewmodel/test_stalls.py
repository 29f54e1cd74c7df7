"""Why a token came late: stalls of known kinds are put into simulated runs, and the words must name them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from engine.params import SamplingParams
from minitui.cli.tail import tail_trace
from minitui.dev.simulator import SMALL, Load, Stress
from minitui.text import ms
from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.viewmodel.compare.runs import recorded_view
from minitui.viewmodel.explain.causes import explain
from minitui.viewmodel.explain.cost_model import FEATURES
from minitui.viewmodel.explain.stalls import Reason, Stall, explain_gap, gap_words
from minitui.viewmodel.history.lane import PREEMPTED, Gap, Lane
from minitui.viewmodel.requests import Requests
from minitui.viewmodel.view import View
from tests.engine.core.test_scheduler_simulation import make_engine
from tests.support.records.golden import GOLDEN
from tests.support.records.views import LONG, TIGHT, empty_view
from tests.viewmodel.test_requests import played

STEP = 150  # the step that stalls
STALL_MS = 80.0
PLAN, GATE, GC, DELAYED, STOPS = 7, 6, 10, 11, 12  # fields of a `parts` record


def run(load: Load, steps: int, change: Callable[[list[Any]], float] | None = None) -> View:
    """The view of a simulated run. `change` alters the `parts` of STEP; it returns how much longer the step took."""
    stress, view, records, later = Stress(load), empty_view(load), [], 0.0
    stress.run_steps(steps)
    for record in stress.drain():
        fields: list[Any] = list(record)
        if change is not None and fields[2] == "parts" and fields[3] == STEP:
            later = change(fields)
        fields[1] += later / 1e3
        records.append(tuple(fields))
    view.fold(records)
    view.frame(stress.now)
    return view


def decoding_in_step(view: View) -> list[Lane]:
    found = [lane for lane in view.history.lanes.lanes.values() if gap_at(view, lane) is not None]
    assert found
    return found


def gap_at(view: View, lane: Lane, step: int = STEP) -> Gap | None:
    found = view.history.tokens.arrivals(lane, view.moment.horizon)
    return next((found.gap(i) for i in range(1, len(found)) if found.steps[i] == step), None)


def stalled(field: int, part: int = PLAN) -> Callable[[list[Any]], float]:
    def change(fields: list[Any]) -> float:
        fields[part] += STALL_MS * 1e3
        if field != part:
            fields[field] += 1 if field == STOPS else STALL_MS * 1e3
        return STALL_MS

    return change


@pytest.mark.parametrize(
    ("field", "name"),
    [(GC, "garbage collection"), (DELAYED, "another program on the core"), (STOPS, "process stopped"), (PLAN, "plan")],
)
def test_the_longest_gap_of_every_request_in_a_stalled_step_has_its_cause(field: int, name: str) -> None:
    view = run(SMALL, 400, stalled(field))
    for lane in decoding_in_step(view):
        stats = view.history.tokens.stats(lane, view.moment.horizon)
        assert stats is not None and stats.longest == gap_at(view, lane)
        reason = explain_gap(view, lane, stats.longest)
        assert [cause.name for cause in reason.causes] == [name]
        assert reason.causes[0].ms == pytest.approx(STALL_MS, rel=0.05) and reason.unexplained == 0
        words = gap_words(view, lane, stats.longest)
        assert f"ms before token {stats.longest.token:,}, step {STEP}: {name} " in words


def test_a_gap_with_prompts_names_them_while_too_few_steps_are_timed() -> None:
    view, seen = run(LONG, 120), 0
    for lane in view.history.lanes.lanes.values():
        for gap in filter(None, (gap_at(view, lane, step) for step in range(120))):
            row = view.history.steps.get(gap.step)
            assert row is not None
            if view.models.of(row.step) is None:
                reason = explain_gap(view, lane, gap)
                words = Stall(lane, gap, reason).words
                if row.chunks:
                    seen += 1
                    few = f"1 prompt of {row.prefill_tokens} tokens"
                    assert str(reason) == f"{few} (too few such steps yet to say more) {ms(gap.ms)} ms"
                    assert words == f"{ms(gap.ms)} ms: {few}" and reason.by_key == {"prompts_unknown": gap.ms}
                elif not reason.causes:
                    assert words.endswith(": cause unknown")
    assert seen


def test_a_device_that_stalls_without_a_measured_cause_is_not_given_one() -> None:
    def change(fields: list[Any]) -> float:
        fields[9] += STALL_MS * 1e3  # it waits longer, but the device's own time is as usual
        return STALL_MS

    view = run(SMALL, 400, change)
    for lane in decoding_in_step(view):
        gap = gap_at(view, lane)
        assert gap is not None
        reason = explain_gap(view, lane, gap)
        assert not reason.causes and reason.unexplained == pytest.approx(STALL_MS, rel=0.05)


def test_a_pause_is_not_part_of_a_gap_but_is_mentioned() -> None:
    usual, paused = run(SMALL, 400), run(SMALL, 400, stalled(GATE, GATE))
    for lane in decoding_in_step(paused):
        before, gap = gap_at(usual, usual.history.lanes.lanes[lane.id]), gap_at(paused, lane)
        assert before is not None and gap is not None
        assert gap.ms == pytest.approx(before.ms) and gap.paused_ms == pytest.approx(STALL_MS)
        assert "80.0 ms of pause or slow motion are not counted" in gap_words(paused, lane, gap)
        assert paused.history.tokens.stats(lane, paused.moment.horizon).tok_s == pytest.approx(  # type: ignore[union-attr]
            usual.history.tokens.stats(lane, usual.moment.horizon).tok_s  # type: ignore[union-attr]
        )


def test_a_long_prompt_of_another_request_is_named_with_its_tokens() -> None:
    view, named = run(LONG, 1_500), 0
    for lane in view.history.lanes.lanes.values():
        stats = view.history.tokens.stats(lane, view.moment.horizon)
        if stats is None or stats.longest is None:
            continue
        row = view.history.steps.get(stats.longest.step)
        assert row is not None
        if row.prefill_tokens > 200:
            requests = [chunk[0] for chunk in row.chunks]
            whose = f"r{requests[0]}" if len(requests) == 1 else ""
            assert f"prefill of {whose}" in gap_words(view, lane, stats.longest)
            assert f"({row.prefill_tokens:,} tokens)" in gap_words(view, lane, stats.longest)
            named += lane.id not in requests
    assert named > 5


def steps_that_prefill(view: View, lane: Lane, gap: Gap) -> list[int]:
    """The steps of a gap that computed prompt tokens of the request."""
    steps = range(gap.since + 1, gap.step + 1)
    return [step for step in steps if any(request == lane.id for request, *_ in view.history.steps.chunks(step))]


def preempted_in(lane: Lane, gap: Gap) -> bool:
    return any(code == PREEMPTED and gap.since < first <= gap.step for code, first, _ in lane.spans)


def test_a_preemption_is_the_cause_of_the_gap_around_it() -> None:
    view, queued, shared = run(TIGHT, 1_500), 0, 0
    for lane in view.history.lanes.lanes.values():
        found = view.history.tokens.arrivals(lane, view.moment.horizon)
        for gap in (found.gap(i) for i in range(1, len(found))):
            reason = explain_gap(view, lane, gap)
            names = [cause.name for cause in reason.causes]
            assert ("queue after a preemption" in names) == preempted_in(lane, gap)
            if preempted_in(lane, gap):
                tokens = sum(n for step, n in lane.again if gap.since < step <= gap.step)
                computed = f"{tokens:,} token{'' if tokens == 1 else 's'}"
                rows = [view.history.steps.get(step) for step in steps_that_prefill(view, lane, gap)]
                others = sum(row.prefill_tokens for row in rows if row is not None) - tokens
                of = {cause.key: cause for cause in reason.causes}
                queued += 1
                if "recompute" not in of:
                    assert str(reason).endswith(f"; {computed} computed again")
                    continue
                assert of["recompute"].name == f"computing {computed} again" and reason.note == ""
                assert ("prefill" in of) == bool(others)
                if others:
                    assert of["prefill"].name.startswith(f"{others:,} other prefill token")
                    assert of["prefill"].ms / of["recompute"].ms == pytest.approx(others / tokens)
                shared += bool(others)
    assert queued > 10 and shared > 2


def test_every_longest_gap_of_a_gpu_s_recording_is_explained_by_a_prompt() -> None:
    """An H200 with overlap: a decode step takes 5 ms, and a step with prefill costs 20 to 35 ms of its launch."""
    view = recorded_view(TraceReader(find_trace("h200-8b")))
    model = view.models.of(view.moment.horizon)
    assert model is not None and model.device is not None and model.device.costs[FEATURES.index("prefill steps")] > 5
    stats = {
        lane.id: view.history.tokens.stats(lane, view.moment.horizon) for lane in view.history.lanes.lanes.values()
    }
    longest = {id: one.longest for id, one in stats.items() if one is not None and one.longest is not None}
    assert sum(gap.ms > 15 for gap in longest.values()) > 50
    varied = 0
    for id, gap in longest.items():
        if gap.ms <= 15:
            continue
        lane = view.history.lanes.lanes[id]
        reason = explain_gap(view, lane, gap)
        assert len(reason.causes) == 1 and reason.unexplained == 0
        following = view.history.steps.get(gap.step + 1)
        assert following is not None and following.launch_ms is not None
        assert f"; its launch {following.launch_ms:.1f} ms)" in reason.causes[0].name
        assert reason.causes[0].name.startswith(f"prefill of r{following.chunks[0][0]}")
        tokens = f"{following.prefill_tokens} tokens, launched meanwhile; its"
        assert f" in next step {following.step} ({tokens}" in reason.causes[0].name
        beyond = sum(part.ms for part in reason.varied)  # a launch of 35 ms, where 23 are expected
        assert beyond <= max(0.0, following.launch_ms - reason.causes[0].ms) and reason.variation < 0.25 * gap.ms
        assert [part.name for part in reason.varied] == [f"launch of next step {following.step}"] * bool(beyond)
        varied += bool(beyond)
    assert varied > 20
    for step in range(view.history.steps.first, view.moment.horizon):
        row = view.history.steps.get(step)
        found = explain(row, model) if row is not None and row.parts is not None else None
        assert found is None or not found.slow


def told_in(reason: Reason) -> float:
    """The sum of all times in the words, which are rounded to three digits."""
    words = re.sub(r"\([^)]*\)", "", str(reason))
    return sum(float(ms.replace(",", "")) for ms in re.findall(r" ([\d,.]*\d)(?=, | ms| \+ usual)", words))


@pytest.mark.parametrize("kind", ["sync", "overlap", "drafts"])
def test_the_parts_of_every_gap_add_up(kind: str) -> None:
    for seed in range(5):
        view = played(seed, kind).view()
        for lane in view.history.lanes.lanes.values():
            found = view.history.tokens.arrivals(lane, view.moment.horizon)
            for gap in (found.gap(i) for i in range(1, len(found))):
                reason = explain_gap(view, lane, gap)
                parts = [reason.usual or 0.0, reason.unexplained, reason.variation]
                parts += [part.ms for part in (*reason.causes, *reason.varied)]
                assert sum(parts) == pytest.approx(gap.ms) and min(parts) >= 0
                if reason.named and reason.usual is not None:
                    assert told_in(reason) == pytest.approx(gap.ms, rel=0.02, abs=0.02), str(reason)


# ---- minitui tail --requests


@pytest.mark.parametrize("path", [GOLDEN, find_trace("small-pool"), find_trace("h200-8b")], ids=lambda path: path.stem)
def test_a_recording_is_told_request_by_request_as_text_and_as_json(path: Any) -> None:
    reader = TraceReader(path)
    records = list(reader.records())
    finished = [record[3] for record in records if record[2] == "finish"]
    asked = [record[3] for record in records if record[2] == "submit"]
    text: list[str] = []
    assert tail_trace(path, text.append, "requests") == 0
    rows: list[str] = []
    assert tail_trace(path, rows.append, "json") == 0
    data = [row for row in map(json.loads, rows) if "request" in row]
    told = [row["request"] for row in data]
    assert [row["request"] for row in data if row["finished"]] == finished
    assert sorted(told) == sorted({*asked, *reader.part(0).snapshot["requests"]})
    view = recorded_view(reader)
    view.history.live.state.gate = "closed"
    figures = {row.id: row for row in Requests().figures(view)}
    for line, row in zip(text, data, strict=False):
        assert f"  r{row['request']} " in line and ("not finished" in line) != row["finished"]
        expected = figures[row["request"]]
        assert row["output_tokens"] == expected.gaps.tokens  # type: ignore[union-attr]
        request = expected.request
        assert (row["prompt_tokens"], row["cached_tokens"]) == (request.prompt_tokens, request.cached_tokens)
        assert (row["preemptions"], row["tokens_computed_twice"]) == (request.preemptions, expected.recomputed_tokens)
        if row["longest_gap"]:
            gap = row["longest_gap"]
            assert gap["ms"] == pytest.approx(expected.gaps.longest.ms, abs=1e-3)  # type: ignore[union-attr]
            assert line.endswith(f"longest gap {gap['text']}") and row["gap_p50_ms"] <= row["gap_p99_ms"] <= gap["ms"]
    gaps = [row for row in data if row["longest_gap"]]
    longest = max(gaps, key=lambda row: (row["longest_gap"]["ms"], -row["longest_gap"]["step"], -row["request"]))
    assert len(text) == len(data) + 2
    waited = max(data, key=lambda row: (row["first_token_ms"] or 0.0, -row["request"]))
    first = f"{ms(waited['first_token_ms'])} ms = queue {ms(waited['queue_ms'])} \\+ prefill {ms(waited['prefill_ms'])}"
    equal = r"( \(as long as (that of another|those of \d+ others)\))?"
    assert re.search(rf"longest wait for a first token of all requests{equal}: r{waited['request']}, {first}", text[-2])
    of_all = re.escape(f": r{longest['request']}, {longest['longest_gap']['text']}")
    assert re.search(rf"the longest gap of all requests{equal}{of_all}", text[-1])
    assert "the longest gap" not in text[-2]


# ---- stalls that have not ended


def longest_of(view: View, lane: Lane) -> Gap:
    gap = Requests().of(view, lane).longest
    assert gap is not None
    return gap


def test_a_step_that_does_not_end_is_the_longest_gap_so_far() -> None:
    engine, view = make_engine(overlap=True), View()
    view.reset(engine.snapshot())
    request = engine.add_request([1, 2], SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(12):
        engine.step()
    view.fold(engine.log.drain(), now=10.0)
    view.frame(10.0)
    lane = view.history.lanes.lanes[request.id]
    before = longest_of(view, lane)
    assert not before.so_far
    view.frame(13.0)
    gap = longest_of(view, lane)
    assert gap.so_far and gap.ms == pytest.approx(3_000, abs=100)
    in_flight = view.history.steps.committed + 1
    assert in_flight == view.history.steps.last
    words = gap_words(view, lane, gap)
    assert f"ms so far before token {gap.token}: step {in_flight:,} has not ended for 3,0" in words
    view.travel(-3)
    assert not longest_of(view, lane).so_far
    view.moment.present()
    engine.step()
    view.fold(engine.log.drain(), now=13.0)
    view.frame(13.0)
    assert not longest_of(view, lane).so_far


def test_a_preempted_request_stalls_from_its_last_token_on() -> None:
    stress, view, seen = Stress(TIGHT), empty_view(TIGHT), dict[int, Gap]()
    ended = reused = 0
    for _ in range(700):
        stress.run_steps(2)
        stress.show(view)
        for lane in list(view.history.lanes.active.values()):
            row = Requests().of(view, lane)
            if row.running is None:
                gap = seen.pop(lane.id, None)
                if gap is not None and row.gaps is not None and row.gaps.longest is not None:
                    assert row.gaps.longest.ms >= gap.ms  # the gap ended, and none was longer
                    ended += 1
                continue
            before = seen.get(lane.id)
            assert row.running.so_far and (before is None or row.running.ms >= before.ms)
            assert row.longest is not None and row.longest.ms >= row.running.ms
            reason = explain_gap(view, lane, row.running)
            assert sum(reason.by_key.values()) == pytest.approx(row.running.ms)
            assert reason.causes[0].key == "queue"
            seen[lane.id] = row.running
        reused += sum(Requests().of(view, lane).reused_tokens for lane in view.history.lanes.active.values())
    assert ended > 10 and reused
