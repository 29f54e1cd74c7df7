"""Attention in plain torch: the reference for the other backends, and the backend for CPUs.

Keys and values are gathered by slot, so a sequence reads only slots that have been written. Padded positions are read
from slot 0, in the null block. The contents of slot 0 are finite, and the mask excludes the padded positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention import kv_fp8
from engine.attention.base import AttentionShape, ForwardMeta, Sinks


@dataclass(slots=True)
class _Gather:
    """Where the keys and values of n sequences are, L positions of each."""

    slots: torch.Tensor | int  # int64 [n · L]; of one sequence in consecutive slots, which are read in place: the first
    shape: tuple[int, int]  # n, L


@dataclass(slots=True)
class _Decodes:
    """All sequences that decode, as one padded batch."""

    gather: _Gather
    mask: torch.Tensor | None  # [n, 1, 1, L], 0 or −inf, added to the scores; None: no mask


@dataclass(slots=True)
class _Prefill:
    """One sequence's chunk: its tokens in q, its keys and values, and its mask."""

    tokens: slice
    gather: _Gather
    mask: torch.Tensor | None  # [q_len, L], 0 or −inf; None: causal mask; queries and keys are the same tokens


class TorchAttention:
    """Gathers keys and values, then calls torch's attention function once for all decodes and once per prefill."""

    name = "torch"

    def __init__(
        self, config: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device, sinks: Sinks = None
    ) -> None:
        self._scale, self._softcap, self._sinks = config.scale, config.softcap, sinks
        self._windows = [config.window(i) for i in range(config.num_layers)]
        self._heads = (config.num_kv_heads, config.head_dim)
        self._group = config.num_heads // config.num_kv_heads
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._num_decodes = 0
        self._scales: torch.Tensor | None = None  # scales of the current layer's cache; None: it is not 8-bit
        self._plans: dict[int, tuple[_Decodes | None, list[_Prefill]]] = {}
        # One buffer for all layers and steps: the page faults of new memory would cost more than the copy.
        self._buffer = torch.empty(0, dtype=dtype, device=device)
        self._offsets = np.arange(block_size)
        self._positions = np.arange(0)

    def plan(self, meta: ForwardMeta) -> None:
        table, lengths, bounds = (part.cpu().numpy() for part in (meta.block_table, meta.seq_lens, meta.cu_seqlens_q))
        self._num_decodes = n = meta.num_decodes
        self._plans = {}
        for window in set(self._windows):
            decodes = self._plan_decodes(table[:n], lengths[:n], window) if n else None
            prefills = [
                self._plan_prefill(table[i], slice(int(bounds[i]), int(bounds[i + 1])), int(lengths[i]), window)
                for i in range(n, len(lengths))
            ]
            self._plans[window] = decodes, prefills

    def run(
        self, layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._scales = kv_scales
        decodes, prefills = self._plans[self._windows[layer]]
        if not prefills and decodes is not None:
            return self._run_decodes(layer, decodes, q, k_cache, v_cache)
        out = torch.empty_like(q, memory_format=torch.contiguous_format).flatten(1)
        n = self._num_decodes
        if decodes is not None:
            out[:n] = self._run_decodes(layer, decodes, q[:n], k_cache, v_cache)
        for chunk in prefills:
            out[chunk.tokens] = self._run_prefill(layer, chunk, q[chunk.tokens], k_cache, v_cache)
        return out

    def _run_decodes(
        self, layer: int, decodes: _Decodes, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        n, (kv_heads, dim) = len(q), self._heads
        keys, values = self._read(decodes.gather, k_cache, v_cache)
        # The query heads that share a key head are passed as several queries of one head, so no key is copied.
        grouped = q.reshape(n, kv_heads, -1, dim)
        if self._softcap or self._sinks is not None:
            return self._attend(layer, grouped, keys, values, decodes.mask).reshape(n, -1)
        return F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=decodes.mask, scale=self._scale
        ).reshape(n, -1)

    def _run_prefill(
        self, layer: int, chunk: _Prefill, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        keys, values = self._read(chunk.gather, k_cache, v_cache)
        if self._softcap or self._sinks is not None:
            tokens, (kv_heads, dim) = len(q), self._heads
            mask = chunk.mask
            if mask is None:
                mask = torch.full((tokens, tokens), -torch.inf, dtype=self._dtype, device=self._device).triu_(1)
            grouped = q.view(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3)  # [Hkv, Hq / Hkv, T, D]
            found = self._attend(layer, grouped[None].flatten(2, 3), keys, values, mask)
            return found.view(kv_heads, -1, tokens, dim).permute(2, 0, 1, 3).reshape(tokens, -1)
        queries, causal = q.transpose(0, 1)[None], chunk.mask is None
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=chunk.mask, is_causal=causal, scale=self._scale, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)

    def _attend(
        self, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the output [n, Hkv, R, D] with soft cap and sinks, which torch's function lacks. q [n, Hkv, R, D];
        keys and values [n, Hkv, L, D]. The R rows of a key head are the tokens of its first query head, then those of
        its next one. mask [n, 1, 1, L], or [tokens, L]; it is added to the scores."""
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.matmul(q, keys.transpose(2, 3)).to(wide) * self._scale
        if self._softcap:
            scores = torch.tanh(scores / self._softcap) * self._softcap
        group = self._group
        scores = scores.unflatten(2, (group, -1))  # [n, Hkv, Hq / Hkv, tokens, L]
        if mask is not None:
            scores = scores + (mask[:, :, None] if mask.dim() == 4 else mask)
        if self._sinks is not None:
            sinks = self._sinks[layer].to(wide).view(1, -1, group, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : keys.shape[2]].to(q.dtype)
        return torch.matmul(weights.flatten(2, 3), values)

    def _read(
        self, gather: _Gather, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values [n, Hkv, L, D] of this layer, valid until the next call."""
        count, scales, found = gather.shape[0] * gather.shape[1], self._scales, []
        for i, cache in enumerate((k_cache, v_cache)):
            part = cache.view(-1, *self._heads)
            if isinstance(gather.slots, int):
                part = part.narrow(0, gather.slots, count)
            elif scales is None:
                numbers = count * self._heads[0] * self._heads[1]
                buffer = self._buffer[i * numbers : (i + 1) * numbers].view(count, *self._heads)
                part = torch.index_select(part, 0, gather.slots, out=buffer)
            else:  # copied as bytes: torch cannot copy 8-bit floating-point numbers by index
                part = part.view(torch.uint8).index_select(0, gather.slots).view(kv_fp8.FP8)
            if scales is not None:
                part = kv_fp8.dequantise(part, scales[i], self._dtype)
            found.append(part.view(*gather.shape, *self._heads).transpose(1, 2))
        return found[0], found[1]

    def _plan_decodes(self, table: np.ndarray, lengths: np.ndarray, window: int) -> _Decodes:
        """Plan all decodes. Each sequence reads its last `window` positions (0: all), padded on the right."""
        longest = int(lengths.max())
        if window == 0:
            table, positions = table[:, : -(-longest // self._block_size)], self._arange(longest)[None]
            slots = table[:, :, None] * np.int64(self._block_size) + self._offsets
            slots = slots.reshape(len(table), -1)[:, :longest]
        else:
            positions = np.maximum(lengths - window, 0)[:, None] + self._arange(min(longest, window))
            slots = self._slots(table, np.minimum(positions, longest - 1))
        seen = positions < lengths[:, None]
        if seen.all():
            return _Decodes(self._gather(slots), None)
        return _Decodes(self._gather(slots * seen), self._additive(seen)[:, None, None, :])

    def _plan_prefill(self, table: np.ndarray, tokens: slice, length: int, window: int) -> _Prefill:
        context = length - (tokens.stop - tokens.start)
        first = max(0, context + 1 - window) if window else 0
        positions = self._arange(length)[first:]
        gather = self._gather(self._slots(table[None], positions[None]))
        if not context and not window:
            return _Prefill(tokens, gather, None)
        queries = self._arange(length)[context:, None]
        seen = positions <= queries
        if window:
            seen &= positions > queries - window
        return _Prefill(tokens, gather, self._additive(seen))

    def _arange(self, length: int) -> np.ndarray:
        """Returns the array 0, 1, … length − 1."""
        if len(self._positions) < length:
            self._positions = np.arange(2 * length)
        return self._positions[:length]

    def _slots(self, table: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns the slots, int64 [n, L], of the keys at `positions` ([n, L], or [1, L] for all sequences)."""
        blocks, offsets = np.divmod(positions, self._block_size)
        if len(positions) == 1:
            return table[:, blocks[0]] * np.int64(self._block_size) + offsets
        return np.take_along_axis(table, blocks, 1) * np.int64(self._block_size) + offsets

    def _gather(self, slots: np.ndarray) -> _Gather:
        """Choose how to read slots [n, L]: in place for one sequence with consecutive slots, else by a copy."""
        shape, elements = (slots.shape[0], slots.shape[1]), slots.size * self._heads[0] * self._heads[1]
        if len(slots) == 1 and (slots[0, 1:] - slots[0, :-1] == 1).all():
            return _Gather(int(slots[0, 0]), shape)
        if self._buffer.numel() < 2 * elements:
            self._buffer = torch.empty(2 * elements + elements // 2, dtype=self._dtype, device=self._device)
        return _Gather(torch.from_numpy(slots.reshape(-1)).to(self._device), shape)

    def _additive(self, seen: np.ndarray) -> torch.Tensor:
        """Returns the mask that is added to the scores: 0 where `seen` is true, else −inf."""
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(torch.from_numpy(~seen).to(self._device), -torch.inf)
