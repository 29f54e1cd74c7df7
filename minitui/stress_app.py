"""The Inspect screen over a stress source: to look at, and to measure (`python -m minitui.stress --measure`)."""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from textual.app import App
from textual.binding import Binding

from engine.records import Record
from engine.state import State
from minitui.feed import Feed
from minitui.pseudo_terminal import run_in_terminal
from minitui.screens.inspect import InspectScreen
from minitui.screens.lecture import LectureScreen
from minitui.stress import LOADS, Load, Stress
from minitui.theme import THEMES
from minitui.thrift import Thrift
from minitui.view import View

BATCH_SECONDS = 0.01  # of engine time that travel together, as they do from the engine's process


class LiveStress:
    """A source that lets as much make-believe time pass as real time does."""

    def __init__(self, load: Load, warm_up: float = 8.0) -> None:
        self.stress = Stress(load)
        self.info = describe(load)
        self.error: str | None = None
        self.dropped = 0
        self._state = _warm(self.stress, warm_up)
        self._last = time.monotonic()

    def drain_records(self) -> list[Record]:
        now = time.monotonic()
        self.stress.run(min(0.2, now - self._last))
        self._last = now
        return self.stress.drain()

    async def snapshot(self) -> dict[str, Any]:
        return self._state.snapshot()


class Playback:
    """A source that plays records made beforehand, in real time and pickled, as they would come over a pipe."""

    def __init__(self, load: Load, seconds: float, warm_up: float = 8.0) -> None:
        self.stress = Stress(load)
        self.info = describe(load)
        self.error: str | None = None
        self.dropped = 0
        self._state = _warm(self.stress, warm_up)
        self._batches: deque[tuple[float, bytes]] = deque()
        begin = self.stress.now
        while self.stress.now - begin < seconds:
            self.stress.run(BATCH_SECONDS)
            self._batches.append((self.stress.now - begin, pickle.dumps(self.stress.drain())))
        self._begin: float | None = None

    def drain_records(self) -> list[Record]:
        now = time.monotonic()
        self._begin = self._begin or now
        records: list[Record] = []
        while self._batches and self._batches[0][0] <= now - self._begin:
            records += pickle.loads(self._batches.popleft()[1])
        return records

    async def snapshot(self) -> dict[str, Any]:
        return self._state.snapshot()


def describe(load: Load) -> dict[str, Any]:
    """What a source says about its engine."""
    return {
        "model": "stress", "device": "make-believe", "dtype": "none", "num_blocks": load.blocks,
        "block_size": load.block_size,
    }  # fmt: skip


def _warm(stress: Stress, seconds: float) -> State:
    load = stress.load
    state = State(load.blocks + 1, load.block_size, load.budget, load.rows)
    for _ in range(round(seconds / 0.25)):
        stress.run(0.25)
        state.apply_all(stress.drain())
    return state


