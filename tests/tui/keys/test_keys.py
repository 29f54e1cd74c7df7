"""The keys that the help lists: each reaches an action that is possible, live, in a recording and with two runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import pytest
from textual.pilot import Pilot

from minitui.chat.sessions import Chats
from minitui.settings import Settings
from minitui.sources.openai import OpenAISource
from minitui.sources.replicas import ReplicaSource
from minitui.sources.vllm import Engine, VllmSource
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
from minitui.tui.actions import ACTIONS
from minitui.tui.apps.app import MinituiApp
from minitui.tui.apps.compare_app import RecordingsApp, TwoRecordings
from minitui.tui.apps.openai_app import ForeignApp
from minitui.tui.apps.replay_app import ReplayApp, replay_app
from minitui.tui.apps.replica_app import ForeignReplicaApp
from minitui.tui.panels import BY_KEY
from minitui.tui.screens.lecture import LectureScreen
from tests.support.app.driving import press, until
from tests.support.app.fake_client import ByteCodec, FakeSource
from tests.support.records.golden import GOLDEN


@contextlib.asynccontextmanager
async def live(size: tuple[int, int]) -> AsyncIterator[tuple[MinituiApp, Pilot[Any]]]:
    """Four chats with answers; the pool has evicted; the engine is paused."""
    source = FakeSource(num_blocks=30)
    app = MinituiApp(
        source, Chats(source), Settings(), system="You are brief. " * 6, known_questions=["What is a block?"],
        load_codec=lambda info: ByteCodec(),
    )
    async with app.run_test(size=size, notifications=True) as pilot:
        await until(pilot, lambda: app.feed.live)
        for number in range(4):
            if number:
                app.select_session(app.chats.new(app.system))
            app.chats.send(app.session, f"Question {number}? " * 4)
            await until(pilot, lambda: not app.session.busy and app.view.moment.idle)
        await source.control("pause")
        await until(pilot, lambda: app.gated)
        yield app, pilot


@contextlib.asynccontextmanager
async def recording(size: tuple[int, int]) -> AsyncIterator[tuple[ReplayApp, Pilot[Any]]]:
    """The golden recording, paused in its middle."""
    app = replay_app(str(GOLDEN), speed=0.2)
    async with app.run_test(size=size, notifications=True, tooltips=True) as pilot:
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


def foreign() -> MinituiApp:
    source = OpenAISource("http://127.0.0.1:9")
    return ForeignApp(source, Chats(source), Settings(), system="")


def foreign_replicas() -> MinituiApp:
    source = ReplicaSource(["http://127.0.0.1:9", "http://127.0.0.1:10"], exact=False)
    return ForeignReplicaApp(source, Chats(source), Settings(), system="", load_codec=None)


def watched() -> MinituiApp:
    source = VllmSource(Engine("http://127.0.0.1:9", "http://127.0.0.1:10"))
    return MinituiApp(source, Chats(source), Settings(), system="", load_codec=lambda info: ByteCodec())


def cached() -> MinituiApp:
    pytest.importorskip("msgpack", reason="the extra 'vllm' is not installed")
    from minitui.tui.apps.cache_app import CacheApp
    from minitui.vllm.kv_source import KvSource

    source = KvSource("http://127.0.0.1:9", "tcp://127.0.0.1:10")
    return CacheApp(source, Chats(source), Settings(), system="")


def replayed() -> MinituiApp:
    return replay_app(str(GOLDEN))


CONTROL = {"gate", "resume", "step", "step10", "until", "slower", "faster", "slow", "clear", "reset"}
PAST = {"freeze", "back", "forward", "now"}
PANELS = {"inspect", *BY_KEY, "lecture", "goto"}
REPLICAS = {"replicas", "pin", "unpin"}
CHATS = {"new", "fork", "write", "search", "chat", "slash"}


@pytest.mark.parametrize(
    ("make", "refused", "offered"),
    [
        (foreign, CONTROL | PAST | PANELS | REPLICAS, CHATS | {"restart", "help"}),
        (foreign_replicas, CONTROL | PAST | PANELS, CHATS | REPLICAS | {"restart", "help"}),
        (watched, CONTROL | REPLICAS, CHATS | PAST | PANELS),
        (cached, CONTROL | PAST | REPLICAS | CHATS | PANELS - {"inspect"}, {"inspect", "theme", "help"}),
        (replayed, REPLICAS | CHATS | {"clear", "restart"}, CONTROL - {"clear"} | PANELS | PAST - {"freeze"}),
    ],
)
async def test_what_the_engine_cannot_do_is_refused_with_a_sentence_and_not_listed(
    make: Any, refused: set[str], offered: set[str]
) -> None:
    app, said = make(), []
    app.say = lambda text, error=False: said.append(text)
    listed = {action.id for action in app.actions}
    assert offered <= listed and not refused & listed
    for id in (action.id for action in ACTIONS if app.reason_against(action)):
        said.clear()
        app.commands.run(id)
        assert len(said) == 1 and len(said[0].split()) > 5, id


async def test_a_lecture_on_an_engine_that_cannot_be_controlled_shows_its_past_only() -> None:
    async with live((120, 40)) as (app, pilot):
        app.leave_prompt()
        await press(pilot, "3")
        screen = app.screen
        assert isinstance(screen, LectureScreen)
        assert {"next step", "predict", "pause", "start over"} <= {what for _, what in screen.hints()}
        with patch.object(FakeSource, "uncontrolled", "it is only watched"):
            shown = {what for _, what in screen.hints()}
            assert not shown & {"next step", "predict", "pause", "start over", "until", "slow motion"}
            await press(pilot, "comma")
            assert ("n", "next step") in screen.hints(), "n goes forward in the past"


async def test_a_key_under_the_help_closes_it_and_acts() -> None:
    async with recording((120, 40)) as (app, pilot):
        await press(pilot, "question_mark", "down", "E")
        await until(pilot, lambda: app.view.moment.horizon == app.replay.trace.last_step)
        assert len(app.screen_stack) == 1
        await press(pilot, "question_mark", "f9")
        assert len(app.screen_stack) == 2, "a key without a meaning leaves the help open"
        await press(pilot, "q")
        assert len(app.screen_stack) == 1 and app.is_running, "q closes the help only"


async def test_a_wrong_name_in_the_table_keys_is_said_with_near_ones() -> None:
    table = {"freze": "f8", "gate": "Esc", "new": "crtl+k"}
    table |= {"step": "ctrl+n, ?,f24,ampersand", "class.next": "f7", "lesson": "+"}  # right, of other applications, too
    source = FakeSource()
    app = MinituiApp(source, Chats(source), Settings(keys=table), system="", load_codec=lambda info: ByteCodec())
    async with app.run_test(size=(120, 36), notifications=True) as pilot:
        await until(pilot, lambda: app.feed.live)
        freze, esc, crtl = sorted(notice.message for notice in app._notifications)
        assert freze == (
            "settings.toml: keys.freze is not the name of an action (near: freeze, reset); the help (?) lists them"
        )
        assert "keys.gate is 'Esc', which is not the name of a key (near: escape" in esc
        assert "keys.new is 'crtl+k'" in crtl and "(near: ctrl+k" in crtl
