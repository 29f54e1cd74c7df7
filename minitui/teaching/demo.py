"""Plays a scenario of minitui/teaching/scenarios.py as lines of text."""

from __future__ import annotations

import time
from typing import Any

from minitui.chat.conversation import Sampling
from minitui.chat.model_choice import load_codec
from minitui.sources.base import Source
from minitui.teaching.scenarios import DEMOS, Demo
from minitui.teaching.stage import Restart, plain_stage

__all__ = ["DEMOS", "Demo", "print_demo"]


async def print_demo(
    demo: Demo, source: Source, system: str, sampling: Sampling, load: Any = load_codec, beat: float = 0.0,
    restart: Restart | None = None,
) -> int:
    """Plays a demo and prints its texts; returns the exit code.

    `load` loads the codec of a model. `beat` scales all pauses; 0 skips them. `restart` starts another engine.
    """
    began = time.monotonic()

    def say(text: str) -> None:
        source.name_groups(stage.chats.names)
        first, *rest = text.split("\n")
        lines = [f"{time.monotonic() - began:5.1f} s  {first}", *(f"         {line}" for line in rest)]
        print("\n".join(lines), flush=True)

    async def named_restart(changes: dict[str, Any]) -> None:
        assert restart is not None
        source.name_groups(stage.chats.names)  # now, because the new engine is recorded in another file
        await restart(changes)

    async with plain_stage(
        source, sampling, load, system=system, say=say, restart=named_restart if restart else None, beat=beat
    ) as stage:
        try:
            await demo.play(stage)
        finally:
            source.name_groups(stage.chats.names)
    return 0
