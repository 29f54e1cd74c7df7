"""The times of KV blocks in /metrics: lifetimes, idle times before evictions, and gaps between uses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.core.engine import Engine
from engine.core.scheduler import SchedulerConfig
from engine.info import EngineInfo
from engine.metrics.metrics import Metrics
from engine.params import SamplingParams
from engine.trace.records import Record, RecordLog
from engine.trace.state import State
from minitui.server.telemetry.broadcast import Broadcast
from tests.support.simulation import SimulatedRunner, simulated
from tests.support.waiting import until

LIFETIME, IDLE, GAP = "kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds"
SHARED = [*range(1, 9)]  # two blocks


def figures(metrics: Metrics, name: str) -> tuple[int, float]:
    """Returns the count and the sum of a histogram on the page."""
    values = dict(line.split(" ", 1) for line in metrics.page("m").splitlines() if not line.startswith("#"))
    labels = '{model_name="m",engine="0"}'
    return int(values[f"vllm:{name}_count{labels}"]), float(values[f"vllm:{name}_sum{labels}"])


class Played:
    """A real scheduler over 8 blocks of 4 tokens, with a clock that the test sets, and its metrics."""

    def __init__(self, budget: int = 64) -> None:
        self.now = 0.0
        log = RecordLog(clock=lambda: self.now)
        config = SchedulerConfig(budget, 4, max_model_len=32)
        self.engine = simulated(Engine(SimulatedRunner(9, 4, 4), config, log=log))
        self.metrics, self.state = Metrics(), State.from_snapshot(self.engine.snapshot())

    def run(self, prompt: list[int], begin: float, end: float) -> list[Record]:
        """Run a request for two tokens; return its records. Its first step is at `begin`, the others are at `end`."""
        self.now = begin
        self.engine.add_request(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
        self.engine.step()
        self.now = end
        while self.engine.has_work:
            self.engine.step()
        return self.engine.log.drain()

    def reply(self, prompt: list[int], begin: float, end: float) -> None:
        """Run a request as `run` does, and measure it."""
        self.measure(self.run(prompt, begin, end))

    def measure(self, records: list[Record]) -> None:
        for record in records:
            self.metrics.observe(record, self.state)
            self.state.apply(record)

    def figures(self, name: str) -> tuple[int, float]:
        return figures(self.metrics, name)


@pytest.fixture
def played() -> Played:
    return Played()


def test_evicted_blocks_have_a_lifetime_and_an_idle_time(played: Played) -> None:
    played.reply([*SHARED, 20], 10, 12)
    played.reply([*SHARED, 21], 30, 35)
    assert played.figures(GAP) == (2, 2 * 20), "both shared blocks, from 10 s to 30 s"
    assert played.figures(LIFETIME) == played.figures(IDLE) == (0, 0)
    played.reply([*range(20, 50)], 60, 61)  # needs all 8 blocks
    assert played.figures(LIFETIME) == (2, 2 * (60 - 10))
    assert played.figures(IDLE) == (2, 2 * (60 - 35))
    assert played.figures(GAP) == (2, 2 * 20)


def test_a_block_that_is_allocated_again_has_a_new_lifetime(played: Played) -> None:
    played.reply([*range(1, 29)], 10, 10)
    played.reply([*range(28, 0, -1)], 20, 20)
    assert played.figures(LIFETIME) == (7, 7 * (20 - 10))
    played.reply([*range(1, 29)], 50, 50)
    assert played.figures(LIFETIME) == (14, 7 * (20 - 10) + 7 * (50 - 20))


def test_a_cache_cleared_by_a_user_has_no_evictions(played: Played) -> None:
    played.reply([*SHARED, 20], 10, 12)
    assert played.engine.clear_cache() > 0
    played.measure(played.engine.log.drain())
    assert played.figures(LIFETIME) == played.figures(IDLE) == (0, 0)


class Client:
    """The engine client of a broadcast: its records are those of `played`."""

    def __init__(self, played: Played) -> None:
        self.engine = played.engine
        self.info = EngineInfo()
        self.records: list[Record] = []

    def drain_records(self) -> list[Record]:
        records, self.records = self.records, []
        return records

    async def snapshot(self) -> dict[str, Any]:
        return self.engine.snapshot()


@pytest.mark.parametrize("lost", [False, True])
def test_lost_records_end_all_known_times(played: Played, lost: bool) -> None:
    async def broadcast() -> None:
        client: Any = Client(played)
        source = Broadcast(played.metrics)
        await source.begin(client)
        try:
            for begin, prompt in ((10, [*SHARED, 20]), (20, [30]), (40, [*range(20, 50)])):
                records = played.run(prompt, begin, begin)
                client.records = records[1:] if lost and begin == 20 else records
                await until(lambda: source.state is not None and source.state.seq >= records[-1][0])  # noqa: B023
        finally:
            await source.end()

    asyncio.run(broadcast())
    assert played.figures(LIFETIME) == played.figures(IDLE) == ((0, 0) if lost else (2, 2 * (40 - 10)))
