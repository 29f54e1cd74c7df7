"""Whatever sizes a terminal tells while it is drawn, the screens settle."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from typing import Any

import pytest
from textual import events
from textual.geometry import Size
from textual.screen import ModalScreen, Screen

import minitui
from minitui.chat.sessions import Chats
from minitui.settings import Settings
from minitui.tui.apps.app_base import AppBase
from minitui.tui.screens.base import BaseScreen
from minitui.tui.screens.dialogs import Overlay
from minitui.tui.terminal.textual_insides import SizedScreen
from minitui.tui.widgets.bars import TopBar
from tests.support.app.driving import drawn, until
from tests.support.app.fake_client import FakeSource
from tests.tui.keys.test_keys import recording


class Host(AppBase):
    def __init__(self) -> None:
        source = FakeSource()
        super().__init__(source, Chats(source), Settings(), system="")

    def get_default_screen(self) -> Screen[None]:
        return BaseScreen()


@pytest.mark.parametrize("kind", [BaseScreen, Overlay])
async def test_two_sizes_on_their_way_do_not_answer_each_other_for_ever(kind: Any, monkeypatch: Any) -> None:
    layouts = 0
    refresh_layout = Screen._refresh_layout

    def count(self: Screen[None], *arguments: Any, **more: Any) -> None:
        nonlocal layouts
        layouts += 1
        if layouts > 50:
            raise SystemExit("the screen is laid out for ever")  # nothing else would be heard of
        refresh_layout(self, *arguments, **more)

    app = Host()
    async with app.run_test(size=(80, 24)) as pilot:
        app.push_screen(kind())
        await pilot.pause()
        monkeypatch.setattr(Screen, "_refresh_layout", count)
        with app.batch_update():
            for size in (Size(90, 28), Size(97, 30)):
                app._size = size
                app.screen.post_message(events.Resize(size, size))
                app.screen.call_later(lambda: None)  # the second does not replace the first
            await asyncio.sleep(0.1)
        assert app.screen.size == Size(97, 30)


def test_all_screens_are_so() -> None:
    for module in pkgutil.walk_packages(minitui.__path__, "minitui."):
        without = module.name.split(".")[1] in ("__main__", "server", "tutor", "bench", "vllm")  # they have no screens
        if not without:
            importlib.import_module(module.name)
    todo, found = [Screen], []
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        if kind.__module__.startswith("minitui."):
            found.append(kind)
    assert len(found) > 12
    assert [kind for kind in found if not issubclass(kind, SizedScreen)] == []
    assert issubclass(Overlay, ModalScreen)


async def test_a_phone_shows_the_panels_one_below_the_other_and_all_tabs() -> None:
    for columns, phone in ((53, True), (80, False)):
        async with recording((columns, 44)) as (app, pilot):
            app.leave_prompt()
            app.open_mode("lecture")
            await drawn(pilot)
            blocks, tree = app.screen.query_one("#map"), app.screen.query_one("#tree")
            await until(pilot, lambda: (tree.region.width > 50) is phone)  # noqa: B023 (called at once)
            assert (tree.region.y >= blocks.region.bottom) is phone
            bar = app.screen.query_one(TopBar)
            assert ("minitui" in bar.text) is not phone and all(label in bar.text for _, label in app.TABS)
            await pilot.click(bar, offset=(bar.text.index("2 Inspect") + 2, 0))
            await until(pilot, lambda app=app: app.current_mode == "inspect")  # type: ignore[misc]
