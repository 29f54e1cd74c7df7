"""Linear layers whose weights are 4-bit numbers in groups, with bfloat16 activations (engine/model/four_bits.py).

    tokens         kernel
    1              _one_kernel: plain arithmetic in float32, fused with the norm before it and the additions after it
    2 to FEW       _few_kernel: numbers become bfloat16 in registers, then tensor cores multiply them
    more           _expand_kernel writes the matrix in bfloat16 to a scratch buffer, then cuBLAS multiplies

The weights stay packed in memory: a number q from 0 to 15 stands for row scale · group scale · (q - 8 + offset).
Unpacking needs no conversion instruction, which would be the bottleneck: the bits of q become the last or the first
bits of a mantissa, so that the float is 128 + q or 1 + q / 16 (Kim et al. 2022, "Who says elephants can't run").

Layout: the matrix [N, K] is stored in tiles of 128 rows, in the order in which the kernels read it. A row of a tile
has P = 64 words of 16 bits (groups of 64 or 128 columns), or 32 (smaller groups, or K is no multiple of 256). Word j
holds the columns j, j + P, j + 2 P and j + 3 P, the first in the lowest bits. So a shift and a mask give operands of a
tensor core with consecutive columns, and these are of one group.
"""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.card import after_previous, card, fitting, overlap
from engine.kernels.norms import silu_mul, silu_times

TILE = 128  # rows of a tile
FEW = 256  # tokens
SHARED = 2048  # columns of a matrix from which on two programs may share a tile
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
def _last(words):
    """Returns 1 + q / 16 in float32, where q are the bits 19 to 22."""
    if INTERPRETED:
        return ((words & 0x00780000) | 0x3F800000).to(tl.float32, bitcast=True)
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, 0x00780000, 0x3F800000, 0xEA;", "=r,r", [words], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _next_to_last(words):
    """Returns 1 + q / 256 in float32, where q are the bits 15 to 18."""
    if INTERPRETED:
        return ((words & 0x00078000) | 0x3F800000).to(tl.float32, bitcast=True)
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, 0x00078000, 0x3F800000, 0xEA;", "=r,r", [words], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _add_quarter(total, words, even, odd, Q: tl.constexpr):
    """Adds the products of two of the eight numbers of each word [n, C] with even and odd [C] to total. The products
    are (1 + q / 16) · x for odd Q, and (16 + q / 16) · x for even Q. One shift serves both."""
    low = words << (15 if Q < 2 else 7)
    high = words >> (1 if Q < 2 else 9)
    if Q % 2:
        total += _last(low) * even[None, :]
        total += _last(high) * odd[None, :]
    else:
        total += _next_to_last(low) * (even * 16.0)[None, :]
        total += _next_to_last(high) * (odd * 16.0)[None, :]
    return total


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
def _spread(factors, by, WORDS: tl.constexpr):
    """Returns by · factors [n, B] in float32, each WORDS times: [n, B · WORDS]."""
    wide = factors.to(tl.float32) * by
    return tl.broadcast_to(wide[:, :, None], [wide.shape[0], wide.shape[1], WORDS]).reshape(
        [wide.shape[0], wide.shape[1] * WORDS]
    )


