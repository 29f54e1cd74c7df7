"""python -m minitui.dev.bench --attached: who watches when, what is compared, and what is said about it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import EngineError
from minitui.bench.rows import random_prompts
from minitui.bench.watching import mean_interval
from minitui.chat.sessions import Chats
from minitui.dev import bench_attached
from minitui.settings import Settings
from minitui.tui.screens.inspect import InspectScreen
from tests.support.fake_client import FakeSource


async def test_only_who_is_attached_sees_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_attached, "SETTLE_S", 0.0)
    source = FakeSource(speed=0.002)
    numbers = bench_attached.Numbers()
    app = bench_attached.MeasuredApp(source, Chats(source), Settings(), system="", load_codec=lambda info: numbers)
    async with app.run_test(size=(100, 40)) as pilot:
        while not app.feed.live:
            await pilot.pause(0.01)
        app.switch_mode("inspect")
        for seed, arm in enumerate(bench_attached.ARMS):
            before, step = app.view.live.state.step, source.engine.scheduler.step
            run = await bench_attached._run(app, arm, random_prompts([8, 8], 850, seed), tokens=12)
            assert run["step_ms"] > 0 and source.engine.scheduler.step - step == 12
            assert source.engine.log.enabled == (arm != "off")
            if arm != "attached":
                await pilot.pause(0.06)  # a frame goes by
                assert app.view.live.state.step == before and run["shown"] == 0
                assert app.feed.backlog == 0, "what nobody looks at must not pile up"
        while app.view.live.state.step < source.engine.scheduler.step:  # it goes on looking
            await pilot.pause(0.02)
        assert isinstance(app.screen, InspectScreen) and app.feed.dropped == 0
        assert app.view.live.state.snapshot() == source.engine.snapshot()


async def test_the_arms_take_turns_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    async def run(app: Any, arm: str, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        order.append(arm)
        return {"step_ms": float(len(order)), "core": 0.5, "shown": 1.0}

    monkeypatch.setattr(bench_attached, "_run", run)
    source = FakeSource()
    await source.start(lambda progress: None)
    numbers = bench_attached.Numbers()
    app = bench_attached.MeasuredApp(source, Chats(source), Settings(), system="", load_codec=lambda info: numbers)
    app.switch_mode = lambda mode: None  # type: ignore[assignment, method-assign, return-value]
    found = await bench_attached.take_turns(app, rows=2, tokens=4, turns=6)
    await source.close()
    turns = [tuple(order[i : i + 3]) for i in range(3, len(order), 3)]
    assert len(turns) == len(set(turns)) == 6, "each order once: none is always first, or after the same"
    assert all(len(found["step_ms"][arm]) == 6 for arm in bench_attached.ARMS)
    assert min(min(times) for times in found["step_ms"].values()) == 4.0, "the warm-up is not counted"


def test_the_slowdown_is_of_the_same_turn_and_small_machines_say_so() -> None:
    figures = {
        "step_ms": {"off": [1.0, 2.0, 4.0], "records": [1.0, 2.0, 4.0], "attached": [1.01, 2.04, 4.12]},
        "core": {"off": 0.1, "records": 0.1, "attached": 0.3},
    }
    report = {"rows": 64, "turns": 3, "cores": 16, "engine_threads": 1, **bench_attached.compare(figures)}
    mean, half = report["slowdown"]["attached"], report["interval"]["attached"]
    assert mean == pytest.approx(0.02) and half == pytest.approx(4.303 * 0.01 / 3**0.5, rel=0.05)
    assert report["slowdown"]["records"] == report["interval"]["records"] == 0.0
    assert "+2.00% (95 % interval" in bench_attached.line_of(report) and "too few" not in bench_attached.line_of(report)
    assert "2 cores: too few" in bench_attached.line_of({**report, "cores": 2})


def test_the_interval_is_students() -> None:
    for n, t in ((5, 2.7764), (9, 2.3060), (21, 2.0860)):
        values = [(-1.0) ** i for i in range(n)]
        assert mean_interval(values)[1] == pytest.approx(t * statistics.stdev(values) / n**0.5, rel=0.003)


def test_an_engine_that_cannot_start_is_told_from_behind_the_terminal(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"could not start: .* is not a directory"):
        bench_attached.attached(EngineConfig(str(tmp_path / "no-such-model")), rows=2, tokens=4, turns=1)
