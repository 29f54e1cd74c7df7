"""The time to first token has its reason in parts, which add up to it; equal durations are not told as the longest."""

from __future__ import annotations

from typing import Any

import pytest

from minitui.cli.tail import tail_trace
from minitui.dev.simulator import SMALL, Load, Stress
from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.tui.widgets.inspect.requests import RequestTable
from minitui.tui.widgets.rows import plain
from minitui.viewmodel.compare.runs import recorded_view
from minitui.viewmodel.explain.stalls import explain_first_token
from minitui.viewmodel.explain.timing import why_briefly
from minitui.viewmodel.history.lane import PREFILLING, QUEUED
from minitui.viewmodel.requests import Requests, by_longest_gap, by_longest_wait, longest
from minitui.viewmodel.view import View
from minitui.viewmodel.words.request_words import first_token_words, request_data, why_first
from minitui.viewmodel.words.story import tell
from tests.support.records.traces import beginning
from tests.support.records.views import TIGHT, empty_view

STALL_MS = 300.0
DELAYED, PLAN = 11, 7  # fields of a `parts` record


@pytest.mark.parametrize("name", ["small-pool", "h200-8b", "vllm-8b"])
def test_the_parts_of_every_first_token_add_up_to_its_time(name: str) -> None:
    view, told = recorded_view(TraceReader(find_trace(name) if name == "small-pool" else beginning(name))), 0
    view.history.live.state.gate = "closed"  # a still picture is exact
    for row in Requests().figures(view):
        lane = view.history.lanes.lanes[row.id]
        reason = why_first(view, row)
        data = request_data(view, lane)
        assert (reason is None) == (data["first_token_causes_ms"] is None)
        if reason is None:
            continue
        told += 1
        assert row.first_ms is not None
        assert sum(reason.by_key.values()) == pytest.approx(row.first_ms, abs=0.01)
        assert sum(data["first_token_causes_ms"].values()) == pytest.approx(data["first_token_ms"], abs=0.02)
        words = first_token_words(row, reason)
        assert words == data["first_token_text"] == dict(tell(view, "request", row.id).lines)["first token"]
        assert words.count("queue ") == 1 and ": " in words
    assert told > 3


def test_a_first_token_that_waited_for_another_prompt_names_it() -> None:
    """The prompt of r63 is launched in step 361, and that of r64 while the device computes step 362."""
    view = recorded_view(TraceReader(find_trace("h200-8b")))
    lane = view.history.lanes.lanes[63]
    row = Requests().of(view, lane)
    words = first_token_words(row, why_first(view, row))
    assert words.startswith("70.2 ms = queue 0.15 + prefill 70.0: launch in 2 steps longer than usual ")
    assert ", prefill of r64 in next step 363 17.7, its 268 prompt tokens 17.7, " in words
    step = view.history.steps.get(362)
    assert step is not None and [chunk[0] for chunk in step.chunks] == [63]
    assert why_briefly(step, view.models.of(362)).startswith("next step's prefill of r64 17.7, launch +12.5")


def folded(load: Load, records: list[Any]) -> View:
    view = empty_view(load)
    view.fold(records)
    view.history.live.state.gate = "closed"
    return view


def delayed_run(at: str) -> tuple[View, int]:
    """A simulated run in which another program has the core before the first token of a request, and this request.
    `at`: while the request is in the "queue", or in the "prefill" step."""
    load = TIGHT if at == "queue" else SMALL
    stress = Stress(load)
    stress.run_steps(400)
    records = stress.drain()
    phase, length = (QUEUED, 5) if at == "queue" else (PREFILLING, 0)
    request, step = next(
        (lane.id, begin + length // 2)
        for lane in folded(load, records).history.lanes.ended if lane.submitted_step > 150
        for code, begin, end in lane.spans if code == phase and end - begin >= length
    )
    changed: list[Any] = []
    later = 0.0
    for record in records:
        fields = list(record)
        if fields[2] == "parts" and fields[3] == step:
            fields[DELAYED] = (fields[DELAYED] or 0) + STALL_MS * 1e3
            fields[PLAN] += STALL_MS * 1e3
            later = STALL_MS
        fields[1] += later / 1e3
        if fields[2] == "first" and fields[3] == request:
            fields[4 if at == "queue" else 5] += STALL_MS
        changed.append(tuple(fields))
    return folded(load, changed), request


@pytest.mark.parametrize("at", ["prefill", "queue"])
def test_another_program_before_the_first_token_is_named(at: str) -> None:
    view, request = delayed_run(at)
    lane = view.history.lanes.lanes[request]
    row = Requests().of(view, lane)
    assert row.queue_ms is not None and row.prefill_ms is not None
    reason = explain_first_token(view, lane, row.queue_ms, row.prefill_ms)
    assert reason is not None and reason.by_key["other_program"] == pytest.approx(STALL_MS, rel=0.05)
    words = first_token_words(row, reason)
    assert "another program on the core " in words
    assert ("rest of the queue " in words) == (at == "queue"), "the parts add up: to both sums, or to the prefill"
    assert reason.unexplained < 0.05 * STALL_MS


def test_gaps_as_long_as_the_longest_are_counted() -> None:
    view = recorded_view(TraceReader(find_trace("h200-8b")))
    view.frame(0.0)
    view.history.live.state.gate = "closed"
    rows = Requests().figures(view)
    worst, equal = longest((row for row in rows if row.longest), by_longest_gap)
    assert worst is not None and worst.longest is not None and worst.id == 8 and len(equal) == 38
    gaps = [row.longest for row in rows if row.id in equal]
    assert all(gap is not None and gap.ms == pytest.approx(worst.longest.ms, abs=1e-6) for gap in gaps)
    lines: list[str] = []
    assert tail_trace(find_trace("h200-8b"), lines.append, "requests") == 0
    assert "the longest gap of all requests (as long as those of 37 others): r8, 36.6 ms before token 305" in lines[-1]
    assert "the longest wait for a first token of all requests: r63, 70.2 ms = queue 0.15 + prefill 70.0: " in lines[-2]
    view.select(None)
    text = "\n".join(plain(row) for row in RequestTable().picture(view, 200, 20).rows)
    assert "r8, the longest gap of all (as long as those of 37 others): 36.6 ms before token 305" in text
    view.select("request", equal[1])
    text = "\n".join(plain(row) for row in RequestTable().picture(view, 200, 20).rows)
    assert f"r{equal[1]}, the longest gap of all (as long as those of 37 others): 36.6 ms" in text
    waited, waiting = longest((row for row in rows if row.first_so_far_ms is not None), by_longest_wait)
    assert waited is not None and waiting == [63]