@triton.jit
def _pair(at, inside, EVEN: tl.constexpr):
    """Returns the two bfloat16 numbers of each 32-bit word, in float32."""
    pair = tl.load(at) if EVEN else tl.load(at, mask=inside, other=0)
    return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _normalised(v, rstd, gain):
    return ((v * rstd).to(tl.bfloat16).to(tl.float32) * gain).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _add_tiles(acc, words, factors, moved, x, gain, rstd, inside, GROUP, P, OFFSETS, NORM, EVEN):
    """Adds the products of the numbers `words` [n, C] with their columns of x to acc [n, C]."""
    part = tl.zeros(acc.shape, tl.float32)
    middle = tl.zeros([acc.shape[1]], tl.float32)
    plain = tl.zeros([acc.shape[1]], tl.float32)
    for q in tl.static_range(4):
        even, odd = _pair(x + q * P // 2, inside, EVEN)
        if NORM:
            gain_even, gain_odd = _pair(gain + q * P // 2, inside, EVEN)
            even = _normalised(even, rstd, gain_even)
            odd = _normalised(odd, rstd, gain_odd)
        part = _add_quarter(part, words, even, odd, q)
        middle += (even + odd) * (1.5 if q % 2 else 16.5)
        plain += even + odd
        if (q + 1) * P % GROUP == 0:
            part -= middle[None, :]
            if OFFSETS:
                part += _spread(moved[q * P // GROUP], 1.0 / 16, P // 2) * plain[None, :]
            acc += part * _spread(factors[q * P // GROUP], 16.0, P // 2)
            part = tl.zeros(acc.shape, tl.float32)
            middle = tl.zeros([acc.shape[1]], tl.float32)
            plain = tl.zeros([acc.shape[1]], tl.float32)
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
    acc = tl.zeros([BLOCK_N, BLOCK_B * WORDS], tl.float32)
    acc = _add_tiles(acc, words, factors, moved, x + at_x, gain, rstd, inside, GROUP, P, OFFSETS, NORM, EVEN)
    acc2 = tl.zeros([BLOCK_N, BLOCK_B * WORDS], tl.float32)
    if GATE_UP:
        acc2 = _add_tiles(acc2, words2, factors2, moved2, x + at_x, gain, rstd, inside, GROUP, P, OFFSETS, NORM, EVEN)
    for chunk in tl.range(1, CHUNKS, num_stages=1):
        inside = chunk * BLOCK_B + c // WORDS < TILES
        in_groups = (chunk * BLOCK_B + b < TILES)[None, :]
        on = chunk * BLOCK_B * 128
        there, to_gain = x + at_x + chunk * BLOCK_B * 2 * P, gain + chunk * BLOCK_B * 2 * P
        words = _loaded(at + on * WORDS, inside[None, :], EVEN)
        factors = _group_factors(at_groups + on * SHARE, in_groups, SHARE, EVEN)
        moved = _group_factors(at_offsets + on * SHARE, in_groups, SHARE, EVEN) if OFFSETS else factors
        acc = _add_tiles(acc, words, factors, moved, there, to_gain, rstd, inside, GROUP, P, OFFSETS, NORM, EVEN)
        if GATE_UP:
            words = _loaded(at + (up + on) * WORDS, inside[None, :], EVEN)
            factors = _group_factors(at_groups + (up + on) * SHARE, in_groups, SHARE, EVEN)
            moved = _group_factors(at_offsets + (up + on) * SHARE, in_groups, SHARE, EVEN) if OFFSETS else factors
            acc2 = _add_tiles(acc2, words, factors, moved, there, to_gain, rstd, inside, GROUP, P, OFFSETS, NORM, EVEN)
    dtype = y.dtype.element_ty
    total = (tl.sum(acc, 1) * by_row).to(dtype)
    if GATE_UP:
        total = silu_times(total, tl.sum(acc2, 1) * tl.load(scale + N + first + r), dtype).to(dtype)
    if RESIDUAL:
        total = (total.to(tl.float32) + tl.load(residual + first + r).to(tl.float32)).to(dtype)
    tl.store(y + first + r, total)


ONE = 8, 4096, 4  # rows of a program, columns that it reads at a time, warps: the fastest measured


def one(
    x: torch.Tensor, w: FourBitMatrix, *, norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None, gate_up: bool = False, out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the same as engine.kernels.gemv.gemv, for x [1, K]."""
    n, k = w.shape[0] // 2 if gate_up else w.shape[0], w.shape[1]
    out = torch.empty(1, n, dtype=x.dtype, device=x.device) if out is None else out
    block_n, columns, warps = ONE
    block_n = block_n // 2 if gate_up else block_n
    width = w.values.shape[-1]
    tiles = triton.next_power_of_2(min(columns, k) // (4 * width))
    weight, eps = norm or (None, 0.0)
    _one_kernel[(n // block_n,)](
        x.view(torch.int32), w.values.view(torch.int32), w.groups, w.offsets, w.scale, out,
        None if weight is None else weight.view(torch.int32), residual, n, K=k, GROUP=k // w.groups.shape[1], P=width,
        EPS=eps, OFFSETS=w.offsets is not None, NORM=norm is not None, RESIDUAL=residual is not None, GATE_UP=gate_up,
        BLOCK_N=block_n, BLOCK_B=tiles, num_warps=warps, **overlap(),
    )
    return out


@triton.jit
def _numbers(words, less, Q: tl.constexpr):
    """Returns 128 + q + less in the type of less, where q are the bits 4 Q to 4 Q + 3 of each 16-bit word. 128 + q has
    the bits 0x4300 | q in bfloat16. The sum is an instruction that Ampere has too."""
    if INTERPRETED:
        return (((words >> (4 * Q)) & 15) + 128).to(less.dtype) + less
    return tl.inline_asm_elementwise(
        f"""
        {{
            .reg .b32 t, one;
            mov.b32 one, 0x3F803F80;
            shr.u32 t, $1, {4 * Q};
            lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, t, one, $2;
        }}
        """,
        "=r,r,r", [words, less], dtype=tl.bfloat16, is_pure=True, pack=2,
    )


@triton.jit
def _times(a, factors):
    """Returns a · factors. Triton's own product is not packed: packing its results between the products of a tensor
    core makes ptxas let these wait for each other."""
    if INTERPRETED:
        return a * factors
    return tl.inline_asm_elementwise(
        "{ .reg .b32 none; mov.b32 none, 0x80008000; fma.rn.bf16x2 $0, $1, $2, none; }",
        "=r,r,r", [a, factors], dtype=tl.bfloat16, is_pure=True, pack=2,
    )


@triton.jit
def _waited(acc):
    """Returns acc, which is used here: if a product ended in the next iteration, ptxas would serialise all of them."""
    if INTERPRETED:
        return acc
    return tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["M", "WHOLE"])  # one compiled program for any number of tokens
def _few_kernel(
    x, w, groups, offsets, scale, y, halves, counters, M, N, WHOLE, K: tl.constexpr, GROUP: tl.constexpr,
    P: tl.constexpr, OFFSETS: tl.constexpr, SCALED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):
    TILES: tl.constexpr = K // (4 * P)
    STEPS: tl.constexpr = TILES * P // WIDTH
    SHARE: tl.constexpr = 4 * P // GROUP
    unit = tl.program_id(0)
    part = tl.program_id(1)
    first = part * STEPS // SPLIT_K
    end = (part + 1) * STEPS // SPLIT_K
    half = (unit - WHOLE) % 2
    shared = (SPLIT_K == 1) & (unit >= WHOLE)
    if shared:
        unit = WHOLE + (unit - WHOLE) // 2
        first = half * STEPS // 2
        end = (half + 1) * STEPS // 2
    wide = tl.cdiv(M, BLOCK_M)
    tile = unit // wide
    m0 = unit % wide * BLOCK_M
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = m0 + tl.arange(0, BLOCK_M)
    by_row = tl.load(scale + n)
    row = tile * BLOCK_N // 128 * TILES * 128 + tile * BLOCK_N % 128
    at_group = tile * BLOCK_N // 128 * TILES * SHARE
    column = tile * BLOCK_N % 128
    after_previous(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i in tl.range(first, end, num_stages=STAGES):
        t = i * WIDTH // P
        piece = i * WIDTH % P  # of the words of a row
        words = w.load([row + t * 128, piece])
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for q in tl.static_range(4):
            g = at_group + t * SHARE + q * P // GROUP
            b = x.load([m0, t * 4 * P + q * P + piece])  # rows past M are zeros
            less = tl.full([BLOCK_N], -136.0, b.dtype)
            if OFFSETS:
                less = (offsets.load([g, column]).reshape([BLOCK_N]) - 136.0).to(b.dtype)  # whole numbers: exact
            a = _numbers(words, less[:, None], q)
            if SCALED:
                acc = tl.dot(_times(a, groups.load([g, column]).reshape([BLOCK_N]).to(b.dtype)[:, None]), b.T, acc)
            else:
                total = tl.dot(a, b.T, total)
                if (q + 1) * P % GROUP == 0:
                    acc += total * groups.load([g, column]).reshape([BLOCK_N]).to(tl.float32)[:, None]
                    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if SCALED:
            acc = _waited(acc)
    acc *= by_row[:, None]
    last = True
    if shared:
        cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        both = halves + (unit - WHOLE) * (2 * BLOCK_N * BLOCK_M) + cell
        tl.store(both + half * (BLOCK_N * BLOCK_M), acc)
        tl.debug_barrier()  # all threads must write their sums before the counter increases
        last = tl.atomic_add(counters + unit - WHOLE, 1, sem="acq_rel") == 1
        if last:
            tl.debug_barrier()
            tl.store(counters + unit - WHOLE, 0)
            acc += tl.load(both + (1 - half) * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
    if last:
        to = y + part.to(tl.int64) * M * N + m[None, :].to(tl.int64) * N + n[:, None]
        tl.store(to, acc.to(y.dtype.element_ty), mask=(m < M)[None, :])


class Form(NamedTuple):
    """How few tokens are multiplied."""

    block_m: int
    block_n: int
    width: int  # words of a row of a tile that are loaded at a time
    warps: int
    stages: int
    scaled: bool  # the factors of groups multiply the weights, not the sums: then the weights are rounded to bfloat16
    programs: int = 1  # that run on a processor at the same time, of 8 warps: 2 have 128 registers each
    parts: int = 1  # parts of K, which the next norm sums


def few_form(m: int, w: FourBitMatrix, in_parts: bool) -> Form:
    """Returns the form that was the fastest in measurements, for x [m, K]. in_parts: there may be several parts."""
    (n, k), width = w.shape, w.values.shape[-1]
    if m <= 32:
        form = Form(max(16, triton.next_power_of_2(m)), 128 if in_parts else 64, 64, 4, 4, scaled=False)
    elif m <= 64:
        form = Form(64, 128, 64, 8, 4, scaled=False)
    elif m <= 128:
        form = Form(64, 128, 64, 8, 2, scaled=True, programs=2)
    else:
        form = Form(128, 128, 32, 8, 2, scaled=True, programs=2)
    parts, tiles, most = 1, k // (4 * width), 8 if m <= 32 and k > 8192 else 4
    units = triton.cdiv(m, form.block_m) * n // form.block_n
    while in_parts and parts < most and 2 * parts * units <= 256 and tiles % (2 * parts) == 0:
        parts *= 2
    form = form._replace(width=min(width, form.width))
    return form._replace(parts=parts)


@cache
def _counters(device: torch.device) -> torch.Tensor:
    """Returns counters, which are 0 before and after each launch."""
    return torch.zeros(2 * card().processors, dtype=torch.int32, device=device)


def few(x: torch.Tensor, w: FourBitMatrix, form: Form, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns x W^T for x [M, K] as [parts, M, N], which the caller sums: fp32, or bfloat16 if there is one part.

    If tiles are left that occupy at most half of the processors, two programs share each of them.
    """
    (m, k), n, width = x.shape, w.shape[0], w.values.shape[-1]
    dtype = torch.float32 if form.parts > 1 else x.dtype
    y = torch.empty(form.parts, m, n, dtype=dtype, device=x.device) if out is None else out
    units = triton.cdiv(m, form.block_m) * (n // form.block_n)
    room = card().processors * form.programs
    left = units % room if form.parts == 1 and k >= SHARED else 0
    left = left if 2 * left <= room else 0
    halves = torch.empty(2 * left * form.block_m * form.block_n, dtype=torch.float32, device=x.device)
    stage = 2 * form.width * (4 * form.block_m + form.block_n) + 1024
    factors, moved = (None if t is None else t.view(-1, TILE) for t in (w.groups, w.offsets))
    described = (None if t is None else TensorDescriptor.from_tensor(t, [1, form.block_n]) for t in (factors, moved))
    tiles = TensorDescriptor.from_tensor(w.values.view(-1, width), [form.block_n, form.width])
    _few_kernel[(units + left, form.parts)](
        TensorDescriptor.from_tensor(x, [form.block_m, form.width]), tiles, *described, w.scale, y, halves,
        _counters(x.device), m, n, units - left, K=k, GROUP=k // w.groups.shape[1], P=width,
        OFFSETS=moved is not None, SCALED=form.scaled, WIDTH=form.width, BLOCK_M=form.block_m, BLOCK_N=form.block_n,
        SPLIT_K=form.parts, STAGES=fitting(form.stages, stage), num_warps=form.warps,
        maxnreg=128 if form.programs > 1 else None, **overlap(),
    )
    return y


@triton.jit
def _expand_kernel(
    w, groups, offsets, scale, out, K: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, OFFSETS: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):
    """w and out are 32-bit words: eight numbers of two neighbouring columns, or two numbers."""
    WORDS: tl.constexpr = P // 2
    TILES: tl.constexpr = K // (4 * P)
    first = tl.program_id(0) * BLOCK_N
    t = tl.program_id(1)
    r = tl.arange(0, BLOCK_N)
    j = tl.arange(0, WORDS)
    row = first // 128 * TILES * 128 + t * 128 + first % 128 + r
    words = tl.load(w + row.to(tl.int64)[:, None] * WORDS + j[None, :])
    by_row = tl.load(scale + first + r)
    after_previous(PDL)
    to = out + (first + r).to(tl.int64)[:, None] * (K // 2) + t * 2 * P + j[None, :]
    for q in tl.static_range(4):
        at = (first // 128 * (K // GROUP) + (t * 4 + q) * P // GROUP) * 128 + first % 128 + r
        factor = (tl.load(groups + at).to(tl.float32) * by_row)[:, None]
        less = (8.0 - tl.load(offsets + at).to(tl.float32))[:, None] if OFFSETS else 8.0
        low = (((words >> (4 * q)) & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0  # 2^23 + q
        high = (((words >> (4 * q + 16)) & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        low = ((low - less) * factor).to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = ((high - less) * factor).to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        tl.store(to + q * WORDS, (low | (high << 16)).to(tl.int32, bitcast=True))


def expand(w: FourBitMatrix) -> torch.Tensor:
    """Returns the matrix in bfloat16 [N, K]. torch reuses this memory for the next matrix."""
    (n, k), width = w.shape, w.values.shape[-1]
    out = torch.empty(n, k, dtype=torch.bfloat16, device=w.values.device)
    _expand_kernel[(n // 64, k // (4 * width))](
        w.values.view(torch.int32), w.groups, w.offsets, w.scale, out.view(torch.int32), K=k,
        GROUP=k // w.groups.shape[1], P=width, OFFSETS=w.offsets is not None, BLOCK_N=64, num_warps=4, **overlap(),
    )
    return out


def product(x: torch.Tensor, w: FourBitMatrix, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns x W^T [T, N] for x [T, K] bfloat16; writes it to `out` if given."""
    if not len(x):  # this step needs no logits, so x has no rows; a tensor descriptor needs at least one
        return x.new_empty(0, w.shape[0])
    if len(x) == 1:
        return one(x, w, out=out)
    if len(x) > FEW:
        return torch.mm(x, expand(w).t(), out=out)
    form = few_form(len(x), w, in_parts=False)
    return few(x.contiguous(), w, form, None if out is None else out[None])[0]


def back_to_hidden(x: torch.Tensor, w: FourBitMatrix, *, silu: bool = False, in_parts: bool = True) -> torch.Tensor:
    """Returns x W^T [T, N]; if `in_parts`, maybe its parts fp32 [parts, T, N], which the next norm sums. T > 1. x: [T,
    K]. With `silu`, x [T, 2 K] is gate and up, and the result is (silu(gate) * up) W^T."""
    x = silu_mul(x) if silu else x
    if not in_parts or len(x) > FEW:
        return product(x, w)
    y = few(x.contiguous(), w, few_form(len(x), w, in_parts=True))
    return y if len(y) > 1 else y[0]
