"""The ranks that share one model, and their collectives within a step.

`Ranks` uses torch.distributed: NCCL between GPUs, gloo between CPUs. GPUs that can write each other's memory use our
own kernels for the small sums of a decode step (engine/kernels/mailbox.py). A measurement finds the size from which
NCCL is faster, and NCCL computes the sums of this size and larger. CUDA graphs can contain all these collectives.

Ranks wait for each other in collectives, so the time that `take_time` returns includes the waiting. Inside a replayed
graph, the time of collectives cannot be measured. For graphs, `take_time` returns the time that the same collectives
took in a separate measurement before the first step (`measure`).

Each collective is captured alone, many times in one graph, for 1, 2, 4, … rows; times for other sizes are
interpolated. During this measurement, all ranks begin the collective at the same time and do nothing else. In a real
step, a collective also waits for the slowest rank, and part of it overlaps with other kernels. All ranks use the times
of the slowest rank, so all make the same decisions.
"""

from __future__ import annotations

import os
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from engine.errors import EngineError
from engine.model.config import ModelConfig
from engine.model.experts import Ops
from engine.model.group import CollectiveTime, Group
from engine.model.slots import Slot
from engine.parallel import mailbox
from engine.parallel.mailbox import Mailbox
from engine.parallel.shards import shard_config, shard_slots

MOST_ROWS = 4096
IN_GRAPH = 16  # collectives in a graph
REPLAYS = 6


@dataclass(slots=True)
class Timings:
    """Microseconds of each collective, by rows (ascending powers of two from 1)."""

    nccl: list[float]  # a sum of [rows, H] over the ranks by NCCL
    mailbox: list[float]  # the same sum through the mailboxes, up to the largest sum that fits into them
    gathers: list[float]  # gathering the logits [rows, V] from all ranks
    elect: float  # choosing the best token of all vocabulary shards; 0 without mailboxes

    @property
    def direct_rows(self) -> int:
        """The number of rows up to which the mailboxes are faster than NCCL; 0 if they are never faster."""
        faster = [mailbox < nccl for mailbox, nccl in zip(self.mailbox, self.nccl, strict=False)]
        count = faster.index(False) if False in faster else len(faster)
        return 1 << (count - 1) if count else 0

    def nccl_us(self, rows: int) -> float:
        return interpolated(self.nccl, rows)

    def sum_us(self, rows: int) -> float:
        """Microseconds of a sum of `rows` rows, by the faster path."""
        return interpolated(self.mailbox if rows <= self.direct_rows else self.nccl, rows)

    def note(self, why_not: str) -> str:
        """Returns the result as a sentence for the user. `why_not`: why there are no mailboxes, if there are none."""
        nccl = f"NCCL, {self.nccl_us(1):.1f} us for one row"
        if not self.mailbox:
            return f"sums over ranks: {nccl}; no mailboxes, because {why_not}"
        if not self.direct_rows:
            return f"sums over ranks: {nccl} (mailboxes: {self.mailbox[0]:.1f})"
        return (
            f"sums over ranks: mailboxes up to {self.direct_rows} rows, {self.mailbox[0]:.1f} us for one row "
            f"(NCCL: {self.nccl_us(1):.1f})"
        )

    def draw_us(self, rows: int, gathered: bool) -> float:
        """Microseconds of the data exchange when `rows` tokens are drawn. `gathered`: whether logits are gathered."""
        return interpolated(self.gathers, rows) if gathered else self.elect


def interpolated(times: list[float], rows: int) -> float:
    """Returns the time for `rows` rows, interpolated between the powers of two below and above."""
    above = bisect_left([1 << k for k in range(len(times))], rows)
    if above >= len(times):
        return times[-1] * rows / (1 << (len(times) - 1))
    if rows == 1 << above:
        return times[above]
    share = (rows - (1 << (above - 1))) / (1 << (above - 1))
    return times[above - 1] * (1 - share) + times[above] * share


