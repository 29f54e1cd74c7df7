"""A picture that stands is of one moment: no two panels of it say different things."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.trace.views import RequestView
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
from minitui.tui.apps.replay_app import ReplayApp, replay_app
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.inspect.block_table import _with_ends
from minitui.viewmodel.explain.predict import question_about, why_no_question
from minitui.viewmodel.explain.timing import summarise
from minitui.viewmodel.history.events import Events
from minitui.viewmodel.history.lanes import Lanes
from minitui.viewmodel.state.eviction import EvictionOrder
from minitui.viewmodel.view import View
from tests.support.app.driving import press, until
from tests.support.records.golden import GOLDEN


def shown_panels(app: Any) -> list[LinePanel]:
    return [
        panel for panel in app.screen.query(LinePanel)
        if panel.id != "details" and panel.size.area and all(node.display for node in panel.ancestors_with_self)
    ]


def moment_of(view: View) -> tuple[int, int]:
    return view.moment.shown.state.seq, view.version


async def act(app: ReplayApp, pilot: Any, rng: random.Random) -> None:
    key = rng.choice(("space", "p", "n", "N", "comma", "full_stop", "end", "2", "3", "play", "play", "seek", "select"))
    if key == "seek":
        await app.seek(rng.randrange(app.replay.trace.last_step + 1))
    elif key == "select":
        state = app.view.moment.shown.state
        kind, ids = rng.choice((("request", list(state.requests)), ("node", list(state.nodes)), ("block", [1, 7, 30])))
        app.view.select(kind, rng.choice(ids) if ids else None) if ids else app.view.select(None)
    elif key == "play":
        await pilot.pause(0.02)
    else:
        await press(pilot, key)


@pytest.mark.parametrize(("size", "seed"), [((80, 24), 0), ((140, 44), 1)])
async def test_all_panels_of_a_picture_that_stands_are_painted_from_one_moment(
    size: tuple[int, int], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    painted: dict[LinePanel, tuple[int, int]] = {}
    paint = LinePanel.paint

    def noted(self: LinePanel, view: View) -> int:
        painted[self] = moment_of(view)
        return paint(self, view)

    monkeypatch.setattr(LinePanel, "paint", noted)
    shutil.copy(GOLDEN, tmp_path / "a.trace")
    app = replay_app(str(tmp_path / "a.trace"), speed=0.3)
    rng, stood = random.Random(seed), set()
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.feed.live and app.replay.step > 3)
        for i in range(20):
            await (press(pilot, "space") if i in (0, 4) else act(app, pilot, rng))
            await pilot.pause()
            app._frame()
            view = app.view
            if not view.moment.still:
                continue
            stood.add((view.moment.playback.paused, view.moment.travel_text != ""))
            panels = shown_panels(app)
            assert len(panels) > 3
            assert {painted[panel] for panel in panels} == {moment_of(view)}
            assert view.moment.tree.eviction(view.moment.shown).nodes == EvictionOrder(view.moment.shown.state).nodes
            assert view.timings == summarise(
                view.history.steps, view.history.first_tokens, view.moment.horizon, view.moment.shown.state.seq
            )
    assert len(stood) > 1, f"it must stand in more ways than {stood}"


def test_a_selected_block_is_never_left_out_of_a_long_table() -> None:
    rng = random.Random(0)
    for _ in range(3_000):
        n, room, across = rng.randrange(1, 60), rng.randrange(1, 30), rng.choice((1, 3, 8))
        for at in (None, rng.randrange(n)):
            shown = _with_ends(n, room, across, at)
            blocks = [item for item in shown if item >= 0]
            assert len(shown) <= room and blocks == sorted(set(blocks))
            assert at is None or at in shown, (n, room, across, at)
            assert room < 5 or len(blocks) - sum(item for item in shown if item < 0) == n


@pytest.mark.parametrize("path", [GOLDEN, *bundled().values()], ids=lambda path: path.stem)
def test_a_step_that_is_gone_to_is_the_step_that_is_shown(path: Path) -> None:
    reader = TraceReader(path)
    records = list(reader.records())
    for step in range(reader.step_before + 2, reader.last_step, 7):
        before = records[reader.number(*reader.locate(step)) - reader.number(0, 0) - 1]
        assert before[2] == "time" and before[3] == step
    assert reader.locate(reader.last_step)[0] == len(reader.keyframes) - 1


def test_a_pause_does_not_vanish_from_what_a_request_waited() -> None:
    lanes, events = Lanes(), Events()
    lanes.now = 1.0
    lanes.submit(RequestView(5, "", 30, 60, submitted=10.0))
    admit = (2, 70.003, "admit", 5, 0, "new")
    lanes.read_at(admit, 1.003)
    events.fold(admit, 3)
    view = View()
    view.history.lanes, view.history.events = lanes, events
    text = view.texts.event(events.since(0)[0])
    assert "waited 3.00 ms (and 60.0 s more while the engine was paused or slowed)" in text


def test_with_prediction_no_eviction_passes_without_a_question_or_a_word() -> None:
    reader = TraceReader(GOLDEN)
    view = View()
    view.reset(reader.part(0).snapshot)
    records = list(reader.records())
    view.fold(records)
    decided, words = set(), set()
    for event in view.history.events.since(0):
        if event.kind in ("evict", "preempt"):
            decided.add(event.step)
    for step in sorted(decided):
        if view.travel_to(step - 1):
            question, why = question_about(view, step), why_no_question(view, step)
            assert (question is None) == bool(why), step
            words.add(why)
        view.moment.present()
    assert len(words) > 1
