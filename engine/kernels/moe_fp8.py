"""The products of a mixture of experts whose weights are e4m3 numbers with a scale per row or per block.

The same two products as in moe.py, for weights as a checkpoint stores them (engine.model.linear: Fp8Weight, Fp8Blocks).
gate_up is a matrix [E · 2 I, H], down is [E · H, I]. H and I are multiples of 128.

The tensor cores multiply e4m3 by e4m3. Activations have a scale per row and group of columns. The tensor cores sum the
products of one group; the sum is multiplied by the scales of the activations and of the block of weights and added in
float32. gate_up rounds its own result: a program has all columns of a group.

    few tokens for each expert    each activation is the sum of two e4m3 numbers, as in eight_bits.py: as precise as
                                  bfloat16. Reading the weights takes most of the time
    more tokens                   each activation is rounded to one e4m3 number, as in eight_bits_many.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.card import after_previous, fitting, overlap, read_tile, tiles_of
from engine.kernels.eight_bits_many import BLOCK, E4M3_MAX, LOW, round_groups, scale_to
from engine.kernels.gemv import ScaledMatrix
from engine.kernels.moe_route import Routes, add_product, by_output, by_pair, store_weighted
from engine.kernels.moe_tiles import Tiles
from engine.kernels.norms import silu_times


@triton.jit(do_not_specialize=["T", "PAIRS"])  # compiled once for any number of tokens
def _gate_up_kernel(
    x, x_scale, w, w_scale, inner, inner_scale, order, tiles, T, PAIRS, H: tl.constexpr, INNER: tl.constexpr,
    TOP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr,
    MOST: tl.constexpr, FACTOR: tl.constexpr, NARROW: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):
    ACROSS: tl.constexpr = INNER // BLOCK_N
    part = tl.program_id(0) % ACROSS
    tile = tiles + tl.program_id(0) // ACROSS * 4
    after_previous(PDL)
    if tl.program_id(0) >= tl.load(tiles + 3) * ACROSS:
        return
    gate = tl.load(tile) * 2 * INNER + part * BLOCK_N
    first = tl.load(tile + 1)
    rows = tl.load(tile + 2)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    token = tl.load(order + first + m, mask=m < rows, other=0) // TOP
    at = x + token.to(tl.int64)[:, None] * H + tl.arange(0, BLOCK_K)[None, :]
    at_low = at + T.to(tl.int64) * H
    at_block = w_scale + gate // BLOCK_K * (H // BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M] if NARROW else [BLOCK_M, BLOCK_N], tl.float32)
    acc2 = tl.zeros(acc.shape, tl.float32)
    for c in tl.range(0, H // BLOCK_K, num_stages=STAGES):
        high = tl.load(at + c * BLOCK_K)
        b = read_tile(w, gate, c * BLOCK_K, None, H, BLOCK_N, BLOCK_K)
        b2 = read_tile(w, gate + INNER, c * BLOCK_K, None, H, BLOCK_N, BLOCK_K)
        y = add_product(None, b, high, NARROW)
        y2 = add_product(None, b2, high, NARROW)
        if NARROW:
            low = tl.load(at_low + c * BLOCK_K)
            y += add_product(None, b, low, NARROW) * (1.0 / FACTOR)
            y2 += add_product(None, b2, low, NARROW) * (1.0 / FACTOR)
        scale = tl.load(x_scale + c * T + token)
        scale2 = scale
        if BLOCKS:
            scale *= tl.load(at_block + c)
            scale2 *= tl.load(at_block + INNER // BLOCK_K * (H // BLOCK_K) + c)
        acc += y * by_pair(scale, NARROW)
        acc2 += y2 * by_pair(scale2, NARROW)
    if not BLOCKS:
        acc *= by_output(tl.load(w_scale + gate + n), NARROW)
        acc2 *= by_output(tl.load(w_scale + gate + INNER + n), NARROW)
    v, by = scale_to(silu_times(acc, acc2, tl.bfloat16), MOST, 0 if NARROW else 1)
    tl.store(by_pair(inner_scale + part * PAIRS + first + m, NARROW), by, mask=by_pair(m < rows, NARROW))
    high = v.to(inner.dtype.element_ty)
    to = by_pair(inner + (first + m).to(tl.int64) * INNER, NARROW) + by_output(part * BLOCK_N + n, NARROW)
    used = by_pair(m < rows, NARROW) & by_output(n < BLOCK_N, NARROW)
    tl.store(to, high, mask=used)
    if NARROW:
        low = ((v - high.to(tl.float32)) * FACTOR).to(inner.dtype.element_ty)
        tl.store(to + PAIRS.to(tl.int64) * INNER, low, mask=used)


@triton.jit(do_not_specialize=["PAIRS"])
def _down_kernel(
    inner, inner_scale, w, w_scale, out, order, tiles, weights, PAIRS, H: tl.constexpr, INNER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALE_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, FACTOR: tl.constexpr, NARROW: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):
    ACROSS: tl.constexpr = H // BLOCK_N
    n0 = tl.program_id(0) % ACROSS * BLOCK_N
    tile = tiles + tl.program_id(0) // ACROSS * 4
    after_previous(PDL)
    if tl.program_id(0) >= tl.load(tiles + 3) * ACROSS:
        return
    row = tl.load(tile) * H + n0
    first = tl.load(tile + 1)
    rows = tl.load(tile + 2)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    at_block = w_scale + row // SCALE_BLOCK * (INNER // SCALE_BLOCK)
    acc = tl.zeros([BLOCK_N, BLOCK_M] if NARROW else [BLOCK_M, BLOCK_N], tl.float32)
    for c in tl.range(0, INNER // BLOCK_K, num_stages=STAGES):
        # Rows after the tile's pairs are arbitrary; they are not stored.
        high = read_tile(inner, first, c * BLOCK_K, first + rows, INNER, BLOCK_M, BLOCK_K)
        b = read_tile(w, row, c * BLOCK_K, None, INNER, BLOCK_N, BLOCK_K)
        y = add_product(None, b, high, NARROW)
        if NARROW:
            low = read_tile(inner, PAIRS + first, c * BLOCK_K, PAIRS + first + rows, INNER, BLOCK_M, BLOCK_K)
            y += add_product(None, b, low, NARROW) * (1.0 / FACTOR)
        scale = tl.load(inner_scale + c * PAIRS + first + m, mask=m < rows, other=0.0)
        if BLOCKS:
            scale *= tl.load(at_block + c * BLOCK_K // SCALE_BLOCK)
        acc += y * by_pair(scale, NARROW)
    if not BLOCKS:
        acc *= by_output(tl.load(w_scale + row + n), NARROW)
    store_weighted(acc, out, order, weights, first, rows, n0 + n, H, BLOCK_M, NARROW)


def products(x: torch.Tensor, gate_up: ScaledMatrix, down: ScaledMatrix, routes: Routes, tiles: Tiles) -> torch.Tensor:
    """Returns the weighted output [T, K, H] of each token's experts, for x [T, H] in bfloat16. With narrow tiles,
    activations are the sum of two numbers. The rows of padding tokens, which have no experts, are not written."""
    (tokens, hidden), inner_size = x.shape, down.shape[1]
    pairs, per_token, count = len(routes.order), routes.weights.shape[1], len(routes.tiles)
    rows, narrow, (n, _, warps, stages), (n_down, _, warps_down, stages_down) = tiles
    parts, blocks = 1 + narrow, gate_up.scale.dim() == 2
    values, scale = round_groups(x, both=narrow)
    inner = torch.empty(parts * pairs, inner_size, dtype=values.dtype, device=x.device)
    inner_scale = torch.empty(inner_size // n, pairs, dtype=torch.float32, device=x.device)
    out = torch.empty(tokens, per_token, hidden, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(count * (inner_size // n),)](
        values, scale, tiles_of(gate_up.values, [n, BLOCK]), gate_up.scale, inner, inner_scale, routes.order,
        routes.tiles, scale.shape[1], pairs, H=hidden, INNER=inner_size, TOP=per_token, BLOCK_M=rows, BLOCK_N=n,
        BLOCK_K=BLOCK, BLOCKS=blocks, MOST=E4M3_MAX, FACTOR=LOW, NARROW=narrow,
        STAGES=fitting(stages, (parts * rows + 2 * n) * BLOCK), num_warps=warps, **overlap(),
    )
    _down_kernel[(count * (hidden // n_down),)](
        tiles_of(inner, [rows, n]), inner_scale, tiles_of(down.values, [n_down, n]), down.scale, out, routes.order,
        routes.tiles, routes.weights, pairs, H=hidden, INNER=inner_size, BLOCK_M=rows, BLOCK_N=n_down, BLOCK_K=n,
        SCALE_BLOCK=BLOCK, BLOCKS=blocks, FACTOR=LOW, NARROW=narrow,
        STAGES=fitting(stages_down, (parts * rows + n_down) * n), num_warps=warps_down, **overlap(),
    )
    return out
