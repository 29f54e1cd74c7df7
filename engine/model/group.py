"""The exchanges between the ranks that share a model. The group in this file has one rank and exchanges nothing.

The decoder calls the same operations for any number of ranks. engine/parallel/group.py has the group of several ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from engine.model.config import ModelConfig
from engine.model.experts import Ops
from engine.model.linear import Matrix, embed
from engine.model.slots import Slot


class Group:
    """A group of one rank."""

    rank = 0
    size = 1

    def own_device(self, device: torch.device) -> torch.device:
        """Returns the device of this rank. `device`: the device of the engine."""
        return device

    def shard(self, config: ModelConfig) -> ModelConfig:
        """Returns the configuration of this rank's part of the model."""
        return config

    def shard_slots(self, slots: Iterable[Slot], config: ModelConfig) -> Iterable[Slot]:
        """Returns the slots of this rank, each with this rank's slice of the checkpoint's tensor. `slots`: the slots of
        a decoder with the configuration shard(config)."""
        return slots

    def join(self, hidden: int, dtype: torch.dtype) -> str:
        """Connect to the other ranks, after this rank's weights are loaded. Returns a sentence for the user, or ""."""
        return ""

    def close(self) -> None:
        """Leave the group."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of x over all ranks; may overwrite x."""
        return x

    def add_norm(
        self, ops: Ops, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add the sum of x over all ranks to residual [T, H] in place; return the norm of the residual."""
        return ops.add_norm(self.sum(x), residual, weight, eps)

    def direct(self, rows: int) -> bool:
        """Returns True if add_norm accepts x as fp32 [parts, rows, H], provided that its `ops` accept such an x."""
        return True

    def embed(self, token_ids: torch.Tensor, table: Matrix) -> torch.Tensor:
        """Returns the embedding rows [T, H] of token_ids [T]. `table`: this rank's rows of the embedding."""
        return embed(token_ids, table)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns all logits [s, V] on every rank. `logits`: this rank's slice [s, V / ranks]."""
        return logits

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Copy x of rank 0 to x on every rank; return x."""
        return x

    def least(self, number: int) -> int:
        """Returns the smallest `number` of all ranks; waits for the device."""
        return number

    @property
    def piece(self) -> tuple[int, int]:
        """The part of the vocabulary from which this rank draws, as (first id, end); (0, 0): the whole vocabulary."""
        return 0, 0

    def elect(
        self, scores: torch.Tensor, outcome: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor,
        last_token: torch.Tensor,
    ) -> None:
        """Choose the best of the ranks' draws, the same on every rank: see engine.kernels.mailbox.elect."""

    def count_step(self, layers: int, rows: int) -> None:
        """Count the time of the sums in a launched graph of `layers` layers; each sum has `rows` rows."""

    def count_draw(self, rows: int, gathered: bool) -> None:
        """Count the time of the collectives in a sampling graph. `gathered`: the graph draws from gathered logits."""

    def take_time(self) -> CollectiveTime | None:
        """Returns the time spent in collectives since the last call; None: this group has no collectives."""
        return None


ALONE = Group()


class CollectiveTime:
    """The time that a step spends in collectives, measured with the host's clock or between GPU events. For a
    collective in a graph, the time measured at the start without other work is added (engine/parallel/group.py)."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._host_ms = 0.0
        self._events: list[tuple[Any, Any]] = []

    def add(self, ms: float) -> None:
        self._host_ms += ms

    def between(self, begin: Any, end: Any) -> None:
        self._events.append((begin, end))

    @property
    def ms(self) -> float:
        """The time in milliseconds."""
        return self._host_ms + sum(begin.elapsed_time(end) for begin, end in self._events)
