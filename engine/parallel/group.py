"""The ranks that share one model, and what they tell each other within a step.

`ALONE` is the group of one: its operations return what they are given, so a model on one device costs nothing more.
`Ranks` is torch.distributed: NCCL between GPUs, gloo between CPUs.

Collectives are where ranks wait for each other, so the time spent in them, which `take` tells, holds the waiting too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F

from engine.errors import EngineError
from engine.model.linear import Matrix, embed

TIMEOUT_S = 60.0  # a rank that is dead is noticed sooner (ranks.py); this is for one that lives and does not answer


class Group:
    """One rank, alone."""

    rank = 0
    size = 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of x, which may be overwritten."""
        return x

    def embed(self, token_ids: torch.Tensor, table: Matrix) -> torch.Tensor:
        """token_ids [T] -> their rows [T, H] of the whole table, of which this rank holds `table`."""
        return embed(token_ids, table)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's slice [s, V / ranks] of the logits -> all of them [s, V], on every rank."""
        return logits

    def take(self) -> Spent | None:
        """What was spent in collectives since this was last called; None: there are none."""
        return None


ALONE = Group()


class Spent:
    """Milliseconds in collectives: counted by the host, or between events of a GPU that the step's end comes after."""

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


def joined(parts: Sequence[torch.Tensor], vocab_size: int) -> torch.Tensor:
    """The ranks' slices [s, ceil(V / ranks)] -> [s, V]: what pads the last of them is left out."""
    width = parts[0].shape[1]
    return torch.cat([part[:, : max(0, vocab_size - i * width)] for i, part in enumerate(parts)], 1)


def own_rows(token_ids: torch.Tensor, table: torch.Tensor, rank: int) -> torch.Tensor:
    """The rows [T, H] of those tokens that stand in this rank's slice of the table, zeros for the others."""
    local = token_ids - rank * len(table)
    elsewhere = (local < 0) | (local >= len(table))
    return F.embedding(local.masked_fill_(elsewhere, 0), table).masked_fill_(elsewhere[:, None], 0)


class Ranks(Group):
    """`size` processes, of which this is number `rank`. `connect` before the first collective, `close` in the end.

    Every rank must call the same collectives with the same shapes in the same order. A rank that is gone makes them
    raise on the others (gloo) or time out (NCCL); either way the group is of no use any more.
    """

    def __init__(self, rank: int, size: int, vocab_size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._vocab_size = vocab_size
        self._device = device
        self._spent = Spent(size)
        self._connected = False

    @property
    def backend(self) -> str:
        return "nccl" if self._device.type == "cuda" else "gloo"

    def connect(self, store: Any) -> None:
        """Meet the other ranks at a torch.distributed store."""
        import torch.distributed as dist

        if dist.is_initialized():
            raise EngineError(
                "torch.distributed is in use in this process already: only one engine with tensor_parallel_size above "
                "1 can live in a process; close the other"
            )
        if self.backend == "nccl":
            torch.cuda.set_device(self._device)
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast is not to be had everywhere
        else:  # all ranks are on this machine, whose own name need not resolve
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=TIMEOUT_S),
            device_id=self._device if self.backend == "nccl" else None,
        )  # fmt: skip
        self._connected = True

    def close(self) -> None:
        if self._connected:
            import torch.distributed as dist

            self._connected = False
            dist.destroy_process_group()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        if not x.numel():  # a step in which nobody samples
            return x
        begin = self._begin()
        dist.all_reduce(x)
        self._end(begin)
        return x

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.sum(own_rows(token_ids, table, self.rank))  # one rank's row, and zeros: exact

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        if not len(logits):
            return logits.new_empty(0, self._vocab_size)
        parts = [torch.empty_like(logits) for _ in range(self.size)]
        begin = self._begin()
        dist.all_gather(parts, logits)
        self._end(begin)
        return joined(parts, self._vocab_size)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """x of rank 0, written to x everywhere."""
        import torch.distributed as dist

        if not x.numel():
            return x
        begin = self._begin()
        dist.broadcast(x, 0)
        self._end(begin)
        return x

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers; waits for the device."""
        import torch.distributed as dist

        numbers = torch.tensor([number], dtype=torch.int64, device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers.item())

    def take(self) -> Spent | None:
        spent, self._spent = self._spent, Spent(self.size)
        return spent

    def _begin(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _end(self, begin: Any) -> None:
        if self._device.type != "cuda":
            self._spent.add((time.perf_counter() - begin) * 1e3)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._spent.between(begin, event)
