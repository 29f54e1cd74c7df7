"""Plays a scenario of minitui/teaching/scenarios.py as lines of text."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from minitui.chat.conversation import Sampling
from minitui.chat.sessions import Chats
from minitui.sources.base import Source
from minitui.teaching.scenarios import DEMOS, Demo
from minitui.teaching.stage import Restart, Stage
from minitui.viewmodel.model import View
from minitui.viewmodel.updater import Updater

__all__ = ["DEMOS", "Demo", "tell_plainly"]


async def tell_plainly(
    demo: Demo, source: Source, system: str, sampling: Sampling, load: Any = None, beat: float = 0.0,
    restart: Restart | None = None,
) -> int:  # fmt: skip
    """Plays a demo and prints its texts; returns the exit code."""
    from minitui.chat.model_choice import load_codec

    began = time.monotonic()

    def tell_names() -> None:
        source.name_groups(chats.names)

    async def go_on(changes: dict[str, Any]) -> None:
        assert restart is not None
        tell_names()  # the new engine is recorded in another file
        await restart(changes)

    def say(text: str) -> None:
        tell_names()
        first, *rest = text.split("\n")
        lines = [f"{time.monotonic() - began:5.1f} s  {first}", *(f"         {line}" for line in rest)]
        print("\n".join(lines), flush=True)

    chats = Chats(source, sampling=sampling)
    try:
        await source.start(lambda progress: None)
        chats.use(await asyncio.to_thread(load or load_codec, source.info))
        feed = Updater(source, View())
        await feed.sync()
        await demo.play(Stage(source, chats, feed, system, say, restart=go_on if restart else None, beat=beat))
        return 0
    finally:
        tell_names()
        await source.close()
