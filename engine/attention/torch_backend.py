"""Attention in plain torch: the specification of the other backends, and what a CPU runs.

Keys and values are gathered by slot, so that only what a sequence has written is ever read: positions beyond a
sequence's end are redirected to slot 0, in the null block, which is finite, and masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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
        self._device = torch.device("cpu")

    def plan(self, meta: ForwardMeta) -> None:
        self._num_decodes = n = meta.num_decodes
        self._device = meta.seq_lens.device
        table, lengths, bounds = (part.cpu().numpy() for part in (meta.block_table, meta.seq_lens, meta.cu_seqlens_q))
        self._plans = {}
        for window in set(self._windows):
            decodes = self._plan_decodes(table[:n], lengths[:n], window) if n else None
            prefills = [
                self._plan_prefill(table[i], slice(int(bounds[i]), int(bounds[i + 1])), int(lengths[i]), window)
                for i in range(n, len(lengths))
            ]
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

    def _plan_decodes(self, table: np.ndarray, lengths: np.ndarray, window: int) -> _Decodes:
        """The last `window` (0: all) positions of each sequence, padded on the right to the longest."""
        longest = int(lengths.max())
        if window == 0:
            positions = np.arange(longest)[None]
        else:
            positions = np.maximum(lengths - window, 0)[:, None] + np.arange(min(longest, window))
        if len(table) == 1:  # no padding
            return _Decodes(self._send(self._slots(table, positions)), None)
        seen = positions < lengths[:, None]
        slots = self._slots(table, np.minimum(positions, longest - 1)) * seen
        return _Decodes(self._send(slots), self._additive(seen)[:, None, None, :])

    def _plan_prefill(self, table: np.ndarray, tokens: slice, length: int, window: int) -> _Prefill:
        context = length - (tokens.stop - tokens.start)
        first = max(0, context + 1 - window) if window else 0
        positions = np.arange(first, length)
        slots = self._send(self._slots(table[None], positions[None]))
        if not context and not window:
            return _Prefill(tokens, slots, None)
        queries = np.arange(context, length)[:, None]
        seen = positions <= queries
        if window:
            seen &= positions > queries - window
        return _Prefill(tokens, slots, self._additive(seen))

    def _slots(self, table: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64 [n, L]: where the keys at `positions` ([n, L], or [1, L] for all) of each sequence lie."""
        blocks, offsets = np.divmod(positions, self._block_size)
        if len(positions) == 1:
            return table[:, blocks[0]] * np.int64(self._block_size) + offsets
        return np.take_along_axis(table, blocks, 1) * np.int64(self._block_size) + offsets

    def _send(self, slots: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(slots.reshape(-1)).to(self._device)

    def _additive(self, seen: np.ndarray) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(torch.from_numpy(~seen).to(self._device), -torch.inf)
