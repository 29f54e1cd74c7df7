"""The decoder's small operations in plain torch. They are the reference for the fused kernels, and CPUs use them.

The decoder calls `ops.<name>` for everything except matrix products and attention. So another module with the same
functions of the protocol Ops can replace this one (Decoder's argument `ops`).

Shapes: T tokens, hidden size H, Hq query heads, Hkv key/value heads, head dimension D, intermediate size I.
Activations have the model's dtype: float64, float32, bfloat16 or float16. For a float64 model, read "fp32" as float64.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from engine.attention import kv_fp8
from engine.model.delta import causal_conv as causal_conv
from engine.model.delta import delta_rule as delta_rule
from engine.model.experts import Experts


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the RMSNorm of x [..., H] with weight [H], or the LayerNorm with weight and bias [2, H]. For RMSNorm, x
    is normalised in fp32, cast back to x.dtype, then multiplied by the weight. This order is the same as in
    transformers; in bfloat16 another order would change the result. A weight in fp32 is multiplied before the cast."""
    if weight.dim() == 2:
        return F.layer_norm(x, x.shape[-1:], weight[0], weight[1], eps)
    if x.dtype in (torch.float32, torch.float64):  # no cast is needed, so one call is enough
        return F.rms_norm(x, weight.shape, weight, eps)
    return (weight * F.rms_norm(x.float(), weight.shape, None, eps).to(weight.dtype)).to(x.dtype)


def plain_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the RMSNorm of x [..., H] without a weight, computed in fp32."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return F.rms_norm(wide, x.shape[-1:], None, eps).to(x.dtype)


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x [T, H] to residual [T, H] in place, rounded to the residual's dtype; return norm(residual) [T, H]."""
    residual.add_(x)
    return norm(residual, weight, eps)


def rope_rows(table: torch.Tensor, positions: torch.Tensor) -> Any:
    """Returns the argument `rope` of `qk_norm_rope_store`, made once per step for all layers. table [max_positions, D]
    fp32: row p is cos(p·f_0 … p·f_(D/2−1)) followed by the sines; positions int64 [T]. This function returns (cos,
    sin), each [T, 1, 2, D/2]. The sine of the first half is negated, so the rotation is x·cos + swapped(x)·sin."""
    cos, sin = table[positions].view(len(positions), 1, 2, -1).unbind(2)
    return torch.stack((cos, cos), 2), torch.stack((-sin, sin), 2)


def qk_norm_rope_store(
    qkv: torch.Tensor, qk_weight: torch.Tensor | None, eps: float, rope: Any, k_cache: torch.Tensor,
    v_cache: torch.Tensor, slot_mapping: torch.Tensor | None, kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate queries and keys; write keys and values to the cache; return the queries [T, Hq, D].

    qkv            [T, (Hq + 2·Hkv)·D], heads in the order q, k, v; may be overwritten
    qk_weight      [Hq + Hkv, D] RMSNorm weight of each query and key head (before rotation); None: no norm
    rope           what rope_rows returned for this step's positions
    k_cache        [num_blocks, block_size, Hkv, D], contiguous, the model's dtype or FP8; v_cache the same
    kv_scales      fp32 [2, Hkv], for an 8-bit cache (engine/attention/kv_fp8.py); None: the cache has the model's dtype
    slot_mapping   int64 [T]: token t is written to cache.view(-1, Hkv, D)[slot_mapping[t]]; padding has slot 0.
                   None: qkv has only queries, of a layer that reads the keys and values of another layer

    The rotation turns the pairs (x_i, x_(i + D/2)) ("half-split"). It is computed in fp32 and rounded once.
    """
    tokens, (kv_heads, dim) = len(qkv), k_cache.shape[2:]
    heads = qkv.view(tokens, -1, dim)
    queries = heads.shape[1] - (0 if slot_mapping is None else 2 * kv_heads)
    qk, v = heads[:, : queries + kv_heads], heads[:, queries + kv_heads :]
    if qk_weight is not None:
        wide = qk if qk.dtype in (torch.float32, torch.float64) else qk.float()
        qk = (F.rms_norm(wide, (dim,), None, eps).to(qk_weight.dtype) * qk_weight).to(qk.dtype)
    cos, sin = rope
    halves = qk.unflatten(-1, (2, dim // 2))
    rotated = torch.addcmul(halves * cos, halves.flip(2), sin).to(qkv.dtype).flatten(2)
    if slot_mapping is None:
        return rotated
    k = rotated[:, queries:]
    if kv_scales is not None:  # copied as bytes: torch cannot copy 8-bit floating-point numbers by index
        k, v = (kv_fp8.quantise(x, scale).view(torch.uint8) for x, scale in zip((k, v), kv_scales, strict=True))
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    k_cache.view(-1, kv_heads, dim).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, kv_heads, dim).index_copy_(0, slot_mapping, v)
    return rotated[:, :queries]


def delta_gates(rates: torch.Tensor, decay: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log decays decay · softplus(a + bias), at most 0, and the rates sigmoid(b) of a delta rule. rates [T,
    2·Hv]: b, then a, of each head; decay and bias [Hv], like the results [T, Hv], fp32."""
    b, a = rates.to(decay.dtype).chunk(2, -1)
    return decay * F.softplus(a + bias), b.sigmoid()


def gated_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the norm of each head of x [T, Hv, Dv] times silu(z): [T, Hv·Dv]. z [T, Hv·Dv]; silu in fp32."""
    wide = z if z.dtype == torch.float64 else z.float()
    return (norm(x, weight, eps) * F.silu(wide).view_as(x)).to(x.dtype).flatten(1)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) · up [T, I] for gate_up [T, 2·I], gates before ups; may overwrite gate_up."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns gelu(gate) · up [T, I] for gate_up [T, 2·I], with GELU in its tanh form."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Returns gelu(x), in its tanh form."""
    return F.gelu(x, approximate="tanh")


def cap(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    """Returns softcap · tanh(scores / softcap); the scores themselves if softcap is 0."""
    return torch.tanh(scores / softcap) * softcap if softcap else scores


def experts(x: torch.Tensor, mixture: Experts, live: torch.Tensor | None) -> torch.Tensor:
    """Computes the experts of `mixture`: x [T, H] -> [T, H]. Adds the number of tokens of each expert to mixture.load.

    live           int32 [1]: the number of tokens before the padding; padding gets zeros. None: no padding
    """
    if live is None:
        return mixture.one_by_one(x)
    tokens = min(len(x), int(live))
    return torch.cat((mixture.one_by_one(x[:tokens]), torch.zeros_like(x[tokens:])))