class StressApp(App[None]):
    """Two screens, and what their bars ask of an application."""

    ENABLE_COMMAND_PALETTE = False
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
        self, source: LiveStress | Playback, fps: float = 20.0, seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`fps` 0: time passes only when somebody calls `tick`."""
        super().__init__()
        self.clock = clock
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = THEMES[0].name
        self.source = source
        self.view = View()
        self.view.ids_to_text = source.stress.words.decode
        self.view.group_names = source.stress.group_names
        self.feed = Feed(source, self.view, clock)  # type: ignore[arg-type]
        self.fps = fps
        self.seconds = seconds  # measured, then the application ends; 0: it stays
        self.figures: dict[str, Any] = {}
        self.story = ""
        self.settings = SimpleNamespace(keys={}, ascii=False)
        self.commands = SimpleNamespace(run=self._run)
        self.session = None
        self.thrift = Thrift()
        self._cpu: list[float] = []  # seconds of CPU time for each frame's fold and paint
        self._backlog = 0

    async def on_mount(self) -> None:
        await self.feed.sync()
        gc.collect()
        gc.set_threshold(20_000, 20, 100)  # as the application does
        gc.freeze()
        if self.fps:
            self.set_interval(1 / self.fps, self.tick)
        if self.seconds:
            self.set_timer(3.0, self._begin)

    def _begin(self) -> None:
        self._cpu.clear()
        self._start = (time.monotonic(), time.process_time(), self.view.steps.last, self.view.live.state.seq)
        self.set_timer(self.seconds, self._end)

    def _end(self) -> None:
        wall = time.monotonic() - self._start[0]
        cpu = sorted(self._cpu)
        self.figures = {
            "seconds": round(wall, 2),
            "cpu_percent": round(100 * (time.process_time() - self._start[1]) / wall, 1),
            "steps_per_s": round((self.view.steps.last - self._start[2]) / wall),
            "records_per_s": round((self.view.live.state.seq - self._start[3]) / wall),
            "frames_per_s": round(len(cpu) / wall, 1),
            "frame_ms_p50": round(1e3 * cpu[len(cpu) // 2], 2),
            "frame_ms_p99": round(1e3 * cpu[int(len(cpu) * 0.99)], 2),
            "backlog_max": self._backlog,
            "requests": len(self.view.live.state.requests),
            "nodes": len(self.view.live.state.nodes) - 1,
            "blocks": self.view.live.total,
            "dropped": self.feed.dropped,
        }
        self.exit()

    def tick(self) -> None:
        """One frame: drain, fold, paint."""
        begin = time.process_time()
        self.feed.pump()
        if self.is_headless or self.thrift.draws():
            if not self.feed.frozen:
                self.view.group_names = dict(self.source.stress.group_names)
                self.view.frame(self.clock())
            if isinstance(self.screen, (InspectScreen, LectureScreen)):
                self.screen.paint(self.view)
        self._cpu.append(time.process_time() - begin)
        self._backlog = max(self._backlog, self.feed.backlog)

    def _run(self, action: str) -> None:
        if action == "step":
            self.action_step()
        elif action in self.MODES:
            self.switch_mode(action)

    def action_freeze(self) -> None:
        self.feed.frozen = not self.feed.frozen

    def action_gate(self) -> None:
        self.source.stress.gate(not self.source.stress.closed)

    def action_step(self) -> None:
        if not self.source.stress.closed:
            self.source.stress.gate(True, "stepping")
        self.source.stress.run_steps(1)

    def action_travel(self, by: int) -> None:
        self.view.travel(by)

    def action_theme(self) -> None:
        names = [theme.name for theme in THEMES]
        self.theme = names[(names.index(self.theme) + 1) % len(names)]


def measure(load: str, size: tuple[int, int], fps: float, seconds: float) -> dict[str, Any]:
    """Run the application in a terminal of its own and return its figures, with the bytes it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        arguments = ["--load", load, "--fps", str(fps), "--seconds", str(seconds), "--out", str(out)]
        arrived = run_in_terminal(["minitui.stress", *arguments], size)
        figures: dict[str, Any] = json.loads(out.read_text())
        end = arrived[-1][0]
        sent = sum(n for at, n in arrived if at > end - seconds)
        return {
            "size": f"{size[0]}x{size[1]}", "load": load, **figures, "kb_per_s": round(sent / seconds / 1e3),
            "additions_per_us": loop_speed(),
        }  # fmt: skip


def loop_speed() -> float:
    """How many additions a Python loop does in a microsecond of CPU time: machines, and hours, differ by much."""
    begin, total = time.process_time(), 0
    for i in range(3_000_000):
        total += i
    return round(3.0 / (time.process_time() - begin), 1)


def main() -> None:
    """The command line: look, or measure."""
    parser = argparse.ArgumentParser(prog="python -m minitui.stress", description=__doc__)
    parser.add_argument("--load", choices=sorted(LOADS), default="classroom")
    parser.add_argument("--fps", type=float, default=20.0)
    parser.add_argument("--size", default="160x48", help="columns x rows of the terminal to measure in")
    parser.add_argument("--measure", action="store_true", help="measure in a terminal of its own and print the figures")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to measure")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        columns, rows = (int(n) for n in options.size.split("x"))
        for name, value in measure(options.load, (columns, rows), options.fps, options.seconds).items():
            print(f"{name:18}{value}")
        return
    load = LOADS[options.load]
    if options.out:
        app = StressApp(Playback(load, options.seconds + 5.0), options.fps, options.seconds)
        app.run()
        Path(options.out).write_text(json.dumps(app.figures))
    else:
        StressApp(LiveStress(load), options.fps).run()
