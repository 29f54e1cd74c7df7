"""Rotary position embedding (RoFormer, Su et al. 2021) and its variants for longer contexts: frequencies and tables."""

from __future__ import annotations

import math

import torch

from engine.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, dim: int) -> torch.Tensor:
    """Returns the dim/2 angles per position, fp32: θ^(-2i/dim), reduced if `rope` stretches positions.

    All arithmetic is in float32, so each angle is bitwise equal to the angle in transformers.
    """
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, dim)
    return plain


def attention_factor(rope: RopeConfig) -> float:
    """Returns the factor by which cos and sin are multiplied: YaRN's temperature, or 1 for all other kinds."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature()


def rope_table(rope: RopeConfig, dim: int, length: int, max_position: int) -> torch.Tensor:
    """Returns the table [length, dim] fp32 of cos and sin.

    Row p is cos(p·f_i) for i < dim/2, then sin(p·f_i), all times the attention factor. `max_position`: the config's
    max_position_embeddings; rope kind "dynamic" stretches longer sequences.
    """
    positions = torch.arange(length, dtype=torch.float32)[:, None]
    frequencies = inverse_frequencies(rope, dim)[None, :]
    if rope.kind == "dynamic" and length > max_position:
        frequencies = _dynamic(rope, dim, positions, max_position)
    angles = positions * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(rope)


def _dynamic(rope: RopeConfig, dim: int, positions: torch.Tensor, max_position: int) -> torch.Tensor:
    """Returns NTK-aware frequencies [length, dim/2]; row p has the frequencies for a sequence that ends at position p.

    The base of a position never changes, so a key depends only on its position and can be cached and shared.
    transformers does the same when it generates token by token; for a long prompt it uses the base of the whole prompt.
    """
    lengths = (positions + 1).clamp_min(max_position).double()
    bases = rope.theta * (rope.factor * lengths / max_position - (rope.factor - 1)) ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / (bases.float() ** exponents)


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Returns Llama 3's frequencies: long wavelengths stretched, short ones kept, medium ones interpolated."""
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > original / low, plain / rope.factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * stretched / rope.factor + smooth * stretched
    is_between = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(is_between, between, stretched)


def _yarn(rope: RopeConfig, dim: int) -> torch.Tensor:
    """Returns the frequencies of YaRN (Peng et al. 2023).

    Dimensions that turn often in the original context keep their frequencies; the frequencies of slow dimensions are
    divided by the factor. For dimensions between these two groups, a ramp mixes the two frequencies.
    """

    def dimension_that_turns(times: float) -> float:
        return dim * math.log(rope.original_max_position / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of width 0 would divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    keep = 1 - ramp
    return 1.0 / (rope.factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep
