"""The base class of the classes that capture steps as CUDA graphs (cuda_graphs.py, verify_graphs.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from engine.core.request import Grammar
from engine.core.step import StepPlan
from engine.worker.graphs.capture import Captures
from engine.worker.graphs.fused_decode import DecodeLayers
from engine.worker.graphs.sampling_graphs import DRAWABLE, SamplingGraphs
from engine.worker.inputs import Draws
from engine.worker.launch import LaunchedStep
from engine.worker.loaded import LoadedModel
from engine.worker.upload import Staging

Array = TypeVar("Array", np.ndarray, torch.Tensor)
Shapes = list[tuple[int, ...]]


class StepGraphs:
    """The graphs of one kind of step, by size."""

    form: str  # the name of the kind
    _input: Staging  # what the graphs read

    def __init__(
        self, loaded: LoadedModel, layers: DecodeLayers, sampling: SamplingGraphs, sizes: Sequence[Any]
    ) -> None:
        """`sizes`: the sizes to capture, ascending."""
        self._loaded, self._batch, self._layers, self._sampling = loaded, loaded.batch, layers, sampling
        self.sizes = sizes
        self._has_states = bool(loaded.shard.state_layers)
        self.graphs: dict[Any, torch.cuda.CUDAGraph] = {}  # by size
        self.wanted: Any = None  # the size of the last step that had no graph yet

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep | None:
        """Replay a graph that is large enough for the plan. Returns None if there is no such graph."""
        raise NotImplementedError

    def size_of(self, size: Any) -> tuple[int, int, int]:
        """Returns (rows that a batch has when it needs this size, tokens, draws)."""
        raise NotImplementedError

    def run(self, size: Any) -> None:
        """Run a step of this size on padding only, and the draws after it."""
        self._input.target.zero_()
        self._run(size)
        self._sampling.run(self.size_of(size)[2])

    def capture(self, size: Any, captures: Captures) -> None:
        """Capture the graph of this size, and those of its draws. Both run on padding only, which changes no state."""
        self._input.target.zero_()
        self._sampling.capture(self.size_of(size)[2], captures)
        self.graphs[size] = captures.capture(partial(self._run, size))

    def _captured(self, size: Any) -> bool:
        """Returns whether this size has its graph. If not, the size is wanted."""
        if size not in self.graphs:
            self.wanted = size
        return size in self.graphs

    def _run(self, size: Any) -> None:
        """Run a step of this size. This call is captured."""
        raise NotImplementedError

    def _replay(self, size: Any, tokens: int) -> None:
        """Replay the graph of this size, which computes this number of tokens, padding included."""
        self.graphs[size].replay()
        self._loaded.group.count_step(self._loaded.shard.num_layers, tokens)

    def _draw(
        self, plan: StepPlan, grammars: Mapping[int, Grammar], bucket: int, positions: np.ndarray,
        drawing: np.ndarray | None, entries: np.ndarray, started: float, begin: Any,
    ) -> LaunchedStep:
        """Draw from the logits of the replayed graph: with the graphs for `bucket` draws, or with
        engine/worker/sampler.py if a row asks for what they lack, such as penalties, masks and logprobs.

        `positions`: of each draw in the buffers, the position of its token. `drawing` and `entries`: the indices of the
        real draws (None: all), and their entries in the plan.
        """
        loaded, sampling, asked = self._loaded, self._sampling, self._batch.sampler.asked(plan.rows)
        if not asked & ~DRAWABLE:
            return sampling.draw(plan, asked, bucket, len(positions), drawing, entries, begin)
        which: slice | torch.Tensor = slice(len(positions))
        if drawing is not None:
            which, positions = self._batch.upload(drawing), positions[drawing]
        rows, lengths = sampling.rows[which].long(), sampling.lengths[which].long()
        draws = Draws(entries, plan.rows[entries], positions.astype(np.int64), rows, lengths)
        drawn = loaded.sample(draws, loaded.group.gather(sampling.logits[which]).float(), grammars)
        return loaded.launched(plan, draws, drawn, {}, started, begin)


def length(shapes: Shapes) -> int:
    """Returns the size of a graph's input with parts of these shapes."""
    return sum(map(math.prod, shapes))


def divided(buffer: Array, shapes: Shapes) -> list[Array]:
    """Returns views of a graph's input, one after the other, of these shapes."""
    views, at = [], 0
    for shape in shapes:
        views.append(buffer[at : at + math.prod(shape)].reshape(shape))
        at += math.prod(shape)
    return views
