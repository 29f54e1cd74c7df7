"""Simulated records as a source, and an application with the Inspect and Lecture screens that shows them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

from textual.binding import Binding

from engine.errors import InvalidRequest
from engine.info import EngineInfo
from engine.params import SamplingParams
from engine.progress import Progress
from engine.trace.records import Record
from engine.trace.state import State
from minitui.chat.sessions import Chats
from minitui.dev.simulator import Load, Stress
from minitui.settings import Settings
from minitui.sources.base import Source
from minitui.tui.apps.app_base import AppBase
from minitui.tui.glyphs import ASCII, glyphs
from minitui.tui.screens.inspect import InspectScreen
from minitui.tui.screens.lecture import LectureScreen
from minitui.viewmodel.updater import Updater


class LiveStress(Source):
    """Simulated records; time passes when records are drained. Only the simulated chats make requests."""

    def __init__(self, load: Load, warm_up: float = 8.0) -> None:
        super().__init__()
        self.info = EngineInfo(
            model="stress", device="make-believe", dtype="none", num_blocks=load.blocks, block_size=load.block_size
        )
        self.stress = Stress(load)
        self._state = State(load.blocks + 1, load.block_size, load.budget, load.rows)
        for _ in range(round(warm_up / 0.25)):
            self.stress.run(0.25)
            self._state.apply_all(self.stress.drain())
        self._last = time.monotonic()

    async def start(self, on_progress: Progress) -> None:
        self._ready.set()

    async def close(self) -> None:
        await self._stop()

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> NoReturn:
        raise InvalidRequest("simulated records answer no requests")

    async def control(self, verb: str, **arguments: Any) -> NoReturn:
        raise InvalidRequest(f"simulated records do not support {verb!r}", "action")

    @property
    def names(self) -> dict[str, str]:
        return dict(self.stress.group_names)

    def decode(self, ids: Sequence[int]) -> str:
        return self.stress.words.decode(ids)

    def gate(self) -> None:
        self.stress.gate(not self.stress.closed)

    def step(self) -> None:
        if not self.stress.closed:
            self.stress.gate(True, "stepping")
        self.stress.run_steps(1)

    def drain_records(self) -> list[Record]:
        now = time.monotonic()
        self.stress.run(min(0.2, now - self._last))
        self._last = now
        return self.stress.drain()

    async def snapshot(self) -> dict[str, Any]:
        return self._state.snapshot()


class StressApp(AppBase):
    """Shows simulated records. A frame is drawn by each call of `tick`."""

    source: LiveStress
    MODES: ClassVar[dict[str, Any]] = {"inspect": InspectScreen, "lecture": LectureScreen}
    DEFAULT_MODE = "inspect"
    CSS = "Screen { background: $ground; color: $ink; }"
    BINDINGS: ClassVar = [
        Binding("space", "freeze", "freeze"),
        Binding("p", "gate", "pause"),
        Binding("n", "step", "step"),
        Binding("comma", "travel(-1)", "back"),
        Binding("full_stop", "travel(1)", "forward"),
        Binding("2", "switch_mode('inspect')", "inspect"),
        Binding("3", "switch_mode('lecture')", "lecture"),
    ]

    def __init__(self, source: LiveStress, clock: Callable[[], float]) -> None:
        settings = Settings(ascii=glyphs() is ASCII)  # the caller has chosen the glyphs
        super().__init__(source, Chats(source), settings, system="")
        self.clock = clock
        self.view.texts.ids_to_text = source.decode
        self.view.texts.group_names = source.names
        self.feed = Updater(source, self.view, clock)

    async def on_mount(self) -> None:
        await self.feed.sync()

    def tick(self) -> None:
        """Fold the new records, and paint a frame."""
        self.feed.pump()
        self.feed.keep_up()
        self.draw()

    def draw(self) -> None:
        super().draw()
        if not self.feed.frozen:
            self.view.texts.group_names = self.source.names
        self.view.frame(self.clock())
        if isinstance(self.screen, (InspectScreen, LectureScreen)):
            self.screen.paint(self.view)

    def action_do(self, action: str) -> None:
        """Run a command of the two screens."""
        if action == "step":
            self.action_step()
        elif action in self.MODES:
            self.switch_mode(action)

    def action_freeze(self) -> None:
        self.feed.frozen = not self.feed.frozen

    def action_gate(self) -> None:
        self.source.gate()

    def action_step(self) -> None:
        self.source.step()

    def action_travel(self, by: int) -> None:
        self.view.travel(by)
