"""Shows the Inspect and Lecture screens with simulated records; --measure measures their cost."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from textual.binding import Binding

from minitui.chat.sessions import Chats
from minitui.dev.pseudo_terminal import run_in_terminal
from minitui.dev.simulator import LOADS
from minitui.dev.simulator_process import SimulatedSource, StressProcess
from minitui.settings import Settings
from minitui.tui.app_base import AppBase
from minitui.tui.glyphs import ASCII, glyphs
from minitui.tui.heap import set_thresholds
from minitui.tui.screens.inspect import TALL, WIDE, InspectScreen
from minitui.tui.screens.lecture import LectureScreen
from minitui.tui.theme import THEMES
from minitui.viewmodel.updater import AFTER_KEY_S, Updater

SETTLE_S = 3.0  # seconds before the measurement


class StressApp(AppBase):
    """An application with the Inspect and Lecture screens, which shows simulated records."""

    source: SimulatedSource
    MODES: ClassVar[dict[str, Any]] = {"inspect": InspectScreen, "lecture": LectureScreen}
    DEFAULT_MODE = "inspect"
    CSS = "Screen { background: $ground; color: $ink; }"
    BINDINGS: ClassVar = [
        Binding("space", "freeze", "freeze"),
        Binding("p", "gate", "pause"),
        Binding("n", "step", "step"),
        Binding("comma", "travel(-1)", "back"),
        Binding("full_stop", "travel(1)", "forward"),
        Binding("T", "theme", "theme"),
        Binding("2", "switch_mode('inspect')", "inspect"),
        Binding("3", "switch_mode('lecture')", "lecture"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(
        self, source: SimulatedSource, fps: float = 20.0, seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic, settle: float = SETTLE_S,
    ) -> None:  # fmt: skip
        """`fps` 0: frames are drawn only by calls of `tick`. Measures for `seconds`, after `settle` seconds."""
        chats = Chats(source)
        settings = Settings(ascii=glyphs() is ASCII)  # the caller has chosen the glyphs
        super().__init__(source, chats, settings, system="")
        self.clock = clock
        self.view.texts.ids_to_text = source.decode
        self.view.texts.group_names = source.names
        self.feed = Updater(source, self.view, clock)
        self.fps = fps
        self.seconds = seconds  # the application ends after a measurement of this length; 0: it does not end by itself
        self.settle = settle
        self.figures: dict[str, Any] = {}
        self._cpu: list[float] = []  # seconds of CPU time for each frame's fold and paint
        self._ticks: list[float] = []  # the time of each drawn frame
        self._ages: list[float] = []  # after each drawn frame: seconds since the oldest record not drawn yet was sent
        self._backlog = 0  # the largest backlog so far

    async def on_mount(self) -> None:
        sys.setswitchinterval(0.001)  # as the application does
        await self.feed.sync()
        gc.collect()
        set_thresholds()  # as the application does
        gc.freeze()
        if self.fps:
            self.set_interval(1 / self.fps, self.tick)
        if self.seconds:
            self.set_timer(self.settle, self._begin)

    def _begin(self) -> None:
        for figures in (self._cpu, self._ticks, self._ages):
            figures.clear()
        self._backlog = 0
        history = self.view.history
        self._began = (time.monotonic(), time.process_time(), history.steps.last, history.live.state.seq)
        self.set_timer(self.seconds, self._end)

    def _end(self) -> None:
        wall = time.monotonic() - self._began[0]
        cpu, ages = sorted(self._cpu), sorted(self._ages)
        gaps = sorted(after - before for before, after in pairwise(self._ticks))
        self.figures = {
            "seconds": round(wall, 2),
            "cpu_percent": round(100 * (time.process_time() - self._began[1]) / wall, 1),
            "steps_per_s": round((self.view.history.steps.last - self._began[2]) / wall),
            "records_per_s": round((self.view.history.live.state.seq - self._began[3]) / wall),
            "frames_per_s": round(len(cpu) / wall, 1),
            "frame_ms_p50": round(1e3 * cpu[len(cpu) // 2], 2),
            "frame_ms_p99": round(1e3 * cpu[int(len(cpu) * 0.99)], 2),
            "drawn_per_s": round(len(self._ticks) / wall, 1),
            "between_ms_p95": round(1e3 * gaps[int(len(gaps) * 0.95)], 1),
            "between_ms_max": round(1e3 * gaps[-1], 1),
            "behind_ms_p95": round(1e3 * ages[int(len(ages) * 0.95)], 1),
            "behind_ms_max": round(1e3 * ages[-1], 1),
            "backlog_max": self._backlog,
            "requests": len(self.view.history.live.state.requests),
            "nodes": len(self.view.history.live.state.nodes) - 1,
            "blocks": self.view.history.live.total,
            "dropped": self.feed.dropped,
        }
        self.exit()

    def tick(self) -> None:
        """Drains and folds the new records, and paints a frame."""
        if self.feed.key_waits("fold") and not self.is_headless:
            self.set_timer(AFTER_KEY_S, self.tick)
            return
        begin = time.process_time()
        self.feed.pump()
        self.feed.keep_up()
        if self.is_headless:
            self.draw()
        elif self.frame_limiter.draws():
            self.call_later(self.draw_frame)
        self._cpu.append(time.process_time() - begin)
        self._backlog = max(self._backlog, self.feed.backlog)

    def draw(self) -> None:
        super().draw()
        begin = time.process_time()
        if not self.feed.frozen:
            self.view.texts.group_names = self.source.names
        self.view.frame(self.clock())
        if isinstance(self.screen, (InspectScreen, LectureScreen)):
            self.screen.paint(self.view)
        self._note_time()
        self._cpu[-1:] = [sum(self._cpu[-1:]) + time.process_time() - begin]

    def _note_time(self) -> None:
        """Notes the time of this frame, and the age of the oldest record that the frame does not show."""
        now, made = time.monotonic(), self.source.made
        while made and made[0][0] <= self.view.history.live.state.seq:
            made.popleft()
        self._ticks.append(now)
        self._ages.append(now - made[0][1] if made else 0.0)

    def action_do(self, action: str) -> None:
        """Runs a command of the two screens."""
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

    def action_theme(self) -> None:
        names = [theme.name for theme in THEMES]
        self.theme = names[(names.index(self.theme) + 1) % len(names)]


# Pairs of a key and a pattern of its effect on the screen.
COLOURS = [(b"c", re.compile(rb"m" + word)) for word in (b"owner", b"age", b"refcount", b"state")]
TITLES = (
    b"Block table", b"Batch lanes", b"Radix tree", b"Timings", b"Waterfall", b"Events", b"Requests", b"Timeline",
    b"Trends", b"KV blocks",
)  # fmt: skip
PANELS = [(b"\t", re.compile(title)) for title in TITLES]
BETWEEN_KEYS_S = 0.12
GIVE_UP_S = 2.0  # a key without a visible effect counts with this time


class Keys:
    """A Typist: presses one key after the other and times each until its effect is on the screen."""

    def __init__(self, single: bool, settle: float) -> None:
        self.settle = settle  # seconds between the first frame and the first key
        self.took: list[float] = []
        self._keys = cycle([*COLOURS, *PANELS] if single else COLOURS)
        self._waits_for: re.Pattern[bytes] | None = None
        self._seen = b""
        self._pressed, self._next = 0.0, math.inf

    def saw(self, data: bytes, now: float) -> None:
        """See Typist."""
        if self._next == math.inf and TITLES[-1] in data:  # the application's first frame
            self._next = now + self.settle
        if self._waits_for is None:
            return
        self._seen += data
        if self._waits_for.search(self._seen):
            self._note(now)

    def press(self, terminal: int, now: float) -> None:
        """See Typist."""
        if self._waits_for is not None and now - self._pressed > GIVE_UP_S:
            self._note(now)
        if self._waits_for is None and now >= self._next:
            key, self._waits_for = next(self._keys)
            self._pressed = now
            os.write(terminal, key)

    def _note(self, now: float) -> None:
        self.took.append(now - self._pressed)
        self._waits_for, self._seen = None, b""
        self._next = now + BETWEEN_KEYS_S * (0.5 + random.random())  # at a random time within a frame

    def figures(self) -> dict[str, Any]:
        """Returns the number of keys and their times in milliseconds."""
        if not self.took:
            return {"keys": 0}
        took = sorted(self.took)
        return {
            "keys": len(took), "key_ms_p50": round(1e3 * took[len(took) // 2], 1),
            "key_ms_p95": round(1e3 * took[int(len(took) * 0.95)], 1), "key_ms_max": round(1e3 * took[-1], 1),
        }  # fmt: skip


def measure(load: str, size: tuple[int, int], fps: float, seconds: float, settle: float = SETTLE_S) -> dict[str, Any]:
    """Runs the application in a pseudo-terminal for `settle` + `seconds`. Returns the figures of the last `seconds`,
    the bytes written, and the times from a key press to its effect on the screen."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        arguments = ["--load", load, "--fps", str(fps), "--seconds", str(seconds), "--out", str(out)]
        arguments += ["--settle", str(settle)]
        keys = Keys(size[0] < WIDE or size[1] < TALL, settle)
        arrived = run_in_terminal(["minitui.dev.simulator_app", *arguments], size, typist=keys)
        figures: dict[str, Any] = json.loads(out.read_text())
        end = arrived[-1][0]
        sent = sum(n for at, n in arrived if at > end - seconds)
        return {
            "size": f"{size[0]}x{size[1]}", "load": load, **figures, **keys.figures(),
            "kb_per_s": round(sent / seconds / 1e3), "additions_per_us": loop_speed(),
        }  # fmt: skip


