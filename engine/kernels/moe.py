"""A mixture of experts as grouped products: the pairs of a token and one of its experts lie sorted by expert, and a
program multiplies one tile of them by one tile of that expert's weights.

    gate_up   rows of x, gathered by token -> silu(gate) · up, sorted
    down      those rows, times the pair's weight -> one row for each pair, where the token wants it
    total     the sum of each token's pairs, in a fixed order

T tokens of hidden size H; E experts of inner size I, K of them for each token; P = T · K pairs. The weights are
gate_up [E, 2 I, H] (gates before ups) and down [E, H, I], read by the bulk tensor copy engine: H and I must be
multiples of 8 in half precision.

Measured on an H200 at Qwen3-30B-A3B's layer (H 2,048, E 128, I 768, K 8) in CUDA graphs, in microseconds; the limit is
the larger of the bytes of the experts that are used at 4.1 TB/s and the operations at 680 TFLOP/s, which is what this
card sustains:

    tokens        2     8    16    64   128   256   512  1,024  2,048  8,192
    limit        36   118   198   289   295   295   295    295    295    910
    products     42   117   187   271   280   291   320    383    470  1,216
    routing       7     7     7     7           8           12     16     40
    sum           2     2     2     2     2     3     4      6     20     70

Up to 256 tokens the time is reading weights. From 512 on, tiles are filled to a half or two thirds, and each tile of
weights is read from the L2 cache once for every tile of rows. In the end it is the products, at 540 to 590 TFLOP/s with
a ninth of the rows padding.

What did not pay: x sorted ahead, so that its tiles too come by the copy engine (gate_up 275 us for 315 at 2,048 tokens,
as much as the sorting costs; nothing at 8,192); a persistent gate_up (1,060 us for 750); tiles of 256 rows; slices of
128 with two stages. Down by itself takes 370 us at 8,192 when it is persistent, 425 when it is not: its sums are short,
so storing one tile and loading the next are a large part of it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.moe_route import Form, Routes, form_for, route


class Tile(NamedTuple):
    """Rows of a program's weights, of which gate_up takes as many gates and as many ups; its slice of what is summed
    over; warps; tiles on their way."""

    n: int
    k: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """How many pairs a tile holds, whether they stand on the narrow side of the product, and each product's tile."""

    rows: int
    narrow: bool
    gate_up: Tile
    down: Tile


