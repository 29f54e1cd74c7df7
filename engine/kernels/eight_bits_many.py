"""Products of many tokens with 8-bit weights: e4m3 with a scale per block, whole numbers with a scale per row.

Fp8Blocks: as in DeepSeek-V3 (section 3.3 of its report, 2024), activations are rounded to e4m3 with a scale per token
and 128 columns. The tensor cores sum the products of 128 columns; each of these sums is multiplied by both scales and
added in float32. So a large activation costs precision only in its own 128 columns.

Int8Rows: the tensor cores multiply 8-bit whole numbers and add the products exactly, in 32 bits. Each sum is then
multiplied by the scales of its token and of its row of weights (W8A8, as in Dettmers et al., LLM.int8(), 2022).

cuBLAS has products by block for compute capability 9.0 since CUDA 12.9; it needs a multiple of 4 tokens. This file's
kernel is for other GPUs and shapes. For 8,192 tokens, gate and up of Qwen3-8B take 1,480 us with cuBLAS and 1,920 us
with this kernel on an H200; with a scale per row they take 1,240 us, in bfloat16 2,330 us (MEASURED.md).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from engine.kernels.card import after_previous, card, fitting, overlap, read_tile, tiles_of
from engine.kernels.gemv import ScaledMatrix
from engine.kernels.norms import silu_times

BLOCK = 128
E4M3_MAX = 448.0
ROUNDED = 2048  # columns that one program rounds, in blocks
PADDED = 4  # the number of rounded tokens is a multiple of this
GROUP_M = 8  # tiles of tokens that share the weights in the L2 cache
LOW = 16.0  # the rounding error of e4m3 is at most a sixteenth of the number
RANGES = {torch.float8_e4m3fn: (E4M3_MAX, LOW), torch.int8: (127.0, 254.0)}  # the largest number, the factor of `low`


@triton.jit
def scale_to(v, MOST: tl.constexpr, AXIS: tl.constexpr):
    """Returns v, divided by its scales so that the largest number along AXIS is MOST, and the scales. A NaN makes its
    scale infinite, so all results that the scale multiplies are NaN."""
    largest = tl.max(tl.where(v != v, float("inf"), tl.abs(v)), AXIS, keep_dims=True)
    return v * (MOST / tl.maximum(largest, 1e-30)), largest / MOST


@triton.jit(do_not_specialize=["P"])  # compiled once for any number of tokens
def _round_kernel(
    x, values, scale, P, K, MOST: tl.constexpr, FACTOR: tl.constexpr, SILU: tl.constexpr, BOTH: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * (COLUMNS // BLOCK) + tl.arange(0, COLUMNS // BLOCK)[:, None]
    k = group * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = k < K
    after_previous(PDL)
    if SILU:
        gate = tl.load(x + row * 2 * K + k, mask=inside, other=0.0)
        up = tl.load(x + row * 2 * K + K + k, mask=inside, other=0.0)
        v = silu_times(gate, up, gate.dtype).to(gate.dtype).to(tl.float32)
    else:
        v = tl.load(x + row * K + k, mask=inside, other=0.0).to(tl.float32)
    v, by = scale_to(v, MOST, 1)
    tl.store(scale + group.to(tl.int64) * P + row, by, mask=group * BLOCK < K)
    WHOLE: tl.constexpr = values.dtype.element_ty == tl.int8
    high = (tl.floor(v + 0.5) if WHOLE else v).to(values.dtype.element_ty)
    tl.store(values + row * K + k, high, mask=inside)
    if BOTH:
        low = (v - high.to(tl.float32)) * FACTOR
        low = (tl.floor(low + 0.5) if WHOLE else low).to(values.dtype.element_ty)
        tl.store(values + (P.to(tl.int64) + row) * K + k, low, mask=inside)


def round_rows(
    x: torch.Tensor, *, silu: bool = False, both: bool = False, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds x [T, K]; returns values [T, K] of an 8-bit dtype and their scales fp32 [T, 1]. With `silu`, x [T, 2 K] is
    gate and up, and silu(gate) * up is rounded. With `both`, the values are [2 T, K]: first the high parts, then the
    low parts, which are multiplied by a factor (RANGES)."""
    block = triton.next_power_of_2(x.shape[1] // (2 if silu else 1))
    values, scale = _round(x, silu, both, dtype, len(x), block, block, max(1, min(16, block // 512)))
    return values, scale.view(-1, 1)


def round_groups(x: torch.Tensor, *, silu: bool = False, both: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds x [T, K]; returns e4m3 values [P, K] and their scales fp32 [K / 128, P]. P: T, rounded up to PADDED. The
    values and scales of the padding are arbitrary. `silu` and `both` are as in `round_rows`."""
    padded = triton.cdiv(len(x), PADDED) * PADDED
    return _round(x, silu, both, torch.float8_e4m3fn, padded, BLOCK, ROUNDED, 4)


def _round(
    x: torch.Tensor, silu: bool, both: bool, dtype: torch.dtype, padded: int, block: int, columns: int, warps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    k = x.shape[1] // (2 if silu else 1)
    values = torch.empty(padded * (2 if both else 1), k, dtype=dtype, device=x.device)
    scale = torch.empty(triton.cdiv(k, block), padded, dtype=torch.float32, device=x.device)
    most, factor = RANGES[dtype]
    _round_kernel[(len(x), triton.cdiv(k, columns))](
        x, values, scale, padded, k, MOST=most, FACTOR=factor, SILU=silu, BOTH=both, BLOCK=block, COLUMNS=columns,
        num_warps=warps, **overlap(),
    )
    return values, scale


@triton.jit(do_not_specialize=["M"])  # one compiled program for any number of tokens
def _product_kernel(
    x, x_scale, w, w_scale, y, M, N, K: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):
    # Programs that run at the same time take neighbouring tiles, so they share rows of x and w in the L2 cache: GROUP
    # rows of tiles, one column after the other.
    span = GROUP * tl.cdiv(N, BLOCK_N)
    above = tl.program_id(0) // span * GROUP
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - above, GROUP)
    tile_m = above + tl.program_id(0) % span % height
    tile_n = tl.program_id(0) % span // height
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    at_scale = w_scale + tile_n * BLOCK_N // BLOCK_K * (K // BLOCK_K)
    if WHOLE:
        by_row = tl.load(w_scale + n, mask=n < N, other=0.0)
    after_previous(PDL)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if WHOLE else tl.float32)
    for c in tl.range(0, K // BLOCK_K, num_stages=STAGES):
        a = read_tile(x, tile_m * BLOCK_M, c * BLOCK_K, M, K, BLOCK_M, BLOCK_K)
        b = read_tile(w, tile_n * BLOCK_N, c * BLOCK_K, N, K, BLOCK_N, BLOCK_K)
        if WHOLE:
            total = tl.dot(a, b.T, total, out_dtype=tl.int32)
        else:
            by_token = tl.load(x_scale + c * M + m, mask=m < M, other=0.0)
            total += tl.dot(a, b.T) * (by_token * tl.load(at_scale + c))[:, None]
    if WHOLE:
        by_token = tl.load(x_scale + m, mask=m < M, other=0.0)
        product = total.to(tl.float32) * by_token[:, None] * by_row[None, :]
    else:
        product = total
    at = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, product.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def product(
    values: torch.Tensor, scale: torch.Tensor, w: ScaledMatrix, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x W^T in bfloat16 [P, N] for round_groups(x [T, K]), or [T, N] for int8 round_rows(x)."""
    if w.scale.dim() == 1 or not _cublas_has_blocks() or w.shape[1] % (4 * BLOCK):
        return tiled(values, scale, w, out)
    return torch._scaled_mm(values, w.values.t(), scale_a=scale.t(), scale_b=w.scale.t(), out_dtype=torch.bfloat16)


@cache
def _cublas_has_blocks() -> bool:
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return version >= (12, 9) and card().capability == (9, 0)


def tiled(values: torch.Tensor, scale: torch.Tensor, w: ScaledMatrix, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the same as `product`, by this file's kernel. K is a multiple of 128."""
    (m, k), n, whole = values.shape, w.shape[0], w.values.dtype == torch.int8
    y = torch.empty(m, n, dtype=torch.bfloat16, device=values.device) if out is None else out
    block_m, block_n, warps, stages = form_for(m, n, whole)
    _product_kernel[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
        tiles_of(values, [block_m, BLOCK]), scale, tiles_of(w.values, [block_n, BLOCK]), w.scale, y, m, n, K=k,
        WHOLE=whole, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK, GROUP=GROUP_M,
        STAGES=fitting(stages, (block_m + block_n) * BLOCK), num_warps=warps, **overlap(),
    )
    return y


def form_for(m: int, n: int, whole: bool) -> tuple[int, int, int, int]:
    """Returns (rows, columns, warps, stages) of a tile. Without `whole`, its columns are in one block of weights."""
    tiles, processors = triton.cdiv(m, 128) * triton.cdiv(n, 256), card().processors
    few = triton.cdiv(m, 64) * triton.cdiv(n, 64) <= 2 * processors
    if whole and card().by_warps and not few:
        return 128, 128, 4, 3
    if whole and tiles >= 0.9 * processors * triton.cdiv(tiles, processors):  # few processors are idle at the end
        return 128, 256, 8, 4
    return (64, 64, 4, 5) if few else (64, 128, 4, 4)
