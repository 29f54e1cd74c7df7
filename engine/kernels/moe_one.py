"""Computes a mixture of experts for one token, with three kernels.

    pick      chooses K experts and their weights from the router's logits
    gate_up   normalises x, then multiplies: each program computes silu(gate) · up for a few rows of one expert
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.card import overlap
from engine.kernels.gemv import ScaledMatrix, spread
from engine.kernels.moe_route import topk_scores

MOST_EXPERTS = 256  # limited because one program compares all pairs of experts
ROWS, BYTE_ROWS, GATE_UP_COLUMNS, DOWN_COLUMNS = 2, 8, 2048, 1024  # sizes of a tile of weights
EXPERTS_AHEAD = 4  # experts whose down weights are loaded before `down` waits for gate_up


@triton.jit
def _pick_kernel(
    logits,
    chosen,
    weights,
    load,
    live,
    E,
    TOP: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    e = tl.arange(0, BLOCK_E)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
def _gate_up_kernel(
    x,
    norm_weight,
    w,
    scale,
    inner,
    chosen,
    H: tl.constexpr,
    INNER: tl.constexpr,
    EPS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    CHUNKS: tl.constexpr = (H + BLOCK_K - 1) // BLOCK_K
    BLOCKS_N: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    slot = tl.program_id(0) // BLOCKS_N
    n = tl.program_id(0) % BLOCKS_N * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = (n < INNER)[:, None]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(chosen + slot).to(tl.int64)
    row = w + (expert * 2 * INNER + n)[:, None] * H + k[None, :]
    # Load the first tiles while the norm is computed.
    first = tl.load(row, mask=rows & (k < H)[None, :], other=0.0, eviction_policy="evict_first")
    first2 = tl.load(row + INNER * H, mask=rows & (k < H)[None, :], other=0.0, eviction_policy="evict_first")
    square = tl.zeros([BLOCK_K], tl.float32)
    for c in tl.static_range(CHUNKS):
        v = tl.load(x + c * BLOCK_K + k, mask=(c * BLOCK_K + k) < H, other=0.0).to(tl.float32)
        square += v * v
    rstd = tl.rsqrt(tl.sum(square, 0) / H + EPS)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc2 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for c in tl.static_range(CHUNKS):
        inside = (c * BLOCK_K + k) < H
        v = tl.load(x + c * BLOCK_K + k, mask=inside, other=0.0)
        g = tl.load(norm_weight + c * BLOCK_K + k, mask=inside, other=0.0)
        v = ((v.to(tl.float32) * rstd).to(v.dtype).to(tl.float32) * g.to(tl.float32)).to(v.dtype)
        v = v.to(tl.float32)
        v2 = v
        if BLOCKS:
            block = c * (BLOCK_K // 128) + tl.arange(0, BLOCK_K // 128)
            at_scale = scale + (expert * 2 * INNER + tl.program_id(0) % BLOCKS_N * BLOCK_N) // 128 * (H // 128) + block
            v *= spread(tl.load(at_scale, mask=block < H // 128, other=0.0), BLOCK_K)
            at_scale += INNER // 128 * (H // 128)
            v2 *= spread(tl.load(at_scale, mask=block < H // 128, other=0.0), BLOCK_K)
        v = v[None, :]
        v2 = v2[None, :]
        if c == 0:
            acc += first.to(tl.float32) * v
            acc2 += first2.to(tl.float32) * v2
        else:
            at, mask = row + c * BLOCK_K, rows & inside[None, :]
            gate = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
            up = tl.load(at + INNER * H, mask=mask, other=0.0, eviction_policy="evict_first")
            acc += gate.to(tl.float32) * v
            acc2 += up.to(tl.float32) * v2
    dtype = inner.dtype.element_ty
    g1 = tl.sum(acc, 1)
    u1 = tl.sum(acc2, 1)
    if SCALED:
        g1 *= tl.load(scale + expert * 2 * INNER + n, mask=n < INNER, other=0.0)
        u1 *= tl.load(scale + expert * 2 * INNER + INNER + n, mask=n < INNER, other=0.0)
    g1 = g1.to(dtype).to(tl.float32)
    u1 = u1.to(dtype).to(tl.float32)
    y = ((g1 * tl.sigmoid(g1)).to(dtype).to(tl.float32) * u1).to(dtype)
    tl.store(inner + slot * INNER + n, y, mask=n < INNER)


@triton.jit
def _down_kernel(
    inner,
    chosen,
    weights,
    w,
    scale,
    residual,
    out,
    H: tl.constexpr,
    INNER: tl.constexpr,
    TOP: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
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
            tile = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
            early = early + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
                block = c * (BLOCK_K // 128) + tl.arange(0, BLOCK_K // 128)
                at_scale = scale + (expert * H + tl.program_id(0) * BLOCK_N) // 128 * (INNER // 128) + block
                v *= spread(tl.load(at_scale, mask=block < INNER // 128, other=0.0), BLOCK_K)
            if slot < AHEAD:
                tile = early[slot * CHUNKS + c]
            else:
                mask = (n < H)[:, None] & inside[None, :]
                at = w + (expert * H + n)[:, None] * INNER + (c * BLOCK_K + k)[None, :]
                tile = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
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
    """Returns x + experts(norm(x)) [1, H] for x [1, H].

    `norm`: (weight, eps). `logits` [1, E]: the router's logits of norm(x). `per_token`: K.
    `normalised`: the weights of the chosen experts are scaled to sum to 1.
    Adds 1 to `load` (int64 [E]) for each chosen expert, unless `live` (int32 [1]) is 0: then the token is padding.
    """
    hidden, inner_size, experts = x.shape[1], down.shape[-1], logits.shape[1]
    (up, up_scale, up_flags), (back, back_scale, back_flags) = _parts(gate_up), _parts(down)
    rows = ROWS if up_scale is None else BYTE_ROWS
    inner = torch.empty(per_token, inner_size, dtype=x.dtype, device=x.device)
    chosen = torch.empty(per_token, dtype=torch.int32, device=x.device)
    weights = torch.empty(per_token, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    _pick_kernel[(1,)](
        logits, chosen, weights, load, live, experts, TOP=per_token, NORMALISED=normalised,
        BLOCK_E=triton.next_power_of_2(experts), num_warps=8, **overlap(),
    )
    _gate_up_kernel[(per_token * triton.cdiv(inner_size, rows),)](
        x, norm[0], up, up_scale, inner, chosen, H=hidden, INNER=inner_size, EPS=norm[1], BLOCK_N=rows,
        BLOCK_K=min(GATE_UP_COLUMNS, triton.next_power_of_2(hidden)), num_warps=4, **up_flags, **overlap(),
    )
    _down_kernel[(triton.cdiv(hidden, rows),)](
        inner, chosen, weights, back, back_scale, x, out, H=hidden, INNER=inner_size, TOP=per_token, BLOCK_N=rows,
        BLOCK_K=min(DOWN_COLUMNS, triton.next_power_of_2(inner_size)), AHEAD=min(EXPERTS_AHEAD, per_token),
        num_warps=4, **back_flags, **overlap(),
    )
    return out


def _parts(weights: torch.Tensor | ScaledMatrix) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, bool]]:
    """Returns the numbers, their scales, and the kernels' arguments SCALED (a scale per row) and BLOCKS."""
    if isinstance(weights, torch.Tensor):
        return weights, None, {"SCALED": False, "BLOCKS": False}
    blocks = weights.scale.dim() == 2
    return weights.values, weights.scale, {"SCALED": not blocks, "BLOCKS": blocks}
