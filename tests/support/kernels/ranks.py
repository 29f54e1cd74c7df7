"""Several ranks in one process, each in a thread: what they compute is that of processes, and they start at once."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import choose_parts
from engine.config import EngineConfig
from engine.core.step import StepPlan
from engine.errors import DeviceLost, EngineError
from engine.model.config import ModelConfig
from engine.model.group import CollectiveTime
from engine.parallel.group import Ranks, joined, own_rows
from engine.worker import rank_runner as parallel_runner
from engine.worker.runner import Runner
from engine.worker.weights import quantised

WAIT_S = 20.0


def run_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the ranks of engines threads of this process."""
    monkeypatch.setattr(parallel_runner, "Workers", ThreadWorkers)
    monkeypatch.setattr(parallel_runner, "Ranks", ThreadRanks)


@pytest.fixture
def ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU may compute 8-bit floats too, by the products that specify those of a GPU; ranks are threads."""
    monkeypatch.setattr(quantised, "check", lambda *_: None)
    run_in_threads(monkeypatch)


class Meeting:
    """Where the threads exchange tensors. Broken for all when one of them fails."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self.given: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """What every rank gave, once all have."""
        self.given[rank] = value
        self.barrier.wait()
        everything = list(self.given)
        self.barrier.wait()
        return everything


class ThreadRanks(Ranks):
    """Ranks that are threads; the store that `connect` gets is a Meeting."""

    collectives = 0

    def connect(self, store: Meeting) -> None:
        self._meeting = store

    def open_mailbox(self, hidden: int, dtype: torch.dtype) -> str:
        return ""

    def close(self) -> None:
        pass

    def _exchange(self, value: Any) -> list[Any]:
        self.collectives += 1
        return self._meeting.exchange(self.rank, value)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x.clone())).sum(0)

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.sum(own_rows(token_ids, table, self.rank))

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        return joined(self._exchange(logits.clone()), self.vocab_size)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._exchange(x.clone())[0])

    def least(self, number: int) -> int:
        return min(self._exchange(number))

    def take_time(self) -> CollectiveTime | None:
        return CollectiveTime(self.size)


class ThreadWorkers:
    """In the place of engine.parallel.processes.Workers."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, directory: Path | None, on_lost: Callable[[str], None] | None
    ) -> None:
        self.size = config.tensor_parallel_size
        self.meeting = Meeting(self.size)
        self.runners: dict[int, Any] = {}
        self.failure = ""
        self.on_lost = on_lost
        self._plans = [queue.SimpleQueue[bytes | None]() for _ in range(self.size - 1)]
        self._ready = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._run, args=(rank, model, config, directory), daemon=True)
            for rank in range(1, self.size)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, rank: int, model: ModelConfig, config: EngineConfig, directory: Path | None) -> None:
        try:
            group = parallel_runner.make_group(model, config, rank, lambda: self.meeting)
            runner = Runner(model, config, choose_parts(model, config), directory, group=group)
            self.runners[rank] = runner
            self._ready.release()
            while (message := self._plans[rank - 1].get()) is not None:
                runner.launch(pickle.loads(message), {})
        except Exception as error:
            self.failure = self.failure or f"rank {rank} of {self.size} failed: {error}"
            self._ready.release()
            self.meeting.barrier.abort()

    def meet(self) -> Meeting:
        return self.meeting

    def await_ready(self) -> None:
        for _ in self._threads:
            self._ready.acquire(timeout=WAIT_S)
        if self.failure:
            raise EngineError(self.failure)

    def send(self, plan: StepPlan) -> None:
        if self.failure:
            raise DeviceLost(self.failure)
        for plans in self._plans:
            plans.put(pickle.dumps(plan))

    def cause(self) -> str:
        return self.failure

    def close(self) -> None:
        for plans in self._plans:
            plans.put(None)
        for thread in self._threads:
            thread.join(timeout=WAIT_S)
