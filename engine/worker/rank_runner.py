"""The runner of a rank: engine/worker/runner.py on a shard of the model, with collectives where the shards meet.

Every rank runs the same plans over the same rows and blocks, so every rank's KV cache holds its heads of the same
tokens. The logits are gathered everywhere, because all-gather is what the libraries do best, and the draw is rank 0's
alone: grammars, penalties and seeds live where the scheduler does, and no other rank has to come to the same result
by luck. What was drawn is broadcast into every rank's last tokens, so a step may be launched before the host has seen
the ids of the one before.

With CUDA graphs (engine/worker/rank_graphs.py) all ranks draw what needs nothing but a row's settings, each from its
piece of the vocabulary; the settings come with the plan, and the noise is a function of seed, position and token."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig
from engine.core.request import Grammar
from engine.core.step import StepPlan, StepResult
from engine.errors import DeviceLost, EngineError
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.weights import Slot
from engine.parallel.group import Ranks
from engine.parallel.processes import Workers, device_of
from engine.parallel.shards import check, shard_config, shard_slots
from engine.progress import Progress
from engine.worker.inputs import Inputs
from engine.worker.launch import Launched
from engine.worker.limits import resolve
from engine.worker.runner import Runner
from engine.worker.sampler import Drawn


class RankRunner(Runner):
    """Any rank's."""

    group: Ranks

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        model_dir: Path | None,
        on_progress: Progress | None,
        rank: int,
        meet: Callable[[], Any],
    ) -> None:
        """`meet`: called when this rank's weights are loaded; the torch.distributed store where the ranks gather."""
        size = engine_config.tensor_parallel_size
        device = device_of(resolve(engine_config, model_config).device, rank, size)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.group = Ranks(rank, size, model_config.vocab_size, device)
        self._meet = meet
        super().__init__(model_config, engine_config, model_dir, on_progress)

    def _own_device(self, device: torch.device) -> torch.device:
        return device_of(device, self.group.rank, self.group.size)

    def _shard(self, config: ModelConfig) -> ModelConfig:
        return shard_config(config, self.group.rank, self.group.size)

    def _slots(self, model: Decoder) -> Iterable[Slot]:
        return shard_slots(model.slots(), self.model_config, self.group.rank, self.group.size)

    def _load(self, model_dir: Path | None, on_progress: Progress | None) -> Decoder:
        model = super()._load(model_dir, on_progress)
        self.group.connect(self._meet())
        note = self.group.open_mailbox(self.model_config.hidden_size, self.dtype)
        self.notes = (note,) if note else ()
        return model

    def _count_blocks(self) -> int:
        return self.group.least(super()._count_blocks())

    def _nothing_drawn(self, inputs: Inputs) -> torch.Tensor:
        return torch.zeros(len(inputs.samples), dtype=torch.int64, device=self.device)


class FollowRunner(RankRunner):
    """The runner of ranks 1 and on."""

    def sample(self, inputs: Inputs, logits: torch.Tensor, grammars: Mapping[int, Grammar]) -> Drawn:
        """What rank 0 drew."""
        ids = self.group.broadcast(self._nothing_drawn(inputs))
        return Drawn(ids, torch.zeros_like(ids, dtype=torch.bool), np.zeros(0, dtype=np.int64), None)


class LeadRunner(RankRunner):
    """Rank 0's: starts the other ranks, and hands them every plan before it runs it."""

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        model_dir: Path | None = None,
        on_progress: Progress | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """`on_lost`: called from a thread, with a sentence, when a rank has ended that should not have."""
        size = engine_config.tensor_parallel_size
        check(model_config, size)
        device_of(resolve(engine_config, model_config).device, size - 1, size)
        self._in_step = True  # all ranks have made the same collectives
        self._workers = Workers(model_config, engine_config, model_dir, on_lost or self._end_waiting)
        self._finalizer = weakref.finalize(self, self._workers.close)
        try:
            super().__init__(model_config, engine_config, model_dir, on_progress, 0, self._workers.meet)
            self._workers.await_ready()
        except BaseException as error:
            cause = self._workers.cause() if isinstance(error, RuntimeError) else None
            self.close()
            raise (EngineError(cause) if cause else error) from error
        self.device_name = f"{size} ranks of {self.device_name}"

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> Shared:  # type: ignore[override]
        """Run a step on all ranks. DeviceLost if one of them fails: where the others stand is not known then."""
        self._in_step = False
        self._workers.send(plan)
        try:
            launched = super().launch(plan, grammars)
        except Exception as error:
            if self._in_step:
                raise
            raise DeviceLost(self._workers.cause() or f"rank 0 failed: {type(error).__name__}: {error}") from error
        self._in_step = True
        return Shared(launched, self._workers)

    def sample(self, inputs: Inputs, logits: torch.Tensor, grammars: Mapping[int, Grammar]) -> Drawn:
        """One token for each entry that samples, told to all ranks. If that fails, nobody waits for it: as with one
        rank, the requests of this step end and the engine goes on."""
        try:
            drawn = super().sample(inputs, logits, grammars)
        except Exception:
            self.group.broadcast(self._nothing_drawn(inputs))
            self._in_step = True
            raise
        self.group.broadcast(drawn.ids)
        return drawn

    def close(self) -> None:
        """End the other ranks."""
        self._finalizer()
        super().close()
        self.group.close()

    def _end_waiting(self, sentence: str) -> None:
        """A rank is gone, and nobody asked to be told: whatever waits for it on this device ends."""
        threading.Thread(target=self.group.abort, name="abort", daemon=True).start()


class Shared:
    """A step on its way on all ranks."""

    def __init__(self, launched: Launched, workers: Workers) -> None:
        self._launched, self._workers = launched, workers

    def wait(self) -> StepResult:
        """As Launched.wait; DeviceLost if a rank was lost meanwhile: what it has computed means nothing then."""
        try:
            return self._launched.wait()
        finally:
            if self._workers.failure:
                raise DeviceLost(self._workers.failure)
