"""The decoder's small operations as fused kernels: the same functions as engine/model/ops.py, which specifies them."""

from __future__ import annotations

import torch

from engine.kernels import moe, norms
from engine.model.experts import Experts

Rope = tuple[torch.Tensor, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] -> its norm."""
    return norms.rms_norm(x, weight, eps, pdl=True)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual [T, H] += x, in place; returns its norm."""
    return norms.rms_norm(x, weight, eps, residual, pdl=True)


def rope_rows(table: torch.Tensor, positions: torch.Tensor) -> Rope:
    """Returns its arguments: the kernel reads the table at each token's position."""
    return table, positions


def qk_norm_rope_store(
    qkv: torch.Tensor, qk_weight: torch.Tensor | None, eps: float, rope: Rope, k_cache: torch.Tensor,
    v_cache: torch.Tensor, slot_mapping: torch.Tensor, kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rotates queries and keys in place, stores keys and values, returns the queries: a view of qkv."""
    return norms.qk_norm_rope_store(qkv, qk_weight, eps, rope, k_cache, v_cache, slot_mapping, kv_scales, pdl=True)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I] -> silu(gate) * up [T, I]."""
    return norms.silu_mul(gate_up, pdl=True)


def experts(x: torch.Tensor, mixture: Experts, live: torch.Tensor | None) -> torch.Tensor:
    """x [T, H] -> [T, H], without waiting on the host."""
    if not len(x):
        return torch.empty_like(x)
    config = mixture.config
    each = moe.each_expert(
        x, mixture.router, mixture.gate_up, mixture.down, config.per_token, config.normalised, mixture.load, live
    )
    return moe.total(each, live)
