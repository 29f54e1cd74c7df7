"""The layer part that Qwen3.5 and Qwen3-Next have instead of attention in most layers: a gated delta rule.

The projections of a token are mixed by a causal convolution, then by the delta rule (engine/model/delta.py), whose
output is normalised and multiplied by silu(z). Yang et al. 2024, "Gated Delta Networks".
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from engine.attention.base import StateMeta
from engine.attention.kv_pool import LayerState
from engine.model.config import DeltaConfig
from engine.model.experts import Ops
from engine.model.linear import linear
from engine.model.matrices import Matrices
from engine.model.slots import Slot

INPUTS = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z")


class DeltaMixer:
    """The weights of one layer's delta rule. Shapes: channels C of q, k and v together; Hv value heads."""

    def __init__(self, config: DeltaConfig, hidden: int, prefix: str, matrices: Matrices, ops: Ops) -> None:
        dtype, device = matrices.dtype, matrices.device
        wide = torch.promote_types(dtype, torch.float32)
        self.config, self._ops = config, ops
        inner, heads = config.value_heads * config.value_dim, config.value_heads
        self.inputs = matrices.empty(config.channels + inner, hidden, prefix, INPUTS)
        self.rates = torch.empty(2 * heads, hidden, dtype=dtype, device=device)  # b, then a
        self.conv = torch.empty(config.channels, config.taps, dtype=dtype, device=device)
        self.decay = torch.empty(heads, dtype=wide, device=device)  # -exp(A_log)
        self.rate_bias = torch.empty(heads, dtype=wide, device=device)
        self.norm = torch.empty(config.value_dim, dtype=dtype, device=device)
        self.output = matrices.empty(hidden, inner, prefix, ["out_proj"])

    def __call__(self, x: torch.Tensor, eps: float, pool: LayerState, states: StateMeta) -> torch.Tensor:
        """x [T, H] -> [T, Hv·Dv], before the output projection. Reads and writes the states in the pool."""
        return self.mix(linear(x, self.inputs), F.linear(x, self.rates), eps, pool, states)

    def mix(
        self, projected: torch.Tensor, rates: torch.Tensor, eps: float, pool: LayerState, states: StateMeta
    ) -> torch.Tensor:
        """Returns the same from the products with `inputs` [T, C + Hv·Dv] and `rates` [T, 2·Hv]."""
        c, ops = self.config, self._ops
        inner = c.value_heads * c.value_dim
        mixed, z = projected.split([c.channels, inner], -1)
        decays, betas = ops.delta_gates(rates, self.decay, self.rate_bias)
        mixed = ops.causal_conv(mixed, self.conv, pool.conv, states)
        q, k, v = mixed.split([c.key_heads * c.key_dim, c.key_heads * c.key_dim, inner], -1)
        q, k = (each.unflatten(-1, (c.key_heads, c.key_dim)) for each in (q, k))
        v = v.unflatten(-1, (c.value_heads, c.value_dim))
        out = ops.delta_rule(q, k, v, decays, betas, pool.recurrent, states)
        return ops.gated_norm(out, z, self.norm, eps)

    def slots(self, prefix: str) -> Iterator[Slot]:
        c = self.config
        keys, values = c.key_heads * c.key_dim, c.value_heads * c.value_dim
        for name, view in zip(INPUTS, self.inputs.split([keys, keys, values, values]), strict=True):
            yield Slot(f"{prefix}{name}.weight", view)
        for name, view in zip("ba", self.rates.chunk(2), strict=True):
            yield Slot(f"{prefix}in_proj_{name}.weight", view)
        yield Slot(f"{prefix}conv1d.weight", self.conv, stored=(*self.conv.shape[:1], 1, *self.conv.shape[1:]))
        yield Slot(f"{prefix}A_log", self.decay)
        yield Slot(f"{prefix}dt_bias", self.rate_bias)
        yield Slot(f"{prefix}norm.weight", self.norm)
        yield Slot(f"{prefix}out_proj.weight", self.output)
