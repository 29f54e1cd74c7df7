"""The decoder's small operations as fused kernels: the same functions as engine/model/ops.py, which specifies them."""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels import delta, delta_ends, moe, norms
from engine.model import ops
from engine.model.experts import Experts

silu_mul, causal_conv, delta_rule = norms.silu_mul, delta.causal_conv, delta.delta_rule
delta_gates, gated_norm = delta_ends.delta_gates, delta_ends.gated_norm


def qk_norm_rope_store(
    qkv: torch.Tensor, qk_weight: torch.Tensor | None, eps: float, rope: Any, k_cache: torch.Tensor,
    v_cache: torch.Tensor, slot_mapping: torch.Tensor | None, kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """See engine/model/ops.py."""
    assert slot_mapping is not None, "engine/model/traits.py refuses layers that share keys and values"
    return norms.qk_norm_rope_store(qkv, qk_weight, eps, rope, k_cache, v_cache, slot_mapping, kv_scales)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the norm of x [..., H]: RMSNorm by our kernel, LayerNorm by torch."""
    return ops.norm(x, weight, eps) if weight.dim() == 2 else norms.rms_norm(x, weight, eps)


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to residual [T, H] in place; return the norm of the sum."""
    if weight.dim() == 2:
        return ops.add_norm(x, residual, weight, eps)
    return norms.rms_norm(x, weight, eps, residual)


def rope_rows(table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the arguments unchanged: the kernel reads the table at each token's position."""
    return table, positions


def experts(x: torch.Tensor, mixture: Experts, live: torch.Tensor | None) -> torch.Tensor:
    """Returns the output of the experts [T, H] for x [T, H]. The host does not wait for the device."""
    if not len(x):
        return torch.empty_like(x)
    config, clamped = mixture.config, None
    if mixture.gate_up_bias is not None and mixture.down_bias is not None:
        clamped = moe.Clamped(mixture.gate_up_bias, mixture.down_bias, config.limit, config.alpha)
    each = moe.each_expert(
        x, mixture.router, mixture.gate_up, mixture.down, config.per_token, config.normalised, mixture.load, live,
        mixture.router_bias, clamped,
    )
    return moe.total(each, live)
