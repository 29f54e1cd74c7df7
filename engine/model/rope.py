"""Rotary position embedding (RoFormer, Su et al. 2021) and its variants for longer contexts: frequencies and tables."""

from __future__ import annotations

import math

import torch

from engine.model.config import LONGROPE, NO_ROPE, PROPORTIONAL, RopeConfig


def inverse_frequencies(rope: RopeConfig, dim: int, length: int = 0) -> torch.Tensor:
    """Returns the dim/2 angles per position, fp32: θ^(-2i/dim), reduced if `rope` stretches positions. All arithmetic
    is in float32, so each angle is bitwise equal to the angle in transformers. `length`: the largest number of
    positions, which decides between the short and the long factors of longrope."""
    if rope.kind == LONGROPE:
        factors = rope.long_factors if length > rope.original_max_position else rope.short_factors
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == PROPORTIONAL:
        pairs = int(rope.share * dim // 2)
        rotated = 1.0 / (rope.theta ** (torch.arange(0, 2 * pairs, 2, dtype=torch.float32) / dim))
        return torch.nn.functional.pad(rotated, (0, dim // 2 - pairs)) / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, dim)
    return plain


def attention_factor(rope: RopeConfig) -> float:
    """Returns the factor by which cos and sin are multiplied: above 1 only for yarn and longrope."""
    if rope.kind not in ("yarn", LONGROPE):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == LONGROPE:
        if rope.factor <= 1 or rope.original_max_position == 1:
            return 1.0
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))

    def temperature(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature()


def rope_table(rope: RopeConfig, dim: int, length: int, max_position: int) -> torch.Tensor:
    """Returns the table [length, dim] fp32 of cos and sin. Row p is cos(p·f_i) for i < dim/2, then sin(p·f_i), all
    times the attention factor. Numbers of a head that are not rotated have the angle 0. `max_position`: the config's
    max_position_embeddings; rope kind "dynamic" stretches longer sequences."""
    rotated = 0 if rope.kind == NO_ROPE else rope.rotary_dim or dim
    cos, sin = torch.ones(length, dim // 2), torch.zeros(length, dim // 2)
    if rotated:
        positions = torch.arange(length, dtype=torch.float32)[:, None]
        frequencies = inverse_frequencies(rope, rotated, length)[None, :]
        if rope.kind == "dynamic" and length > max_position:
            frequencies = _dynamic(rope, rotated, positions, max_position)
        angles, factor = positions * frequencies, attention_factor(rope)
        cos[:, : rotated // 2], sin[:, : rotated // 2] = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, sin), dim=-1)


def row_order(rope: RopeConfig, dim: int) -> torch.Tensor | None:
    """Returns the numbers of a head [dim] in the order in which the decoder has them; None: as in the checkpoint. The
    decoder rotates number i with number i + dim/2. Some checkpoints rotate other pairs, or only a part of the head.
    Attention does not depend on the order, if queries and keys have the same."""
    rotated = rope.rotary_dim or dim
    if rotated == dim and not rope.interleaved:
        return None
    turned = torch.arange(rotated).view(-1, 2).t() if rope.interleaved else torch.arange(rotated).view(2, -1)
    return torch.cat((turned, torch.arange(rotated, dim).view(2, -1)), dim=1).flatten()


def query_scales(rope: RopeConfig, length: int) -> torch.Tensor | None:
    """Returns the factors of queries by position, fp32 [length] (Llama 4's scaling); None if all are 1."""
    if not rope.query_beta or length <= rope.original_max_position:
        return None
    lengths = torch.arange(length) // rope.original_max_position
    return 1 + rope.query_beta * torch.log(1 + lengths)


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
    """Returns the frequencies of YaRN (Peng et al. 2023). Dimensions that turn often in the original context keep their
    frequencies; the frequencies of slow dimensions are divided by the factor. For dimensions between these two groups,
    a ramp mixes the two frequencies."""

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
