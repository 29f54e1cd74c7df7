"""Linear layers whose weights are 4-bit numbers in groups, with bfloat16 activations (engine/model/four_bits.py).

    tokens         kernel
    1              four_bits_one.py: whole numbers, fused with the norm before it and the additions after it
    2 to FEW       _few_kernel: numbers become bfloat16 in registers, then tensor cores multiply them
                   (on Hopper, for wide matrices, from MANY tokens on: four_bits_many.py)
    more           _expand_kernel writes the matrix in bfloat16 to a scratch buffer, then cuBLAS multiplies

The weights stay packed in memory: a number q from 0 to 15 stands for row scale · group scale · (q - 8 + offset).
Unpacking needs no conversion instruction, which would be the bottleneck: the bits of q become the last bits of a
mantissa, so that the float is 128 + q (Kim et al. 2022, "Who says elephants can't run").

Layout: the matrix [N, K] is stored in tiles of 128 rows, in the order in which the kernels read it. A row of a tile
has P = 64 words of 16 bits (groups of 64 or 128 columns), or 32 (smaller groups, or K is no multiple of 256). Word j
holds the columns j, j + P, j + 2 P and j + 3 P, the first in the lowest bits. So a shift and a mask give operands of a
tensor core with consecutive columns, and these are of one group.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.card import after_previous, card, overlap, read_tile, tiles_of
from engine.kernels.four_bits_one import INTERPRETED, FourBitMatrix, one
from engine.kernels.norms import silu_mul

MANY, FEW = 128, 256  # tokens
WIDE = 16384  # rows of a matrix from which on its tiles occupy all processors several times
SHARED = 2048  # columns of a matrix from which on two programs may share a tile


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
def factors_of(groups, offsets, g, column, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """Returns the factors and the offsets of COUNT groups from g on, for ROWS rows from `column` on. Kernels call
    this one tile early: Triton loads only operands of tensor cores ahead."""
    found = ()
    for i in tl.static_range(COUNT):
        at = (g + i) * 128 + column + tl.arange(0, ROWS)
        by = tl.load(groups + at)
        found = found + ((by, by if offsets is None else tl.load(offsets + at)),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def add_quarter(
    acc, by, words, b, factors, Q: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr
):
    """Returns acc and `by` after the products of one of the four numbers of each word [n, C] with b [m, C]. acc is the
    sum divided by `by`, the factors [n] of the latest group, so the factors need neither a second sum nor a product
    with each number.

    The other factors of a row are float16 from 6e-8 to 1, so a factor of 0 may become 1e-18: what its group adds is
    lost in the rounding of the sum, and sums up to 1e20 remain finite. Each new divisor rounds the sum by 3e-7 of it at
    most, 100 groups by 3e-5; rounding it to bfloat16 changes it by up to 4e-3.
    """
    less = tl.full(by.shape, -136.0, b.dtype)
    if OFFSETS:
        less = (factors[1] - 136.0).to(b.dtype)
    if Q * P % GROUP == 0:
        before = by
        by = factors[0].to(tl.float32)
        by = tl.where(by == 0.0, 1e-18, by)
        acc *= (before / by)[:, None]
    return tl.dot(_numbers(words, less[:, None], Q), b.T, acc), by


@triton.jit(do_not_specialize=["M", "WHOLE"])  # one compiled program for any number of tokens
def _few_kernel(
    x, w, groups, offsets, scale, y, halves, counters, M, N, WHOLE, K: tl.constexpr, GROUP: tl.constexpr,
    P: tl.constexpr, OFFSETS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
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
    n0 = unit // wide * BLOCK_N
    m0 = unit % wide * BLOCK_M
    n = n0 + tl.arange(0, BLOCK_N)
    m = m0 + tl.arange(0, BLOCK_M)
    by_row = tl.load(scale + n)
    column = n0 % 128
    row = n0 // 128 * TILES * 128 + column
    at_group = n0 // 128 * TILES * SHARE
    factors = factors_of(groups, offsets, at_group + first // (P // WIDTH) * SHARE, column, SHARE, BLOCK_N)
    by = tl.full([BLOCK_N], 1.0, tl.float32)
    after_previous(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i in tl.range(first, end, num_stages=STAGES):
        t = i // (P // WIDTH)
        following = tl.minimum(i + 1, end - 1) // (P // WIDTH)
        later = factors_of(groups, offsets, at_group + following * SHARE, column, SHARE, BLOCK_N)
        piece = i % (P // WIDTH) * WIDTH  # of the words of a row; written so, it is known to be a multiple
        words = read_tile(w, row + t * 128, piece, None, P, BLOCK_N, WIDTH)
        for q in tl.static_range(4):
            b = read_tile(x, m0, t * 4 * P + q * P + piece, M, K, BLOCK_M, WIDTH)
            acc, by = add_quarter(acc, by, words, b, factors[q * P // GROUP], q, P, GROUP, OFFSETS)
        factors = later
    acc *= (by_row * by)[:, None]
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
    stages: int  # Triton loads stages - 1 tiles ahead
    programs: int = 1  # that run on a processor at the same time
    parts: int = 1  # parts of K, which the next norm sums
    described: bool = False  # tiles are read from tensor descriptors


def few_form(m: int, w: FourBitMatrix, in_parts: bool) -> Form:
    """Returns the form that was the fastest in measurements, for x [m, K]. in_parts: there may be several parts."""
    (n, k), width = w.shape, w.values.shape[-1]
    most = 1 if not in_parts else 8 if k > 8192 and m <= 64 else 4 if m <= 128 else 2
    tokens, wide = min(128, max(16, triton.next_power_of_2(m))), n >= WIDE
    if card().by_warps:  # these fit into 99 KiB
        rows = 128 if n // 128 * most >= card().processors else 64
        form = Form(tokens, rows, 64, 4, 3 if m > 32 else 4, 128 // rows)
        if m > 64:  # the operands of these tensor cores take more registers
            form = Form(tokens, 128, 32, 8, 3)
    elif m <= 64:
        stages = {16: (3, 5), 32: (4, 3), 64: (3, 2)}[tokens][wide]
        form = Form(tokens, 64, 64, 4, stages, 2 if tokens == 32 and not wide else 3, described=tokens == 32 and wide)
    elif width == 64 and w.offsets is None and (wide or in_parts):
        form = Form(128, 128, 64, 8, 3, described=True)
    elif m <= 128 and not wide and not in_parts:
        form = Form(64, 64, 64, 4, 2, 3, described=True)
    else:
        form = Form(128, 64, 32, 4, 3 if in_parts else 2, 3, described=True)
    parts, tiles = 1, k // (4 * width)
    units = triton.cdiv(m, form.block_m) * n // form.block_n
    while parts < most and 2 * parts * units <= 256 and tiles % (2 * parts) == 0:
        parts *= 2
    return form._replace(width=min(width, form.width), parts=parts)


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
    registers = 65536 // (32 * form.warps * form.programs) // 8 * 8
    words, rows = w.values.view(-1, width), x
    if form.described:
        words, rows = tiles_of(words, [form.block_n, form.width]), tiles_of(x, [form.block_m, form.width])
    _few_kernel[(units + left, form.parts)](
        rows, words, w.groups, w.offsets, w.scale, y, halves, _counters(x.device), m, n, units - left, K=k,
        GROUP=k // w.groups.shape[1], P=width, OFFSETS=w.offsets is not None, WIDTH=form.width,
        BLOCK_M=form.block_m, BLOCK_N=form.block_n, SPLIT_K=form.parts, STAGES=form.stages, num_warps=form.warps,
        maxnreg=registers if registers < 248 else None, **overlap(),
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
    many = len(x) > MANY and w.shape[0] >= WIDE and card().capability == (9, 0)
    if many and triton.__version__.startswith("3.6."):  # Gluon's names change from version to version
        from engine.kernels import four_bits_many

        if four_bits_many.has(w):
            out = torch.empty(len(x), w.shape[0], dtype=x.dtype, device=x.device) if out is None else out
            return four_bits_many.product(x.contiguous(), w, _counters(x.device), out)
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
