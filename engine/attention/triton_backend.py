"""Paged attention in Triton: split-KV decode and paged prefill, for half-precision models without sliding windows."""

from __future__ import annotations

import itertools

import torch

from engine.attention.base import AttentionShape, ForwardMeta
from engine.attention.flash_backend import FlashAttention
from engine.attention.kv_pool import KVPool
from engine.attention.rows import own_keys_and_values
from engine.kernels.decode_attention import DecodeWorkspace, decode_attention, form_for, form_for_fp8
from engine.kernels.prefill_attention import PrefillWorkspace, prefill_attention


class TritonAttention:
    """One kernel for sequences that decode, another for chunks. They read lengths and block tables on the device."""

    name = "triton"

    def __init__(
        self, config: AttentionShape, max_rows: int, max_model_len: int, device: torch.device,
        flash: FlashAttention | None = None,
    ) -> None:  # fmt: skip
        """`flash`: computes chunks, except in captured steps and in steps with fewer than `flash_from` tokens."""
        if flash is not None:
            self.name = "flash + triton"
        self._flash, self.flash_from = flash, 0
        self.group = config.num_heads // config.num_kv_heads
        self.scale = config.head_dim**-0.5
        self.workspace = DecodeWorkspace(
            max_rows, config.num_kv_heads, self.group, config.head_dim, device, max_model_len
        )
        self._prefill = PrefillWorkspace(config.num_kv_heads, config.head_dim, device)
        self._rows = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._meta: ForwardMeta | None = None
        self._padded = False
        self._kept: list[torch.Tensor] = []  # the last one is in use; captured graphs may use the earlier ones
        self._splits: int | None = None

    def plan(self, meta: ForwardMeta, padded: bool = False, splits: int | None = None) -> None:
        """See AttentionBackend.plan.

        `padded`: the output of rows of padding is finite; otherwise it is undefined. `splits`: the number of programs
        that share the keys of a chunk, fixed in captured steps; None: chosen from the batch.
        """
        self._meta, self._padded, self._splits = meta, padded, splits

    def run(
        self, layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        meta = self._meta
        assert meta is not None, "plan() comes before run()"
        tokens, heads, dim = q.shape
        n = meta.num_decodes
        flash = self._flash if tokens > n and tokens >= self.flash_from and self._splits is None else None
        if flash is not None:
            out = flash.chunks(meta, n, layer, q, k_cache, v_cache)  # the undefined rows are written below
        elif self._padded:
            out = self._padded_out(q)
        else:
            out = torch.empty(tokens, heads * dim, dtype=q.dtype, device=q.device)
        if n:
            decode_attention(
                q, k_cache, v_cache, out, self.workspace, meta.block_table, self._rows[:n], meta.seq_lens[:n],
                self.scale, self.group, kv_scales=kv_scales,
            )  # fmt: skip
        if tokens > n and flash is None:
            prefill_attention(
                q, k_cache, v_cache, out, self._prefill, meta.block_table, meta.seq_lens, meta.cu_seqlens_q,
                self.scale, first=n, max_seq_len=meta.max_seq_len, dense=own_keys_and_values(q, k_cache.shape[2]),
                splits=self._splits, kv_scales=kv_scales, fresh=meta.fresh,
            )  # fmt: skip
        return out

    def _padded_out(self, q: torch.Tensor) -> torch.Tensor:
        """[T, heads * d], one buffer for all layers and steps, so that no layer has to clear rows of padding.

        These rows are never written in a step; they hold zeros or values of an earlier step.
        """
        tokens, width = q.shape[0], q.shape[1] * q.shape[2]
        if not self._kept or len(self._kept[-1]) < tokens:
            self._kept.append(torch.zeros(tokens, width, dtype=q.dtype, device=q.device))
        return self._kept[-1][:tokens]

    def warm_up(self, pool: KVPool, dtype: torch.dtype) -> None:
        """Run every form of the kernels on padding, so that none is compiled during a request."""
        kv_heads, dim, most = pool.keys[0].shape[2], pool.keys[0].shape[3], len(self._rows)
        heads = kv_heads * self.group
        device = self._rows.device
        table = torch.zeros(most, 1, dtype=torch.int32, device=device)
        nothing = torch.zeros(most + 1, dtype=torch.int32, device=device)
        q = torch.zeros(most, heads + 2 * kv_heads, dim, dtype=dtype, device=device)[:, :heads]
        out = torch.empty(most, heads * dim, dtype=dtype, device=device)
        chosen = form_for if pool.scales[0] is None else form_for_fp8
        forms = {chosen(n, kv_heads, self.workspace.longest): n for n in range(1, most + 1)}
        for n in forms.values():
            decode_attention(
                q[:n], pool.keys[0], pool.values[0], out[:n], self.workspace, table, self._rows[:n], nothing[:n],
                self.scale, self.group, kv_scales=pool.scales[0],
            )  # fmt: skip
        for splits, fresh in itertools.product((1, 2, 4, 8), (False, True)):
            prefill_attention(
                q[:1], pool.keys[0], pool.values[0], out[:1], self._prefill, table[:1], nothing[:1], nothing[:2],
                self.scale, max_seq_len=1, dense=own_keys_and_values(q[:1], kv_heads), splits=splits,
                kv_scales=pool.scales[0], fresh=fresh,
            )  # fmt: skip
        if self._flash is not None:
            self._flash.warm_up(pool, heads, dtype)


def supports(config: AttentionShape, dtype: torch.dtype) -> str:
    """Why TritonAttention cannot run this model; empty if it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the triton backend computes in half precision; this model runs in {str(dtype).removeprefix('torch.')}"
    if config.head_dim not in (16, 32, 64, 128, 256):
        return f"the triton backend has head dimensions 16 to 256, powers of two; this model has {config.head_dim}"
    if any(config.window(layer) for layer in range(config.num_layers)):
        return "the triton backend has no sliding window, which this model uses"
    return ""
