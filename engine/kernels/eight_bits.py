"""Linear layers whose weights are 8-bit numbers (engine.model.linear: Fp8Weight, Fp8Blocks, Int8Rows).

    weights          scale per     1 token    2 to 64 tokens    more tokens
    e4m3             row           gemv       skinny            torch._scaled_mm
    e4m3             block         gemv       skinny            eight_bits_many.py
    whole numbers    row           gemv       skinny            eight_bits_many.py

gemv widens the weights as it reads them and does not round activations. The other kernels multiply on the tensor cores,
weights and activations in 8 bits.

Up to 64 tokens, reading the weights is the bottleneck. If the kernel widened the weights in registers, arithmetic would
be the bottleneck. Instead each activation is the sum of two 8-bit numbers, high and low: low is the rounding error of
high, times 16 (e4m3) or 254 (whole numbers). This is at least as precise as bfloat16, and the tensor cores get the
weights unchanged. Above 64 tokens, arithmetic is the bottleneck, and 8 bits are up to twice as fast as bfloat16; there
activations are rounded to one number and lose as much precision as the weights. Activations have one scale per row, as
in Micikevicius et al., FP8 formats for deep learning, 2022.

The four matrix products of a layer of Qwen3-8B on an H200 take, in bfloat16 -> e4m3: 97 -> 58 us for 1 token,
158 -> 120 us for 256 tokens, 3,960 -> 2,240 us for 8,192 tokens (MEASURED.md, with errors and smaller models).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels import eight_bits_many
from engine.kernels.card import after_previous, card, fitting, overlap, read_tile, tiles_of
from engine.kernels.eight_bits_many import RANGES, round_groups, round_rows
from engine.kernels.gemv import ScaledMatrix, gemv

SKINNY = 64  # tokens
BLOCK_K = 128  # the tensor cores sum this many products of e4m3 with fewer bits; the sums are then added in float32


@triton.jit(do_not_specialize=["M"])  # one compiled program for any number of tokens
def _skinny_kernel(
    x, x_scale, w, w_scale, y, M, N, K: tl.constexpr, FACTOR: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    part = tl.program_id(1)
    SPAN: tl.constexpr = K // SPLIT_K
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    if BLOCKS:
        at_scale = w_scale + tile * BLOCK_N // BLOCK_K * (K // BLOCK_K) + part * SPAN // BLOCK_K
    else:
        by_row = tl.load(w_scale + n, mask=n < N, other=0.0)
    after_previous(PDL)
    SUM: tl.constexpr = tl.int32 if WHOLE else tl.float32
    high = tl.zeros([BLOCK_N, BLOCK_M], SUM)
    low = tl.zeros([BLOCK_N, BLOCK_M], SUM)
    for k0 in tl.range(0, SPAN, BLOCK_K, num_stages=STAGES):
        k = part * SPAN + k0
        a = read_tile(w, tile * BLOCK_N, k, N, K, BLOCK_N, BLOCK_K)
        # Rows of b past M are low parts or zeros; results of these rows are not stored.
        b = read_tile(x, 0, k, 2 * M, K, BLOCK_M, BLOCK_K)
        c = read_tile(x, M, k, 2 * M, K, BLOCK_M, BLOCK_K)
        if BLOCKS:
            by_block = tl.load(at_scale + k0 // BLOCK_K)
            high += tl.dot(a, b.T) * by_block
            low += tl.dot(a, c.T) * by_block
        elif WHOLE:
            high = tl.dot(a, b.T, high, out_dtype=tl.int32)
            low = tl.dot(a, c.T, low, out_dtype=tl.int32)
        else:
            high = tl.dot(a, b.T, high, max_num_imprecise_acc=BLOCK_K)
            low = tl.dot(a, c.T, low, max_num_imprecise_acc=BLOCK_K)
    by_token = tl.load(x_scale + m, mask=m < M, other=0.0)
    product = (high.to(tl.float32) + low.to(tl.float32) * (1.0 / FACTOR)) * by_token[None, :]
    if not BLOCKS:
        product *= by_row[:, None]
    at = y + part.to(tl.int64) * M * N + m[None, :] * N + n[:, None]
    tl.store(at, product.to(y.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


def skinny(
    values: torch.Tensor, scale: torch.Tensor, w: ScaledMatrix, parts: int = 1, dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x W^T as [parts, M, N], which the caller sums. K is cut into `parts` parts. values, scale: round_rows(x
    [M, K], both=True, dtype=that of W), M at most 64. K must be a multiple of 128 times `parts`."""
    m, (n, k), block_k = len(scale), w.shape, BLOCK_K
    block_m = max(16, triton.next_power_of_2(m))
    block_n, stages, warps = (128, 5, 8) if parts > 1 and n >= 4096 else (64, 6, 4)
    if block_m == 64:
        block_n, stages, warps = 64, 3 if n >= 16384 else 4, 4
    if card().by_warps:
        block_n, stages, warps = 64 if n <= 3 * 64 * card().processors else 128, 4, 4
        if block_m * block_n >= 64 * 128 and w.scale.dim() == 1:
            block_k = 64
    stages = fitting(stages, (2 * block_m + block_n) * block_k)
    y = torch.empty(parts, m, n, dtype=dtype, device=values.device) if out is None else out
    _skinny_kernel[(triton.cdiv(n, block_n), parts)](
        tiles_of(values, [block_m, block_k]), scale, tiles_of(w.values, [block_n, block_k]), w.scale, y, m, n, K=k,
        FACTOR=RANGES[values.dtype][1], BLOCKS=w.scale.dim() == 2, WHOLE=values.dtype == torch.int8, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_K=block_k, SPLIT_K=parts, STAGES=stages, num_warps=warps, **overlap(),
    )
    return y


