"""Row-wise kernels around the matrix products: (residual +) RMSNorm, q/k norm + RoPE + KV store, SiLU-and-multiply.

Each kernel reads its input once and writes its output once. engine/model/ops.py specifies shapes and roundings. On an
H200 the kernels reach 3.9 to 4.3 TB/s for 8,192 tokens of Qwen3-8B (MEASURED.md). The next kernel starts when they end:
the programs of a product that starts earlier have only the processors that the few programs here leave.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.card import after_previous, overlap
from engine.kernels.decode_attention import norm_rope


@triton.jit
def silu_times(gate, up, dtype: tl.constexpr):
    """Returns silu(gate) * up in float32. All numbers before the product are rounded to `dtype`, as in model/ops.py."""
    gate = gate.to(dtype).to(tl.float32)
    return (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, stride_x, stride_part, H, EPS: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < H
    w = tl.load(weight + i, mask=mask, other=0.0)  # does not depend on the previous kernel
    after_previous(PDL, NEXT=False)
    v = tl.load(x + row * stride_x + i, mask=mask, other=0.0)
    dtype = out.dtype.element_ty
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            v += tl.load(x + part * stride_part + row * stride_x + i, mask=mask, other=0.0)
    v = v.to(dtype).to(tl.float32)
    if ADD:
        v = (v + tl.load(residual + row * H + i, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual + row * H + i, v, mask=mask)
        v = v.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(v * v, 0) / H + EPS)
    y = ((v * rstd).to(w.dtype).to(tl.float32) * w.to(tl.float32)).to(dtype)  # with an fp32 weight, one rounding
    tl.store(out + row * H + i, y, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Returns rms_norm(x) * weight for x [..., H]. With `residual` [T, H], adds x to the residual in place and returns
    the norm of the residual instead. x may be fp32 [parts, T, H], as engine.kernels.split_linear returns it; its parts
    are summed first."""
    hidden = x.shape[-1]
    parts = x.shape[0] if x.dtype == torch.float32 and x.dim() == 3 else 1
    flat = x if parts > 1 else x.view(-1, hidden)
    tokens = flat.shape[-2]
    dtype = x.dtype if residual is None else residual.dtype
    out = torch.empty(tokens, hidden, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(tokens,)](
        flat, residual, weight, out, flat.stride(-2), flat.stride(0), hidden, EPS=eps, ADD=residual is not None,
        PARTS=parts, BLOCK=block, num_warps=max(1, min(8, block // 512)), **overlap(),
    )
    return out if parts > 1 else out.view(x.shape)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _qk_norm_rope_store_kernel(
    qkv, qk_weight, rope, positions, k_cache, v_cache, slots, kv_scales, stride_qkv, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_KV: tl.constexpr, EPS: tl.constexpr,
    HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, D)
    after_previous(PDL, NEXT=False)
    position = tl.load(positions + token)
    slot = tl.load(slots + token) * KV_HEADS * D
    base = qkv + token * stride_qkv
    j = tl.arange(0, BLOCK_KV)
    inside = (j < KV_HEADS)[:, None]
    v_at = base + (HEADS + KV_HEADS + j)[:, None] * D + d[None, :]
    v = tl.load(v_at, mask=inside)
    cell = slot + j[:, None] * D + d[None, :]
    if k_cache.dtype.element_ty == tl.float8e4nv:
        # The qkv row gets the same rounded values as the cache: attention may read this step's keys from the row too.
        mask = h < HEADS
        rotated = norm_rope(base, qk_weight, rope, position, h, mask, EPS, HAS_NORM, D)
        k = norm_rope(base, qk_weight, rope, position, HEADS + j, j < KV_HEADS, EPS, HAS_NORM, D)
        k_scale = tl.load(kv_scales + j, mask=j < KV_HEADS, other=1.0)[:, None]
        v_scale = tl.load(kv_scales + KV_HEADS + j, mask=j < KV_HEADS, other=1.0)[:, None]
        small_k = (k.to(tl.float32) * tl.div_rn(1.0, k_scale)).to(tl.float8e4nv)
        small_v = (v.to(tl.float32) * tl.div_rn(1.0, v_scale)).to(tl.float8e4nv)
        tl.debug_barrier()  # all threads have read the row, which the stores below overwrite
        tl.store(k_cache + cell, small_k, mask=inside)
        tl.store(v_cache + cell, small_v, mask=inside)
        k = (small_k.to(tl.float32) * k_scale).to(k.dtype)
        tl.store(base + (HEADS + j)[:, None] * D + d[None, :], k, mask=inside)
        tl.store(v_at, (small_v.to(tl.float32) * v_scale).to(v.dtype), mask=inside)
    else:
        mask = h < HEADS + KV_HEADS
        rotated = norm_rope(base, qk_weight, rope, position, h, mask, EPS, HAS_NORM, D)
        tl.debug_barrier()  # as above
        key = (mask & (h >= HEADS))[:, None]
        tl.store(k_cache + slot + (h - HEADS)[:, None] * D + d[None, :], rotated, mask=key)
        tl.store(v_cache + cell, v, mask=inside)
    tl.store(base + h[:, None] * D + d[None, :], rotated, mask=mask[:, None])


def qk_norm_rope_store(
    qkv: torch.Tensor, qk_weight: torch.Tensor | None, eps: float, rope: tuple[torch.Tensor, torch.Tensor],
    k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ops.qk_norm_rope_store in one kernel, in place; returns the queries, a view of `qkv`. rope = (table fp32
    [max_positions, D], positions int64 [T])."""
    kv_heads, dim = k_cache.shape[2:]
    tokens = qkv.shape[0]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    block_h = triton.next_power_of_2(heads + (kv_heads if kv_scales is None else 0))
    _qk_norm_rope_store_kernel[(tokens,)](
        qkv, qk_weight, *rope, k_cache, v_cache, slot_mapping, kv_scales, qkv.stride(0), HEADS=heads, KV_HEADS=kv_heads,
        D=dim, BLOCK_H=block_h, BLOCK_KV=triton.next_power_of_2(kv_heads), EPS=eps, HAS_NORM=qk_weight is not None,
        num_warps=4 if block_h <= 32 else 8, **overlap(),
    )
    return qkv.view(tokens, -1, dim)[:, :heads]


@triton.jit
def _silu_mul_kernel(gate_up, out, INNER, BLOCKS, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = i < INNER
    after_previous(PDL, NEXT=False)
    gate = tl.load(gate_up + row * 2 * INNER + i, mask=mask)
    up = tl.load(gate_up + row * 2 * INNER + INNER + i, mask=mask)
    tl.store(out + row * INNER + i, silu_times(gate, up, gate.dtype).to(gate.dtype), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up [T, I]. Each row of gate_up [T, 2 I] has the values of gate, then the values of up."""
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    blocks = triton.cdiv(inner, 1024)
    # One grid axis for rows and blocks: the other axes are limited to 65,535, and a step may have more tokens.
    _silu_mul_kernel[(tokens * blocks,)](gate_up, out, inner, blocks, BLOCK=1024, num_warps=4, **overlap())
    return out
