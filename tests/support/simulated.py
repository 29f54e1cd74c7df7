"""A source of simulated records without a process of its own."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from engine.process.heartbeat import Condition
from engine.trace.records import Packet, Record, packets
from minitui.dev.simulator import Load, Stress
from minitui.dev.simulator_process import describe, warmed


class LiveStress:
    """Simulated records made in this process; time passes when records are drained."""

    def __init__(self, load: Load, warm_up: float = 8.0) -> None:
        self.stress = Stress(load)
        self.info = describe(load)
        self.error: str | None = None
        self.condition, self.connection = Condition(), ""
        self.dropped = 0
        self.decode = self.stress.words.decode
        self.made: deque[tuple[int, float]] = deque()
        self._state = warmed(self.stress, warm_up)
        self._last = time.monotonic()

    @property
    def names(self) -> dict[str, str]:
        return dict(self.stress.group_names)

    def gate(self) -> None:
        self.stress.gate(not self.stress.closed)

    def step(self) -> None:
        if not self.stress.closed:
            self.stress.gate(True, "stepping")
        self.stress.run_steps(1)

    def close(self) -> None:
        """Does nothing: there is no process."""

    def drain_packets(self) -> list[Packet]:
        return packets(self.drain_records())

    def drain_records(self) -> list[Record]:
        now = time.monotonic()
        self.stress.run(min(0.2, now - self._last))
        self._last = now
        return self.stress.drain()

    async def snapshot(self) -> dict[str, Any]:
        return self._state.snapshot()

    def recorded(self) -> None:
        """There is no recording."""
