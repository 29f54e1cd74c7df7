"""The scales of an 8-bit KV cache, computed from the weights alone.

By the inequality of Cauchy and Schwarz, no entry of RMSNorm(x) W is larger than the norm of its row of W times
sqrt(hidden size). A normed key is at most sqrt(head dimension) times its weight. With these bounds no value is cut off,
and no prompts are needed for calibration. A token's keys do not depend on other tokens, so a cached prefix, other
chunks or a preemption change nothing. A bound that is too large does little harm: these floating-point numbers have 4
significant bits over 15 octaves, and lose them gradually over 3 more. Scales are powers of two, so x / scale and the
conversion back to 16 bits are exact; only the rounding to 4 bits loses precision.
"""

from __future__ import annotations

import torch

from engine.attention.kv_fp8 import E4M3_MAX
from engine.model.decoder import Decoder, Layer

SLACK = 1.15  # for earlier rounding, which is to 8 bits if the weights have 8 bits
LEAST = 2.0**-14  # the smallest scale: the smallest float16 with full precision


def kv_scales(model: Decoder) -> list[torch.Tensor]:
    """The scales of keys and values in each layer, fp32 [2, Hkv], powers of two."""
    rotation = _largest_rotation(model.rope_table)
    return [_layer_scales(model, layer, rotation) for layer in model.layers]


def _layer_scales(model: Decoder, layer: Layer, rotation: float) -> torch.Tensor:
    config = model.config
    kv_heads, dim = config.num_kv_heads, config.head_dim
    first = config.num_heads * dim
    rows = layer.qkv
    if not isinstance(rows, torch.Tensor):  # of 8 bits
        rows = rows.rows(torch.arange(rows.shape[0], device=rows.device))
    bounds = (rows[first:].float() * layer.input_norm.float()).norm(dim=1) * config.hidden_size**0.5
    if layer.qkv_bias is not None:
        bounds += layer.qkv_bias[first:].float().abs()
    keys, values = bounds.view(2, kv_heads, dim)
    if layer.qk_norm is not None:
        keys = layer.qk_norm[config.num_heads :].float().abs() * dim**0.5
    # Rotation turns pairs (i, i + D/2): each entry may become as large as the norm of its pair.
    pairs = keys.view(kv_heads, 2, -1).norm(dim=1) * rotation
    largest = torch.stack((pairs.amax(1), values.amax(1))) * (SLACK / E4M3_MAX)
    return torch.exp2(largest.clamp_min(LEAST).log2().ceil())


def _largest_rotation(table: torch.Tensor) -> float:
    """The largest factor by which rotation stretches a pair: 1, or the attention factor of a stretched context."""
    return float(table.view(len(table), 2, -1).norm(dim=1).amax())
