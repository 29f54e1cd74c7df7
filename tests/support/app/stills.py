"""Pictures of whole screens that are the same on every machine: time passes by the engine's steps and by nothing else.
The parts are the real ones, over the scripted source. Where they look at a clock they see this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from engine.core.host_pauses import HostPauses, Pauses
from engine.core.request import Grammar
from engine.core.step import StepPlan
from engine.trace.records import RecordLog
from minitui.tui.apps.app import MinituiApp
from minitui.viewmodel.updater import Updater
from tests.support.app.driving import lines, settled
from tests.support.app.fake_client import FakeSource, ScriptedRunner
from tests.support.paths import SNAPSHOTS

SIZES = [(80, 24), (120, 36)]
STEP_S = 0.005  # an engine's step of decoding
TOKEN_S = 0.00005  # more for each token that it computes
STEP_CLOCKS = ("engine.core.step_clock.now",)
WATCHES = (
    "minitui.tui.apps.app", "minitui.chat.sessions", "minitui.chat.conversation", "minitui.tui.screens.chat",
    "minitui.teaching.reading",
)


class Clock:
    """Seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        """Whoever draws, measures or counts sees this clock; who waits for another task does not."""
        watch = SimpleNamespace(**{**vars(time), "monotonic": self})
        with contextlib.ExitStack() as patches:
            for name in STEP_CLOCKS:
                patches.enter_context(patch(name, self))
            for module in WATCHES:
                patches.enter_context(patch(f"{module}.time", watch))
            patches.enter_context(patch.object(HostPauses, "since_last", lambda *_, **__: Pauses(0.0, 0.0, 0)))
            patches.enter_context(patch("minitui.tui.screens.chat.TEXT_EVERY", 0.0))
            patches.enter_context(patch.object(RecordLog.__init__, "__defaults__", (self, 50_000)))
            patches.enter_context(patch.object(MinituiApp, "set_interval"))  # frames come when the test wants them
            patches.enter_context(patch.object(Updater.__init__, "__defaults__", (self,)))
            yield


class StillSource(FakeSource):
    """A step takes as long as it has tokens, and is taken when `steps` says so."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        super().__init__(**options)
        launch = self.runner.launch

        def measured(plan: StepPlan, grammars: Mapping[int, Grammar]) -> ScriptedRunner._Launched:
            clock.now += STEP_S + TOKEN_S * plan.num_tokens
            return launch(plan, grammars)

        self.runner.launch = measured  # type: ignore[method-assign]

    async def _run(self) -> None:
        """Takes no step by itself."""

    def drain_records(self) -> list[Any]:
        if self.info:  # what gates say is not drained by steps
            self._flush()
        return super().drain_records()

    async def steps(self, count: int = 10_000) -> None:
        """So many steps, or until nothing is left to compute; after each all chats have their tokens."""
        for _ in range(count):
            if not self.engine.has_work:
                break
            self.take_step()
            while any(stream.news.qsize() for stream in self.streams.values() if not stream.ended):
                await asyncio.sleep(0)


class Album:
    """The pictures of one screen in one size, one below the other."""

    def __init__(self, name: str, size: tuple[int, int], app: Any, clock: Clock) -> None:
        self.path = SNAPSHOTS / f"{name}-{size[0]}x{size[1]}.txt"
        self.app, self.size, self.clock = app, size, clock
        self.pictures: list[str] = []

    async def take(self, title: str, rest: float = 0.0) -> str:
        """Draw everything, `rest` seconds after what happened last, and keep it."""
        self.clock.now += rest
        for _ in range(2):  # again when all have their places
            for _ in range(2):  # each frame draws half of the panels
                self.app._frame()
            await settled()
        rows = [line.rstrip() for line in lines(self.app)]
        assert len(rows) == self.size[1] and max(map(len, rows)) <= self.size[0]
        text = "\n".join(rows)
        self.pictures.append(f"==== {title}\n{text}\n")
        return text

    def compare(self) -> None:
        """With what is kept in tests/snapshots; UPDATE_SNAPSHOTS=1 writes it anew."""
        text = "\n".join(self.pictures)
        if os.environ.get("UPDATE_SNAPSHOTS"):
            self.path.write_text(text, encoding="utf-8")
        pairs = zip_longest(text.splitlines(), self.path.read_text(encoding="utf-8").splitlines(), fillvalue="")
        first = next(((new, old) for new, old in pairs if new != old), None)
        assert first is None, (
            f"{self.path.name} differs, first where it has\n{first[1]}\nand now has\n{first[0]}\n"
            "Look whether the new picture is right; UPDATE_SNAPSHOTS=1 keeps it."
        )
