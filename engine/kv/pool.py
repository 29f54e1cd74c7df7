"""Stage 3's tensors: one pool of keys and one of values per layer. Who owns which block, allocator.py knows."""

from __future__ import annotations

import torch

from engine.config import ModelConfig


class KVPool:
    """keys[layer], values[layer]: [num_blocks, block_size, kv_heads, head_dim], zeros at first; storage never moves.

    Block 0 is the null block: padding points at it, nobody owns it, and what it holds is always finite.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))
