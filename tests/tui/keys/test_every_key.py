"""Each key that the help lists runs its own action, and none of them fails, wherever the engine or the recording is.

Whether an action changes the picture depends on its state (a list at its end, a zoom at its limit): the tests of the
panels and of the commands see to that.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import pytest
from textual.pilot import Pilot

from minitui.tui.apps.app import MinituiApp
from minitui.tui.apps.replay_app import ReplayApp
from minitui.tui.panels import ALONE, IN_ORDER
from minitui.tui.screens.help import bindings_here
from minitui.tui.screens.inspect import InspectScreen
from tests.support.app.driving import drawn, settled
from tests.tui.keys.test_keys import live, recording, two_recordings

# They end the application, start again, or change the chats or the settings: their commands are not run.
NOT_RUN = ("new", "fork", "replay", "retry", "close", "reset", "quit", "theme", "tokens", "clear")
LEFT_OUT = {"keys", "suspend", "interrupt"}  # the first works in the prompt; the others would end this process

async def return_to(app: MinituiApp, mode: str, panel: str) -> None:
    """Close dialogs, and show the place again if a key has left it."""
    while len(app.screen_stack) > 1:
        app.pop_screen()
    if app.current_mode != mode:
        app.switch_mode(mode)
    await settled()
    app.leave_prompt()
    screen = app.screen
    if isinstance(screen, InspectScreen) and panel and (screen.current != panel or not screen._panels[panel].has_focus):
        screen._go_to(type(screen._place)(panel, panel in ALONE or screen.small))
    if isinstance(app, ReplayApp):
        app.replay.set_paused(True)
    await settled()


async def press_all(app: MinituiApp, pilot: Pilot[Any], mode: str, panel: str = "", common: bool = True) -> list[str]:
    """Press each key that the help lists here, and return those that did not run their action. `common`: also the keys
    of the screen and of the application."""
    await return_to(app, mode, panel)
    await drawn(pilot)
    groups = bindings_here(app)
    here = [b for group in (groups if common else groups[:1]) for b in group.bindings]
    listed = [(b.key, b.action) for b in here if b.id not in LEFT_OUT]
    listed += [(a.key, f"do('{a.id}')") for a in app.actions if a.key and a.id not in LEFT_OUT and common]
    first: dict[str, str] = {}  # key -> action: the panel's, else the screen's, else the application's
    for keys, action in listed:
        for key in keys.split(","):
            first.setdefault(key, action)
    ran: list[str] = []
    run_action, wrong = app.run_action, []

    async def noted(action: Any, *place: Any) -> bool:
        ran.append(str(action))
        return await run_action(action, *place)

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(app, "run_action", noted))
        for id in NOT_RUN:
            patches.enter_context(patch.object(app.commands, f"do_{id}", lambda _: None))
        for key, action in first.items():
            app.clear_notifications()  # a long one leaves the transcript fewer lines, so it has other keys
            await return_to(app, mode, panel)
            await drawn(pilot)
            ran.clear()
            await pilot.press(key)
            wrong += [f"{key}: {action}, not {ran}"] * (action not in ran)
            await pilot.press("escape")  # close the details or the search that the key may have opened
    await drawn(pilot)
    return wrong


async def test_every_key_of_a_panel_runs_its_action() -> None:
    async with recording((120, 40)) as (app, pilot):
        running = app.view.moment.shown.state.requests
        app.view.select("request", max(running, key=lambda id: len(running[id].table)))
        assert isinstance(app.screen, InspectScreen)
        for panel in (name for name in IN_ORDER if name not in app.screen.absent):
            assert await press_all(app, pilot, "inspect", panel, common=False) == []
        assert await press_all(app, pilot, "inspect", "map") == []


@pytest.mark.parametrize(("mode", "panel"), [("chat", ""), ("lecture", "")])
async def test_every_key_runs_its_action_on_an_engine(mode: str, panel: str) -> None:
    async with live((80, 24)) as (app, pilot):
        assert await press_all(app, pilot, mode, panel) == []


async def test_every_key_runs_its_action_on_two_runs() -> None:
    async with two_recordings((80, 24)) as (app, pilot):
        assert await press_all(app, pilot, "compare") == []