def loop_speed() -> float:
    """Returns the additions of a Python loop per microsecond of CPU time: machine speeds differ, even by the hour."""
    begin, total = time.process_time(), 0
    for i in range(3_000_000):
        total += i
    return round(3.0 / (time.process_time() - begin), 1)


def main(
    load: Annotated[str, typer.Option(help=f"One of {', '.join(sorted(LOADS))}.")] = "classroom",
    fps: Annotated[float, typer.Option(help="Frames per second.")] = 20.0,
    size: Annotated[str, typer.Option(help="With --measure: columns x rows of the terminal.")] = "160x48",
    measured: Annotated[
        bool, typer.Option("--measure", help="Measure in a pseudo-terminal and print the figures.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="How long to measure.")] = 10.0,
    settle: Annotated[float, typer.Option(help="Seconds before the measurement.")] = SETTLE_S,
    out: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Show the Inspect and Lecture screens with simulated records."""
    if load not in LOADS:
        raise typer.BadParameter(f"there is no load {load!r}: the loads are {', '.join(sorted(LOADS))}")
    if measured:
        columns, rows = (int(n) for n in size.split("x"))
        for name, value in measure(load, (columns, rows), fps, seconds, settle).items():
            print(f"{name:18}{value}")
        return
    source = StressProcess(load, ahead=seconds + settle + 1.0 if out else 0.0)
    try:
        app = StressApp(source, fps, seconds if out else 0.0, settle=settle)
        app.run()
    finally:
        asyncio.run(source.close())
    if out:
        out.write_text(json.dumps(app.figures))


if __name__ == "__main__":
    typer.run(main)
