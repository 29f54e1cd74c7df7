"""How matrices are rounded to 4-bit numbers in groups, with torch. On a CPU, a compiled kernel does the same."""

from __future__ import annotations

import torch

# A group's largest number becomes -8, or -8 after clipping. These quotients of this number and the scale are tried.
QUOTIENTS = (8.6, 8.2, 7.8, 7.4, 7.0)


def round_groups(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns numbers uint8 [N, K] from 0 to 15 and scales fp32 [N, K / group]; scale · (number - 8) approximates x. x:
    [N, K], float32. The scale of a group is the one of the candidates with the smallest sum of squared errors."""
    parts = x.unflatten(1, (-1, group))
    extreme = parts.gather(2, parts.abs().argmax(2, keepdim=True))
    best, least = torch.zeros_like(extreme), torch.full_like(extreme, torch.inf)
    for quotient in QUOTIENTS:
        scale = extreme / -quotient
        error = (_steps(parts, scale) * scale - parts).square_().sum(2, keepdim=True)
        better = ~(error >= least)  # a scale that is not finite is taken, so that it shows
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return (_steps(parts, best) + 8).to(torch.uint8).flatten(1), best.squeeze(2)


def _steps(parts: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    return (parts * inverse).round_().clamp_(-8, 7)
