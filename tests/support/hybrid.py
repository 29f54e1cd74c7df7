"""A view of the real scheduler over a simulated device, for a model with full attention, a window and states."""

from __future__ import annotations

from engine.core.engine import Engine
from engine.core.request import Request
from engine.core.scheduler import SchedulerConfig
from engine.params import SamplingParams
from engine.trace.records import Record
from engine.trace.side_pool import SideGroup
from minitui.viewmodel.view import View
from tests.support.simulation import SimulatedRunner, simulated

WINDOW = SideGroup("window 12", "window", 13, 12)
STATES = SideGroup("state", "state", 11)


class Hybrid:
    """An engine with blocks of 4 tokens and checkpoints after every 16 tokens, and the view of its records."""

    def __init__(self, *groups: SideGroup, blocks: int = 60) -> None:
        self.runner = SimulatedRunner(blocks + 1, 4, 4, groups=groups or (WINDOW, STATES))
        config = SchedulerConfig(64, 4, max_model_len=4096, checkpoint_interval=16)
        self.engine = simulated(Engine(self.runner, config, eos_ids=frozenset({49})))
        self.view = View()
        self.view.texts.ids_to_text = lambda ids: " ".join(f"w{id}" for id in ids)
        self.view.reset(self.engine.snapshot())
        self.snapshot = self.engine.snapshot()
        self.records: list[Record] = []
        self.now = 0.0

    def add(self, ids: list[int], tokens: int = 4) -> Request:
        return self.engine.add_request(ids, SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True))

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.engine.step()
            self.fold()

    def ask(self, ids: list[int], tokens: int = 4) -> Request:
        """Run a request to its end."""
        request = self.add(ids, tokens)
        while self.engine.has_work:
            self.step()
        return request

    def fold(self) -> None:
        records = self.engine.log.drain()
        self.records += records
        self.now += 0.05
        self.view.fold(records, self.now)
        self.view.frame(self.now)
