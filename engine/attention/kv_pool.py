"""The tensors of the KV cache: a pool of keys and a pool of values per layer.

core/allocator.py records which blocks are in use.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from engine.attention.base import AttentionShape


class KVPool:
    """Holds keys[layer] and values[layer], each [num_blocks, block_size, kv_heads, head_dim], initially zeros.

    The memory of these tensors never moves. scales[layer]: fp32 [2, kv_heads], the scales of keys and values in an
    8-bit cache; None in other caches. Block 0 is the null block: padding refers to it, no request holds it, and its
    contents are always finite.
    """

    def __init__(
        self, config: AttentionShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
        scales: list[torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.scales: Sequence[torch.Tensor | None] = scales if scales is not None else [None] * config.num_layers
        tensors = _zeros(2 * config.num_layers, shape, dtype, device)
        self.keys, self.values = tensors[: config.num_layers], tensors[config.num_layers :]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


def _zeros(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Sequence[torch.Tensor]:
    """Returns `count` tensors of zeros."""
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]
    # The system writes the zeros of a page when the page is used first. torch.zeros would write all of them now. numpy
    # asks for large pages: the first token of a model would wait for a large page of each of these tensors.
    size = count * math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(count, *shape).unbind()
