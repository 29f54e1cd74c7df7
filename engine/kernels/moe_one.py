"""Computes a mixture of experts for one token, with three kernels.

    pick      chooses K experts and their weights from the router's logits
    gate_up   (gemv.py) normalises x, then multiplies: a program computes silu(gate) · up for a few rows of one expert
    down      each program sums a few rows of the result over all K experts and adds the residual

Shapes: x [1, H], gate_up [E, 2 I, H] (gate rows, then up rows), down [E, H, I]. As in gemv.py, the weights may be 8-bit
numbers with a scale per row or per block: matrices [E · 2 I, H] and [E · H, I].

Reading the experts' weights takes most of the time. With the shape of Qwen3-30B-A3B, the router and the three kernels
take 28 us; reading the weights alone takes 18.4 us (MEASURED.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.card import after_previous, overlap
from engine.kernels.gemv import ScaledMatrix, block_scales, gemv_kernel, parts, streamed
from engine.kernels.moe_route import topk_scores

MOST_EXPERTS = 256  # limited because one program compares all pairs of experts
ROWS, BYTE_ROWS, GATE_UP_COLUMNS, DOWN_COLUMNS = 2, 8, 2048, 1024  # sizes of a tile of weights
EXPERTS_AHEAD = 4  # experts whose down weights are loaded before `down` waits for gate_up


@triton.jit
def _pick_kernel(
    logits, chosen, weights, load, live, E, TOP: tl.constexpr, NORMALISED: tl.constexpr, BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    e = tl.arange(0, BLOCK_E)
    after_previous(PDL)
    logit = tl.load(logits + e, mask=e < E, other=float("-inf")).to(tl.float32)
    counted = tl.load(live) > 0
    old_load = tl.load(load + e, mask=e < E, other=0)
    # An expert's rank is the number of experts that are more probable, or equally probable and of a lower index.
    score = topk_scores(logit, e, E)
    precedes = (score[None, :] > score[:, None]) | ((score[None, :] == score[:, None]) & (e[None, :] < e[:, None]))
    rank = tl.sum(precedes.to(tl.int32), 1)
    share = tl.exp(logit - tl.max(logit, 0))
    share = share / tl.sum(share, 0)
    top = rank < TOP
    if NORMALISED:
        share = share / tl.sum(tl.where(top, share, 0.0), 0)
    tl.store(chosen + rank, e, mask=top)
    tl.store(weights + rank, share.to(logits.dtype.element_ty).to(tl.float32), mask=top)
    tl.store(load + e, old_load + 1, mask=top & counted)


@triton.jit
def _down_kernel(
    inner, chosen, weights, w, scale, residual, out, H: tl.constexpr, INNER: tl.constexpr, TOP: tl.constexpr,
    SCALED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    CHUNKS: tl.constexpr = (INNER + BLOCK_K - 1) // BLOCK_K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # `down` starts only after gate_up has waited for `pick`, so `chosen` is complete here. Load the down weights of the
    # first AHEAD experts while gate_up still runs.
    early = ()
    for slot in tl.static_range(AHEAD):
        expert = tl.load(chosen + slot).to(tl.int64)
        for c in tl.static_range(CHUNKS):
            at = w + (expert * H + n)[:, None] * INNER + (c * BLOCK_K + k)[None, :]
            mask = (n < H)[:, None] & ((c * BLOCK_K + k) < INNER)[None, :]
            early = early + (streamed(at, mask),)  # type: ignore[assignment]  # noqa: RUF005
    after_previous(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for slot in tl.static_range(TOP):
        weight = tl.load(weights + slot)
        expert = tl.load(chosen + slot).to(tl.int64)
        by_row = tl.full([BLOCK_N], 1.0, tl.float32)
        if SCALED:
            by_row = tl.load(scale + expert * H + n, mask=n < H, other=0.0)
        for c in tl.static_range(CHUNKS):
            inside = (c * BLOCK_K + k) < INNER
            v = tl.load(inner + slot * INNER + c * BLOCK_K + k, mask=inside, other=0.0).to(tl.float32) * weight
            if BLOCKS:
                v *= block_scales(scale, expert * H + tl.program_id(0) * BLOCK_N, c, INNER, BLOCK_K)
            mask = (n < H)[:, None] & inside[None, :]
            at = w + (expert * H + n)[:, None] * INNER + (c * BLOCK_K + k)[None, :]
            tile = early[slot * CHUNKS + c] if slot < AHEAD else streamed(at, mask)
            acc += tile.to(tl.float32) * (v[None, :] * by_row[:, None] if SCALED else v[None, :])
    dtype = out.dtype.element_ty
    y = tl.sum(acc, 1).to(dtype).to(tl.float32)
    r = tl.load(residual + n, mask=n < H, other=0.0).to(tl.float32)
    tl.store(out + n, (y + r).to(dtype), mask=n < H)


def one_token(
    x: torch.Tensor, norm: tuple[torch.Tensor, float], logits: torch.Tensor,
    gate_up: torch.Tensor | ScaledMatrix, down: torch.Tensor | ScaledMatrix, per_token: int, normalised: bool,
    load: torch.Tensor, live: torch.Tensor,
) -> torch.Tensor:
    """Returns x + experts(norm(x)) [1, H] for x [1, H]. `norm`: (weight, eps). `logits` [1, E]: the router's logits of
    norm(x). `per_token`: K. `normalised`: the weights of the chosen experts are scaled to sum to 1. Adds 1 to `load`
    (int64 [E]) for each chosen expert, unless `live` (int32 [1]) is 0: then the token is padding."""
    hidden, inner_size, experts = x.shape[1], down.shape[-1], logits.shape[1]
    (up, up_scale, up_flags), (back, back_scale, back_flags) = parts(gate_up), parts(down)
    rows = ROWS if up_scale is None else BYTE_ROWS
    inner = torch.empty(per_token, inner_size, dtype=x.dtype, device=x.device)
    chosen = torch.empty(per_token, dtype=torch.int32, device=x.device)
    weights = torch.empty(per_token, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    _pick_kernel[(1,)](
        logits, chosen, weights, load, live, experts, TOP=per_token, NORMALISED=normalised,
        BLOCK_E=triton.next_power_of_2(experts), num_warps=8, **overlap(),
    )
    each = triton.cdiv(inner_size, rows)
    gemv_kernel[(per_token * each,)](
        x, up, inner, up_scale, norm[0], None, chosen, inner_size, K=hidden, EPS=norm[1], NORM=True, RESIDUAL=False,
        GATE_UP=True, EACH=each, BLOCK_N=rows, BLOCK_K=min(GATE_UP_COLUMNS, triton.next_power_of_2(hidden)), AHEAD=1,
        num_warps=4, **up_flags, **overlap(),
    )
    _down_kernel[(triton.cdiv(hidden, rows),)](
        inner, chosen, weights, back, back_scale, x, out, H=hidden, INNER=inner_size, TOP=per_token, BLOCK_N=rows,
        BLOCK_K=min(DOWN_COLUMNS, triton.next_power_of_2(inner_size)), AHEAD=min(EXPERTS_AHEAD, per_token),
        num_warps=4, **back_flags, **overlap(),
    )
    return out
