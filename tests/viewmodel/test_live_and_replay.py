"""An explanation is made of what was known when the step ended: a replay of a whole run says what was said live."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.info import EngineInfo
from minitui.dev.simulator import Load, Stress
from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.trace.recorder import Recorder
from minitui.viewmodel.compare.runs import recorded_view
from minitui.viewmodel.explain.cost_models import FIRST_FIT
from minitui.viewmodel.explain.stalls import gap_words
from minitui.viewmodel.explain.timing import why_slow
from minitui.viewmodel.view import View
from minitui.viewmodel.words.teller import RequestTeller, Teller
from tests.support.records.views import LONG, TIGHT, empty_state


def said_of(view: View, step: int) -> list[str]:
    """The explanations of a step and of the gaps that end with it."""
    row = view.history.steps.get(step)
    assert row is not None
    told = [why_slow(row, view.models.of(step), always=True)]
    for lane in sorted(view.history.lanes.lanes.values(), key=lambda lane: lane.id):
        found = view.history.tokens.arrivals(lane, step)
        if len(found) > 1 and found.steps[-1] == step:
            told.append(gap_words(view, lane, found.gap(len(found) - 1)))
    return told


@pytest.mark.parametrize("load", [LONG, TIGHT], ids=["long", "tight"])
def test_a_replay_explains_each_step_and_gap_as_the_live_run_did(load: Load, tmp_path: Path) -> None:
    stress, view = Stress(load), View()
    snapshot = empty_state(load).snapshot()
    view.reset(snapshot)
    recorder = Recorder(tmp_path / "run.trace", keyframe_every=1_000)
    recorder.begin(EngineInfo(num_blocks=load.blocks, block_size=load.block_size), snapshot)
    live: dict[int, list[str]] = {}
    for _ in range(40):
        begin = max(view.history.steps.committed + 1, 0)
        stress.run_steps(7)
        records = stress.drain()
        recorder.feed(records)
        view.fold(records)
        if view.history.steps.committed >= FIRST_FIT:  # before, nothing is known that a time can be compared with
            live |= {step: said_of(view, step) for step in range(begin, view.history.steps.committed + 1)}
    live |= {step: said_of(view, step) for step in range(FIRST_FIT)}
    recorder.close()
    reader = TraceReader(tmp_path / "run.trace")
    replayed = recorded_view(reader)
    for step, texts in live.items():
        assert said_of(replayed, step) == texts
    assert len(live) > 200 and sum("expected" in texts[0] for texts in live.values()) > 200
    for teller in (Teller, RequestTeller):
        of_live, records = teller(View()), list(reader.records())
        of_live.view.reset(snapshot)
        told = [line.text for i in range(0, len(records), 40) for line in of_live.tell(records[i : i + 40])]
        lines = [line.text for line in teller(View()).tell_all(reader)]
        assert [text for text in told if "expected" in text or "longest gap" in text][5:] == [
            text for text in lines if text in set(told) and ("expected" in text or "longest gap" in text)
        ][5:]


def test_displayed_times_of_a_live_engine_begin_where_those_of_its_recording_do(tmp_path: Path) -> None:
    reader, view = TraceReader(find_trace("small-pool")), View()
    records = [(seq, t + 20.2, *rest) for seq, t, *rest in reader.records()]  # the first question came after 20.2 s
    snapshot = reader.part(0).snapshot | {"t": 0.0}
    recorder = Recorder(tmp_path / "live.trace")
    recorder.begin(reader.info, snapshot)
    recorder.feed(records)
    recorder.close()
    view.reset(snapshot)
    view.fold(records)
    assert (
        view.history.origin == pytest.approx(TraceReader(tmp_path / "live.trace").begin_t, abs=1e-5)
        and view.history.origin > 20
    )
    view.reset(snapshot | {"t": 50.0})  # after a gap, the recording continues
    assert view.history.origin == records[0][1]
