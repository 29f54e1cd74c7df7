"""A trace played back: the same picture as live, with the clock in the viewer's hands."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.params import SamplingParams
from engine.trace.records import Record
from engine.trace.state import State
from minitui.sources.replay import ReplaySource
from minitui.trace.reader import TraceReader, timeless
from minitui.trace.recorder import Recorder
from minitui.viewmodel.moment import Playback
from minitui.viewmodel.requests import Requests
from minitui.viewmodel.updater import Updater
from minitui.viewmodel.view import View
from minitui.viewmodel.words.request_words import figures_in_words, request_json
from tests.support.records.golden import GOLDEN, INFO, make_engine, play
from tests.support.records.traces import state_at


class Player:
    """A replay, the feed and view that an application has, and a clock that is moved by hand."""

    def __init__(self, path: Path = GOLDEN, speed: float = 1.0) -> None:
        self.now = 0.0
        self.source = ReplaySource(path, speed, clock=lambda: self.now)
        self.view = View()
        self.feed = Updater(self.source, self.view, clock=lambda: self.now)
        self.records: list[Record] = []

    async def start(self) -> Player:
        await self.source.start(lambda progress: None)
        await self.feed.sync()
        return self

    async def run(self, seconds: float, frame: float = 0.05) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += frame
            await self.frame()

    async def frame(self) -> None:
        if self.feed.pump():
            await self.feed.sync()
            self.feed.pump()
        self.view.moment.playback = Playback(self.source.speed, self.source.paused)
        self.view.frame(self.now)

    async def seek(self, step: int) -> None:
        if await self.source.control("seek", step=step):
            self.feed.forget()
            await self.feed.sync()
        await self.frame()

    @property
    def state(self) -> State:
        return self.view.history.live.state


def essence(state: State) -> dict[str, object]:
    """The state without record numbers, which differ in a replay."""
    snapshot = timeless(state.snapshot())
    del snapshot["seq"]
    order = sorted((node["last_used"], id) for id, node in snapshot["nodes"].items())
    for rank, (_, id) in enumerate(order):
        snapshot["nodes"][id]["last_used"] = rank
    return snapshot


async def test_the_fold_of_a_replay_is_the_state_of_the_engine() -> None:
    engine = make_engine()
    play(engine)
    player = await Player().start()
    await player.run(player.source.trace.seconds + 1)
    assert player.source.ended and not player.view.history.dropped
    assert timeless(player.state.snapshot()) == timeless(engine.snapshot())


async def test_it_plays_at_the_speed_asked_for() -> None:
    seconds = TraceReader(GOLDEN).seconds
    for speed in (0.5, 1.0, 4.0):
        player = await Player(speed=speed).start()
        await player.run(seconds / speed / 2)
        half = player.source.played
        assert half == pytest.approx(seconds / 2, abs=0.1 * speed)
        await player.run(seconds / speed / 2 + 0.1)
        assert player.source.ended
    assert not player.view.moment.slowed, "faster is not slow motion"


async def test_slower_than_the_engine_is_slow_motion_of_the_replay_not_of_the_engine() -> None:
    player = await Player(speed=0.1).start()
    await player.run(2.0)
    assert player.source.pace == 10 and player.view.moment.slowed
    assert player.state.pace == 1 and player.view.moment.pace_text == ""
    await player.source.control("pace", factor=2)
    await player.run(0.2)
    assert player.source.speed == 0.5
    for factor in (0, -1, 1e9):
        for verb in ("speed", "pace"):
            with pytest.raises(InvalidRequest):
                await player.source.control(verb, factor=factor)


async def test_a_paused_replay_stops_and_steps_one_by_one() -> None:
    player = await Player(speed=1.0).start()
    await player.run(0.3)
    await player.source.control("pause")
    await player.run(0.1)
    stood = player.state.step
    await player.run(5.0)
    assert player.state.step == stood and player.source.paused and player.view.moment.exact
    for expected in (stood + 1, stood + 2):
        await player.source.control("step", n=1)
        await player.run(0.1)
        assert player.state.step == expected
        assert essence(player.state) == essence(state_at(player.source.trace, expected))
    await player.source.control("step", n=10)
    await player.run(0.1)
    assert player.state.step == stood + 12
    await player.source.control("resume")
    await player.run(0.2)
    assert not player.source.paused and player.state.step > stood + 12


@pytest.mark.parametrize("event", ["preemption", "eviction", "hit", "finish", "admission", "prefill"])
async def test_it_runs_until_something_happens_and_says_what(event: str) -> None:
    player = await Player().start()
    await player.source.control("run_until", predicate={"event": event})
    await player.run(0.2)
    assert player.source.paused and player.source.cause and not player.source.until
    kinds = {
        "preemption": "preempt", "eviction": "evict", "hit": "match", "finish": "finish", "admission": "admit",
        "prefill": "step",
    }
    trace, first = player.source.trace, None
    last_step = -1
    for record in trace.records():
        last_step = record[3] if record[2] == "step" else last_step
        if record[2] == kinds[event] and (event not in ("hit", "prefill") or record[4]):
            planning = record[2] not in ("finish", "step")
            first = last_step + planning
            break
    assert player.state.step == first


@pytest.mark.parametrize("order", [(100, 20, 139, 0, 57, 58), (139, 138, 1)])
async def test_seeking_shows_exactly_that_step_and_its_history(order: tuple[int, ...]) -> None:
    player = await Player().start()
    await player.source.control("pause")
    for step in order:
        await player.seek(step)
        assert player.state.step == step
        assert essence(player.state) == essence(state_at(player.source.trace, step))
        assert (
            player.view.history.steps.first <= max(0, step - 50)
            and not player.view.history.gap
            and not player.view.history.dropped
        )
        assert player.source.paused
    await player.source.control("resume")
    await player.run(0.2)
    assert player.state.step > order[-1]


async def test_a_reader_notices_a_jump_by_itself() -> None:
    player = await Player().start()
    await player.run(0.4)
    await player.source.control("pause")
    for step in (100, 20):
        await player.source.control("seek", step=step)
        await player.frame()
        await player.frame()
        assert essence(player.state) == essence(state_at(player.source.trace, step))
    assert player.view.history.dropped


def with_pauses(path: Path) -> Path:
    """The golden run with a pause of 5 s after a request was submitted, and with slow motion in the steps 40 to 59."""
    reader, records, later, held = TraceReader(GOLDEN), list[Record](), 0.0, 0

    def add(t: float, *record: Any) -> None:
        records.append((len(records) + 1, round(t, 6), *record))

    for _, t, kind, *fields in reader.records():
        if kind == "parts" and held:
            fields[3], held = fields[3] + held, 0
        add(t + later, kind, *fields)
        if kind == "submit" and fields[0] == 5:
            add(t, "gate", "closed", "paused")
            later, held = 5.0, 5_000_000
            add(t + later, "gate", "open", "resumed")
        if kind != "time":
            continue
        slowed = 40 <= fields[0] < 60
        if fields[0] in (40, 60):
            add(t + later, "pace", 50.0 if slowed else 1.0)
        if slowed:
            later, held = later + fields[4] / 1e3 * 49, round(fields[4] * 49e3)
    recorder = Recorder(path, keyframe_every=400)
    recorder.begin(INFO, reader.part(0).snapshot)
    recorder.feed(records)
    recorder.close()
    return path


async def test_a_replay_says_what_was_said_during_the_recording_also_about_pauses_and_slow_motion(
    tmp_path: Path,
) -> None:
    path = with_pauses(tmp_path / "paused.trace")
    reader = TraceReader(path)
    recorded = View()
    recorded.reset(reader.part(0).snapshot)
    recorded.fold(list(reader.records()))

    def said(view: View) -> list[Any]:
        steps = [view.history.steps.get(step) for step in range(reader.last_step + 1)]
        return [
            [view.texts.event(event) for event in view.history.events.since(0)], view.history.rates.now,
            [replace(row, end_seq=0) for row in steps if row is not None],
            [(lane.id, lane.waited_ms, lane.paused_s) for lane in view.history.lanes.lanes.values()],
            [view.history.tokens.stats(lane, view.moment.horizon) for lane in view.history.lanes.lanes.values()],
        ]

    texts = "\n".join(said(recorded)[0])
    assert "(and 5,000 ms more while the engine was paused or slowed)" in texts
    assert "slow motion" in texts and "the engine is paused" in texts
    waited = max(Requests().figures(recorded), key=lambda row: row.paused_ms)
    assert waited.paused_ms >= 5000 and waited.queue_ms is not None and waited.queue_ms < 5000
    assert "(not counted: 5,000 ms while paused or slowed)" in " · ".join(figures_in_words(waited))
    assert request_json(waited, "", None)["queue_paused_ms"] == round(waited.paused_ms, 3)
    assert max(row.parts.gate for row in said(recorded)[2] if row.parts is not None) >= 5000
    for speed in (0.2, 50.0):
        player = await Player(path, speed).start()
        await player.run(1.0)  # then it is paused, and goes on in single steps and to events
        await player.source.control("pause")
        await player.source.control("step", n=3)
        await player.run(0.1)
        await player.source.control("run_until", predicate={"event": "finish"})
        await player.run(0.1)
        await player.seek(reader.last_step)
        await player.run(0.1)
        assert said(player.view) == said(recorded), f"at speed {speed}"
    await player.seek(30)
    await player.seek(reader.last_step)
    assert said(player.view) == said(recorded), "after jumps"


async def test_a_recording_takes_no_questions() -> None:
    player = await Player().start()
    with pytest.raises(InvalidRequest, match="recording"):
        player.source.submit([1], SamplingParams())
    with pytest.raises(InvalidRequest, match="recording"):
        await player.source.control("clear_cache")
    await player.source.restart(lambda progress: None)
    await player.source.close()


async def test_bookmarks_are_places_to_go_to(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    shutil.copy(GOLDEN, path)
    player = await Player(path).start()
    await player.source.control("pause")
    await player.seek(30)
    player.source.bookmark(30, "here it stalls")
    await player.seek(0)
    steps: list[int] = []
    while (mark := player.source.next_bookmark(player.source.step, 1)) is not None:
        await player.seek(mark[0])
        steps.append(mark[0])
    assert 30 in steps and steps == sorted(steps)
    assert player.source.next_bookmark(player.source.step, -1) is not None


async def test_a_trace_without_its_end_plays_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "cut.trace"
    path.write_bytes(GOLDEN.read_bytes()[:-4000])
    player = await Player(path).start()
    await player.run(player.source.trace.seconds + 0.5)
    assert player.source.ended and player.state.step > 80
