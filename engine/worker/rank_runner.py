"""Runners of the ranks that share a model: each runs its shard, and collectives combine the results.

Every rank runs the same plans over the same rows and blocks. So the KV caches of all ranks have the same tokens; each
cache has the keys and values of its rank's heads. The logits are gathered on all ranks, but only rank 0 draws, for two
reasons: only rank 0 has the grammars, and the results of the ranks may differ by rounding. The drawn ids are broadcast
into every rank's last tokens. So a step can be launched before the host has the ids of the previous step.

With CUDA graphs all ranks draw (worker/graphs/sampling_graphs.py). This is possible because the plan contains the
sampling settings, and the noise is a function of seed, position and token.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.core.request import Grammar
from engine.core.step import StepPlan
from engine.errors import DeviceLost, EngineError
from engine.model.config import ModelConfig
from engine.parallel.group import Ranks
from engine.parallel.processes import Workers, device_of
from engine.parallel.shards import check
from engine.progress import Progress
from engine.worker.launch import LaunchedStep
from engine.worker.limits import resolve
from engine.worker.loaded import DrawFailed
from engine.worker.runner import Parts, Runner


def make_group(model: ModelConfig, config: EngineConfig, rank: int, meet: Callable[[], Any]) -> Ranks:
    """Returns the group, for one of its ranks. `meet`: called after this rank's weights are loaded. It waits for the
    other ranks and returns the torch.distributed store through which the ranks connect."""
    size = config.tensor_parallel_size
    device = device_of(resolve(config, model).device, rank, size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return Ranks(rank, size, model.vocab_size, device, meet)


class LeadRunner:
    """Rank 0's Runner. It sends every plan to the other ranks before rank 0 runs the plan."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, parts: Parts, directory: Path | None = None,
        on_progress: Progress | None = None, on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """Starts the other ranks. `on_lost`: called from another thread, with a sentence, when a rank ends
        unexpectedly. None: abort the work on this device that waits for the lost rank."""
        size = config.tensor_parallel_size
        check(model, size)
        device_of(resolve(config, model).device, size - 1, size)
        self._group = make_group(model, config, 0, lambda: self._workers.meet())
        self._workers = workers = Workers(model, config, directory, on_lost or self._abort)
        self._end_workers = weakref.finalize(self, workers.close)
        try:
            self.runner = runner = Runner(model, config, parts, directory, on_progress, self._group)
            workers.await_ready()
        except BaseException as error:
            cause = workers.cause() if isinstance(error, RuntimeError) else None
            self._end_workers()
            self._group.close()
            raise (EngineError(cause) if cause else error) from error
        self.loaded, self.synchronous, self.groups = runner.loaded, runner.synchronous, runner.groups
        self.prepare = runner.prepare  # nothing is left
        self.num_blocks, self.block_size, self.vocab_size = runner.num_blocks, runner.block_size, runner.vocab_size

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep:
        """Run a step on all ranks. Raises DeviceLost if the step fails on any rank, because the ranks may then have run
        different collectives. An exception in sampling is raised unchanged: all ranks have run the same collectives, so
        the engine can continue."""
        self._workers.send(plan)
        try:
            launched = self.runner.launch(plan, grammars)
        except DrawFailed as failed:
            raise failed.error from None
        except Exception as error:
            raise DeviceLost(self._workers.cause() or f"rank 0 failed: {type(error).__name__}: {error}") from error
        launched.check = self._check
        return launched

    def _check(self) -> None:
        """Raise DeviceLost if a rank was lost, because the results of the step are then invalid."""
        if self._workers.failure:
            raise DeviceLost(self._workers.failure)

    def close(self) -> None:
        """End the other ranks."""
        self._end_workers()
        self.runner.close()

    def _abort(self, sentence: str) -> None:
        threading.Thread(target=self._group.abort, name="abort", daemon=True).start()