def product(
    values: torch.Tensor, scale: torch.Tensor, w: ScaledMatrix, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x W^T [T, N] in bfloat16. values, scale: round_rows(x [T, K])."""
    if out is None:
        out = torch.empty(len(values), len(w.values), dtype=torch.bfloat16, device=values.device)
    torch._scaled_mm(
        values, w.values.t(), scale_a=scale, scale_b=w.scale[None], out_dtype=torch.bfloat16, use_fast_accum=True,
        out=out,
    )
    return out


def byte_linear(x: torch.Tensor, w: ScaledMatrix, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns x W^T [T, N] for x [T, K] bfloat16; writes it to `out` if given."""
    if not len(x):  # this step needs no logits, so x has no rows; a tensor descriptor needs at least one
        return x.new_empty(0, w.shape[0])
    if len(x) == 1:
        return gemv(x, w, out=out)
    if len(x) <= SKINNY:
        rounded = round_rows(x.contiguous(), both=True, dtype=w.values.dtype)
        return skinny(*rounded, w, out=None if out is None else out[None])[0]
    return _many(x.contiguous(), w, out=out)


def back_to_hidden(x: torch.Tensor, w: ScaledMatrix, *, silu: bool = False, in_parts: bool = True) -> torch.Tensor:
    """Returns x W^T [T, N]; if `in_parts`, maybe its parts fp32 [parts, T, N], which the next norm sums. T > 1. x: [T,
    K]. With `silu`, x [T, 2 K] is gate and up, and the result is (silu(gate) * up) W^T."""
    if len(x) > SKINNY:
        return _many(x, w, silu=silu)
    (n, k), parts = w.shape, 1
    tiles = triton.cdiv(n, 128 if n >= 4096 else 64)
    while in_parts and parts < 4 and parts * tiles < 128 and k % (2 * parts * BLOCK_K) == 0:
        parts *= 2
    rounded = round_rows(x, silu=silu, both=True, dtype=w.values.dtype)
    y = skinny(*rounded, w, parts, torch.float32 if parts > 1 else torch.bfloat16)
    return y if parts > 1 else y[0]


def _many(x: torch.Tensor, w: ScaledMatrix, *, silu: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
    if w.scale.dim() == 2:
        y = eight_bits_many.product(*round_groups(x, silu=silu), w)[: len(x)]
        return y if out is None else out.copy_(y)
    many = eight_bits_many.product if w.values.dtype == torch.int8 else product
    return many(*round_rows(x, silu=silu, dtype=w.values.dtype), w, out)
