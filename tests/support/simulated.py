"""A source of simulated records without a process of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from engine.trace.records import Record
from minitui.dev.simulator import Load, Stress
from minitui.dev.simulator_process import SimulatedSource, warmed


class LiveStress(SimulatedSource):
    """Simulated records made in this process; time passes when records are drained."""

    def __init__(self, load: Load, warm_up: float = 8.0) -> None:
        super().__init__(load)
        self.stress = Stress(load)
        self._state = warmed(self.stress, warm_up)
        self._last = time.monotonic()

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
