"""Measures the application: folding a record, drawing Inspect and Chat, and memory over hours.

    python -m minitui.dev.bench --app [--seconds 15] [--hours 2] [--json]

Inspect and Chat run in pseudo-terminals of 160 × 48. Inspect shows simulated chats, of which 64 decode at any time.
Chat shows eight chats that the bundled model answers. The hours are simulated, faster than real time.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from engine.trace.records import Record
from engine.trace.state import State
from minitui.dev.simulator import CLASSROOM, STEADY, Load, Stress
from minitui.viewmodel.model import View

SIZE = (160, 48)
GOALS = {"inspect": 0.15, "chat": 0.25}  # the most processor time, as a share of a core
SLOW_ENGINE = replace(CLASSROOM, step_ms=25.0)  # an hour has 100,000 steps and half a million records
FOLDED_SECONDS, FOLDS = 20.0, 5  # seconds of records; how often they are folded
SLOW, QUICK = 12.0, 25.0  # the lowest and highest additions per microsecond that one machine reached
_NOT_DATA = (ModuleType, type, FunctionType, BuiltinFunctionType, MethodType)


@dataclass(frozen=True)
class FoldCost:
    """Microseconds to fold a record: into the engine's State alone, and into the View with its histories."""

    records: int
    state_us: float
    view_us: float


def measure_app(say: Callable[[str], Any], seconds: float, hours: float) -> dict[str, Any]:
    """Measures everything; passes each line to `say` and returns the data."""
    from minitui.dev.latency import measure as chat
    from minitui.dev.simulator_app import loop_speed
    from minitui.dev.simulator_app import measure as inspect

    def share(name: str, found: float) -> str:
        verdict = "reached" if found <= GOALS[name] else "missed"
        return f"{found:.1%} of a core, goal {GOALS[name]:.0%} {verdict}"

    say(f"this machine does {loop_speed():.0f} additions per microsecond (usual: {SLOW:.0f} to {QUICK:.0f})")
    fold = fold_cost(STEADY)
    say(f"folding  {fold.view_us:.2f} us per record; the engine's state alone {fold.state_us:.2f}")
    found = inspect("steady", SIZE, 20.0, seconds)
    say(
        f"inspect  {share('inspect', found['cpu_percent'] / 100)} · {found['requests']} requests, "
        f"{found['steps_per_s']} steps and {found['records_per_s']:,} records a second, "
        f"frames of {found['frame_ms_p50']} ms (p99 {found['frame_ms_p99']}), {found['kb_per_s']} KB/s, "
        f"{found['additions_per_us']:.0f} additions per microsecond"
    )
    chats = chat(8, 1500, seconds, *SIZE, [])
    say(
        f"chat     {share('chat', chats.core)} · 8 answers at once, keys echoed within {chats.p50} ms "
        f"(p95 {chats.p95}), {chats.bytes_per_second / 1e3:,.0f} KB/s"
    )
    sizes = sizes_over(SLOW_ENGINE, hours)
    for hour, size in sizes:
        say(f"memory   {size / 1e6:6.1f} MB of history after {hour:4.1f} hours")
    return {
        "fold": vars(fold), "inspect": found, "chat": vars(chats),
        "memory": [{"hours": hour, "bytes": size} for hour, size in sizes],
    }  # fmt: skip


def fold_cost(load: Load, seconds: float = FOLDED_SECONDS, folds: int = FOLDS) -> FoldCost:
    """Returns the least cost of several folds of the same records. The records are folded in frames of 50 ms."""
    stress = Stress(load)
    stress.run(8.0)  # until all chats have started
    start = blank(load)
    start.apply_all(stress.drain())
    frames: list[list[Record]] = []
    for _ in range(round(seconds * 20)):
        stress.run(0.05)
        frames.append(stress.drain())
    records = sum(map(len, frames))
    state_s, view_s = [], []
    for _ in range(folds):
        state, view = start.copy(), View()
        view.reset(start.snapshot())
        gc.collect()
        gc.disable()
        try:
            began = time.perf_counter()
            for frame in frames:
                state.apply_all(frame)
            between = time.perf_counter()
            for i, frame in enumerate(frames):
                view.fold(frame, i / 20)
            state_s.append(between - began)
            view_s.append(time.perf_counter() - between)
        finally:
            gc.enable()
    return FoldCost(records, min(state_s) / records * 1e6, min(view_s) / records * 1e6)


def sizes_over(load: Load, hours: float, marks: int = 4) -> list[tuple[float, int]]:
    """Returns (hours, bytes of the view) at `marks` evenly spaced times of a simulated run."""
    stress, view = Stress(load), View()
    view.ids_to_text = stress.words.decode
    view.reset(blank(load).snapshot())
    sizes = []
    for mark in range(1, marks + 1):
        end = 3600 * hours * mark / marks
        while stress.now < end:
            stress.run(0.5)
            view.fold(stress.drain(), stress.now)
            view.frame(stress.now)
        sizes.append((hours * mark / marks, bytes_reached(view)))
    return sizes


def blank(load: Load) -> State:
    """Returns the state before the first request."""
    return State(load.blocks + 1, load.block_size, load.budget, load.rows)


def bytes_reached(*roots: Any) -> int:
    """Returns the bytes of all objects that are reachable from `roots`, without modules, types and functions."""
    seen: set[int] = set()
    unvisited = list(roots)
    total = 0
    while unvisited:
        item = unvisited.pop()
        if id(item) in seen or isinstance(item, _NOT_DATA):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        unvisited += gc.get_referents(item)
    return total
