"""Spans: what the waterfall and the export draw is what happened, by a clock that counts."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.core.engine import Engine
from engine.core.scheduler import SchedulerConfig
from engine.params import SamplingParams
from engine.trace.records import Record, RecordLog
from engine.trace.state import State
from engine.trace.views import RequestView
from minitui.export import export
from minitui.export.perfetto import DEVICE, HOST, NAMES, PAUSES, REQUESTS, STAGES
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
from minitui.viewmodel.history import steps as step_columns
from minitui.viewmodel.history.lanes import Lanes
from minitui.viewmodel.history.spans import NOT_REPORTED, Span, Timeline
from minitui.viewmodel.history.steps import GATE_SHOWN, IDLE_SHOWN, Steps
from minitui.viewmodel.view import View
from tests.engine.core import test_step_clock
from tests.engine.core.test_step_clock import COMMIT, EMIT, PLAN, Timed
from tests.support.records.golden import GOLDEN

Truth = list[tuple[str, float, float]]  # kind, begin and end in ms of the clock


def played(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, *, pause_s: float = 0.0, idle_s: float = 0.0,
    computed: list[tuple[float, float]] | None = None, vary: random.Random | None = None,
) -> tuple[list[Record], Truth]:
    """Returns the records of two requests, one after the other, and what the host really did. `computed` gets the times
    at which the device began and ended each step. `vary`: launches and computations take different times."""
    runner = Timed(monkeypatch)
    log = RecordLog(clock=lambda: runner.now)
    origin, truth = runner.now, []
    engine = Engine(runner, SchedulerConfig(max_num_seqs=2), overlap=overlap, log=log)

    def spend(kind: str, seconds: float) -> None:
        truth.append((kind, (runner.now - origin) * 1e3, (runner.now + seconds - origin) * 1e3))
        runner.now += seconds

    def timed(owner: Any, name: str, kind: str, seconds: float) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any) -> Any:
            if seconds:
                spend(kind, seconds)
                result = original(*args)
                if result is None:  # no step was left to plan: this is a part of the wait
                    truth[-1] = ("wait", *truth[-1][1:])
                return result
            before = runner.now
            result = original(*args)
            truth.append((kind, (before - origin) * 1e3, (runner.now - origin) * 1e3))
            return result

        monkeypatch.setattr(owner, name, wrapped)

    timed(engine.scheduler, "plan", "plan", PLAN)
    timed(engine.committer, "commit", "commit", COMMIT)
    launch = runner.launch

    def launching(*args: Any) -> Any:
        if vary is not None:
            monkeypatch.setattr(test_step_clock, "LAUNCH", vary.choice((0.05, 2.0, 15.0)))
            monkeypatch.setattr(test_step_clock, "DEVICE", vary.choice((3.0, 8.0, 20.0, 60.0)))
        launched = launch(*args)
        if computed is not None:
            end = (runner._free_at - origin) * 1e3
            computed.append((end - test_step_clock.DEVICE * 1e3, end))
        return launched

    monkeypatch.setattr(runner, "launch", launching)
    timed(runner, "launch", "launch", 0.0)
    original = engine._commit

    def waiting(scheduled: Any, launched: Any, times: Any) -> Any:
        timed(launched, "wait", "wait", 0.0)
        return original(scheduled, launched, times)

    monkeypatch.setattr(engine, "_commit", waiting)
    for turn in range(2):
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=6, ignore_eos=True))
        while engine.has_work:
            engine.step()
            if engine.has_work:
                spend("emit", EMIT)
                if pause_s and not overlap:
                    log.held += pause_s
                    spend("gate", pause_s)
        if not turn and idle_s:
            spend("idle", idle_s)
    return log.drain(), truth


def folded(records: list[Record]) -> tuple[Steps, Lanes]:
    steps, lanes = Steps(), Lanes()
    for record in records:
        steps.read(record)
        lanes.read_at(record, record[1])
        if record[2] == "submit":
            lanes.submit(RequestView(*record[3:7], submitted=record[1]))
    return steps, lanes


def same(spans: list[Span], truth: Truth) -> None:
    """Compares kinds and times."""
    assert [span.kind for span in spans] == [kind for kind, _, _ in truth]
    assert [span.begin for span in spans] == pytest.approx([begin for _, begin, _ in truth])
    assert [span.end for span in spans] == pytest.approx([end for _, _, end in truth])


def host(steps: Steps) -> list[Span]:
    line = Timeline(steps, steps.last)
    return line.host(line.first, line.last)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_host_track_is_what_the_host_did_at_each_moment(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    records, truth = played(monkeypatch, overlap)
    steps, _ = folded(records)
    drawn = host(steps)
    same(drawn, [t for t in truth if t[2] > t[1]])
    assert [span.ms for span in drawn] == pytest.approx([span.end - span.begin for span in drawn])
    planned = [span.step for span in drawn if span.kind == "plan"]
    assert planned == sorted(set(planned)) == list(range(steps.last + 1))
    for kind in ("launch", "commit"):
        assert [span.step for span in drawn if span.kind == kind] == planned


@pytest.mark.parametrize("overlap", [False, True])
def test_without_parts_the_time_between_steps_is_not_reported(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_columns, "IDLE_SHOWN", 1e9)
    records, truth = played(monkeypatch, overlap)
    steps, _ = folded([record for record in records if record[2] != "parts"])
    known = [(NOT_REPORTED if kind == "emit" else kind, begin, end) for kind, begin, end in truth if end > begin]
    if overlap:  # before the last step of a request arrives, nothing is planned: then the wait is not known either
        known = [(kind, begin, end) for kind, begin, end in known if kind in ("plan", "launch", "commit")]
        assert {span.kind for span in host(steps)} == {"plan", "launch", "commit", NOT_REPORTED}
        same([span for span in host(steps) if span.kind != NOT_REPORTED], known)
        return
    same(host(steps), known)


def test_a_device_that_does_not_tell_its_time_has_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [(*r[:8], None, r[9]) if r[2] == "time" else r for r in played(monkeypatch, False)[0]]
    steps, _ = folded(records)
    assert Timeline(steps, steps.last).device(0, steps.last) == [] and len(host(steps)) > 20


def test_a_pause_and_idle_time_are_short_on_the_axis_but_keep_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    records, truth = played(monkeypatch, False, pause_s=30.0, idle_s=600.0)
    steps, lanes = folded(records)
    drawn = host(steps)
    assert [span.kind for span in drawn] == [kind for kind, begin, end in truth if end > begin]
    assert [span.ms for span in drawn] == pytest.approx([end - begin for _, begin, end in truth if end > begin])
    for before, after in pairwise(drawn):
        assert after.begin == pytest.approx(before.end), "nothing is missing between two spans"
    lengths = {span.kind: span.end - span.begin for span in drawn}
    assert lengths["gate"] == pytest.approx(GATE_SHOWN) and lengths["idle"] == pytest.approx(IDLE_SHOWN)
    # The moments of records lie on the same axis: the second request came after the idle time.
    line = Timeline(steps, steps.last)
    second = line.request(lanes.lanes[2], line.first, line.last)
    idle = next(span for span in drawn if span.kind == "idle")
    assert second[0].begin == pytest.approx(idle.end) and second[-1].kind == "finished"
    assert line.at(truth[-1][2] / 1e3) == pytest.approx(line.end)


@pytest.mark.parametrize("with_parts", [True, False])
def test_a_replay_in_slow_motion_shows_the_real_times(with_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_columns, "IDLE_SHOWN", 1e9)
    records = [r for r in played(monkeypatch, True)[0] if with_parts or r[2] != "parts"]
    slowly = [(0, 0.0, "pace", 10.0), *((seq, 10 * t, *rest) for seq, t, *rest in records)]
    steps, _ = folded(records)
    line, slow_line = Timeline(steps, steps.last), Timeline(folded(slowly)[0], steps.last)

    def lengths(spans: list[Span]) -> list[tuple[str, int, float]]:
        # The first step of a request does not overlap: a delay of slow motion is before it, shortened to 2 ms.
        return [(s.kind, s.step, round(s.end - s.begin, 1)) for s in spans if s.step not in (0, 1, 6, 7)]

    assert len(lengths(line.host(0, 11))) > 30
    assert lengths(slow_line.host(0, 11)) == lengths(line.host(0, 11))
    assert lengths(slow_line.device(0, 11)) == lengths(line.device(0, 11))
    assert slow_line.planned(4) - slow_line.planned(3) == pytest.approx(line.planned(4) - line.planned(3))
    assert slow_line.clock(slow_line.end) == pytest.approx(slowly[-1][1]), "the label of the axis is the engine's time"
    assert line.clock(line.end) == pytest.approx(records[-1][1])
    assert slow_line.end - slow_line.planned(8) == pytest.approx(line.end - line.planned(8))


def test_pauses_end_with_their_step_and_a_stop_is_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [
        (*r[:10], 1_000_000, 2_000_000, 3) if r[2] == "parts" and r[3] == 4 else
        (*r[:10], 0, None, 0) if r[2] == "parts" else r
        for r in played(monkeypatch, False)[0]
    ]
    steps, _ = folded(records)
    line = Timeline(steps, steps.last)
    arrival = line.arrived(4)
    assert line.pauses(line.first, line.last) == [
        Span("delayed", 4, arrival - 3_000, arrival - 1_000, 2_000), Span("gc", 4, arrival - 1_000, arrival, 1_000),
        Span("stop", 4, arrival, arrival, 0.0),
    ]


def test_the_steps_of_a_window_are_the_steps_with_spans_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, _ = folded(played(monkeypatch, True)[0])
    line = Timeline(steps, steps.last)
    everything = host(steps)
    for left in range(int(line.begin), int(line.end), 3_000):
        first, last = line.steps_between(left, left + 20_000, 500)
        inside = [span for span in everything if span.end > left and span.begin < left + 20_000]
        part = line.host(first, last)
        assert [span for span in part if span.end > left and span.begin < left + 20_000] == inside
        assert last - first < 8, "only what is visible is computed"


def folded_view(reader: TraceReader) -> View:
    view = View()
    view.reset(reader.part(0).snapshot)
    records = list(reader.records())
    for start in range(0, len(records), 97):
        view.fold(records[start : start + 97])
    view.frame(1.0)
    return view


@pytest.mark.parametrize("name", ["golden", "h200-8b"])
def test_the_export_for_perfetto_has_exactly_the_spans_of_the_view(name: str, tmp_path: Path) -> None:
    path = GOLDEN if name == "golden" else bundled()[name]
    events = json.loads(export(path, "perfetto", tmp_path / "a.json").read_text())["traceEvents"]
    view = folded_view(TraceReader(path))
    line = Timeline(view.history.steps, view.moment.horizon)
    # Slices have a length of a nanosecond or more.
    exported = {
        (e["pid"], e["tid"], e["name"].split(" +")[0], e["args"]["step"], e["ts"], e["dur"])
        for e in events if e["ph"] == "X" and "step" in e["args"]
    }
    reader = TraceReader(path)
    origin = 1e3 * (reader.part(0).snapshot["t"] or next(reader.records())[1])

    def slices(pid: int, tid: int, spans: list[Span]) -> set[tuple[Any, ...]]:
        def us(ms: float) -> float:
            return round(max(0.0, ms - origin) * 1e3, 3)

        return {
            (pid, tid, f"step {s.step} · {s.kind}" if pid == DEVICE else NAMES.get(s.kind, s.kind), s.step,
             us(s.begin), round(us(s.end) - us(s.begin), 3))
            for s in spans if us(s.end) > us(s.begin)
        }

    shown = slices(HOST, STAGES, line.host(line.first, line.last))
    shown |= slices(HOST, PAUSES, line.pauses(line.first, line.last))
    shown |= slices(DEVICE, 1, line.device(line.first, line.last))
    for lane in view.history.lanes.lanes.values():
        shown |= slices(REQUESTS, lane.id, line.request(lane, line.first, line.last))
    assert exported == shown and len(shown) > 900
    assert {kind for _, _, kind, *_ in shown} >= {"plan", "launch", "commit", "waiting", "prefill", "decoding"}


def test_the_phases_of_each_request_tile_its_life() -> None:
    reader = TraceReader(GOLDEN)
    view = folded_view(reader)
    line = Timeline(view.history.steps, view.moment.horizon)
    state = State.from_snapshot(reader.part(0).snapshot)
    submitted = {r[3]: r[1] for r in reader.records() if r[2] == "submit"}
    assert not state.requests and len(submitted) > 30
    finished = 0
    for id, lane in view.history.lanes.lanes.items():
        spans = line.request(lane, line.first, line.last)
        for before, after in pairwise(spans):
            assert after.begin >= before.end, f"r{id}: {before} and {after} overlap"
        assert spans[0].begin >= line.at(submitted[id])
        if lane.finish_reason:
            finished += 1
            assert spans[-1].kind == "finished" and spans[-1].end == pytest.approx(line.at(lane.finished_t))
        assert sum(span.tokens for span in spans) <= lane.computed_tokens
        assert sum(span.kind == "preempted" for span in spans) == lane.preemptions
    assert finished > 20
