"""Runs an engine step by step, and reads its records: the part of a stage that needs no chats. `beat` scales only the
pauses in which the user reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from engine.core.gate import RUNNING
from engine.errors import EngineError
from engine.trace.state import State
from engine.trace.views import RequestView
from minitui.sources.base import Source
from minitui.teaching.figures import Figures
from minitui.viewmodel.explain.timing import Timings
from minitui.viewmodel.history.events import Event
from minitui.viewmodel.history.steps import StepRow
from minitui.viewmodel.updater import Updater
from minitui.viewmodel.view import View

WAIT_SECONDS = 30.0  # a longer wait fails
MAX_STEPS = 2000  # limit of `step_until`
PACES = (1, 2, 5, 10, 20, 50, 100, 200)  # factors of slow motion
HELD_TICK = 0.05  # seconds between two checks of `held`


@dataclass
class Driver:
    """An engine and its view."""

    source: Source
    feed: Updater  # folds the records into the view
    _: KW_ONLY
    beat: float = 1.0  # the length of pauses is multiplied by this
    held: Callable[[], bool] = lambda: False  # True while the user freezes the view: pauses and waits do not end
    hurried: bool = False  # True: pauses end at once, because the user has skipped them
    by_hand: bool = False  # True: a pause does not end by itself, only by `next_picture`
    _pictures: int = 0  # how often `next_picture` was called
    _began: tuple[int, int] = (-1, 0)  # numbers of the last step and the last record before `begin_count`

    # ---- reading

    @property
    def view(self) -> View:
        return self.feed.view

    def state(self) -> State:
        """Returns the engine's state, computed from the records received so far."""
        self.feed.pump()
        return self.view.history.live.state

    def youngest(self) -> RequestView:
        """Returns the newest request that is running or waiting."""
        requests = self.state().requests
        return requests[max(requests)]

    def last_row(self) -> StepRow:
        """Returns the last step."""
        self.state()
        row = self.view.history.steps.get(self.view.history.steps.last)
        assert row is not None
        return row

    def rows(self) -> list[StepRow]:
        """Returns the steps since `begin_count`."""
        self.state()
        steps = self.view.history.steps
        return [row for step in range(self._began[0] + 1, steps.last + 1) if (row := steps.get(step)) is not None]

    def timings(self) -> Timings:
        """Returns the figures of the timings panel, up to the last step of a paused engine."""
        self.state()
        self.view.frame(time.monotonic())
        return self.view.timings

    def begin_count(self) -> None:
        """Makes `figures` and `events` count from now on."""
        self._began = (self.state().step, self.state().seq)

    def events(self, kind: str) -> list[Event]:
        """Returns the events of one kind (minitui.viewmodel.history.events.KINDS) since `begin_count`, oldest first."""
        self.state()
        return [event for event in self.view.history.events.since(self._began[1] + 1) if event.kind == kind]

    def figures(self) -> Figures:
        """Returns the figures of the steps since `begin_count`."""
        return Figures.of(self.rows(), self.events("hit"))

    # ---- pauses and waits

    async def pause(
        self, seconds: float, done: Callable[[], bool] = lambda: False, tell: Callable[[float], None] = lambda _: None
    ) -> None:
        """Waits for the user to read, or until `done()`. The wait does not end while the view is frozen (space).
        `tell` is called again and again with the seconds that are left."""
        left, seen = seconds * self.beat, self._pictures
        await asyncio.sleep(0)
        while ((left > 0 and not self.hurried and self._pictures == seen) or self.held()) and not done():
            began = time.monotonic()
            tell(left)
            await asyncio.sleep(min(left, HELD_TICK) if left > 0 else HELD_TICK)
            if not self.held() and not self.by_hand:
                left -= time.monotonic() - began

    def next_picture(self) -> None:
        """Ends the current pause. From now on, each pause lasts until the next call."""
        self.by_hand = True
        self._pictures += 1

    async def until(self, what: str, condition: Callable[[], Any]) -> None:
        """Waits until `condition()` is true. Raises EngineError, which names `what`, after WAIT_SECONDS."""
        end = time.monotonic() + WAIT_SECONDS
        interval = 0.001  # seconds: most waits are for a step of a few milliseconds
        while not condition():
            if self.source.error:
                raise EngineError(self.source.error)
            if self.held():  # a frozen view folds no records
                end = time.monotonic() + WAIT_SECONDS
            if time.monotonic() > end:
                raise EngineError(f"gave up after waiting {WAIT_SECONDS:.0f} s for {what}")
            await asyncio.sleep(interval)
            interval = min(1.5 * interval, 0.01)

    async def settle(self) -> None:
        """Ends a run: waits until the records of all its requests and steps have arrived. The requests have ended."""
        steps = self.view.history.steps
        await self.until("the last records", lambda: not self.state().requests and steps.committed == steps.last)
        self.view.run_end = steps.committed

    # ---- steps

    async def gate(self) -> None:
        """Pauses the engine between two steps."""
        await self.source.control("pause")
        await self.until("the engine to stop", lambda: self.state().gate == "closed")

    async def open(self) -> None:
        """Lets the engine run again."""
        await self.pause(0)
        await self.source.control("resume")

    async def step(self, n: int = 1, seconds: float = 0.0) -> None:
        """Runs `n` steps, with a pause of `seconds` after each. Stops earlier if no request is left."""
        for _ in range(n):
            state = self.state()
            if not state.requests:
                return
            last = state.step
            await self.pause(0)
            await self.source.control("step", n=1)
            await self.until(f"step {last + 1}", partial(self._ended_after, last))
            await self.pause(seconds)

    async def run_steps(self, n: int) -> None:
        """Runs `n` steps of running requests one after the other, so that their times are those of a busy engine."""
        last = self.state().step
        await self.source.control("step", n=n)
        await self.until(f"step {last + n}", partial(self._ended_after, last + n - 1))

    async def watch(self, n: int, seconds: float) -> None:
        """Runs `n` steps with a pause of `seconds` after each. Without pauses, runs none: the user sees no steps."""
        if self.beat:
            await self.step(n, seconds)

    def _ended_after(self, last: int) -> bool:
        state = self.state()
        row = self.view.history.steps.get(state.step) if state.step > last else None
        return row is not None and row.end_seq > 0

    async def step_until(self, what: str, condition: Callable[[], Any], seconds: float = 0.0) -> None:
        """Runs single steps until `condition()` is true. Raises EngineError, which names `what`, if it stays false."""
        for _ in range(MAX_STEPS):
            if condition():
                return
            if not self.state().requests:
                break
            await self.step(1, seconds)
        if not condition():
            raise EngineError(f"{what} did not happen")

    async def run_until(self, event: str) -> str:
        """Runs until an event (a key of engine.core.gate.EVENTS) happens; returns why the engine paused."""
        seen = len(self._stops())
        await self.pause(0)
        await self.source.control("run_until", predicate={"event": event})
        await self.until(f"the {event}", lambda: len(self._stops()) > seen)
        return str(self._stops()[-1].record.reason)

    def _stops(self) -> list[Any]:
        """Returns the events in which `run_until` closed the gate."""
        self.feed.pump()
        return [
            event for event in self.view.history.events.since(0)
            if event.record.kind == "gate" and event.record.state == "closed"
            and not str(event.record.reason).startswith((RUNNING, "paused", "stepping"))
        ]

    async def slow(self, seconds: float) -> None:
        """Sets slow motion so that a typical recent step would take about `seconds`; full speed if `beat` is 0."""
        last = self.view.history.steps.last
        rows = [self.view.history.steps.get(step) for step in range(max(0, last - 8), last + 1)]
        recent = [row.took_ms for row in rows if row is not None and row.took_ms]
        typical = sorted(recent)[len(recent) // 2] / 1e3 if recent else 0.01
        wanted = seconds * self.beat / typical
        factor = max((pace for pace in PACES if pace <= wanted), default=1)
        await self.source.control("pace", factor=factor)
