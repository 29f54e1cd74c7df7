"""Measures how long each collective takes, before the first step: inside a captured step this cannot be measured.

Each collective is captured alone, many times in one graph, for 1, 2, 4, … rows; times for other sizes are
interpolated. During this measurement, all ranks begin the collective at the same time and do nothing else. In a real
step, a collective also waits for the slowest rank, and part of it overlaps with other kernels. The measured times also
decide up to which size a sum uses the mailboxes (mailbox.py) instead of NCCL. All ranks use the times of the slowest
rank, so all make the same decision.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch

from engine.parallel.mailbox import Mailbox

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


class Group(Protocol):
    """The part of engine.parallel.group.Ranks that `measure` uses."""

    size: int
    vocab_size: int
    device: torch.device
    box: Mailbox | None

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits [s, V], gathered from each rank's slice [s, V / ranks]."""


def measure(group: Group, hidden: int, dtype: torch.dtype) -> Timings:
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


def _microseconds(group: Group, run: Callable[[], object]) -> float:
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
