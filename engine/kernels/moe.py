"""A mixture of experts as grouped matrix products.

A token and each of its experts form a pair, and the pairs are sorted by expert. A program multiplies one tile of pairs
by one tile of their expert's weights.

    gate_up   rows of x, gathered by token -> silu(gate) · up, one row per pair, sorted by expert
    down      rows of gate_up -> the expert's output times the pair's weight, one row per pair, in the order of tokens
    total     the sum of each token's pairs, in a fixed order

T tokens of hidden size H; E experts of inner size I, K of them for each token; P = T · K pairs. The weights are gate_up
[E, 2 I, H] (gate rows before up rows) and down [E, H, I]. The GPU's tensor memory accelerator reads them, so H and I
must be multiples of 8 in half precision.

At Qwen3-30B-A3B's shape, up to 256 tokens, nearly all the time is spent on reading weights (MEASURED.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels import moe_fp8, moe_int4
from engine.kernels.card import after_previous, card, fitting, overlap, read_tile, tiles_of
from engine.kernels.moe_route import Routes, add_product, by_output, by_pair, route, store_weighted
from engine.kernels.moe_tiles import Tiles, tiles_for
from engine.kernels.norms import silu_times


class Clamped(NamedTuple):
    """What experts of gpt-oss have besides weights: biases, and the numbers of their activation (model/experts.py)."""

    gate_up: torch.Tensor  # [E, 2 I]
    down: torch.Tensor  # [E, H]
    limit: float
    alpha: float


@triton.jit
def _gate_up_kernel(
    x, w, bias, inner, order, tiles, H: tl.constexpr, INNER: tl.constexpr, TOP: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NARROW: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    tile = tiles + tl.program_id(0) // BLOCKS * 4
    n0 = tl.program_id(0) % BLOCKS * BLOCK_N
    after_previous(PDL)
    if tl.program_id(0) >= tl.load(tiles + 3) * BLOCKS:
        return
    gate = tl.load(tile) * 2 * INNER + n0
    first = tl.load(tile + 1)
    rows = tl.load(tile + 2)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    token = tl.load(order + first + m, mask=m < rows, other=0) // TOP
    at = x + token.to(tl.int64)[:, None] * H + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M] if NARROW else [BLOCK_M, BLOCK_N], tl.float32)
    acc2 = tl.zeros(acc.shape, tl.float32)
    for k0 in tl.range(0, H, BLOCK_K, num_stages=STAGES):
        if H % BLOCK_K == 0:
            a = tl.load(at + k0)
        else:
            a = tl.load(at + k0, mask=(k < H - k0)[None, :], other=0.0)
        b = read_tile(w, gate, k0, gate - n0 + INNER, H, BLOCK_N, BLOCK_K)
        b2 = read_tile(w, gate + INNER, k0, gate - n0 + 2 * INNER, H, BLOCK_N, BLOCK_K)
        acc = add_product(acc, b, a, NARROW)
        acc2 = add_product(acc2, b2, a, NARROW)
    dtype = inner.dtype.element_ty
    n = n0 + tl.arange(0, BLOCK_N)
    if LIMIT > 0:
        at_bias = bias + gate - n0 + n
        acc += by_output(tl.load(at_bias, mask=n < INNER, other=0.0).to(tl.float32), NARROW)
        acc2 += by_output(tl.load(at_bias + INNER, mask=n < INNER, other=0.0).to(tl.float32), NARROW)
    if LIMIT > 0:
        g = acc.to(dtype).to(tl.float32)
        u = acc2.to(dtype).to(tl.float32)
        g = tl.where(g > LIMIT, LIMIT, g)  # NaN stays NaN
        u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u))
        y = (g * tl.sigmoid(g * ALPHA)).to(dtype).to(tl.float32) * (u + 1).to(dtype).to(tl.float32)
    else:
        y = silu_times(acc, acc2, dtype)
    to = by_pair(inner + (first + m).to(tl.int64) * INNER, NARROW) + by_output(n, NARROW)
    tl.store(to, y.to(dtype), mask=by_pair(m < rows, NARROW) & by_output(n < INNER, NARROW))


@triton.jit
def _down_tile(
    inner, w, bias, out, order, tiles, weights, work, H: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NARROW: tl.constexpr, STAGES: tl.constexpr,
):
    BLOCKS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    tile = tiles + work // BLOCKS * 4
    n0 = work % BLOCKS * BLOCK_N
    at = tl.load(tile) * H + n0
    first = tl.load(tile + 1)
    rows = tl.load(tile + 2)
    acc = tl.zeros([BLOCK_N, BLOCK_M] if NARROW else [BLOCK_M, BLOCK_N], tl.float32)
    for k0 in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        # Rows after the tile's pairs are zeros or another tile's; they are not stored.
        a = read_tile(inner, first, k0, first + rows, INNER, BLOCK_M, BLOCK_K)
        acc = add_product(acc, read_tile(w, at, k0, at - n0 + H, INNER, BLOCK_N, BLOCK_K), a, NARROW)
    n = n0 + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        acc += by_output(tl.load(bias + at - n0 + n, mask=n < H, other=0.0).to(tl.float32), NARROW)
    store_weighted(acc, out, order, weights, first, rows, n, H, BLOCK_M, NARROW)


@triton.jit
def _down_kernel(
    inner, w, bias, out, order, tiles, weights, H: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NARROW: tl.constexpr, STAGES: tl.constexpr,
    PERSISTENT: tl.constexpr, PDL: tl.constexpr,
):
    after_previous(PDL)
    count = tl.load(tiles + 3) * ((H + BLOCK_N - 1) // BLOCK_N)
    first = tl.program_id(0)
    if PERSISTENT:  # each program loads its next tile while it stores the current tile
        for work in tl.range(first, count, tl.num_programs(0), flatten=True):
            _down_tile(
                inner, w, bias, out, order, tiles, weights, work, H, INNER, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K, NARROW,
                STAGES,
            )
    elif first < count:
        _down_tile(
            inner, w, bias, out, order, tiles, weights, first, H, INNER, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K, NARROW,
            STAGES,
        )


@triton.jit
def _total_kernel(
    each, out, live, H, TOP: tl.constexpr, BLOCK: tl.constexpr, HAS_LIVE: tl.constexpr, PDL: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    after_previous(PDL)
    used = i < H
    if HAS_LIVE:
        used = used & (token < tl.load(live))  # padding tokens have no pairs: their sums are zeros
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP):
        total += tl.load(each + (token * TOP + k) * H + i, mask=used, other=0.0).to(tl.float32)
    tl.store(out + token * H + i, total.to(out.dtype.element_ty), mask=i < H)


def products(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, routes: Routes, tiles: Tiles,
    clamped: Clamped | None = None,
) -> torch.Tensor:
    """Returns the weighted output [T, K, H] of each token's experts, for x [T, H]. The rows of padding tokens, which
    have no experts, are not written."""
    (tokens, hidden), (experts, inner_size) = x.shape, (len(down), down.shape[2])
    pairs, per_token = len(routes.order), routes.weights.shape[1]
    inner = torch.empty(pairs, inner_size, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, per_token, hidden, dtype=x.dtype, device=x.device)
    count, (n, k, warps, stages) = len(routes.tiles), tiles.gate_up
    gate_up_bias, down_bias, limit, alpha = clamped or (None, None, 0.0, 0.0)
    k = min(k, max(16, triton.next_power_of_2(hidden)))
    w = tiles_of(gate_up.view(experts * 2 * inner_size, hidden), [n, k])
    _gate_up_kernel[(count * triton.cdiv(inner_size, n),)](
        x, w, gate_up_bias, inner, routes.order, routes.tiles, H=hidden, INNER=inner_size, TOP=per_token, LIMIT=limit,
        ALPHA=alpha, BLOCK_M=tiles.rows, BLOCK_N=n, BLOCK_K=k, NARROW=tiles.narrow,
        STAGES=fitting(stages, (tiles.rows + 2 * n) * k * x.element_size()), num_warps=warps, **overlap(),
    )
    n, k, warps, stages = tiles.down
    k = min(k, max(16, triton.next_power_of_2(inner_size)))
    programs = count * triton.cdiv(hidden, n)
    persistent = tiles.rows >= 128
    if persistent:
        programs = min(programs, card().processors)
    rows = tiles_of(inner, [tiles.rows, k])
    w = tiles_of(down.view(experts * hidden, inner_size), [n, k])
    _down_kernel[(programs,)](
        rows, w, down_bias, out, routes.order, routes.tiles, routes.weights, H=hidden, INNER=inner_size,
        HAS_BIAS=clamped is not None, BLOCK_M=tiles.rows, BLOCK_N=n, BLOCK_K=k, NARROW=tiles.narrow,
        STAGES=fitting(stages, (tiles.rows + n) * k * x.element_size()), PERSISTENT=persistent,
        num_warps=warps, **overlap(),
    )
    return out


def total(each: torch.Tensor, live: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the sums [T, H] of `each` [T, K, H] over K; zeros for tokens past `live`."""
    tokens, top, hidden = each.shape
    out = torch.empty(tokens, hidden, dtype=each.dtype, device=each.device)
    block = min(2048, triton.next_power_of_2(hidden))
    _total_kernel[(tokens, triton.cdiv(hidden, block))](
        each, out, live, hidden, TOP=top, BLOCK=block, HAS_LIVE=live is not None, num_warps=4, **overlap()
    )
    return out


