"""The products of a mixture of experts whose weights are 4-bit numbers in groups (engine/kernels/four_bits.py).

The same two products as in moe.py. gate_up is a matrix [E · 2 I, H], down is [E · H, I], both in tiles of 128 rows. H
and I are multiples of 128, so a tile belongs to one expert. The numbers become bfloat16 in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.card import after_previous, fitting, overlap, read_tile, tiles_of
from engine.kernels.four_bits import FourBitMatrix, add_quarter, factors_of
from engine.kernels.moe_route import Routes, store_weighted
from engine.kernels.moe_tiles import Tiles
from engine.kernels.norms import silu_times


@triton.jit
def _gate_up_kernel(
    x, w, groups, offsets, scale, inner, order, tiles, H: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
    P: tl.constexpr, TOP: tl.constexpr, OFFSETS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):
    ACROSS: tl.constexpr = INNER // BLOCK_N
    STEPS: tl.constexpr = H // (4 * WIDTH)
    SHARE: tl.constexpr = 4 * P // GROUP
    tile = tiles + tl.program_id(0) // ACROSS * 4
    n0 = tl.program_id(0) % ACROSS * BLOCK_N
    after_previous(PDL)
    if tl.program_id(0) >= tl.load(tiles + 3) * ACROSS:
        return
    gate = tl.load(tile) * 2 * INNER + n0
    column = gate % 128
    first = tl.load(tile + 1)
    rows = tl.load(tile + 2)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    token = tl.load(order + first + m, mask=m < rows, other=0) // TOP
    at = x + token.to(tl.int64)[:, None] * H + tl.arange(0, WIDTH)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc2 = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    by = tl.full([BLOCK_N], 1.0, tl.float32)
    by2 = tl.full([BLOCK_N], 1.0, tl.float32)
    g = gate // 128 * (H // GROUP)
    g2 = g + INNER // 128 * (H // GROUP)
    factors = factors_of(groups, offsets, g, column, SHARE, BLOCK_N)
    factors2 = factors_of(groups, offsets, g2, column, SHARE, BLOCK_N)
    for i in tl.range(0, STEPS, num_stages=STAGES):
        t = i // (P // WIDTH)
        following = tl.minimum(i + 1, STEPS - 1) // (P // WIDTH) * SHARE
        later = factors_of(groups, offsets, g + following, column, SHARE, BLOCK_N)
        later2 = factors_of(groups, offsets, g2 + following, column, SHARE, BLOCK_N)
        piece = i % (P // WIDTH) * WIDTH  # of the words of a row; written so, it is known to be a multiple
        row = (gate // 128 * (H // (4 * P)) + t) * 128 + column
        words = read_tile(w, row, piece, None, P, BLOCK_N, WIDTH)
        row += INNER * (H // (4 * P))
        words2 = read_tile(w, row, piece, None, P, BLOCK_N, WIDTH)
        for q in tl.static_range(4):
            b = tl.load(at + (t * 4 + q) * P + piece)
            acc, by = add_quarter(acc, by, words, b, factors[q * P // GROUP], q, P, GROUP, OFFSETS)
            acc2, by2 = add_quarter(acc2, by2, words2, b, factors2[q * P // GROUP], q, P, GROUP, OFFSETS)
        factors = later
        factors2 = later2
    acc *= (by * tl.load(scale + gate + n))[:, None]
    acc2 *= (by2 * tl.load(scale + gate + INNER + n))[:, None]
    dtype = inner.dtype.element_ty
    to = inner + (first + m).to(tl.int64)[None, :] * INNER + (n0 + n)[:, None]
    tl.store(to, silu_times(acc, acc2, dtype).to(dtype), mask=(m < rows)[None, :] & (n < BLOCK_N)[:, None])


@triton.jit
def _down_kernel(
    inner, w, groups, offsets, scale, out, order, tiles, weights, H: tl.constexpr, INNER: tl.constexpr,
    GROUP: tl.constexpr, P: tl.constexpr, OFFSETS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):
    ACROSS: tl.constexpr = H // BLOCK_N
    STEPS: tl.constexpr = INNER // (4 * WIDTH)
    SHARE: tl.constexpr = 4 * P // GROUP
    tile = tiles + tl.program_id(0) // ACROSS * 4
    n0 = tl.program_id(0) % ACROSS * BLOCK_N
    after_previous(PDL)
    if tl.program_id(0) >= tl.load(tiles + 3) * ACROSS:
        return
    row = tl.load(tile) * H + n0
    first = tl.load(tile + 1)
    rows = tl.load(tile + 2)
    n = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    by = tl.full([BLOCK_N], 1.0, tl.float32)
    g = row // 128 * (INNER // GROUP)
    factors = factors_of(groups, offsets, g, row % 128, SHARE, BLOCK_N)
    for i in tl.range(0, STEPS, num_stages=STAGES):
        t = i // (P // WIDTH)
        following = tl.minimum(i + 1, STEPS - 1) // (P // WIDTH) * SHARE
        later = factors_of(groups, offsets, g + following, row % 128, SHARE, BLOCK_N)
        piece = i % (P // WIDTH) * WIDTH
        at = (row // 128 * (INNER // (4 * P)) + t) * 128 + row % 128
        words = read_tile(w, at, piece, None, P, BLOCK_N, WIDTH)
        for q in tl.static_range(4):
            b = read_tile(inner, first, (t * 4 + q) * P + piece, first + rows, INNER, BLOCK_M, WIDTH)
            acc, by = add_quarter(acc, by, words, b, factors[q * P // GROUP], q, P, GROUP, OFFSETS)
        factors = later
    acc *= (by * tl.load(scale + row + n))[:, None]
    store_weighted(acc, out, order, weights, first, rows, n0 + n, H, BLOCK_M, True)


def _loads(width: int, stages: int, tokens: int, rows: int) -> tuple[int, int]:
    """Returns how many words of a row are loaded at a time, and how many times ahead: fewer if two loads of words
    [rows, width] and activations [tokens, 4 · width] do not fit into the shared memory."""
    while fitting(2, 2 * width * (4 * tokens + rows) + 1024) < 2 and width > 16:
        width //= 2
    return width, fitting(stages, 2 * width * (4 * tokens + rows) + 1024)


def products(
    x: torch.Tensor, gate_up: FourBitMatrix, down: FourBitMatrix, routes: Routes, tiles: Tiles
) -> torch.Tensor:
    """Returns the same as moe.products: the weighted output [T, K, H] of each token's experts, for x [T, H]."""
    (tokens, hidden), inner_size = x.shape, down.shape[1]
    per_token = routes.weights.shape[1]
    inner = torch.empty(len(routes.order), inner_size, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens, per_token, hidden, dtype=x.dtype, device=x.device)
    for w, n, columns, (block_n, width, warps, stages) in (
        (gate_up, inner_size, hidden, tiles.gate_up), (down, hidden, inner_size, tiles.down)
    ):
        p, matrices = w.values.shape[-1], 2 if w is gate_up else 1
        width, stages = _loads(min(width, p), stages, tiles.rows, matrices * block_n)
        words = tiles_of(w.values.view(-1, p), [block_n, width])
        options = {
            "H": hidden, "INNER": inner_size, "GROUP": columns // w.groups.shape[1], "P": p,
            "OFFSETS": w.offsets is not None, "WIDTH": width, "BLOCK_M": tiles.rows, "BLOCK_N": block_n,
            "STAGES": stages, "num_warps": warps, **overlap(),
        }
        grid = (len(routes.tiles) * (n // block_n),)
        if w is gate_up:
            _gate_up_kernel[grid](
                x, words, w.groups, w.offsets, w.scale, inner, routes.order, routes.tiles, TOP=per_token, **options
            )
        else:
            rows = tiles_of(inner, [tiles.rows, width])
            _down_kernel[grid](
                rows, words, w.groups, w.offsets, w.scale, out, routes.order, routes.tiles, routes.weights, **options
            )
    return out
