"""Time travel: a picture of the past says what the live picture said then, and nothing that happened later."""

from __future__ import annotations

from typing import Any

import pytest

from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
from minitui.viewmodel.compare.runs import recorded_view
from minitui.viewmodel.explain.cost_models import first_model
from minitui.viewmodel.history.spans import Timeline
from minitui.viewmodel.moment import Playback
from minitui.viewmodel.requests import Requests
from minitui.viewmodel.view import View
from minitui.viewmodel.words.story import tell
from minitui.viewmodel.words.summary import summary
from tests.support.records.golden import GOLDEN
from tests.support.records.traces import beginning


@pytest.mark.parametrize("name", ["golden", "small-pool", "vllm-8b"])
def test_the_past_says_what_the_live_picture_said_at_that_step(name: str) -> None:
    reader = TraceReader({"golden": GOLDEN, "vllm-8b": beginning("vllm-8b")}.get(name) or bundled()[name])
    records, begin = list(reader.records()), reader.part(0).snapshot

    def view_of(records: list[Any]) -> View:
        view = View()
        view.texts.ids_to_text = lambda ids: ""  # the tree keeps the texts that it has shown
        view.reset(begin)
        view.models.look_ahead(first_model(begin, reader.records()))
        view.fold(records)
        return view

    def said(view: View) -> list[Any]:
        state = view.moment.shown.state
        asked = [("request", lane.id) for lane in view.history.lanes.lanes.values() if view.moment.begun(lane)]
        asked += [("group", group) for group in sorted({request.group for request in state.requests.values()})]
        asked += [("node", node) for node in list(state.nodes)[1:40]] + [("block", block) for block in range(1, 20)]
        asked += [("step", view.moment.horizon), ("step", view.moment.horizon - 1)]
        line = Timeline(view.history.steps, view.moment.horizon)
        steps = max(line.first, line.last - 8), line.last
        lanes = [lane for lane in view.history.lanes.around(view.moment.horizon) if view.moment.begun(lane)]
        return [
            [tell(view, *what) for what in asked], Requests().figures(view), view.history.events.count_to(state.seq),
            line.host(*steps), line.device(*steps), sorted(line.request(lane, *steps) for lane in lanes),
        ]

    whole = view_of(records)
    rows = [whole.history.steps.get(step) for step in range(reader.step_before + 4, reader.last_step)]
    ends = {row.step: row.end_seq for row in rows if row is not None and row.end_seq}
    for step, at in list(ends.items())[:: len(ends) // 3]:
        live = view_of([record for record in records if record[0] <= at])
        live.travel_to(step)  # another step may be in flight
        assert whole.travel_to(step)
        for view in (live, whole):
            view.moment.shown.state.gate = "closed"  # a live picture that stands
            view.frame(0.0)
        for then, now in zip(said(live), said(whole), strict=True):
            assert now == then, step
    assert whole.travel_to(min(ends))
    later = [lane.id for lane in whole.history.lanes.lanes.values() if not whole.moment.begun(lane)]
    assert later or name == "small-pool"
    assert all("not submitted yet" in tell(whole, "request", request).lines[0][1] for request in later)


def test_what_a_preempted_request_takes_again_is_not_saved() -> None:
    view = recorded_view(TraceReader(bundled()["small-pool"]))
    view.frame(0.0)
    lanes = view.history.lanes.lanes.values()
    assert sum(lane.request.cached_tokens for lane in lanes) == 0 < sum(lane.preemptions for lane in lanes)
    assert (view.moment.reused_lately.saved, view.moment.reused.hit_rate, int(view.moment.shown.saved.sum())) == (
        0,
        0.0,
        0,
    )
    assert view.moment.reused_lately.resumed == sum(lane.taken_again(view.moment.horizon) for lane in lanes) == 96
    assert any("resumed requests took 96 tokens from the cache again" in line for line in summary(view))
    assert view.moment.recent("missed", 240).sum() == sum(lane.request.prompt_tokens for lane in lanes)
    view.travel_to(20)
    view.frame(0.0)
    assert view.moment.reused_lately.resumed == 0


def test_a_paused_picture_ends_with_a_step_that_has_ended_and_steps_in_flight_come_after_it() -> None:
    reader, view = TraceReader(bundled()["h200-8b"]), View()
    records = list(reader.records())
    planned = next(i for i, record in enumerate(records) if record[2] == "step" and record[3] == 58)
    view.reset(reader.part(0).snapshot)
    view.fold(records[: planned + 1])
    assert view.moment.horizon == 58, "a picture that moves"
    view.moment.playback = Playback(paused=True)
    assert view.moment.horizon == 56 and view.travel_to(55) and view.moment.travel_text == "PAST step 55, 1 back"
    assert not view.travel_to(56) and not view.moment.travel_text and view.moment.horizon == 56
    view.fold([(records[planned][0] + 1, records[planned][1], "fail", 57, "out of memory")])
    assert view.moment.horizon == 57, "a step that failed has ended, too"
