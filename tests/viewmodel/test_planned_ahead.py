"""Where steps overlap, the next step is planned before a step ends: each text says of which moment it speaks."""

from __future__ import annotations

import pytest

from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.tui.widgets.inspect.step_bar import StepBar
from minitui.tui.widgets.rows import plain
from minitui.viewmodel.compare.runs import recorded_view
from minitui.viewmodel.history.lane import FINISHED
from minitui.viewmodel.moment import Playback
from minitui.viewmodel.view import View
from minitui.viewmodel.words.story import tell
from minitui.viewmodel.words.teller import RequestTeller
from minitui.vllm.translate import Translator
from tests.support.records.traces import beginning
from tests.support.vllm_played import messages_of, recorded


@pytest.fixture(scope="module")
def vllm() -> View:
    return recorded_view(TraceReader(find_trace("vllm-8b")))


def told(view: View, step: int) -> str:
    """The line of a step's details about the queue."""
    return dict(tell(view, "step", step).lines)["waiting"]


def test_the_picture_of_a_step_says_which_plan_its_requests_and_blocks_include(vllm: View) -> None:
    compared = 0
    for step in range(2_520, 2_560):
        assert vllm.travel_to(step) and vllm.moment.planned_ahead == step + 1
        row, state = vllm.history.steps.get(step), vllm.moment.shown.state
        assert row is not None
        running = sum(request.state == "running" for request in state.requests.values())
        now = f"after the plan of step {step + 1:,}, as in the panels: {running} running, {len(state.queue)} waiting"
        queue = f"{row.waiting} request{'s' * (row.waiting != 1)} in the queue" if row.waiting else "none"
        assert told(vllm, step) == f"{queue} when this step was planned; {now}"
        assert told(vllm, step - 1).endswith(("in the queue", "none"))  # the panels show another step
        compared += len(state.queue) != row.waiting
        bar = StepBar(frame="box").picture(vllm, 120, 2)
        assert bar.note == [(f"panels are 1 step ahead: with the plan of step {step + 1:,}", "dim")]
        line = plain(StepBar(frame="none").picture(vllm, 80, 2).rows[0])
        assert line.endswith("panels are 1 step ahead") or len(line.rstrip()) > 80 - 24
    assert compared > 5
    vllm.moment.present()


def test_requests_that_have_not_finished_are_told_at_the_step_that_the_app_shows_at_the_end(vllm: View) -> None:
    view = View()
    lines = list(RequestTeller(view).tell_all(TraceReader(find_trace("vllm-8b"))))
    last = [line for line in lines if "not finished" in line.text or line.kind == "longest"]
    vllm.moment.playback = Playback(paused=True)
    assert vllm.moment.horizon < vllm.history.live.state.step == vllm.moment.planned_ahead
    assert len(last) > 50 and {line.step for line in last} == {vllm.moment.horizon}
    vllm.moment.playback = None


@pytest.mark.parametrize("name", recorded())
def test_vllm_s_reason_for_waiting_belongs_to_the_step_whose_plan_left_the_request_out(name: str) -> None:
    (_, *init), *messages = messages_of(name)
    translator, records = Translator(*init), []
    for message in messages:
        translator.take(message)
        new = translator.drain()
        left = next((record[4].split()[1] for record in new if record[2] == "wait" and "left" in record[4]), None)
        assert left is None or int(left) == translator.blocks.available
        records += new
    waits = [i for i, record in enumerate(records) if record[2] == "wait"]
    assert waits and all(records[i + 1][2] == "step" or records[i + 1][2] == "draft" for i in waits)


@pytest.mark.parametrize("name", ["h200-8b", "vllm-8b", "small-pool"])
def test_a_request_finishes_at_the_step_of_its_last_token(name: str) -> None:
    view = recorded_view(TraceReader(beginning(name, 0.6) if name == "vllm-8b" else find_trace(name)))
    finishes = [event for event in view.history.events.newest_first() if event.kind == "finish"][::3]
    known = 0
    for event in finishes:
        lane = view.history.lanes.lanes[event.request]
        assert lane.finish_step == event.step and event in view.history.events.of_step(event.step)
        found = view.history.tokens.arrivals(lane, view.moment.horizon)
        if len(found) and lane.finish_reason != "abort":  # an aborted request finishes while a step runs
            assert event.step == int(found.steps[-1])
            known += 1
        assert (FINISHED, range(1, 2)) in list(lane.pieces(event.step - 1, 1, 4, view.moment.horizon))
        assert all(columns.stop <= 2 for _, columns in lane.pieces(event.step - 1, 1, 4, view.moment.horizon))
        if view.travel_to(event.step):
            assert lane.id not in view.moment.shown.state.requests
            assert f"at step {event.step:,}" in dict(tell(view, "request", lane.id).lines)["finished"]
    assert known >= 0.8 * len(finishes) > 0
