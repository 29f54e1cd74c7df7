"""Chooses the experts of each token and sorts the (token, expert) pairs by expert.

Three kernels do this on the device, so a CUDA graph can contain them:

    router   multiplies x · router^T; each slice of the hidden size gives one fp32 part of the sum
    choose   sums the parts, takes softmax and top-k of each token, and numbers the pairs of each expert
    group    computes the place of each pair from the experts' counts, and the tiles for the matrix products

Shapes: T tokens of hidden size H, E experts, K experts for each token. Pair t · K + k is choice k of token t.
Atomic counters number the pairs, so the order of pairs within an expert differs from run to run. The result of a pair
does not depend on its place.

The three kernels together take 7 us for up to 64 tokens of Qwen3-30B-A3B on an H200 (MEASURED.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.card import after_previous, overlap

ROUTER_PROGRAMS = 128  # the hidden size is split so that the router kernel has about this many programs


@triton.jit(do_not_specialize=["T"])  # compiled once for any number of tokens
def _router_kernel(
    x, router, parts, counts, T, E, H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, ALL_E: tl.constexpr, PDL: tl.constexpr,
):
    part = tl.program_id(1)
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    SPAN: tl.constexpr = (H + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    at_x = x + t.to(tl.int64)[:, None] * H
    at_w = router + e[:, None] * H
    after_previous(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for k0 in range(0, SPAN, BLOCK_K):
        columns = part * SPAN + k0 + k
        a = tl.load(at_x + columns[None, :], mask=(t < T)[:, None] & (columns < H)[None, :], other=0.0)
        b = tl.load(at_w + columns[None, :], mask=(e < E)[:, None] & (columns < H)[None, :], other=0.0)
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
    at = parts + (part.to(tl.int64) * T + t)[:, None] * E + e[None, :]
    tl.store(at, acc, mask=(t < T)[:, None] & (e < E)[None, :])
    if (tl.program_id(0) == 0) & (part == 0) & (tl.program_id(2) == 0):
        every = tl.arange(0, ALL_E)
        tl.store(counts + every, tl.zeros([ALL_E], tl.int32), mask=every < E)


@triton.jit
def by_pair(v, NARROW: tl.constexpr):
    """Returns numbers of the pairs of a tile [M] in the shape of a product: [1, M] if NARROW, else [M, 1]."""
    return v[None, :] if NARROW else v[:, None]


@triton.jit
def by_output(v, NARROW: tl.constexpr):
    """Returns numbers of the rows of weights [N] in the shape of a product."""
    return v[:, None] if NARROW else v[None, :]


@triton.jit
def add_product(total, w, x, NARROW: tl.constexpr):
    """Returns total + w · xᵀ [N, M] if NARROW, else total + x · wᵀ [M, N], for w [N, K] and x [M, K]."""
    if NARROW:
        y = tl.dot(w, x.T, total, input_precision="ieee")
    else:
        y = tl.dot(x, w.T, total, input_precision="ieee")
    return y


@triton.jit
def store_weighted(acc, out, order, weights, first, rows, n, H, BLOCK_M: tl.constexpr, NARROW: tl.constexpr):
    """Multiplies the outputs `n` of a tile of pairs by the pairs' weights, and stores them in the order of tokens."""
    m = tl.arange(0, BLOCK_M)
    pair = tl.load(order + first + m, mask=m < rows, other=0)
    weight = tl.load(weights + pair, mask=m < rows, other=0.0).to(tl.float32)
    to = by_pair(out + pair.to(tl.int64) * H, NARROW) + by_output(n, NARROW)
    y = (acc * by_pair(weight, NARROW)).to(out.dtype.element_ty)
    tl.store(to, y, mask=by_pair(m < rows, NARROW) & by_output(n < H, NARROW))


@triton.jit
def topk_scores(logits, e, E):
    """Returns scores for top-k from logits fp32 [..., BLOCK_E]: none is NaN, and only columns from E on are -inf."""
    low = tl.where(logits > -3.0e38, logits, -3.0e38)
    return tl.where(e < E, low, float("-inf"))


