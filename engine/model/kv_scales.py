"""The scales of an 8-bit KV cache, found from the weights alone.

No entry of RMSNorm(x) W can be larger than the norm of its row of W times sqrt(hidden size),
by Cauchy and Schwarz, nor a normed key larger than sqrt(head dimension) times its weight. So nothing is ever cut off,
no prompt has to be found to calibrate with, and what a token's keys become does not depend on which other tokens there
are: a cached prefix, another cut into chunks, a preemption change nothing. That such bounds are generous does not
matter to floating-point numbers: they have 4 significant bits over 15 octaves, and fade over 3 more. Scales are powers
of two, so that x / scale and its way back to 16 bits are exact, and rounding to 4 bits is all that happens.
"""

from __future__ import annotations

import torch

from engine.attention.kv_fp8 import E4M3_MAX
from engine.model.decoder import Decoder, Layer

SLACK = 1.15  # what is bounded has been rounded on the way, to 8 bits where weights have as many
LEAST = 2.0**-14  # a scale: the smallest that 16 bits hold with all their precision


def kv_scales(model: Decoder) -> list[torch.Tensor]:
    """fp32 [2, Hkv] for each layer: the scales of its keys and of its values, powers of two."""
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
    # Rotation turns pairs (i, i + D/2): each may end up as long as both together.
    pairs = keys.view(kv_heads, 2, -1).norm(dim=1) * rotation
    largest = torch.stack((pairs.amax(1), values.amax(1))) * (SLACK / E4M3_MAX)
    return torch.exp2(largest.clamp_min(LEAST).log2().ceil())


def _largest_rotation(table: torch.Tensor) -> float:
    """By how much rotation stretches at most: 1, or the attention factor of a stretched context."""
    return float(table.view(len(table), 2, -1).norm(dim=1).amax())
