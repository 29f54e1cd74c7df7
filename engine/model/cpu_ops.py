"""The small operations for a CPU in float32: the functions of engine/model/ops.py, in fewer and cheaper calls.

On small tensors a call costs more than its arithmetic. For a single token numpy does the work, whose calls cost about
a third of torch's; for several, norms are built on vector_norm, one pass instead of the four of rms_norm.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.model import ops
from engine.model.ops import silu_mul

__all__ = ["add_rms_norm", "linear", "qk_norm_rope_store", "rms_norm", "rope_rows", "silu_mul"]

# Between these numbers of tokens, MKL multiplies weight · xᵀ up to twice as fast as x · weightᵀ.
FEWEST_TRANSPOSED, MOST_TRANSPOSED = 3, 48


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As ops.linear; the result may be laid out column by column."""
    if not FEWEST_TRANSPOSED <= len(x) <= MOST_TRANSPOSED:
        return F.linear(x, weight, bias)
    product = torch.mm(weight, x.t().contiguous()).t()
    return product if bias is None else product + bias


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As ops.rms_norm."""
    if len(x) == 1:
        return torch.from_numpy(_norm_one(x.numpy(), weight, eps))
    return (x * _inverse_rms(x, eps)).mul_(weight)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As ops.add_rms_norm."""
    if len(x) == 1:
        total = residual.numpy()
        total += x.numpy()
        return torch.from_numpy(_norm_one(total, weight, eps))
    residual.add_(x)
    return (residual * _inverse_rms(residual, eps)).mul_(weight)


def rope_rows(table: torch.Tensor, positions: torch.Tensor) -> Any:
    """Of one token: cosines and sines [D / 2] each, in numpy; of several: as ops.rope_rows."""
    if len(positions) > 1:
        return ops.rope_rows(table, positions)
    row = table.numpy()[positions.item()]
    return row[: len(row) // 2], row[len(row) // 2 :]


def qk_norm_rope_store(
    qkv: torch.Tensor,
    qk_weight: torch.Tensor | None,
    eps: float,
    rope: Any,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """As ops.qk_norm_rope_store."""
    kv_heads, dim = k_cache.shape[2:]
    if len(qkv) > 1:
        if qk_weight is not None:
            qkv = qkv.contiguous()
            qk = qkv.view(len(qkv), -1, dim)[:, :-kv_heads]
            qk.mul_(_inverse_rms(qk, eps)).mul_(qk_weight)
        return ops.qk_norm_rope_store(qkv.contiguous(), None, eps, rope, k_cache, v_cache, slot_mapping)
    heads = qkv.numpy().reshape(-1, dim)
    qk, half = heads[:-kv_heads], dim // 2
    if qk_weight is not None:
        square = np.einsum("hd,hd->h", qk, qk)
        square /= dim
        square += eps
        qk /= np.sqrt(square, out=square)[:, None]
        qk *= qk_weight.numpy()
    cos, sin = rope
    rotated = np.empty_like(qk)
    low, high = qk[:, :half], qk[:, half:]
    np.subtract(low * cos, high * sin, out=rotated[:, :half])
    np.add(high * cos, low * sin, out=rotated[:, half:])
    slot = slot_mapping.item()
    k_cache.numpy().reshape(-1, kv_heads, dim)[slot] = rotated[-kv_heads:]
    v_cache.numpy().reshape(-1, kv_heads, dim)[slot] = heads[-kv_heads:]
    return torch.from_numpy(rotated[None, :-kv_heads])


def _norm_one(x: np.ndarray, weight: torch.Tensor, eps: float) -> np.ndarray:
    """x [1, H]."""
    flat = x.reshape(-1)
    scale = 1.0 / math.sqrt(float(np.dot(flat, flat)) / flat.size + eps)
    normed = x * scale
    normed *= weight.numpy()
    return normed


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x²) + eps) over the last dimension, which is kept."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_scalar(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@lru_cache
def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value)
