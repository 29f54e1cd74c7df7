"""Finds this step's keys and values in the qkv projection, where they follow the queries."""

from __future__ import annotations

import torch


def own_keys_and_values(q: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return this step's keys and values [T, Hkv, D] if q [T, Hq, D] is the first part of each qkv row; else None.

    It also returns None if the size of a qkv row is not a multiple of 16 bytes.

    The fused operations have already rotated the keys in place. For an 8-bit cache, they have also rounded the keys and
    values.
    """
    tokens, heads, dim = q.shape
    width = (heads + 2 * kv_heads) * dim
    if q.stride() != (width, dim, 1) or q.dtype.itemsize * width % 16:
        return None
    size, stride = (tokens, kv_heads, dim), q.stride()
    return (
        q.as_strided(size, stride, q.storage_offset() + heads * dim),
        q.as_strided(size, stride, q.storage_offset() + (heads + kv_heads) * dim),
    )
