"""Panels, and screens over simulated records whose time passes by the test's word, not by the clock's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from minitui.dev.simulator import Load
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.rows import plain
from minitui.viewmodel.view import View
from tests.support.records.simulated import LiveStress, StressApp


def body(panel: LinePanel, view: View, width: int, height: int) -> list[str]:
    """Returns the panel's rows as text, without its frame."""
    return [plain(row) for row in panel.picture(view, width, height).rows]


class Steady(LiveStress):
    """Simulated records that come when the test wants them."""

    def drain_records(self) -> list[Any]:
        return self.stress.drain()


@asynccontextmanager
async def simulated(
    load: Load, size: tuple[int, int], warm_up: float = 4.0, first: int = 20, key: str = ""
) -> AsyncIterator[tuple[StressApp, Any, Callable[..., Awaitable[None]]]]:
    """The application, its pilot, and a function that draws frames of 50 ms. `first`: frames so far, after `key`;
    without a key, there are more until a request runs."""
    now = 1000.0
    app = StressApp(Steady(load, warm_up), clock=lambda: now)

    async def frames(n: int = 1) -> None:
        nonlocal now
        for _ in range(n):
            now += 0.05
            app.source.stress.run(0.05)
            app.tick()
        await pilot.pause()

    async with app.run_test(size=size) as pilot:
        await pilot.press(*[key] * bool(key))
        await pilot.pause()
        await frames(first)
        while not key and not app.source.stress.scheduler.running:
            await frames()
        yield app, pilot, frames
