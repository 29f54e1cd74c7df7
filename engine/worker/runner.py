"""Runs steps: takes a StepPlan, computes the model's forward pass and draws tokens.

A Runner is composed of parts, chosen in engine/build.py:

    group       the ranks that share the model (one: engine/model/group.py; several: engine/parallel/group.py)
    ops         the decoder's small operations, in torch or as fused kernels
    executors   ways to run a step, the preferred way first; each step uses the first way that can run it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from engine.config import EngineConfig
from engine.core.request import Grammar
from engine.core.step import StepPlan
from engine.model.config import ModelConfig
from engine.model.experts import Ops
from engine.model.group import ALONE, Group
from engine.progress import Progress
from engine.worker.launch import LaunchedStep
from engine.worker.loaded import LoadedModel

if TYPE_CHECKING:
    from engine.kernels.compile_ahead import CompileAhead


class Executor(Protocol):
    """One way to run steps."""

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep | None:
        """Start a step. Returns None if this executor cannot run the step; the runner then tries the next executor."""

    def prepare(self, wanted: bool = False) -> dict[str, Any] | None:
        """See Runner.prepare. Most executors are ready when they are made."""
        return None

    def close(self) -> None:
        """Free the device memory of the executor. Most executors keep none."""
        return


@dataclass(frozen=True)
class Parts:
    """The parts of a runner that depend on the device and the configuration."""

    ops: Ops
    executors: tuple[Callable[[LoadedModel, Progress | None], Executor], ...]  # made and tried in this order
    reserved_bytes: int = 0  # device memory that the executors need and the KV cache must not use
    compiler: Callable[[], CompileAhead | None] | None = None  # compiles kernels of `ops` before their first launch


class Runner:
    """A loaded model, and the executors that run its steps."""

    def __init__(
        self, model_config: ModelConfig, engine_config: EngineConfig, parts: Parts, model_dir: Path | None = None,
        on_progress: Progress | None = None, group: Group = ALONE, later: bool = False,
    ) -> None:
        """Loads the weights, sizes the KV pool and makes the executors; raises EngineError. `later`: leave it to the
        caller to `prepare` the executors."""
        compiler = parts.compiler() if parts.compiler is not None and group.size == 1 else None
        try:
            self.loaded = loaded = LoadedModel(
                model_config, engine_config, parts.ops, model_dir, on_progress, group, parts.reserved_bytes, compiler
            )
            self.num_blocks, self.block_size, self.vocab_size = loaded.num_blocks, loaded.block_size, loaded.vocab_size
            self.groups, self.synchronous = loaded.groups, loaded.synchronous
            # Executors refer to the loaded model, not to the runner: after gc.freeze, cycles would never be freed.
            with torch.inference_mode():
                self.executors = [make(loaded, on_progress) for make in parts.executors]
                if model_config.experts is not None:
                    loaded.model.take_expert_load()  # discards the expert load of the warm-up
            while not later and (progress := self.prepare()) is not None:
                if on_progress is not None:
                    on_progress(progress)
        except BaseException:
            if compiler is not None:
                compiler.close()  # else no other engine of this process could compile ahead
            raise

    def prepare(self, wanted: bool = False) -> dict[str, Any] | None:
        """Do one piece of the work that makes later steps faster, such as the capture of a CUDA graph: up to 0.1 s.
        `wanted`: do nothing unless a recent step would have been faster. Returns what is left, as a message for
        on_progress; None: nothing."""
        with torch.inference_mode():
            left = [progress for each in self.executors if (progress := each.prepare(wanted)) is not None]
        return left[0] if left else None

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep:
        """Start a step with the first executor that can run it. `grammars`: by entry, for the entries that have one."""
        # Launching changes the rows' settings too: tensors made in inference mode can only be changed in that mode.
        with torch.inference_mode():
            for executor in self.executors:
                launched = executor.launch(plan, grammars)
                if launched is not None:
                    return launched
        raise RuntimeError("no executor could run the step: the last executor must be able to run any step")

    def close(self) -> None:
        """Close the executors first, then the group: captured collectives keep the group alive."""
        for executor in self.executors:
            executor.close()
        self.loaded.group.close()