@triton.jit
def _gate_up_kernel(
    x,
    w,
    inner,
    order,
    tiles,
    H: tl.constexpr,
    INNER: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NARROW: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    tile = tiles + tl.program_id(0) // BLOCKS * 4
    n0 = tl.program_id(0) % BLOCKS * BLOCK_N
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if tl.program_id(0) >= tl.load(tiles + 3) * BLOCKS:
        return
    gate = tl.load(tile) * 2 * INNER + n0
    first = tl.load(tile + 1)
    rows = tl.load(tile + 2)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    token = tl.load(order + first + m, mask=m < rows, other=0) // TOP
    at = x + token.to(tl.int64)[:, None] * H + k[None, :]
    if NARROW:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc2 = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in tl.range(0, H, BLOCK_K, num_stages=STAGES):
        if H % BLOCK_K == 0:
            a = tl.load(at + k0)
        else:
            a = tl.load(at + k0, mask=(k < H - k0)[None, :], other=0.0)
        b = w.load([gate, k0])
        b2 = w.load([gate + INNER, k0])
        if NARROW:
            acc = tl.dot(b, a.T, acc, input_precision="ieee")
            acc2 = tl.dot(b2, a.T, acc2, input_precision="ieee")
        else:
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
            acc2 = tl.dot(a, b2.T, acc2, input_precision="ieee")
    dtype = inner.dtype.element_ty
    g = acc.to(dtype).to(tl.float32)
    y = ((g * tl.sigmoid(g)).to(dtype).to(tl.float32) * acc2.to(dtype).to(tl.float32)).to(dtype)
    n = n0 + tl.arange(0, BLOCK_N)
    row = inner + (first + m).to(tl.int64) * INNER
    if NARROW:
        tl.store(row[None, :] + n[:, None], y, mask=(m < rows)[None, :] & (n < INNER)[:, None])
    else:
        tl.store(row[:, None] + n[None, :], y, mask=(m < rows)[:, None] & (n < INNER)[None, :])


@triton.jit
def _down_tile(
    inner,
    w,
    out,
    order,
    tiles,
    weights,
    work,
    H: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NARROW: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCKS: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    tile = tiles + work // BLOCKS * 4
    n0 = work % BLOCKS * BLOCK_N
    at = tl.load(tile) * H + n0
    first = tl.load(tile + 1)
    rows = tl.load(tile + 2)
    m = tl.arange(0, BLOCK_M)
    if NARROW:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        a = inner.load([first, k0])  # rows past this tile's are another's, or zeros: nobody stores them
        b = w.load([at, k0])
        if NARROW:
            acc = tl.dot(b, a.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
    pair = tl.load(order + first + m, mask=m < rows, other=0)
    weight = tl.load(weights + pair, mask=m < rows, other=0.0).to(tl.float32)
    n = n0 + tl.arange(0, BLOCK_N)
    row = out + pair.to(tl.int64) * H
    dtype = out.dtype.element_ty
    if NARROW:
        y = (acc * weight[None, :]).to(dtype)
        tl.store(row[None, :] + n[:, None], y, mask=(m < rows)[None, :] & (n < H)[:, None])
    else:
        y = (acc * weight[:, None]).to(dtype)
        tl.store(row[:, None] + n[None, :], y, mask=(m < rows)[:, None] & (n < H)[None, :])


@triton.jit
def _down_kernel(
    inner,
    w,
    out,
    order,
    tiles,
    weights,
    H: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NARROW: tl.constexpr,
    STAGES: tl.constexpr,
    PERSISTENT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    works = tl.load(tiles + 3) * ((H + BLOCK_N - 1) // BLOCK_N)
    first = tl.program_id(0)
    if PERSISTENT:  # the next tile's loads are on their way while this one is stored
        for work in tl.range(first, works, tl.num_programs(0), flatten=True):
            _down_tile(
                inner, w, out, order, tiles, weights, work, H, INNER, BLOCK_M, BLOCK_N, BLOCK_K, NARROW, STAGES
            )
    elif first < works:
        _down_tile(inner, w, out, order, tiles, weights, first, H, INNER, BLOCK_M, BLOCK_N, BLOCK_K, NARROW, STAGES)


@triton.jit
def _total_kernel(
    each, out, live, H, TOP: tl.constexpr, BLOCK: tl.constexpr, HAS_LIVE: tl.constexpr, PDL: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    used = i < H
    if HAS_LIVE:
        used = used & (token < tl.load(live))  # padding has no pairs: zeros
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP):
        total += tl.load(each + (token * TOP + k) * H + i, mask=used, other=0.0).to(tl.float32)
    tl.store(out + token * H + i, total.to(out.dtype.element_ty), mask=i < H)


def tiles_for(tokens: int, per_token: int, experts: int) -> Tiles:
    """The tiles measured fastest."""
    each = tokens * per_token / experts  # pairs of an expert, if all are used alike
    if each <= 10:
        return Tiles(16, True, Tile(64, 128, 4, 4), Tile(128, 128, 4, 3))
    if each <= 20:
        return Tiles(32, True, Tile(64, 128, 4, 4), Tile(128, 64, 4, 4))
    if each <= 48:
        return Tiles(64, False, Tile(128, 64, 4, 3), Tile(128, 64, 4, 4))
    return Tiles(128, False, Tile(128, 64, 8, 4), Tile(256, 64, 8, 4))


def forms(most: int, hidden: int, experts: int, per_token: int) -> list[int]:
    """Numbers of tokens up to `most`, such that steps of these use every form of the kernels that any step does."""
    found: dict[tuple[Tiles, Form], int] = {}
    for tokens in range(1, most + 1):
        tiles = tiles_for(tokens, per_token, experts)
        found.setdefault((tiles, form_for(tokens, hidden, experts, per_token, tiles.rows)), tokens)
    return list(found.values())


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def products(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, routes: Routes, tiles: Tiles, *, pdl: bool = True
) -> torch.Tensor:
    """x [T, H] -> [T, K, H]: what each of a token's experts adds to it. Rows of tokens without experts are left as they
    are found."""
    (tokens, hidden), (experts, inner_size) = x.shape, (len(down), down.shape[2])
    pairs, each = len(routes.order), routes.weights.shape[1]
    inner = torch.empty(pairs, inner_size, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, each, hidden, dtype=x.dtype, device=x.device)
    count, (n, k, warps, stages) = len(routes.tiles), tiles.gate_up
    k = min(k, max(16, triton.next_power_of_2(hidden)))
    w = TensorDescriptor.from_tensor(gate_up.view(experts * 2 * inner_size, hidden), [n, k])
    _gate_up_kernel[(count * triton.cdiv(inner_size, n),)](
        x, w, inner, routes.order, routes.tiles, H=hidden, INNER=inner_size, TOP=each, BLOCK_M=tiles.rows, BLOCK_N=n,
        BLOCK_K=k, NARROW=tiles.narrow, STAGES=stages, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    n, k, warps, stages = tiles.down
    k = min(k, max(16, triton.next_power_of_2(inner_size)))
    programs = count * triton.cdiv(hidden, n)
    persistent = tiles.rows >= 128
    if persistent:
        programs = min(programs, _processors(x.device))
    rows = TensorDescriptor.from_tensor(inner, [tiles.rows, k])
    w = TensorDescriptor.from_tensor(down.view(experts * hidden, inner_size), [n, k])
    _down_kernel[(programs,)](
        rows, w, out, routes.order, routes.tiles, routes.weights, H=hidden, INNER=inner_size, BLOCK_M=tiles.rows,
        BLOCK_N=n, BLOCK_K=k, NARROW=tiles.narrow, STAGES=stages, PERSISTENT=persistent,
        PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def total(each: torch.Tensor, live: torch.Tensor | None = None, *, pdl: bool = True) -> torch.Tensor:
    """each [T, K, H] -> the sums [T, H]; zeros for tokens past `live`."""
    tokens, top, hidden = each.shape
    out = torch.empty(tokens, hidden, dtype=each.dtype, device=each.device)
    block = min(2048, triton.next_power_of_2(hidden))
    _total_kernel[(tokens, triton.cdiv(hidden, block))](
        each, out, live, hidden, TOP=top, BLOCK=block, HAS_LIVE=live is not None, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return out


def each_expert(
    x: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, per_token: int, normalised: bool,
    load: torch.Tensor, live: torch.Tensor | None = None, *, tiles: Tiles | None = None, pdl: bool = True,
) -> torch.Tensor:  # fmt: skip
    """x [T, H] -> [T, K, H], to be summed over K: what each token's experts make of it, times their weights.

    Adds to load int64 [E] how many tokens each expert got. `live` int32 [1]: only so many tokens, the first, count;
    the others' rows are left as they are found. `tiles` overrides `tiles_for`.
    """
    tiles = tiles or tiles_for(len(x), per_token, len(router))
    routes = route(x, router, per_token, normalised, load, tiles.rows, live, pdl=pdl)
    return products(x, gate_up, down, routes, tiles, pdl=pdl)
