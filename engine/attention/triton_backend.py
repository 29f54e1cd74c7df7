"""Paged attention in Triton: split-KV decode and paged prefill, for half-precision models."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from engine.attention.base import AttentionShape, ForwardMeta, Sinks
from engine.attention.flash_backend import FlashAttention
from engine.attention.kv_pool import KVPool
from engine.kernels.decode_attention import DecodeWorkspace, decode_attention, form_for, form_for_fp8
from engine.kernels.prefill_attention import PrefillWorkspace, prefill_attention


class TritonAttention:
    """Runs one kernel for decodes and another for chunks. Both read lengths and block tables on the device."""

    name = "triton"

    def __init__(
        self, config: AttentionShape, max_rows: int, max_model_len: int, device: torch.device,
        flash: FlashAttention | None = None, sinks: Sinks = None,
    ) -> None:
        """`flash` computes chunks, except in captured steps and in steps with fewer than `flash_from` tokens."""
        if flash is not None:
            self.name = "flash + triton"
        self._flash, self.flash_from = flash, 0
        self.kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        self.group = config.num_heads // config.num_kv_heads
        self.scale = config.scale
        windows = [config.window(layer) for layer in range(config.num_layers)]
        # Of each layer: the arguments of the kernels that differ between models and layers.
        self.features: list[dict[str, Any]] = [
            {"window": window, "softcap": config.softcap, "sinks": None if sinks is None else sinks[layer]}
            for layer, window in enumerate(windows)
        ]
        self._forms = {window > 0: layer for layer, window in enumerate(windows)}  # a layer of each compiled form
        self.workspace = DecodeWorkspace(
            max_rows, config.num_kv_heads, self.group, config.head_dim, device, max_model_len
        )
        self._prefill = PrefillWorkspace(config.num_kv_heads, config.head_dim, device)
        self._rows = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._meta: ForwardMeta | None = None
        self._padded = False
        self._outputs: list[torch.Tensor] = []  # new steps use the last buffer; captured graphs may use older ones
        self._splits: int | None = None

    def plan(self, meta: ForwardMeta, padded: bool = False, splits: int | None = None) -> None:
        """See AttentionBackend.plan. `padded`: True if padding rows must get a finite output; if False, their output is
        undefined. `splits`: the number of programs that share the keys of a chunk. None: the kernel chooses a number
        for this batch."""
        self._meta, self._padded, self._splits = meta, padded, splits

    def run(
        self, layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        meta = self._meta
        assert meta is not None, "call plan() before run()"
        tokens, heads, dim = q.shape
        n = meta.num_decodes
        flash = self._flash if tokens > n and tokens >= self.flash_from and self._splits is None else None
        if flash is not None:
            out = flash.chunks(meta, n, layer, q, k_cache, v_cache)  # does not write the first n rows
        elif self._padded:
            out = self._padded_out(q)
        else:
            out = torch.empty(tokens, heads * dim, dtype=q.dtype, device=q.device)
        if n:
            decode_attention(
                q, k_cache, v_cache, out, self.workspace, meta.block_table, self._rows[:n], meta.seq_lens[:n],
                self.scale, self.group, kv_scales=kv_scales, **self.features[layer],
            )
        if tokens > n and flash is None:
            prefill_attention(
                q, k_cache, v_cache, out, self._prefill, meta.block_table, meta.seq_lens, meta.cu_seqlens_q,
                self.scale, first=n, max_seq_len=meta.max_seq_len, dense=own_keys_and_values(q, k_cache.shape[2]),
                splits=self._splits, kv_scales=kv_scales, fresh=meta.fresh, **self.features[layer],
            )
        return out

    def _padded_out(self, q: torch.Tensor) -> torch.Tensor:
        """Returns a buffer [T, heads * d] that all layers and steps share, so that no layer has to clear padding rows.
        No step writes its padding rows, so these hold zeros or the values of an earlier step."""
        tokens, width = q.shape[0], q.shape[1] * q.shape[2]
        if not self._outputs or len(self._outputs[-1]) < tokens:
            self._outputs.append(torch.zeros(tokens, width, dtype=q.dtype, device=q.device))
        return self._outputs[-1][:tokens]

    def warm_up(self, pool: KVPool, dtype: torch.dtype, layer: int = 0, most_rows: int | None = None) -> None:
        """Run every form of the kernels on padding, so that no form is compiled during a request. `layer`: one that
        this backend computes. `most_rows`: the largest number of decodes whose forms are run."""
        kv_heads, dim, max_rows = self.kv_heads, self.head_dim, len(self._rows)
        heads = kv_heads * self.group
        cache, kv_scales = (pool.keys[layer], pool.values[layer]), pool.scales[layer]
        device = self._rows.device
        table = torch.zeros(max_rows, 1, dtype=torch.int32, device=device)
        no_lengths = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        q = torch.zeros(max_rows, heads + 2 * kv_heads, dim, dtype=dtype, device=device)[:, :heads]
        out = torch.empty(max_rows, heads * dim, dtype=dtype, device=device)
        choose_form = form_for if kv_scales is None else form_for_fp8
        forms = {choose_form(n, kv_heads, self.workspace.longest): n for n in range(1, (most_rows or max_rows) + 1)}
        features = [self.features[layer] for layer in self._forms.values()]
        for n, special in itertools.product(forms.values(), features):
            decode_attention(
                q[:n], *cache, out[:n], self.workspace, table, self._rows[:n], no_lengths[:n],
                self.scale, self.group, kv_scales=kv_scales, **special,
            )
        if most_rows is not None:
            return
        for splits, fresh, special in itertools.product((1, 2), (False, True), features):
            prefill_attention(
                q[:1], *cache, out[:1], self._prefill, table[:1], no_lengths[:1], no_lengths[:2],
                self.scale, max_seq_len=1, dense=own_keys_and_values(q[:1], kv_heads), splits=splits,
                kv_scales=kv_scales, fresh=fresh, **special,
            )

    def warm_up_flash(self, pool: KVPool, dtype: torch.dtype, layer: int = 0) -> None:
        """Compile the kernels of FlashAttention, if this backend uses it. Arguments: as for `warm_up`."""
        if self._flash is not None:
            self._flash.warm_up(pool.keys[layer], pool.values[layer], self.kv_heads * self.group, dtype)


def why_unsupported(config: AttentionShape, dtype: torch.dtype) -> str:
    """Returns the reason why TritonAttention cannot run this model; an empty string if it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the triton backend computes in half precision; this model runs in {str(dtype).removeprefix('torch.')}"
    if config.head_dim not in (16, 32, 64, 128, 256):
        return f"the triton backend needs a head dimension of 16, 32, 64, 128 or 256; this model has {config.head_dim}"
    return ""


def own_keys_and_values(q: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns this step's keys and values [T, Hkv, D] if q [T, Hq, D] is the first part of each qkv row; else None.

    It also returns None if the size of a qkv row is not a multiple of 16 bytes.

    The fused operations have already rotated the keys in place. For an 8-bit cache, they have also rounded the keys and
    values.
    """
    tokens, heads, dim = q.shape
    width = (heads + 2 * kv_heads) * dim
    if q.stride() != (width, dim, 1) or q.dtype.itemsize * width % 16:
        return None
    size, stride = (tokens, kv_heads, dim), q.stride()
    return (
        q.as_strided(size, stride, q.storage_offset() + heads * dim),
        q.as_strided(size, stride, q.storage_offset() + (heads + kv_heads) * dim),
    )