def measure(group: Ranks, hidden: int, dtype: torch.dtype) -> Timings:
    """Measures all collectives. Every rank must call this function with the same arguments."""
    import torch.distributed as dist

    device, box = group.device, group.box
    rows = [1 << k for k in range(MOST_ROWS.bit_length())]
    x = torch.randn(MOST_ROWS, hidden, device=device).to(dtype)
    logits = torch.randn(256, -(-group.vocab_size // group.size), device=device).to(dtype)
    nccl = [_microseconds(group, partial(dist.all_reduce, x[:n])) for n in rows]
    gathers = [_microseconds(group, partial(group.gather, logits[:n])) for n in rows if n <= len(logits)]
    mailbox, elect_us = [], 0.0
    if box is not None:
        from engine.kernels.mailbox import elect, sum_ranks

        mailbox = [_microseconds(group, partial(sum_ranks, x[:n], box)) for n in rows if box.holds(x[:n])]
        ids, last = (torch.zeros(256, dtype=torch.int64, device=device) for _ in range(2))
        entries = torch.arange(256, dtype=torch.int32, device=device)
        scores = torch.zeros(256, device=device)
        elect_us = _microseconds(group, partial(elect, scores, ids, entries, entries, last, box))
    found = torch.tensor([*nccl, *mailbox, *gathers, elect_us], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    numbers = iter(found.tolist())

    def next_like(like: list[float]) -> list[float]:
        return [next(numbers) for _ in like]

    return Timings(next_like(nccl), next_like(mailbox), next_like(gathers), next(numbers))


def _microseconds(group: Ranks, run: Callable[[], object]) -> float:
    """Returns the time of one `run`: the fastest of REPLAYS replays of a graph with IN_GRAPH runs."""
    stream = torch.cuda.Stream(group.device)
    stream.wait_stream(torch.cuda.current_stream(group.device))
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize(group.device)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")  # NCCL's thread queries events during the capture
        for _ in range(IN_GRAPH):
            run()
        graph.capture_end()
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize(group.device)
    times = [begin.elapsed_time(end) for begin, end in pairwise(events)]
    return min(times) * 1e3 / IN_GRAPH


TIMEOUT_S = 60.0  # for a rank that runs but does not answer; processes.py detects a dead rank sooner


def joined(parts: Sequence[torch.Tensor], vocab_size: int) -> torch.Tensor:
    """Returns [s, V], joined from the ranks' slices [s, ceil(V / ranks)] without the padding of the last slices."""
    width = parts[0].shape[1]
    return torch.cat([part[:, : max(0, vocab_size - i * width)] for i, part in enumerate(parts)], 1)


def own_rows(token_ids: torch.Tensor, table: torch.Tensor, rank: int) -> torch.Tensor:
    """Returns [T, H]: rows of the table for tokens in this rank's slice of the vocabulary, zeros for other tokens."""
    local = token_ids - rank * len(table)
    elsewhere = (local < 0) | (local >= len(table))
    return F.embedding(local.masked_fill_(elsewhere, 0), table).masked_fill_(elsewhere[:, None], 0)


class Ranks(Group):
    """A group of `size` processes; this process is number `rank`. Call `join` before the first collective, and `close`
    last. Every rank must call the same collectives with the same shapes in the same order. After a rank has ended,
    collectives of the other ranks raise (gloo) or time out (NCCL), and the group can no longer be used."""

    def __init__(self, rank: int, size: int, vocab_size: int, device: torch.device, meet: Callable[[], Any]) -> None:
        """`meet`: called after this rank has loaded its weights; returns the ranks' torch.distributed store."""
        self._meet = meet
        self.rank = rank
        self.size = size
        self.vocab_size = vocab_size
        self.device = device
        self._spent = CollectiveTime(size)
        self._connected = False
        self.box: Mailbox | None = None
        self._direct_rows = 0  # sums of up to this many rows use the mailbox
        self.timings: Timings | None = None

    @property
    def backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    def own_device(self, device: torch.device) -> torch.device:
        return self.device

    def shard(self, config: ModelConfig) -> ModelConfig:
        return shard_config(config, self.rank, self.size)

    def shard_slots(self, slots: Iterable[Slot], config: ModelConfig) -> Iterable[Slot]:
        return shard_slots(slots, config, self.rank, self.size)

    def join(self, hidden: int, dtype: torch.dtype) -> str:
        self.connect(self._meet())
        return self.open_mailbox(hidden, dtype)

    def connect(self, store: Any) -> None:
        """Connect to the other ranks through a torch.distributed store."""
        import torch.distributed as dist

        self._store = store
        if dist.is_initialized():
            raise EngineError(
                "torch.distributed is already in use in this process: a process can have only one engine with "
                "tensor_parallel_size above 1; close the other engine"
            )
        if self.backend == "nccl":
            torch.cuda.set_device(self.device)
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast is not available everywhere
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # otherwise each capture exchanges buffer handles
        else:  # all ranks are on this machine; gloo may fail to resolve the machine's name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=TIMEOUT_S),
            device_id=self.device if self.backend == "nccl" else None,
        )
        self._connected = True

    def open_mailbox(self, hidden: int, dtype: torch.dtype) -> str:
        """On GPUs: connect the mailbox, and measure whether the mailbox or NCCL sums [T, hidden] faster for each T.
        Returns the result as a sentence; "" on a CPU."""
        if self.device.type != "cuda":
            return ""
        why_not = f"mailboxes need half precision, and the dtype is {str(dtype).removeprefix('torch.')}"
        if dtype.itemsize == 2:
            try:
                import engine.kernels.mailbox  # noqa: F401

                self.box = mailbox.connect(self._store, self.rank, self.size, hidden, self.device)
            except (ImportError, AttributeError, TypeError, RuntimeError) as error:
                why_not = str(error).partition("\n")[0] or type(error).__name__
        if not self.least(int(self.box is not None)):  # all ranks must use the same path
            self.box = None
        self.timings = measure(self, hidden, dtype)
        self._direct_rows = self.timings.direct_rows
        return self.timings.note(why_not)

    def direct(self, rows: int) -> bool:
        return rows <= self._direct_rows

    @property
    def piece(self) -> tuple[int, int]:
        width = -(-self.vocab_size // self.size)
        if self.box is None or width * (self.size - 1) >= self.vocab_size:  # the last rank's piece would be empty
            return 0, 0
        return self.rank * width, min((self.rank + 1) * width, self.vocab_size)

    def elect(
        self, scores: torch.Tensor, outcome: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor,
        last_token: torch.Tensor,
    ) -> None:
        from engine.kernels.mailbox import elect

        assert self.box is not None
        elect(scores, outcome, rows, seq_lens, last_token, self.box)

    def count_step(self, layers: int, rows: int) -> None:
        if self.timings is not None:
            self._spent.add((2 * layers + 1) * self.timings.sum_us(rows) / 1e3)

    def count_draw(self, rows: int, gathered: bool) -> None:
        if self.timings is not None:
            self._spent.add(self.timings.draw_us(rows, gathered or self.piece == (0, 0)) / 1e3)

    def abort(self) -> None:
        """End all waits for other ranks on this device, because a rank has ended. Any thread may call this."""
        if self.box is not None:
            with torch.inference_mode():  # required: the tensor was made in inference mode
                self.box.abort.fill_(1)
        if self._connected and self.backend == "nccl":
            from torch.distributed.distributed_c10d import _abort_process_group

            self._connected = False
            _abort_process_group()

    def close(self) -> None:
        """Leave the group. First free all graphs that contain its collectives: NCCL waits until they are freed."""
        if not self._connected:
            return
        import torch.distributed as dist

        if self.backend == "nccl":
            self.abort()  # destroying the group would wait for the other ranks
        else:
            self._connected = False
            dist.destroy_process_group()
        self.box = None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():  # the step draws no token
            return x
        begin = self._begin()
        if self.box is not None and self.direct(len(x)) and self.box.holds(x):
            from engine.kernels.mailbox import sum_ranks

            x = sum_ranks(x, self.box)
        else:
            import torch.distributed as dist

            dist.all_reduce(x)
        self._end(begin)
        return x

    def add_norm(
        self, ops: Ops, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        plain = weight.dtype == residual.dtype and weight.dim() == 1  # the kernel has no other norm
        if self.box is None or not plain or not self.direct(len(residual)) or not self.box.holds(residual):
            return super().add_norm(ops, x, residual, weight, eps)
        from engine.kernels.mailbox import sum_ranks

        begin = self._begin()
        x = sum_ranks(x, self.box, (residual, weight, eps))
        self._end(begin)
        return x

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Returns exact rows: each is the sum of one rank's row and zeros from the other ranks."""
        if self.box is None or not self.direct(len(token_ids)) or table.dtype.itemsize != 2:
            return self.sum(own_rows(token_ids, table, self.rank))
        from engine.kernels.mailbox import embed_ranks

        begin = self._begin()
        rows = embed_ranks(token_ids, table, self.box)
        self._end(begin)
        return rows

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        if not len(logits):
            return logits.new_empty(0, self.vocab_size)
        gathered = logits.new_empty(self.size, *logits.shape)
        begin = self._begin()
        # all_gather_single is the newer name of the same function.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered.view(-1, logits.shape[1]), logits.contiguous())
        self._end(begin)
        return joined(list(gathered), self.vocab_size)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        if not x.numel():
            return x
        begin = self._begin()
        dist.broadcast(x, 0)
        self._end(begin)
        return x

    def least(self, number: int) -> int:
        import torch.distributed as dist

        numbers = torch.tensor([number], dtype=torch.int64, device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers.item())

    def take_time(self) -> CollectiveTime | None:
        spent, self._spent = self._spent, CollectiveTime(self.size)
        return spent

    def _begin(self) -> Any:
        return self._event() if self.device.type == "cuda" else time.perf_counter()

    def _end(self, begin: Any) -> None:
        if self.device.type != "cuda":
            self._spent.add((time.perf_counter() - begin) * 1e3)
        elif begin is not None:
            self._spent.between(begin, self._event())

    def _event(self) -> Any:
        """Returns an event recorded in the stream; None while a graph is captured, because nothing runs then."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
