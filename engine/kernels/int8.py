"""Products of many tokens with weights that are whole numbers of 8 bits, with a scale per row (Int8Rows).

The tensor cores multiply 8-bit whole numbers and add the products exactly, in 32 bits. Each sum is then multiplied by
the scales of its token and of its row of weights (W8A8, as in Dettmers et al., LLM.int8(), 2022).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.card import card, fitting, overlap
from engine.kernels.fp8_blocks import GROUP_M, tile_of_program
from engine.kernels.gemv import ScaledMatrix

BLOCK_K = 128


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
    by_row = tl.load(w_scale + n, mask=n < N, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        a = x.load([tile_m * BLOCK_M, k])
        b = w.load([tile_n * BLOCK_N, k])
        total = tl.dot(a, b.T, total, out_dtype=tl.int32)
    by_token = tl.load(x_scale + m, mask=m < M, other=0.0)
    product = total.to(tl.float32) * by_token[:, None] * by_row[None, :]
    at = y + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, product.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def product(
    values: torch.Tensor, scale: torch.Tensor, w: ScaledMatrix, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x W^T [T, N] in bfloat16. values int8 [T, K], scale fp32 [T, 1]: the rounded x. K: a multiple of 128."""
    (m, k), n = values.shape, w.shape[0]
    y = torch.empty(m, n, dtype=torch.bfloat16, device=values.device) if out is None else out
    block_m, block_n, warps, stages = form_for(m, n)
    stages = fitting(stages, (block_m + block_n) * BLOCK_K)
    _product_kernel[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
        TensorDescriptor.from_tensor(values, [block_m, BLOCK_K]), scale,
        TensorDescriptor.from_tensor(w.values, [block_n, BLOCK_K]), w.scale, y, m, n, K=k, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_K=BLOCK_K, GROUP=GROUP_M, STAGES=stages, num_warps=warps, **overlap(),
    )
    return y


def form_for(m: int, n: int) -> tuple[int, int, int, int]:
    """Returns (rows, columns, warps, stages) of a tile."""
    tiles, processors = triton.cdiv(m, 128) * triton.cdiv(n, 256), card().processors
    if tiles >= 0.9 * processors * triton.cdiv(tiles, processors):  # large tiles leave few processors idle at the end
        return 128, 256, 8, 4
    few = triton.cdiv(m, 64) * triton.cdiv(n, 64) <= 2 * processors
    return (64, 64, 4, 5) if few else (64, 128, 4, 4)