@triton.jit(do_not_specialize=["T"])
def _choose_kernel(
    parts, bias, chosen, weights, places, counts, live, T, E, TOP: tl.constexpr, BLOCK_TOP: tl.constexpr,
    NORMALISED: tl.constexpr, SPLIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_LIVE: tl.constexpr, PDL: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_TOP)
    after_previous(PDL)
    tokens = T
    if HAS_LIVE:
        tokens = tl.minimum(T, tl.load(live))
    inside = (t < T)[:, None] & (e < E)[None, :]
    at = parts + t.to(tl.int64)[:, None] * E + e[None, :]
    logits = tl.load(at, mask=inside, other=0.0)
    for part in tl.static_range(1, SPLIT):
        logits += tl.load(at + part * T * E, mask=inside, other=0.0)
    if HAS_BIAS:
        logits += tl.load(bias + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    dtype = weights.dtype.element_ty
    logits = tl.where((e < E)[None, :], logits.to(dtype).to(tl.float32), float("-inf"))
    highest = tl.max(logits, 1)
    total = tl.sum(tl.exp(logits - highest[:, None]), 1)
    remaining = topk_scores(logits, e[None, :], E)
    expert = tl.zeros([BLOCK_T, BLOCK_TOP], tl.int32)
    share = tl.zeros([BLOCK_T, BLOCK_TOP], tl.float32)
    for i in tl.static_range(TOP):
        value, index = tl.max(remaining, 1, return_indices=True, return_indices_tie_break_left=True)
        expert = tl.where(k[None, :] == i, index[:, None], expert)
        share = tl.where(k[None, :] == i, (tl.exp(value - highest) / total)[:, None], share)
        remaining = tl.where(e[None, :] == index[:, None], float("-inf"), remaining)
    if NORMALISED:
        share = share / tl.sum(share, 1)[:, None]
    pair = t[:, None] * TOP + k[None, :]
    tl.store(weights + pair, share.to(dtype), mask=(t < T)[:, None] & (k < TOP)[None, :])
    valid = (t < tokens)[:, None] & (k < TOP)[None, :]
    place = tl.atomic_add(counts + expert, 1, mask=valid, sem="relaxed")
    tl.store(chosen + pair, expert, mask=valid)
    tl.store(places + pair, place, mask=valid)


@triton.jit(do_not_specialize=["T", "TILES"])
def _group_kernel(
    chosen, places, counts, order, tiles, load, live, T, E, TILES, TOP: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_TILES: tl.constexpr, HAS_LIVE: tl.constexpr, PDL: tl.constexpr,
):
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    after_previous(PDL)
    tokens = T
    if HAS_LIVE:
        tokens = tl.minimum(T, tl.load(live))
    valid = pair < tokens * TOP
    expert = tl.load(chosen + pair, mask=valid, other=0)
    place = tl.load(places + pair, mask=valid, other=0)
    e = tl.arange(0, BLOCK_E)
    count = tl.load(counts + e, mask=e < E, other=0)
    before = tl.sum(tl.where(e[None, :] < expert[:, None], count[None, :], 0), 1)
    tl.store(order + before + place, pair, mask=valid)
    # Describe the tiles that this program handles.
    ends = tl.cumsum((count + BLOCK_M - 1) // BLOCK_M, 0)
    j = tl.program_id(0) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
    tile_expert = tl.sum((ends[None, :] <= j[:, None]).to(tl.int32), 1)  # E: no tile
    earlier = e[None, :] < tile_expert[:, None]
    begin = tl.sum(tl.where(earlier, count[None, :], 0), 1)
    size = tl.sum(tl.where(e[None, :] == tile_expert[:, None], count[None, :], 0), 1)
    skipped = (j - tl.max(tl.where(earlier, ends[None, :], 0), 1)) * BLOCK_M
    at = tiles + 4 * j
    tl.store(at, tl.where(tile_expert < E, tile_expert, 0), mask=j < TILES)
    tl.store(at + 1, begin + skipped, mask=j < TILES)
    tl.store(at + 2, tl.where(tile_expert < E, tl.minimum(size - skipped, BLOCK_M), 0), mask=j < TILES)
    if tl.program_id(0) == 0:
        tl.store(tiles + 3, tl.max(ends, 0))
        total = tl.load(load + e, mask=e < E, other=0)
        tl.store(load + e, total + count, mask=e < E)


@dataclass(slots=True)
class Routes:
    """The pairs of all tokens, sorted by expert and divided into tiles for the matrix products. Tile j belongs to
    expert tiles[j, 0] and has tiles[j, 2] pairs; its first pair is order[tiles[j, 1]]. tiles[0, 3] is the number of
    tiles in use; the other tiles have no pairs."""

    weights: torch.Tensor  # [T, K]   the weight of the output of each pair
    order: torch.Tensor  # int32 [T·K]  the pairs, sorted by expert
    tiles: torch.Tensor  # int32 [tiles, 4]


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Returns the largest number of tiles, of at most `rows` pairs each, that `pairs` pairs can need."""
    used = min(pairs, experts)
    return used + (pairs - used) // rows


class Form(NamedTuple):
    """Tile sizes of the three kernels."""

    tokens: int  # tokens in a tile of `router`
    split: int  # slices of the hidden size in `router`
    experts: int  # experts in a tile of `router`
    choose: int  # tokens in a program of `choose`
    pairs: int  # pairs in a program of `group`
    tiles: int  # tiles in a program of `group`


def form_for(tokens: int, hidden: int, experts: int, per_token: int, rows: int) -> Form:
    """Returns the tile sizes that were fastest in measurements. `rows`: pairs in a tile of the matrix products."""
    block_m = 16 if tokens <= 512 else 64
    block_k = _block_k(hidden)
    programs = triton.cdiv(tokens, block_m)
    split = 1
    while split < 8 and split * programs < ROUTER_PROGRAMS and split * 2 * block_k <= hidden:
        split *= 2
    block_e = min(_block_e(experts), 32 if programs * split < 64 else 128)
    block_t, block = (1, 8) if tokens <= 1024 else (2, 16)
    pairs = tokens * per_token
    tiles = triton.cdiv(most_tiles(pairs, experts, rows), triton.cdiv(pairs, block))
    return Form(block_m, split, block_e, block_t, block, triton.next_power_of_2(tiles))


def _block_k(hidden: int) -> int:
    return min(128, max(16, triton.next_power_of_2(hidden)))


def _block_e(experts: int) -> int:
    return max(16, triton.next_power_of_2(experts))


def route(
    x: torch.Tensor, router: torch.Tensor, per_token: int, normalised: bool, load: torch.Tensor, rows: int,
    live: torch.Tensor | None = None, bias: torch.Tensor | None = None,
) -> Routes:
    """Returns the routes of x [T, H] for router [E, H] and its `bias` [E], in tiles of at most `rows` pairs. Adds the
    number of tokens of each expert to `load` int64 [E]. Only the first `live` (int32 [1]) tokens are routed; the others
    are padding. None: all tokens are routed."""
    (tokens, hidden), experts = x.shape, len(router)
    pairs, device = tokens * per_token, x.device
    form, block_e = form_for(tokens, hidden, experts, per_token, rows), _block_e(experts)
    split, block = form.split, form.pairs
    parts = torch.empty(split, tokens, experts, dtype=torch.float32, device=device)
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    _router_kernel[(triton.cdiv(tokens, form.tokens), split, triton.cdiv(experts, form.experts))](
        x, router, parts, counts, tokens, experts, H=hidden, BLOCK_M=form.tokens, BLOCK_E=form.experts,
        BLOCK_K=_block_k(hidden), SPLIT=split, ALL_E=block_e, num_warps=4, num_stages=3, **overlap(),
    )
    tiles = most_tiles(pairs, experts, rows)
    routes = Routes(
        torch.empty(tokens, per_token, dtype=x.dtype, device=device),
        torch.empty(pairs, dtype=torch.int32, device=device), torch.empty(tiles, 4, dtype=torch.int32, device=device),
    )
    chosen, places = torch.empty(2, pairs, dtype=torch.int32, device=device)
    block_top = triton.next_power_of_2(per_token)
    _choose_kernel[(triton.cdiv(tokens, form.choose),)](
        parts, bias, chosen, routes.weights, places, counts, live, tokens, experts, TOP=per_token,
        BLOCK_TOP=block_top, NORMALISED=normalised, SPLIT=split, BLOCK_T=form.choose, BLOCK_E=block_e,
        HAS_BIAS=bias is not None, HAS_LIVE=live is not None, num_warps=1, **overlap(),
    )
    _group_kernel[(triton.cdiv(pairs, block),)](
        chosen, places, counts, routes.order, routes.tiles, load, live, tokens, experts, tiles, TOP=per_token,
        PAIRS=block, BLOCK_E=block_e, BLOCK_M=rows, HAS_LIVE=live is not None,
        BLOCK_TILES=form.tiles, num_warps=1, **overlap(),
    )
    return routes
