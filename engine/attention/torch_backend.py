"""Attention in plain torch: the specification of the other backends, and what a CPU runs.

Keys and values are gathered by slot, so that only what a sequence has written is ever read: positions beyond a
sequence's end are redirected to slot 0, in the null block, which is finite, and masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.config import ModelConfig
from engine.forward import ForwardMeta


@dataclass(slots=True)
class _Decodes:
    """All sequences that decode, as one padded batch of n × L keys."""

    slots: torch.Tensor  # int64 [n · L]
    mask: torch.Tensor | None  # [n, 1, 1, L], 0 or −inf, added to the scores; None: everything is seen


@dataclass(slots=True)
class _Prefill:
    """One sequence's chunk: its tokens in q, its keys' slots, who sees whom."""

    tokens: slice
    slots: torch.Tensor  # int64 [keys]
    mask: torch.Tensor | None  # [q_len, keys], 0 or −inf; None: plainly causal, as many keys as queries


class TorchAttention:
    """Gather, then torch's scaled_dot_product_attention: decodes in one call, prefills one by one."""

    name = "torch"

    def __init__(self, config: ModelConfig, block_size: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._windows = [config.window(i) for i in range(config.num_layers)]
        self._block_size = block_size
        self._plans: dict[int, tuple[_Decodes | None, list[_Prefill]]] = {}
        self._num_decodes = 0

    def plan(self, meta: ForwardMeta) -> None:
        self._num_decodes = n = meta.num_decodes
        self._plans = {}
        for window in set(self._windows):
            decodes = self._plan_decodes(meta, window) if n else None
            prefills = self._plan_prefills(meta, window) if len(meta.seq_lens) > n else []
            self._plans[window] = decodes, prefills

    def run(self, layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        kv_heads, dim = k_cache.shape[2:]
        keys, values = k_cache.view(-1, kv_heads, dim), v_cache.view(-1, kv_heads, dim)
        decodes, prefills = self._plans[self._windows[layer]]
        if not prefills and decodes is not None:
            return self._run_decodes(decodes, q, keys, values)
        out = torch.empty_like(q, memory_format=torch.contiguous_format).flatten(1)
        n = self._num_decodes
        if decodes is not None:
            out[:n] = self._run_decodes(decodes, q[:n], keys, values)
        for chunk in prefills:
            out[chunk.tokens] = self._run_prefill(chunk, q[chunk.tokens], keys, values)
        return out

    def _run_decodes(
        self, decodes: _Decodes, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        n, (_, kv_heads, dim) = len(q), keys.shape
        k = keys.index_select(0, decodes.slots).view(n, -1, kv_heads, dim).transpose(1, 2)  # [n, Hkv, L, D]
        v = values.index_select(0, decodes.slots).view(n, -1, kv_heads, dim).transpose(1, 2)
        # The query heads that share a key head stand where a sequence's queries usually stand: no key is repeated.
        grouped = q.reshape(n, kv_heads, -1, dim)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=decodes.mask).reshape(n, -1)

    def _run_prefill(
        self, chunk: _Prefill, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        k = keys.index_select(0, chunk.slots).transpose(0, 1)[None]  # [1, Hkv, keys, D]
        v = values.index_select(0, chunk.slots).transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)

    def _plan_decodes(self, meta: ForwardMeta, window: int) -> _Decodes:
        """Positions first … seq_len − 1 of each sequence, padded on the right to the longest."""
        n, size = meta.num_decodes, self._block_size
        lengths, table = meta.seq_lens[:n, None].long(), meta.block_table[:n]
        device = table.device
        longest = meta.max_seq_len if n == len(meta.seq_lens) else int(lengths.max())
        if window == 0:
            columns = -(-longest // size)
            offsets = torch.arange(size, device=device)
            slots = (table[:, :columns, None].long() * size + offsets).flatten(1)[:, :longest]
            if n == 1:
                return _Decodes(slots.flatten(), None)
            positions = torch.arange(longest, device=device)[None]
        else:
            positions = (lengths - window).clamp_min(0) + torch.arange(min(longest, window), device=device)
            blocks = table.long().gather(1, (positions // size).clamp_max(table.shape[1] - 1))
            slots = blocks * size + positions % size
        seen = positions < lengths
        return _Decodes((slots * seen).flatten(), self._additive(seen)[:, None, None, :])

    def _plan_prefills(self, meta: ForwardMeta, window: int) -> list[_Prefill]:
        device = meta.block_table.device
        bounds, lengths = meta.cu_seqlens_q.tolist(), meta.seq_lens.tolist()
        chunks = []
        for i in range(meta.num_decodes, len(lengths)):
            start, end, length = bounds[i], bounds[i + 1], lengths[i]
            context = length - (end - start)
            first = max(0, context + 1 - window) if window else 0
            positions = torch.arange(first, length, device=device)
            slots = meta.block_table[i].long()[positions // self._block_size] * self._block_size
            slots += positions % self._block_size
            mask = None
            if context or window:
                queries = torch.arange(context, length, device=device)[:, None]
                seen = positions <= queries
                if window:
                    seen &= positions > queries - window
                mask = self._additive(seen)
            chunks.append(_Prefill(slice(start, end), slots, mask))
        return chunks

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        return torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
