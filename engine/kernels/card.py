"""What the kernels must know of the card: its processors, its shared memory, and whether launches can overlap.

    Ampere (8.0, 8.6), Ada (8.9)      launches do not overlap; 8.6 and 8.9 have 99 KiB of shared memory
    Hopper (9.0), Blackwell (10.0)    launches overlap; 227 KiB
    Blackwell (12.0), such as RTX 50  launches overlap; 99 KiB

Tiles and stages were measured on Hopper; those for 2 to 64 tokens with 4- and 8-bit numbers, and those for 8-bit
whole numbers, also as they are compiled for an RTX 4090. On a card with less shared memory, fewer tiles are loaded
ahead.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

OVERLAP = (9, 0)  # programmatic dependent launch
RESERVED = 2048  # bytes of shared memory that a kernel uses for other things than tiles


class Card(NamedTuple):
    """The current GPU."""

    capability: tuple[int, int]
    shared: int  # bytes of shared memory that one program can use
    processors: int = 132  # multiprocessors: programs that run at the same time, or more

    @property
    def by_warps(self) -> bool:
        """Returns True if each warp multiplies on its own (mma.sync), and tensor cores read registers only."""
        return self.capability[0] not in (9, 10)


@cache
def card() -> Card:
    """Returns the current GPU; without a GPU, a Hopper card."""
    if not torch.cuda.is_available():
        return Card((9, 0), 227 * 1024)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    shared = getattr(properties, "shared_memory_per_block_optin")  # noqa: B009 (torch's types lack it)
    return Card((properties.major, properties.minor), shared, properties.multi_processor_count)


@cache
def overlap() -> dict[str, bool]:
    """Returns the arguments of a kernel that starts before the previous kernel has ended, if the card can do that."""
    can = card().capability >= OVERLAP
    return {"PDL": can, "launch_pdl": can}


@triton.jit
def after_previous(PDL: tl.constexpr, NEXT: tl.constexpr = True):
    """Wait until the previous kernel has ended, and if NEXT let the next one start. PDL: the launches overlap."""
    if PDL:
        gdc_wait()
        if NEXT:
            gdc_launch_dependents()


def tiles_of(t: torch.Tensor, block: list[int]) -> TensorDescriptor | torch.Tensor:
    """Returns the argument of a kernel that reads tiles of this shape from a matrix with `read_tile`.

    Below Hopper it is the matrix: from a descriptor, Triton would make loads of single numbers.
    """
    return TensorDescriptor.from_tensor(t, block) if card().capability >= OVERLAP else t


@triton.jit
def read_tile(t, row, column, HEIGHT, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns the tile [ROWS, COLUMNS] of t [HEIGHT, WIDTH] from `row` and `column` on; zeros outside. HEIGHT is
    None if no number is outside. t: what `tiles_of` returned."""
    if isinstance(t, tl.tensor):
        r = row + tl.arange(0, ROWS)
        c = column + tl.arange(0, COLUMNS)
        at = t + r.to(tl.int64)[:, None] * WIDTH + c[None, :]
        if HEIGHT is None:
            found = tl.load(at)
        elif WIDTH % COLUMNS == 0:
            found = tl.load(at, mask=(r < HEIGHT)[:, None], other=0.0)
        else:
            found = tl.load(at, mask=(r < HEIGHT)[:, None] & (c < WIDTH)[None, :], other=0.0)
    else:
        found = t.load([row, column])
    return found


def fitting(stages: int, stage_bytes: int, other_bytes: int = 0) -> int:
    """Returns `stages`, or fewer if that many stages do not fit into the shared memory beside `other_bytes`."""
    return max(1, min(stages, (card().shared - RESERVED - other_bytes) // stage_bytes))
