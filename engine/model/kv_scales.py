"""Computes the scales of an 8-bit KV cache from the weights alone, without prompts for calibration.

By the Cauchy-Schwarz inequality, no entry of W RMSNorm(x) is larger than the norm of the entry's row of W times
sqrt(hidden size). If a model normalises keys, no entry of a key is larger than sqrt(head dimension) times the entry's
norm weight. With these bounds, no number exceeds the range of the cache. The scales do not depend on tokens, so the
cache holds the same numbers whether a prefix was cached, chunked or computed again after a preemption.

A bound that is too large does little harm: an e4m3 number has 4 significant bits over 15 octaves, and fewer and fewer
bits over 3 smaller octaves. Scales are powers of two, so x / scale and the conversion back to 16 bits are exact. Only
the rounding to 4 bits loses precision.
"""

from __future__ import annotations

import torch

from engine.attention.kv_fp8 import E4M3_MAX
from engine.model.decoder import Decoder, Layer

SLACK = 1.15  # room for rounding errors of keys and values; they are largest with 8-bit weights and activations
LEAST = 2.0**-14  # the smallest scale; it is also the smallest float16 number with full precision


def kv_scales(model: Decoder) -> list[torch.Tensor]:
    """Returns the scales of keys and values for each layer, fp32 [2, Hkv], powers of two."""
    return [
        _layer_scales(model, layer, _largest_rotation(table))
        for layer, table in zip(model.layers, model.rope_tables, strict=True)
    ]


def _layer_scales(model: Decoder, layer: Layer, rotation: float) -> torch.Tensor:
    config = model.config
    kv_heads, dim = config.num_kv_heads, config.head_dim
    first_key_row = config.num_heads * dim
    rows = layer.qkv
    if not isinstance(rows, torch.Tensor):  # a quantised matrix
        rows = rows.rows(torch.arange(rows.shape[0], device=rows.device))
    assert layer.input_norm is not None, "engine/model/traits.py refuses models without this norm"
    bounds = (rows[first_key_row:].float() * layer.input_norm.float()).norm(dim=1) * config.hidden_size**0.5
    if layer.qkv_bias is not None:
        bounds += layer.qkv_bias[first_key_row:].float().abs()
    keys, values = bounds.view(2, kv_heads, dim)
    if layer.qk_norm is not None:
        keys = layer.qk_norm[config.num_heads :].float().abs() * dim**0.5
    # Rotary positions rotate pairs (i, i + D/2), so an entry may become as large as the norm of its pair.
    pairs = keys.view(kv_heads, 2, -1).norm(dim=1) * rotation
    largest = torch.stack((pairs.amax(1), values.amax(1))) * (SLACK / E4M3_MAX)
    return torch.exp2(largest.clamp_min(LEAST).log2().ceil())


def _largest_rotation(table: torch.Tensor) -> float:
    """Returns the largest factor by which rotation stretches a pair: 1, or yarn's attention factor."""
    return float(table.view(len(table), 2, -1).norm(dim=1).amax())
