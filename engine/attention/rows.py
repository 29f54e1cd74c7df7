"""Where this step's keys and values stand behind its queries."""

from __future__ import annotations

import torch


def own_keys_and_values(q: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """This step's keys and values [T, Hkv, D], if q [T, Hq, D] is the head of rows of qkv: the fused operations rotate
    those in place, and of an 8-bit cache round them to what it holds. None if it is not."""
    tokens, heads, dim = q.shape
    width = (heads + 2 * kv_heads) * dim
    if q.stride() != (width, dim, 1) or q.dtype.itemsize * width % 16:
        return None
    size, stride = (tokens, kv_heads, dim), q.stride()
    return (
        q.as_strided(size, stride, q.storage_offset() + heads * dim),
        q.as_strided(size, stride, q.storage_offset() + (heads + kv_heads) * dim),
    )
