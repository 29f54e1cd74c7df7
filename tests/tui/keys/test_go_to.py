"""One key goes to a step, a request, a block, a node or a chat, by number or name, on every screen."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.errors import InvalidRequest
from minitui.chat.sessions import Chats
from minitui.settings import Settings
from minitui.tui.apps.app import MinituiApp
from minitui.tui.screens.inspect import InspectScreen
from minitui.viewmodel.places import find
from tests.support.app.driving import press, type_text, until
from tests.support.app.fake_client import ByteCodec, FakeSource


@contextlib.asynccontextmanager
async def answered(size: tuple[int, int] = (120, 40)) -> AsyncIterator[tuple[MinituiApp, Pilot[Any]]]:
    """Two chats, "paging" (r1) and "trees" (r2), have an answer; letters are keys."""
    source = FakeSource()
    app = MinituiApp(source, Chats(source), Settings(), system="Be brief. " * 8, load_codec=lambda info: ByteCodec())
    async with app.run_test(size=size, notifications=True) as pilot:
        await until(pilot, lambda: app.feed.live)
        for title in ("paging", "trees"):
            if app.session.messages:
                app.select_session(app.chats.new(app.system))
            app.chats.rename(app.session, title)
            app.chats.send(app.session, f"What about {title}?")
            await until(pilot, lambda: not app.session.busy and app.view.moment.idle)
        await press(pilot, "ctrl+g")
        yield app, pilot


async def go(pilot: Pilot[Any], name: str) -> None:
    await press(pilot, "g")
    await type_text(pilot, name)
    await press(pilot, "enter")


async def test_a_step_is_shown_and_escape_returns_to_the_panel_and_the_present() -> None:
    async with answered() as (app, pilot):
        newest = app.view.moment.newest
        await go(pilot, "9")  # from the chats
        assert (
            app.current_mode == "inspect"
            and app.view.moment.horizon == 9
            and "PAST step 9" in app.view.moment.travel_text
        )
        await press(pilot, "w")
        await go(pilot, "step 4")  # while it shows the past
        screen = app.screen
        assert isinstance(screen, InspectScreen)
        assert app.view.moment.horizon == 4 and screen.current == "waterfall", "the panel stays"
        await press(pilot, "escape")
        assert app.view.moment.horizon == 9 and screen.current == "waterfall"
        await press(pilot, "3")
        await go(pilot, f"{newest:,}")
        assert app.current_mode == "lecture" and not app.view.moment.travel_text and app.view.moment.horizon == newest
        await go(pilot, "3")
        assert app.current_mode == "lecture" and app.view.moment.horizon == 3


async def test_a_request_opens_its_timeline_also_by_the_name_of_its_chat() -> None:
    async with answered() as (app, pilot):
        for name, request in (("r2", 2), ("PAGING", 1), ("request 2", 2), ("pag", 1)):
            await go(pilot, name)
            screen = app.screen
            assert isinstance(screen, InspectScreen)
            assert screen.current == "timeline" and app.view.subject() == request, name
        await press(pilot, "escape")
        assert isinstance(app.screen, InspectScreen) and app.screen.current != "timeline", "one escape, not four"


async def test_a_block_and_a_node_are_selected_in_their_panels() -> None:
    async with answered() as (app, pilot):
        await press(pilot, "2")
        screen = app.screen
        assert isinstance(screen, InspectScreen)
        await go(pilot, "b3")
        assert screen.current == "map" and app.view.selection is not None
        assert (app.view.selection.kind, app.view.selection.id) == ("block", 3)
        node = max(app.view.moment.shown.state.nodes)
        await press(pilot, "5")
        await go(pilot, f"node {node}")
        assert screen.current == "tree" and app.view.selection.id == node


async def test_what_does_not_exist_is_named_with_what_there_is() -> None:
    async with answered() as (app, pilot):
        view, steps = app.view, app.steps_kept
        assert steps == (0, view.moment.newest)
        for name, error in (
            ("9999", f"no step 9,999: steps 0 to {view.moment.newest} can be shown"),
            ("r7", "no request 7: r1 to r2 are kept"),
            ("block 900", "the pool has blocks 1 to 256"),
            ("n99", "no node 99: the tree of this moment has"),
            ("what", "there is no 'what': type 400 or step 400, r12"),
        ):
            with pytest.raises(InvalidRequest, match=error):
                find(view, name, steps)
        app.chats.rename(app.chats.sessions[0], "trees too")
        await until(pilot, lambda: "trees too" in " ".join(view.texts.group_names.values()))
        with pytest.raises(InvalidRequest, match=r"'tree' names 2 chats: .*trees too.* \(r1\)"):
            find(view, "tree", steps)
        await go(pilot, "9999")
        assert "no step 9,999" in [notice.message for notice in app._notifications][-1]
        assert app.current_mode == "chat" and not app.view.moment.travel_text
