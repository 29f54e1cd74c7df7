"""What surrounds the gated delta rule in a layer, one kernel each: decays and rates before it, a gated norm after it.

engine/model/ops.py specifies both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

VALUES = 1024  # in a program of _gated_norm_kernel


@triton.jit
def _gates_kernel(x, decay, bias, g, beta, stride_x, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    mask = h < HEADS
    b = tl.load(x + t * stride_x + h, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(x + t * stride_x + HEADS + h, mask=mask, other=0.0).to(tl.float32)
    a += tl.load(bias + h, mask=mask, other=0.0)
    softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    tl.store(g + t * HEADS + h, tl.load(decay + h, mask=mask, other=0.0) * softplus, mask=mask)
    tl.store(beta + t * HEADS + h, tl.sigmoid(b), mask=mask)


def delta_gates(rates: torch.Tensor, decay: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (decay · softplus(a + bias), sigmoid(b)), fp32 [T, Hv] each. rates [T, 2·Hv]: b, then a, of each head."""
    tokens, heads = rates.shape[0], rates.shape[1] // 2
    g, beta = torch.empty(2, tokens, heads, dtype=torch.float32, device=rates.device)
    _gates_kernel[(tokens,)](
        rates, decay, bias, g, beta, rates.stride(0), HEADS=heads, BLOCK=triton.next_power_of_2(heads), num_warps=1
    )
    return g, beta


@triton.jit
def _gated_norm_kernel(
    x, z, weight, out, rows, stride_z, EPS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    mask = (row < rows)[:, None]
    at = row.to(tl.int64)[:, None] * D + d[None, :]
    v = tl.load(x + at, mask=mask, other=0.0)
    dtype = v.dtype
    v = v.to(tl.float32)
    w = tl.load(weight + d)
    v = (v * tl.rsqrt(tl.sum(v * v, 1) / D + EPS)[:, None]).to(w.dtype).to(tl.float32)
    v = (v * w.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    at_z = (row // HEADS).to(tl.int64)[:, None] * stride_z + (row % HEADS)[:, None] * D + d[None, :]
    gate = tl.load(z + at_z, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, v * gate * tl.sigmoid(gate), mask=mask)


def gated_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the norm of each head of x [T, Hv, Dv] times silu(z): [T, Hv·Dv]. z [T, Hv·Dv], rows of any stride."""
    tokens, heads, dim = x.shape
    out = torch.empty(tokens, heads * dim, dtype=x.dtype, device=x.device)
    rows = max(1, VALUES // dim)
    _gated_norm_kernel[(triton.cdiv(tokens * heads, rows),)](
        x, z, weight, out, tokens * heads, z.stride(0), EPS=eps, HEADS=heads, D=dim, ROWS=rows, num_warps=4
    )
    return out
