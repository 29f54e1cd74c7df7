"""The tensors of the KV cache: a pool of keys and a pool of values per layer, or a pool of recurrent states.

core/allocator.py records which blocks are in use.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from engine.attention.base import AttentionShape
from engine.groups import cache_groups


class LayerState(NamedTuple):
    """The recurrent states of a layer, one in each slot. Slot 0 holds zeros and is never written."""

    conv: torch.Tensor  # [slots, C, K - 1]
    recurrent: torch.Tensor  # [slots, Hv, Dk, Dv] fp32 or float64, whose columns are contiguous


class KVPool:
    """Holds keys[layer] and values[layer], each [blocks of the group, block_size, kv_heads, head_dim], initially zeros.

    A layer that reads the keys and values of another layer has that layer's tensors. A layer with a recurrent state has
    None there, and its states in states[layer], which is None for the other layers. The memory of these tensors never
    moves. scales[layer]: fp32 [2, kv_heads], the scales of keys and values in an 8-bit cache; None in other caches.
    Block 0 of each group is its null block: padding refers to it, no request holds it, and its contents are always
    finite.
    """

    def __init__(
        self, config: AttentionShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
        scales: list[torch.Tensor] | None = None, side_blocks: tuple[int, ...] = (),
    ) -> None:
        """`num_blocks`: of group 0. `side_blocks`: of the other groups (engine/groups.py); (): the same number."""
        groups = cache_groups(config)
        self.num_blocks = num_blocks
        self.side_blocks = side_blocks or (num_blocks,) * (len(groups) - 1)
        self.block_size = block_size
        self.dtype = dtype
        self.scales: Sequence[torch.Tensor | None] = scales if scales is not None else [None] * config.num_layers
        self.states: list[LayerState | None] = [None] * config.num_layers
        held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group, blocks in zip(groups, (num_blocks, *self.side_blocks), strict=True):
            if group.state is not None:
                wide, count = torch.promote_types(dtype, torch.float32), len(group.layers)
                convs = _zeros(count, (blocks, *group.state.conv), dtype, device)
                heads, keys, values = group.state.recurrent
                recurrents = _zeros(count, (blocks, heads, values, keys), wide, device)
                for layer, conv, recurrent in zip(group.layers, convs, recurrents, strict=True):
                    self.states[layer] = LayerState(conv, recurrent.transpose(2, 3))
            else:
                shape = (blocks, block_size, group.num_kv_heads, group.head_dim)
                count = len(group.layers)
                tensors = _zeros(2 * count, shape, dtype, device)
                held |= zip(group.layers, zip(tensors[:count], tensors[count:], strict=True), strict=True)
        self._held = held
        sources: list[tuple[Any, Any]]
        sources = [held.get(config.source_of(layer), (None, None)) for layer in range(config.num_layers)]
        self.keys, self.values = [keys for keys, _ in sources], [values for _, values in sources]

    @property
    def nbytes(self) -> int:
        states = (state for state in self.states if state is not None)
        return sum(first.nbytes + second.nbytes for first, second in (*self._held.values(), *states))


def _zeros(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Sequence[torch.Tensor]:
    """Returns `count` tensors of zeros."""
    if device.type != "cpu":  # one call, which does not hold Python's lock: it takes half a second for 115 GB
        return torch.zeros((count, *shape), dtype=dtype, device=device).unbind()
    # The system writes the zeros of a page when the page is used first. torch.zeros would write all of them now. numpy
    # asks for large pages: the first token of a model would wait for a large page of each of these tensors.
    size = count * math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(count, *shape).unbind()
