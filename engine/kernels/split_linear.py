"""A linear layer for 2 to 256 tokens. Programs split the input dimension K; the next norm sums their results.

The kernel computes y = x W^T and reads W once. Narrow layers (the projections back to the hidden size) have too few
output tiles to keep all multiprocessors reading, so K is split. rms_norm adds the results of the parts as it reads
them, so no reduction kernel is needed.

On an H200 with 64 tokens, Qwen3-8B's down projection with the norm takes 29.0 us; with cuBLAS it takes 33.0 us
(MEASURED.md). If cuBLAS is as fast, `form_for` returns None.

Shapes: x [M, K] and W [N, K], row-major; result fp32 [SPLIT_K, M, N].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.card import after_previous, fitting, overlap, read_tile, tiles_of


@triton.jit
def _split_linear_kernel(
    x, w, y, M, N, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK_N
    part = tl.program_id(1)
    SPAN: tl.constexpr = K // SPLIT_K
    after_previous(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k0 in tl.range(0, SPAN, BLOCK_K, num_stages=STAGES):
        a = read_tile(w, first, part * SPAN + k0, N, K, BLOCK_N, BLOCK_K)
        b = read_tile(x, 0, part * SPAN + k0, M, K, BLOCK_M, BLOCK_K)
        acc = tl.dot(a, b.T, acc)
    n = first + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    at = y + part.to(tl.int64) * M * N + m[None, :] * N + n[:, None]
    tl.store(at, acc.to(y.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


class Form(NamedTuple):
    """The number of parts and the tile sizes of a product."""

    parts: int  # parts of K
    block_n: int
    block_k: int
    stages: int
    warps: int


def form_for(m: int, n: int, k: int) -> Form | None:
    """Returns the form that was fastest in measurements, for x [m, k] and W [n, k]; None if cuBLAS was as fast."""
    if m < 2 or m > 256:
        return None
    if m <= 64:
        split = parts(n, k)
        return Form(split, 64, 128, 5 if split < 4 else 4, 4) if split else None
    split = parts(n, k, 64)
    if split < 2:
        return None
    if m <= 128:
        return Form(split, 64, 64, 5, 4) if k <= 4096 else None
    return Form(split, 64, 64, 5, 4) if m > 224 else None


def parts(n: int, k: int, block_k: int = 128) -> int:
    """Returns the number of parts of K: enough for about 128 programs, at most 4; 0 if block_k does not divide K."""
    split = 1
    while split < 4 and split * triton.cdiv(n, 64) < 128 and k % (2 * split * block_k) == 0:
        split *= 2
    return split if k % (split * block_k) == 0 else 0


def split_linear(x: torch.Tensor, w: torch.Tensor, form: Form, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns partial results [parts, M, N] whose sum is x [M, K] · w [N, K]^T. K must be a multiple of block_k times
    parts, and M at most 256."""
    (m, k), n = x.shape, w.shape[0]
    block_m = max(16, triton.next_power_of_2(m))
    split, block_n, block_k, stages, warps = form
    y = torch.empty(split, m, n, dtype=dtype, device=x.device)
    tiles_x, tiles_w = (tiles_of(t, [b, block_k]) for t, b in ((x, block_m), (w, block_n)))
    _split_linear_kernel[(triton.cdiv(n, block_n), split)](
        tiles_x, tiles_w, y, m, n, K=k, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, SPLIT_K=split,
        STAGES=fitting(stages, (block_m + block_n) * block_k * x.element_size()), num_warps=warps, **overlap(),
    )
    return y
