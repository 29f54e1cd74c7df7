"""A linear layer for one token: y = W x, fused with the operations around it. Reading W takes most of the time.

    gemv(x, w)                              y = W x
    gemv(x, w, norm=(weight, eps))          y = W rmsnorm(x)
    gemv(x, w, residual=r)                  r + W x
    gemv(x, w, gate_up=True)                silu(W_gate x) * (W_up x)      (W: the rows of W_gate, then of W_up)

W may consist of 8-bit numbers with a scale per row, or per 128 rows and 128 columns (engine/model/linear.py). The
kernel loads these numbers and then converts them to fp32. With a scale per block, all rows of a program have the same
scales, so x is multiplied by them.

Shapes: x [1, K], W [N, K] row-major, y [1, N]. Each program reads BLOCK_N whole rows of W. W does not depend on
the previous kernel, so a program loads its first tiles into registers before it waits for that kernel (programmatic
dependent launch). Thus the GPU reads memory without a pause between kernels.

On an H200 the down projection of Qwen3-8B takes 24.6 us (15.8 us in e4m3); cuBLAS takes 30.5 us (MEASURED.md).
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl

from engine.kernels.card import after_previous, overlap
from engine.kernels.norms import silu_times


class ScaledMatrix(Protocol):
    """A matrix of 8-bit numbers [N, K] with float32 scales, such as engine.model.linear.ByteWeight. The scales are [N],
    one per row, or [N / 128, K / 128], one per block."""

    values: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> torch.Size: ...


@triton.jit
def streamed(at, mask):
    """Returns numbers that no other program reads: they leave the L2 cache first."""
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def block_scales(scale, row, c, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Returns the scales [BLOCK_K] of a row of W from column c · BLOCK_K on. A thread loads a scale once for all its
    columns."""
    block = c * (BLOCK_K // 128) + tl.arange(0, BLOCK_K // 128)
    found = tl.load(scale + row // 128 * (K // 128) + block, mask=block < K // 128, other=0.0)
    return tl.broadcast_to(found[:, None], [BLOCK_K // 128, 128]).reshape([BLOCK_K])


@triton.jit
def widen(numbers):
    """Returns weights in float32. An 8-bit whole number n becomes the last byte of the float 2^23 + 128 + n, from which
    2^23 + 128 is subtracted: the instruction that converts integers is so slow that it would be the bottleneck."""
    if numbers.dtype == tl.int8:
        wide = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 t;
                xor.b32 t, $4, 0x80808080;
                prmt.b32 $0, t, 0x4B000000, 0x7540;
                prmt.b32 $1, t, 0x4B000000, 0x7541;
                prmt.b32 $2, t, 0x4B000000, 0x7542;
                prmt.b32 $3, t, 0x4B000000, 0x7543;
            }
            """,
            "=r,=r,=r,=r,r", [numbers], dtype=tl.float32, is_pure=True, pack=4,
        )
        wide -= 8388736.0
    else:
        wide = numbers.to(tl.float32)
    return wide


@triton.jit
def gemv_kernel(
    x, w, y, scale, norm_weight, residual, chosen, N, K: tl.constexpr, EPS: tl.constexpr, SCALED: tl.constexpr,
    BLOCKS: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE_UP: tl.constexpr, EACH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):
    """EACH > 0: W has a gate and an up matrix for each expert; EACH programs compute a row of y for each expert in
    `chosen`, which is the output of an earlier kernel."""
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EVEN: tl.constexpr = K % BLOCK_K == 0
    first = tl.program_id(0) * BLOCK_N
    if EACH > 0:
        after_previous(PDL)
        slot = tl.program_id(0) // EACH
        first -= slot * EACH * BLOCK_N
        expert = tl.load(chosen + slot).to(tl.int64)
        y += slot * N
        w += expert * 2 * N * K
        if BLOCKS:
            scale += expert * 2 * N // 128 * (K // 128)
        elif SCALED:
            scale += expert * 2 * N
    rows = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_mask = (rows < N)[:, None]
    at = w + rows.to(tl.int64)[:, None] * K + k[None, :]
    at2 = at + N.to(tl.int64) * K
    early = ()
    early2 = ()
    for c in tl.static_range(AHEAD):
        mask = row_mask if EVEN else row_mask & ((c * BLOCK_K + k) < K)[None, :]
        early = early + (streamed(at + c * BLOCK_K, mask),)  # type: ignore[assignment]  # noqa: RUF005
        if GATE_UP:
            early2 = early2 + (streamed(at2 + c * BLOCK_K, mask),)  # type: ignore[assignment]  # noqa: RUF005
    if EACH == 0:
        after_previous(PDL)
    rstd = 1.0
    if NORM:
        square = tl.zeros([BLOCK_K], tl.float32)
        for c in tl.static_range(CHUNKS):
            v = tl.load(x + c * BLOCK_K + k, mask=(c * BLOCK_K + k) < K, other=0.0).to(tl.float32)
            square += v * v
        rstd = tl.rsqrt(tl.sum(square, 0) / K + EPS)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc2 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for c in tl.static_range(CHUNKS):
        inside = (c * BLOCK_K + k) < K
        v = tl.load(x + c * BLOCK_K + k, mask=inside, other=0.0)
        if NORM:
            g = tl.load(norm_weight + c * BLOCK_K + k, mask=inside, other=0.0)
            v = ((v.to(tl.float32) * rstd).to(v.dtype).to(tl.float32) * g.to(tl.float32)).to(v.dtype)
        v = v.to(tl.float32)
        v2 = v
        if BLOCKS:
            if GATE_UP:
                v2 *= block_scales(scale, N + first, c, K, BLOCK_K)
            v *= block_scales(scale, first, c, K, BLOCK_K)
        mask = row_mask if EVEN else row_mask & inside[None, :]
        acc += widen(early[c] if c < AHEAD else streamed(at + c * BLOCK_K, mask)) * v[None, :]
        if GATE_UP:
            acc2 += widen(early2[c] if c < AHEAD else streamed(at2 + c * BLOCK_K, mask)) * v2[None, :]
    dtype = y.dtype.element_ty
    total = tl.sum(acc, 1)
    if SCALED:
        total *= tl.load(scale + rows, mask=rows < N, other=0.0)
    total = total.to(dtype)
    if GATE_UP:
        up = tl.sum(acc2, 1)
        if SCALED:
            up *= tl.load(scale + N + rows, mask=rows < N, other=0.0)
        total = silu_times(total, up, dtype).to(dtype)
    if RESIDUAL:
        r = tl.load(residual + rows, mask=rows < N, other=0.0)
        total = (total.to(tl.float32) + r.to(tl.float32)).to(dtype)
    tl.store(y + rows, total, mask=rows < N)


def tiles(n: int, k: int, gate_up: bool, scaled: bool = False) -> tuple[int, int, int, int]:
    """Returns (BLOCK_N, BLOCK_K, AHEAD, warps): the fastest measured values for W [n, k]. `scaled`: W is 8-bit. AHEAD
    tiles are loaded before the wait for the previous kernel. If n is small, there are few programs, so each loads more
    tiles ahead. If n is large, the many programs hide the latency."""
    if scaled:
        return byte_tiles(n, k, gate_up)
    if gate_up:
        return (8, 512, 4, 4) if k <= 2048 else (2, 2048, 2, 4)
    if n <= 2048:
        return (4, 2048, 1, 4) if k > 2048 else (2, 2048, 2, 4)
    if k <= 2048:
        return (16, 512, 4, 4) if n <= 65536 else (8, 1024, 1, 4)
    if n > 65536:
        return (8, 1024, 1, 4)
    return (2, 2048, 2, 4) if k > 8192 else (4, 2048, 1, 4) if n <= 4096 else (4, 1024, 2, 4)


def byte_tiles(n: int, k: int, gate_up: bool) -> tuple[int, int, int, int]:
    """Like `tiles`, for 8-bit weights: a tile of the same number of bytes has twice as many weights."""
    if gate_up:
        return (8, 1024, 1, 4) if k <= 2048 else (4, 1024, 4, 4)
    if n > 65536:
        return (8, 1024, 1, 2) if k <= 2048 else (2, 2048, 2, 4)
    if n <= 2048:
        return (8, 1024, 3, 8) if k > 2048 else (8, 2048, 1, 8)
    if k <= 2048:
        return (16, 1024, 1, 8)
    return (8, 512, 4, 4) if k > 8192 else (8, 1024, 2, 4) if n > 4096 else (4, 1024, 2, 2)


def gemv(
    x: torch.Tensor, w: torch.Tensor | ScaledMatrix, *, norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None, gate_up: bool = False, out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute y as the module's docstring describes; return it in `out` or in a new tensor [1, N]."""
    n, k = w.shape[0] // 2 if gate_up else w.shape[0], w.shape[1]
    out = torch.empty(1, n, dtype=x.dtype, device=x.device) if out is None else out
    values, scale, flags = parts(w)
    block_n, block_k, ahead, warps = tiles(n, k, gate_up, scale is not None)
    block_k = min(block_k, triton.next_power_of_2(k))
    weight, eps = norm or (None, 0.0)
    gemv_kernel[(triton.cdiv(n, block_n),)](
        x, values, out, scale, weight, residual, None, n, K=k, EPS=eps, NORM=norm is not None,
        RESIDUAL=residual is not None, GATE_UP=gate_up, EACH=0, BLOCK_N=block_n, BLOCK_K=block_k,
        AHEAD=min(ahead, triton.cdiv(k, block_k)), num_warps=warps, **flags, **overlap(),
    )
    return out


def parts(w: torch.Tensor | ScaledMatrix) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, bool]]:
    """Returns the numbers, their scales, and the kernels' arguments SCALED (a scale per row) and BLOCKS."""
    values, scale = (w, None) if isinstance(w, torch.Tensor) else (w.values, w.scale)
    blocks = scale is not None and scale.dim() == 2
    return values, scale, {"SCALED": scale is not None and not blocks, "BLOCKS": blocks}
