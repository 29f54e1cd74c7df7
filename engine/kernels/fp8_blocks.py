"""Products of many tokens with e4m3 weights that have a scale per 128 rows and 128 columns (Fp8Blocks).

As in DeepSeek-V3 (section 3.3 of its report, 2024), activations are rounded to e4m3 with a scale per token and 128
columns. The tensor cores sum the products of 128 columns; each of these sums is multiplied by both scales and added in
float32. So a large activation costs precision only in its own 128 columns.

cuBLAS has such products for compute capability 9.0 since CUDA 12.9; it needs a multiple of 4 tokens. This file's kernel
is for other GPUs and shapes. For 8,192 tokens, gate and up of Qwen3-8B take 1,480 us with cuBLAS and 1,920 us with this
kernel on an H200; with a scale per row they take 1,240 us, in bfloat16 2,330 us (MEASURED.md).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.card import card, fitting, overlap
from engine.kernels.gemv import ScaledMatrix

BLOCK = 128
E4M3_MAX = 448.0
ROUNDED = 2048  # columns that one program rounds
PADDED = 4  # the number of rounded tokens is a multiple of this
GROUP_M = 8  # tiles of tokens that share the weights in the L2 cache
LOW = 16.0  # the rounding error of e4m3 is at most a sixteenth of the number


@triton.jit
def activations(x, row, k, inside, K, SILU: tl.constexpr):
    """Returns columns `k` of a row of x in float32; with SILU, x has gate and up, and the result is silu(gate) * up."""
    if SILU:
        gate = tl.load(x + row * 2 * K + k, mask=inside, other=0.0)
        up = tl.load(x + row * 2 * K + K + k, mask=inside, other=0.0)
        g = gate.to(tl.float32)
        s = (g * tl.sigmoid(g)).to(gate.dtype).to(tl.float32)
        v = (s * up.to(tl.float32)).to(gate.dtype).to(tl.float32)
    else:
        v = tl.load(x + row * K + k, mask=inside, other=0.0).to(tl.float32)
    return v


@triton.jit(do_not_specialize=["P"])  # compiled once for any number of tokens
def _round_groups_kernel(
    x,
    values,
    scale,
    P,
    K,
    MOST: tl.constexpr,
    FACTOR: tl.constexpr,
    SILU: tl.constexpr,
    BOTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * (COLUMNS // BLOCK) + tl.arange(0, COLUMNS // BLOCK)
    k = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = k < K
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    v = activations(x, row, k, inside, K, SILU)
    # A NaN makes the scale of its columns infinite, so the results of the row are NaN.
    largest = tl.max(tl.where(v != v, float("inf"), tl.abs(v)), 1)
    tl.store(scale + group.to(tl.int64) * P + row, largest / MOST, mask=group * BLOCK < K)
    v = v * (MOST / tl.maximum(largest, 1e-30))[:, None]
    high = v.to(values.dtype.element_ty)
    tl.store(values + row * K + k, high, mask=inside)
    if BOTH:
        low = ((v - high.to(tl.float32)) * FACTOR).to(values.dtype.element_ty)
        tl.store(values + (P.to(tl.int64) + row) * K + k, low, mask=inside)


def round_groups(x: torch.Tensor, *, silu: bool = False, both: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds x [T, K]; returns e4m3 values [P, K] and their scales fp32 [K / 128, P]. P: T, rounded up to PADDED.

    The values and scales of the padding are arbitrary. With `silu`, x [T, 2 K] is gate and up, and silu(gate) * up is
    rounded. With `both`, the values are [2 P, K]: the high parts, then the low parts, which are multiplied by LOW.
    """
    tokens, k = x.shape[0], x.shape[1] // (2 if silu else 1)
    padded = triton.cdiv(tokens, PADDED) * PADDED
    values = torch.empty(padded * (2 if both else 1), k, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(k // BLOCK, padded, dtype=torch.float32, device=x.device)
    _round_groups_kernel[(tokens, triton.cdiv(k, ROUNDED))](
        x, values, scale, padded, k, MOST=E4M3_MAX, FACTOR=LOW, SILU=silu, BOTH=both, BLOCK=BLOCK, COLUMNS=ROUNDED,
        num_warps=4, **overlap(),
    )
    return values, scale


@triton.jit
def tile_of_program(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Returns (row, column) of this program's tile, in tiles.

    Programs that run at the same time take neighbouring tiles, so they share rows of x and w in the L2 cache: GROUP
    rows of tiles, one column after the other.
    """
    down = tl.cdiv(M, BLOCK_M)
    span = GROUP * tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // span * GROUP
    height = tl.minimum(down - first, GROUP)
    return first + tl.program_id(0) % span % height, tl.program_id(0) % span // height


@triton.jit(do_not_specialize=["M"])  # one compiled program for any number of tokens
def _product_kernel(
    x,
    x_scale,
    w,
    w_scale,
    y,
    M,
    N,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    tile_m, tile_n = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    at_scale = w_scale + tile_n * BLOCK_N // BLOCK_K * (K // BLOCK_K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for c in tl.range(0, K // BLOCK_K, num_stages=STAGES):
        a = x.load([tile_m * BLOCK_M, c * BLOCK_K])
        b = w.load([tile_n * BLOCK_N, c * BLOCK_K])
        by_token = tl.load(x_scale + c * M + m, mask=m < M, other=0.0)
        by_block = tl.load(at_scale + c)
        acc += tl.dot(a, b.T) * (by_token * by_block)[:, None]
    at = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, acc.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def product(values: torch.Tensor, scale: torch.Tensor, w: ScaledMatrix) -> torch.Tensor:
    """Returns x W^T [P, N] in bfloat16. values, scale: round_groups(x [T, K])."""
    if not _cublas_has_blocks() or w.shape[1] % (4 * BLOCK):
        return tiled(values, scale, w)
    return torch._scaled_mm(
        values, w.values.t(), scale_a=scale.t(), scale_b=w.scale.t(), out_dtype=torch.bfloat16
    )


@cache
def _cublas_has_blocks() -> bool:
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return version >= (12, 9) and card().capability == (9, 0)


def tiled(values: torch.Tensor, scale: torch.Tensor, w: ScaledMatrix) -> torch.Tensor:
    """Returns the same as `product`, by this file's kernel."""
    (m, k), n = values.shape, w.shape[0]
    y = torch.empty(m, n, dtype=torch.bfloat16, device=values.device)
    block_m, block_n, warps, stages = form_for(m, n)
    stages = fitting(stages, (block_m + block_n) * BLOCK)
    _product_kernel[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
        TensorDescriptor.from_tensor(values, [block_m, BLOCK]), scale,
        TensorDescriptor.from_tensor(w.values, [block_n, BLOCK]), w.scale, y, m, n, K=k, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_K=BLOCK, GROUP=GROUP_M, STAGES=stages, num_warps=warps, **overlap(),
    )
    return y


def form_for(m: int, n: int) -> tuple[int, int, int, int]:
    """Returns (rows, columns, warps, stages) of a tile. A tile's columns are in one block of weights."""
    few = triton.cdiv(m, 64) * triton.cdiv(n, 64) <= 2 * card().processors
    return (64, 64, 4, 5) if few else (64, BLOCK, 4, 4)
