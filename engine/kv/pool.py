"""Stage 3's tensors: one pool of keys and one of values per layer. Who owns which block, allocator.py knows."""

from __future__ import annotations

import torch

NULL_BLOCK = 0


class KVPool:
    """keys[layer], values[layer]: [num_blocks, block_size, kv_heads, head_dim], zeros at first; storage never moves.

    Block 0 is the null block: padding points at it, nobody owns it, and what it holds is always finite.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write k, v [T, kv_heads, head_dim] of T tokens to slots (block · block_size + offset), int64 [T]."""
        self.keys[layer].view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
        self.values[layer].view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)
