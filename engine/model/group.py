"""The exchanges between the ranks that share a model; here for one rank, which exchanges nothing.

The decoder calls these operations without knowing the number of ranks. engine/parallel/group.py has the group of
several ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from engine.model.config import ModelConfig
from engine.model.experts import Ops
from engine.model.linear import Matrix, embed
from engine.model.weights import Slot


class Group:
    """A group of one rank."""

    rank = 0
    size = 1

    def own_device(self, device: torch.device) -> torch.device:
        """The device of this rank; `device`: that of the engine."""
        return device

    def shard(self, config: ModelConfig) -> ModelConfig:
        """The configuration of this rank's part of the model."""
        return config

    def shard_slots(self, slots: Iterable[Slot], config: ModelConfig) -> Iterable[Slot]:
        """The slots of a decoder of `shard(config)`, each with the slice of the whole tensor that it takes."""
        return slots

    def join(self, hidden: int, dtype: torch.dtype) -> str:
        """Meet the other ranks, after this rank's weights are loaded. Returns a sentence for the user, or ""."""
        return ""

    def close(self) -> None:
        """Leave the group."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of x, which may be overwritten."""
        return x

    def add_norm(
        self, ops: Ops, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add the sum over all ranks of x to residual [T, H] in place; return its norm. `ops`: the decoder's."""
        return ops.add_rms_norm(self.sum(x), residual, weight, eps)

    def direct(self, rows: int) -> bool:
        """True if add_norm over `rows` rows accepts x as fp32 [parts, T, H] too; its `ops` must also accept that."""
        return True

    def embed(self, token_ids: torch.Tensor, table: Matrix) -> torch.Tensor:
        """token_ids [T] -> their rows [T, H] of the whole embedding; `table`: this rank's rows."""
        return embed(token_ids, table)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's slice [s, V / ranks] of the logits -> all of them [s, V], on every rank."""
        return logits

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """x of rank 0, written to x on every rank."""
        return x

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers; waits for the device."""
        return number

    @property
    def piece(self) -> tuple[int, int]:
        """(first id, end) of the piece of the vocabulary from which this rank draws; (0, 0): from all of it."""
        return 0, 0

    def elect(
        self, scores: torch.Tensor, outcome: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor,
        last_token: torch.Tensor,
    ) -> None:  # fmt: skip
        """Choose the best draw of all ranks' pieces, on all ranks: see engine.kernels.mailbox.elect."""

    def count_step(self, layers: int, rows: int) -> None:
        """Count the time of the sums in a launched graph: those of `layers` layers, over `rows` rows."""

    def count_draw(self, rows: int, gathered: bool) -> None:
        """Count the time of the collectives in a launched sampling graph. `gathered`: it does not draw by piece."""

    def take(self) -> Spent | None:
        """The time in collectives since the last call; None: there are none."""
        return None


ALONE = Group()


class Spent:
    """Milliseconds that a step spends in collectives, measured by the host or between events of a GPU.

    For graphs it is the time that the same collectives took alone when the group was made (engine/parallel/timing.py).
    """

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
        return self._host_ms + sum(begin.elapsed_time(end) for begin, end in self._events)