def each_expert(
    x: torch.Tensor, router: torch.Tensor, gate_up: Any, down: Any, per_token: int, normalised: bool,
    load: torch.Tensor, live: torch.Tensor | None = None, router_bias: torch.Tensor | None = None,
    clamped: Clamped | None = None,
) -> torch.Tensor:
    """Returns the weighted output [T, K, H] of each token's experts, for x [T, H]. The caller sums it over K. The
    weights are tensors, or matrices of e4m3 (moe_fp8.py) or 4-bit numbers (moe_int4.py). Adds the number of tokens of
    each expert to load int64 [E]. `live` int32 [1]: only the first `live` tokens are counted, and only their rows are
    written."""
    bits = bits_of(gate_up)
    tiles = tiles_for(len(x), per_token, len(router), bits)
    routes = route(x, router, per_token, normalised, load, tiles.rows, live, router_bias)
    if bits == 16:
        return products(x, gate_up, down, routes, tiles, clamped)
    return (moe_int4 if bits == 4 else moe_fp8).products(x, gate_up, down, routes, tiles)


def bits_of(weights: Any) -> int:
    """Returns the bits of a number: 16 of a tensor, 8 of e4m3 numbers, 4 of numbers in groups."""
    return 16 if isinstance(weights, torch.Tensor) else 4 if hasattr(weights, "groups") else 8
