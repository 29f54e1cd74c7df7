"""Rotary position embedding (RoFormer, Su et al. 2021) and the ways to stretch it: frequencies and cos/sin tables."""

from __future__ import annotations

import math

import torch

from engine.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, dim: int) -> torch.Tensor:
    """The dim/2 angles per position, fp32: θ^(-2i/dim), slowed down as `rope.kind` says (float32 throughout, so that
    they are those of transformers to the bit)."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, dim)
    return plain


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by (YaRN's temperature); 1 for every other kind."""
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
    """[length, dim] fp32: row p is cos(p·f_i) for i < dim/2, then sin(p·f_i); times the attention factor.

    `max_position` is the config's max_position_embeddings, beyond which "dynamic" stretches.
    """
    positions = torch.arange(length, dtype=torch.float32)[:, None]
    frequencies = inverse_frequencies(rope, dim)[None, :]
    if rope.kind == "dynamic" and length > max_position:
        frequencies = _dynamic(rope, dim, positions, max_position)
    angles = positions * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(rope)


def _dynamic(rope: RopeConfig, dim: int, positions: torch.Tensor, max_position: int) -> torch.Tensor:
    """[length, dim/2]: NTK-aware frequencies for a sequence that is exactly as long as the position needs.

    Each position keeps the base at which it was computed, so that a key depends on its position alone and can be
    cached and shared. It is what transformers does when it generates token by token; a long prompt it computes with
    the base of the whole.
    """
    lengths = (positions + 1).clamp_min(max_position).double()
    bases = rope.theta * (rope.factor * lengths / max_position - (rope.factor - 1)) ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / (bases.float() ** exponents)


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones left alone, those between interpolated."""
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > original / low, plain / rope.factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * stretched / rope.factor + smooth * stretched
    is_between = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(is_between, between, stretched)


def _yarn(rope: RopeConfig, dim: int) -> torch.Tensor:
    """YaRN (Peng et al. 2023): dimensions that turn often within the original context keep their frequency, those that
    hardly turn are stretched, with a ramp between."""

    def dimension_that_turns(times: float) -> float:
        return dim * math.log(rope.original_max_position / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    keep = 1 - ramp
    return 1.0 / (rope.factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep
