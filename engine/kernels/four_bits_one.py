"""The product of a matrix of 4-bit numbers in groups with one token (engine/kernels/four_bits.py has the layout).

Plain arithmetic in float32 would be the bottleneck, not the memory. So a number from 0 to 15 becomes a byte, and the
activations of a group become 16-bit whole numbers with one scale: a high byte and a low byte. One instruction (dp4a)
multiplies four numbers by four bytes and adds the products. Only the rounding to 16 bits is an error: 2e-5.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
import triton
import triton.language as tl

from engine.kernels.card import after_previous, overlap
from engine.kernels.norms import silu_times

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # Triton's interpreter has no assembly


class FourBitMatrix(Protocol):
    """A matrix [N, K], such as engine.model.four_bits.Int4Tiles; both are multiples of 128. values: int16 [N / 128, K /
    4 P, 128, P]; scale: fp32 [N]; groups and offsets: fp16 [N / 128, K / group, 128], with groups of 32, 64 or 128
    columns."""

    values: torch.Tensor
    scale: torch.Tensor
    groups: torch.Tensor
    offsets: torch.Tensor | None

    @property
    def shape(self) -> torch.Size: ...


@triton.jit
def _dot4(a, b, total):
    """Returns total + the sum of the products of the four signed bytes of each word."""
    if INTERPRETED:
        for i in tl.static_range(4):
            total += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
        return total
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _bytes(a, b, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Returns (byte FIRST of a, byte FIRST of b, byte SECOND of a, byte SECOND of b) as a word."""
    if INTERPRETED:
        low = ((a >> (8 * FIRST)) & 255) | (((b >> (8 * FIRST)) & 255) << 8)
        return low | (((a >> (8 * SECOND)) & 255) << 16) | (((b >> (8 * SECOND)) & 255) << 24)
    return tl.inline_asm_elementwise(
        f"prmt.b32 $0, $1, $2, {FIRST + 16 * (4 + FIRST) + 256 * SECOND + 4096 * (4 + SECOND)};",
        "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1,
    )


@triton.jit
def _halves(a, b):
    """Returns (byte 0 of a, byte 1 of a, byte 0 of b, byte 1 of b) as a word."""
    return (a & 0xFFFF) | (b << 16)


@triton.jit
def _loaded(at, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _group_factors(at, inside, SHARE: tl.constexpr, EVEN: tl.constexpr):
    """Returns the SHARE factors [n, B] of the groups of each tile."""
    found = ()
    for g in tl.static_range(SHARE):
        found = found + (_loaded(at + g * 128, inside, EVEN),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _spread(v, TIMES: tl.constexpr):
    """Returns v [n, B], each number TIMES times: [n, B · TIMES]."""
    return tl.broadcast_to(v[:, :, None], [v.shape[0], v.shape[1], TIMES]).reshape([v.shape[0], v.shape[1] * TIMES])


@triton.jit
def _pair(at, inside, EVEN: tl.constexpr):
    """Returns the two bfloat16 numbers of each 32-bit word, in float32."""
    pair = tl.load(at) if EVEN else tl.load(at, mask=inside, other=0)
    return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _normalised(even, odd, gain):
    """Returns even and odd, rounded to bfloat16, times the two bfloat16 numbers of gain, rounded to bfloat16."""
    if INTERPRETED:
        even = even.to(tl.bfloat16).to(tl.float32) * (gain << 16).to(tl.float32, bitcast=True)
        odd = odd.to(tl.bfloat16).to(tl.float32) * (gain & -65536).to(tl.float32, bitcast=True)
        return even.to(tl.bfloat16).to(tl.float32), odd.to(tl.bfloat16).to(tl.float32)
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 t, none;
            mov.b32 none, 0x80008000;
            cvt.rn.bf16x2.f32 t, $3, $2;
            fma.rn.bf16x2 t, t, $4, none;
            shl.b32 $0, t, 16;
            and.b32 $1, t, 0xFFFF0000;
        }
        """,
        "=r,=r,r,r,r", [even, odd, gain], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
    )


@triton.jit
def _largest(even, odd, BLOCK_B: tl.constexpr):
    """Returns the largest absolute number of each tile [BLOCK_B]; infinity if one is NaN."""
    most = tl.maximum(tl.abs(even), tl.abs(odd), propagate_nan=tl.PropagateNan.ALL)
    most = tl.where(most == most, most, float("inf"))
    return tl.maximum(tl.max(most.reshape([BLOCK_B, most.shape[0] // BLOCK_B]), 1), 1e-30)


@triton.jit
def _whole(even, odd, most, BLOCK_B: tl.constexpr):
    """Returns the numbers as 16-bit whole numbers, in the last bits of floats of 2^23 and more; most: their scale."""
    by = tl.broadcast_to((32512.0 / most)[:, None], [BLOCK_B, even.shape[0] // BLOCK_B]).reshape(even.shape)
    return (even * by + 12582912.0).to(tl.int32, bitcast=True), (odd * by + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _activations(x, gain, rstd, inside, HALF: tl.constexpr, P, GROUP, NORM, EVEN, BLOCK_B):
    """Returns the quarters 2 HALF and 2 HALF + 1 of the columns of each tile as words of low bytes and of high bytes
    (even and odd column of the first quarter in the bytes 0 and 2, of the second in 1 and 3), and their scales."""
    at = HALF * P
    even, odd = _pair(x + at, inside, EVEN)
    even2, odd2 = _pair(x + at + P // 2, inside, EVEN)
    if NORM:
        even, odd = _normalised(even * rstd, odd * rstd, tl.load(gain + at, mask=inside, other=0))
        even2, odd2 = _normalised(even2 * rstd, odd2 * rstd, tl.load(gain + at + P // 2, mask=inside, other=0))
    most = _largest(even, odd, BLOCK_B)
    most2 = _largest(even2, odd2, BLOCK_B)
    if GROUP > P:  # both quarters are in one group
        most = tl.maximum(most, most2)
        most2 = most
    a, c = _whole(even, odd, most, BLOCK_B)
    b, d = _whole(even2, odd2, most2, BLOCK_B)
    low = _halves(_bytes(a, b, 0, 0), _bytes(c, d, 0, 0))
    high = _halves(_bytes(a + 128, b + 128, 1, 1), _bytes(c + 128, d + 128, 1, 1))
    return low, high, (most / 32512.0, most2 / 32512.0)


@triton.jit
def _four_words(t):
    """Returns the sums of four neighbours of the last dimension [..., C], which are in one thread and one group."""
    if len(t.shape) == 1:
        total = tl.sum(t.reshape([t.shape[0] // 4, 4]), 1)
    else:
        total = tl.sum(t.reshape([t.shape[0], t.shape[1] // 4, 4]), 2)
    return total


@triton.jit
def _add_half(acc, words, factors, moved, low, high, scales, HALF: tl.constexpr, P, GROUP, OFFSETS):
    """Adds the products of two quarters of the numbers `words` [n, C] with their activations to acc [n, C / 4]."""
    numbers = _bytes(words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F, HALF, HALF + 2)
    for q in tl.static_range(1 if GROUP > P else 2):
        mask = -1 if GROUP > P else -0x00FF0100 if q else 0x00FF00FF
        some, more = low & mask, high & mask
        ones = tl.full(low.shape, 0x01010101, tl.int32)
        sums = _four_words(_dot4(ones, some, _dot4(ones, more, tl.zeros(low.shape, tl.int32)) * 256)).to(tl.float32)
        some = tl.broadcast_to(some[None, :], words.shape)
        more = tl.broadcast_to(more[None, :], words.shape)
        part = _four_words(_dot4(numbers, some, _dot4(numbers, more, tl.zeros(words.shape, tl.int32)) * 256))
        less = -8.0
        if OFFSETS:
            less += _spread(moved[(2 * HALF + q) * P // GROUP].to(tl.float32), P // 8)
        by = _spread(factors[(2 * HALF + q) * P // GROUP].to(tl.float32) * scales[q][None, :], P // 8)
        acc += (part.to(tl.float32) + less * sums[None, :]) * by
    return acc


@triton.jit
def _one_kernel(
    x, w, groups, offsets, scale, y, norm_weight, residual, N, K: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr,
    EPS: tl.constexpr, OFFSETS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE_UP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):
    """x, w and norm_weight are 32-bit words: two activations, or eight numbers of two neighbouring columns."""
    WORDS: tl.constexpr = P // 2  # of a row of a tile
    TILES: tl.constexpr = K // (4 * P)
    CHUNKS: tl.constexpr = (TILES + BLOCK_B - 1) // BLOCK_B
    EVEN: tl.constexpr = TILES % BLOCK_B == 0
    SHARE: tl.constexpr = 4 * P // GROUP  # groups of a row of a tile
    first = tl.program_id(0) * BLOCK_N
    r = tl.arange(0, BLOCK_N)
    b = tl.arange(0, BLOCK_B)
    c = tl.arange(0, BLOCK_B * WORDS)
    up = (N // 128).to(tl.int64) * TILES * 128
    row = (first // 128).to(tl.int64) * TILES * 128 + first % 128 + r[:, None]
    at = w + row * WORDS + (c // WORDS * 128 * WORDS + c % WORDS)[None, :]
    row = (first // 128).to(tl.int64) * SHARE * TILES * 128 + first % 128 + r[:, None]
    at_groups = groups + row + b[None, :] * SHARE * 128
    at_offsets = offsets + row + b[None, :] * SHARE * 128 if OFFSETS else at_groups
    at_x = c // WORDS * 2 * P + c % WORDS
    inside = c // WORDS < TILES
    in_groups = (b < TILES)[None, :]
    # The first chunk and its scales do not depend on the previous kernel.
    words = _loaded(at, inside[None, :], EVEN)
    factors = _group_factors(at_groups, in_groups, SHARE, EVEN)
    moved = _group_factors(at_offsets, in_groups, SHARE, EVEN) if OFFSETS else factors
    words2, factors2, moved2 = words, factors, moved
    if GATE_UP:
        words2 = _loaded(at + up * WORDS, inside[None, :], EVEN)
        factors2 = _group_factors(at_groups + up * SHARE, in_groups, SHARE, EVEN)
        moved2 = _group_factors(at_offsets + up * SHARE, in_groups, SHARE, EVEN) if OFFSETS else factors2
    by_row = tl.load(scale + first + r)
    after_previous(PDL)
    rstd = 1.0
    if NORM:
        square = tl.zeros([BLOCK_B * WORDS], tl.float32)
        for chunk in tl.range(0, CHUNKS, num_stages=1):
            for q in tl.static_range(4):
                even, odd = _pair(
                    x + at_x + chunk * BLOCK_B * 2 * P + q * WORDS, chunk * BLOCK_B + c // WORDS < TILES, EVEN
                )
                square += even * even + odd * odd
        rstd = tl.rsqrt(tl.sum(square, 0) / K + EPS)
    gain = norm_weight + at_x if NORM else x + at_x
    acc = tl.zeros([BLOCK_N, BLOCK_B * WORDS // 4], tl.float32)
    acc2 = tl.zeros([BLOCK_N, BLOCK_B * WORDS // 4], tl.float32)
    for chunk in tl.range(0, CHUNKS, num_stages=1):
        these, by, less, these2, by2, less2 = words, factors, moved, words2, factors2, moved2
        if CHUNKS > 1:  # load the next chunk
            inside = ((chunk + 1) * BLOCK_B + c // WORDS < TILES)[None, :]
            in_groups = ((chunk + 1) * BLOCK_B + b < TILES)[None, :]
            on = (chunk + 1) * BLOCK_B * 128
            words = _loaded(at + on * WORDS, inside, False)
            factors = _group_factors(at_groups + on * SHARE, in_groups, SHARE, False)
            moved = _group_factors(at_offsets + on * SHARE, in_groups, SHARE, False) if OFFSETS else factors
            if GATE_UP:
                words2 = _loaded(at + (on + up) * WORDS, inside, False)
                factors2 = _group_factors(at_groups + (on + up) * SHARE, in_groups, SHARE, False)
                moved2 = moved
                if OFFSETS:
                    moved2 = _group_factors(at_offsets + (on + up) * SHARE, in_groups, SHARE, False)
        inside = chunk * BLOCK_B + c // WORDS < TILES
        there, to_gain = x + at_x + chunk * BLOCK_B * 2 * P, gain + chunk * BLOCK_B * 2 * P
        for half in tl.static_range(2):
            low, high, scales = _activations(there, to_gain, rstd, inside, half, P, GROUP, NORM, EVEN, BLOCK_B)
            acc = _add_half(acc, these, by, less, low, high, scales, half, P, GROUP, OFFSETS)
            if GATE_UP:
                acc2 = _add_half(acc2, these2, by2, less2, low, high, scales, half, P, GROUP, OFFSETS)
    dtype = y.dtype.element_ty
    total = (tl.sum(acc, 1) * by_row).to(dtype)
    if GATE_UP:
        total = silu_times(total, tl.sum(acc2, 1) * tl.load(scale + N + first + r), dtype).to(dtype)
    if RESIDUAL:
        total = (total.to(tl.float32) + tl.load(residual + first + r).to(tl.float32)).to(dtype)
    tl.store(y + first + r, total)


def one_form(gate_up: bool, large: bool) -> tuple[int, int, int]:
    """Returns (rows of a program, columns that it reads at a time, warps): the fastest in measurements. `large`: groups
    of 128 without offsets; with others, 16 rows need more registers than there are."""
    return (16 if large and not gate_up else 8), 4096, 4


def one(
    x: torch.Tensor, w: FourBitMatrix, *, norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None, gate_up: bool = False, out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the same as engine.kernels.gemv.gemv, for x [1, K]."""
    n, k = w.shape[0] // 2 if gate_up else w.shape[0], w.shape[1]
    out = torch.empty(1, n, dtype=x.dtype, device=x.device) if out is None else out
    group = k // w.groups.shape[1]
    block_n, columns, warps = one_form(gate_up, group == 128 and w.offsets is None)
    block_n = block_n // 2 if gate_up else block_n
    width = w.values.shape[-1]
    tiles = triton.next_power_of_2(min(columns, k) // (4 * width))
    weight, eps = norm or (None, 0.0)
    _one_kernel[(n // block_n,)](
        x.view(torch.int32), w.values.view(torch.int32), w.groups, w.offsets, w.scale, out,
        None if weight is None else weight.view(torch.int32), residual, n, K=k, GROUP=group, P=width,
        EPS=eps, OFFSETS=w.offsets is not None, NORM=norm is not None, RESIDUAL=residual is not None, GATE_UP=gate_up,
        BLOCK_N=block_n, BLOCK_B=tiles, num_warps=warps, **overlap(),
    )
    return out
