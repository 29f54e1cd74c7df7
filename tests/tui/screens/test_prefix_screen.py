"""/prefix over the running engine: what each request shares, what it lost, and whose fault that is."""

from __future__ import annotations

from typing import Any

from minitui.prefix.diagnose import CAUSES
from minitui.tui.apps.app import MinituiApp
from minitui.tui.screens.prefix import PrefixPanel, PrefixScreen
from minitui.tui.widgets.rows import plain
from tests.support.app.driving import press, until
from tests.tui.screens.test_chat_screen import SYSTEM, ask, running


def shown(app: MinituiApp) -> str:
    assert isinstance(app.screen, PrefixScreen)
    return "\n".join(map(plain, app.screen.query_one(PrefixPanel).drawn_rows))


async def opened(app: MinituiApp, pilot: Any) -> PrefixPanel:
    await until(pilot, lambda: app.feed.live)
    app.commands.run("prefix")
    await until(pilot, lambda: isinstance(app.screen, PrefixScreen))
    panel = app.screen.query_one(PrefixPanel)
    await until(pilot, lambda: not str(panel.found).startswith("reading"))
    return panel


async def test_a_changed_system_prompt_is_named_with_what_it_cost() -> None:
    async with running() as (app, pilot, _):
        panel = await opened(app, pilot)
        assert "No request was admitted" in shown(app)
        await press(pilot, "escape")
        codec = app.chats.codec
        assert codec is not None
        app.view.texts.ids_to_text = lambda ids: codec.decode(ids).replace("<start>", "<|im_start|>")
        app.focus_prompt()
        await ask(app, pilot, "What is a block table? " * 3)
        first = app.session
        app.commands.run("new")
        await ask(app, pilot, "And what is a radix tree?")
        app.select_session(first)
        app.chats.set_system(first, f"{SYSTEM.strip()} Be brief.")
        app.focus_prompt()
        await ask(app, pilot, "Why is decode slow?")
        panel = await opened(app, pilot)
        assert isinstance(panel.found, list)
        assert [one.cause for one in panel.found] == ["system prompt changed", "none", "first"]
        changed = panel.found[0]
        assert changed.could == changed.cached == 96 and changed.ancestor == panel.found[2].number
        text = shown(app)
        assert "system prompt changed (client)" in text and "+ " in text and "Be brief." in text
        assert CAUSES["system prompt changed"][1] in " ".join(text.replace("│", " ").split())
        await press(pilot, "down", "down")
        assert "No earlier request begins alike." in shown(app)
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: max(map(len, shown(app).splitlines())) < 80)
        assert "system prompt changed (client)" in shown(app), "the cause is cut"
