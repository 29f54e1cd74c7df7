"""Lists of blocks in short form: a run of successive numbers, upwards or downwards, becomes a pair (first, last).

The free blocks of a large pool are tens of thousands of numbers, but few runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import sub

Runs = list[int | list[int]]  # a block, or [first, last] of a run


def runs_of(blocks: Sequence[int]) -> Runs:
    """Returns the blocks in the same order, with runs as pairs."""
    runs: Runs = []
    at = done = 0  # blocks before `done` are in `runs`
    for step, group in groupby(map(sub, blocks[1:], blocks)):
        end = at + sum(1 for _ in group)  # all steps from block `at` to block `end` are equal
        if step not in (1, -1):
            runs += blocks[done:end]
            done = max(done, end)
        elif end > max(at, done):
            runs.append([blocks[max(at, done)], blocks[end]])
            done = end + 1
        at = end
    return runs + list(blocks[done:])


def blocks_of(runs: Runs) -> list[int]:
    """Returns the blocks of `runs_of`, in order."""
    blocks: list[int] = []
    for run in runs:
        if isinstance(run, int):
            blocks.append(run)
        else:
            first, last = run
            blocks += range(first, last + 1) if first <= last else range(first, last - 1, -1)
    return blocks


def number_of(runs: Runs) -> int:
    return sum(1 if isinstance(run, int) else abs(run[1] - run[0]) + 1 for run in runs)
