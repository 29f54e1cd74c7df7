"""The decoder's small operations as fused kernels: the same functions as engine/model/ops.py, which specifies them."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from engine.kernels import norms
from engine.kernels.norms import qk_norm_rope_store, rms_norm, silu_mul

__all__ = ["add_rms_norm", "linear", "qk_norm_rope_store", "rms_norm", "rope_rows", "silu_mul"]


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual [T, H] += x, in place; returns its norm."""
    return norms.rms_norm(x, weight, eps, residual)


def rope_rows(table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nothing to gather ahead: the kernel reads the table at each token's position."""
    return table, positions
