"""A linear layer for a few tokens (2 to 64): y = x W^T with W read once, at the speed of memory.

Shapes: x [M, K], W [N, K] row-major, y [M, N], M padded to a power of two of at least 16. Programs tile N and split K;
with SPLIT_K > 1 the program that arrives last sums the partial results (a counter it resets itself).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _skinny_kernel(
    x, w, y, residual, partial, counters, M, N, stride_x, stride_y,
    K: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, SWAP: tl.constexpr,
):
    tile = tl.program_id(0)
    part = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    SPAN: tl.constexpr = K // SPLIT_K
    x_at = x + m[:, None] * stride_x + part * SPAN + k[None, :]
    w_at = w + n.to(tl.int64)[:, None] * K + part * SPAN + k[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if SWAP:
        acc_t = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in tl.range(0, SPAN, BLOCK_K, num_stages=STAGES):
        a = tl.load(x_at + k0, mask=(m < M)[:, None], other=0.0)
        b = tl.load(w_at + k0, mask=(n < N)[:, None], other=0.0)
        if SWAP:
            acc_t = tl.dot(b, a.T, acc_t)
        else:
            acc = tl.dot(a, b.T, acc)
    if SWAP:
        acc = acc_t.T
    mask = (m < M)[:, None] & (n < N)[None, :]
    if SPLIT_K > 1:
        cell = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        base = tile * SPLIT_K * BLOCK_M * BLOCK_N
        tl.store(partial + base + part * BLOCK_M * BLOCK_N + cell, acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if arrived < SPLIT_K - 1:
            return
        tl.debug_barrier()
        tl.store(counters + tile, 0)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for s in tl.static_range(SPLIT_K):
            acc += tl.load(partial + base + s * BLOCK_M * BLOCK_N + cell, volatile=True)
    result = acc.to(y.dtype.element_ty)
    at = m[:, None] * stride_y + n[None, :]
    if RESIDUAL:
        r = tl.load(residual + at, mask=mask, other=0.0)
        result = (result.to(tl.float32) + r.to(tl.float32)).to(y.dtype.element_ty)
    tl.store(y + at, result, mask=mask)


def skinny(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, workspace: tuple[torch.Tensor, torch.Tensor] | None = None, *,
    residual: torch.Tensor | None = None, block_n: int = 32, block_k: int = 128, split_k: int = 1, stages: int = 4,
    warps: int = 4, pdl: bool = True, swap: bool = False,
) -> torch.Tensor:
    m, k = x.shape
    n = w.shape[0]
    partial, counters = workspace or (None, None)
    _skinny_kernel[(triton.cdiv(n, block_n), split_k)](
        x, w, out, residual, partial, counters, m, n, x.stride(0), out.stride(0), K=k, RESIDUAL=residual is not None,
        BLOCK_M=max(16, triton.next_power_of_2(m)), BLOCK_N=block_n, BLOCK_K=block_k, SPLIT_K=split_k, STAGES=stages,
        PDL=pdl, SWAP=swap, num_warps=warps, launch_pdl=pdl,
    )
    return out
