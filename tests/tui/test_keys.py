"""The keys that the help lists: each reaches an action that is possible, live, in a recording and with two runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from textual.actions import parse
from textual.pilot import Pilot

from minitui.chat.sessions import Chats
from minitui.settings import Settings
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
from minitui.tui.app import MinituiApp
from minitui.tui.commands import MODES
from minitui.tui.compare_app import RecordingsApp, TwoRecordings
from minitui.tui.replay_app import ReplayApp, replay_app
from minitui.tui.screens.bindings import bindings_here
from minitui.tui.widgets.base import LinePanel
from tests.support.driving import press, until
from tests.support.fake_client import ByteCodec, FakeSource
from tests.support.golden import GOLDEN


@contextlib.asynccontextmanager
async def live(size: tuple[int, int]) -> AsyncIterator[tuple[MinituiApp, Pilot[Any]]]:
    """Four chats with answers; the pool has evicted; the engine is paused."""
    source = FakeSource(num_blocks=30)
    app = MinituiApp(
        source, Chats(source), Settings(), system="You are brief. " * 6, known_questions=["What is a block?"],
        load_codec=lambda info: ByteCodec(),
    )  # fmt: skip
    async with app.run_test(size=size, notifications=True) as pilot:
        await until(pilot, lambda: app.feed.live)
        for number in range(4):
            if number:
                app.select_session(app.chats.new(app.system))
            app.chats.send(app.session, f"Question {number}? " * 4)
            await until(pilot, lambda: not app.session.busy and app.view.idle)
        await source.control("pause")
        await until(pilot, lambda: app.gated)
        yield app, pilot


@contextlib.asynccontextmanager
async def recording(size: tuple[int, int]) -> AsyncIterator[tuple[ReplayApp, Pilot[Any]]]:
    """The golden recording, paused in its middle."""
    app = replay_app(str(GOLDEN), speed=0.2)
    async with app.run_test(size=size, notifications=True) as pilot:
        await until(pilot, lambda: app.feed.live)
        await press(pilot, "E")
        await until(pilot, lambda: app.replay.ended and not app.feed.backlog)
        app.travel_to(70)
        yield app, pilot


@contextlib.asynccontextmanager
async def two_recordings(size: tuple[int, int]) -> AsyncIterator[tuple[RecordingsApp, Pilot[Any]]]:
    paths = bundled()
    source = TwoRecordings((TraceReader(paths["small-pool"]), TraceReader(paths["small-pool"])), ("first", "second"))
    app = RecordingsApp(source, Chats(source), Settings(), system="")
    async with app.run_test(size=size, notifications=True) as pilot:
        await until(pilot, lambda: app.view.earlier is not None)
        yield app, pilot


@pytest.mark.parametrize("opened", [live, recording, two_recordings])
async def test_the_help_lists_only_keys_that_reach_an_action(opened: Any) -> None:
    async with opened((80, 24)) as (app, pilot):
        for action in app.actions:
            assert action.id in MODES or hasattr(app.commands, f"do_{action.id}"), action.id
            app.commands._check(action.id)  # raises an error where the action is not offered
        for mode in app.MODES:
            await app.switch_mode(mode)
            for panel in app.screen.query(LinePanel):
                if not panel.focusable or not panel.display:
                    continue
                panel.focus()
                await until(pilot, lambda panel=panel: app.focused is panel)  # type: ignore[misc]
                for here in bindings_here(app):
                    for binding in here.bindings:
                        _, name, parameters = parse(binding.action)
                        owner = app if binding.action.startswith("app.") else here.node
                        assert hasattr(owner, f"action_{name}") or hasattr(app, f"action_{name}"), binding
                        assert here.node.check_action(name, parameters) is not False, binding


async def test_a_key_under_the_help_closes_it_and_acts() -> None:
    async with recording((120, 40)) as (app, pilot):
        await press(pilot, "question_mark", "down", "E")
        await until(pilot, lambda: app.view.horizon == app.replay.trace.last_step)
        assert len(app.screen_stack) == 1
        await press(pilot, "question_mark", "f9")
        assert len(app.screen_stack) == 2, "a key without a meaning leaves the help open"
        await press(pilot, "q")
        assert len(app.screen_stack) == 1 and app.is_running, "q closes the help only"
