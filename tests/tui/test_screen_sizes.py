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
from minitui.tui.app_base import AppBase
from minitui.tui.screens.base import BaseScreen
from minitui.tui.screens.dialogs import Overlay
from minitui.tui.textual_insides import SizedScreen
from tests.support.fake_client import FakeSource


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
