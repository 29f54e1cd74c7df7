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

SMALL_GATHER = 1 << 21  # key elements; up to this number, numpy with one thread copies faster than torch with several


@dataclass(slots=True)
class _Cache:
    """Views of the KV cache of one layer."""

    k_cache: torch.Tensor  # the tensor from which the views were made
    arrays: tuple[np.ndarray, np.ndarray]  # keys and values [all slots, Hkv, D]
    keys: torch.Tensor  # [1, Hkv, all slots, D]
    values: torch.Tensor


@dataclass(slots=True)
class _Gather:
    """How to copy the keys and values of n sequences, L positions of each, from the cache into buffers."""

    slots: np.ndarray  # int64 [n · L]
    buffers: torch.Tensor  # [2, n · L, Hkv, D]
    arrays: np.ndarray | None  # the buffers as numpy arrays; None: torch makes the copy
    keys: torch.Tensor  # [n, Hkv, L, D], a view of the first buffer
    values: torch.Tensor  # a view of the second buffer


@dataclass(slots=True)
class _InPlace:
    """Where the keys and values of one sequence are. Its slots are consecutive, so no copy is needed."""

    first: int  # the first slot
    length: int  # number of slots


@dataclass(slots=True)
class _Decodes:
    """All sequences that decode, as one padded batch."""

    gather: _Gather | _InPlace
    mask: torch.Tensor | None  # [n, 1, 1, L], 0 or −inf, added to the scores; None: no mask


@dataclass(slots=True)
class _Prefill:
    """One sequence's chunk: its tokens in q, its keys and values, and its mask."""

    tokens: slice
    gather: _Gather | _InPlace
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
        self._by_numpy = device.type == "cpu" and dtype != torch.bfloat16  # numpy has no bfloat16
        self._num_decodes = 0
        self._scales: torch.Tensor | None = None  # scales of the current layer's cache; None: it is not 8-bit
        self._plans: dict[int, tuple[_Decodes | None, list[_Prefill]]] = {}
        # One buffer for all layers and steps: the page faults of new memory would cost more than the copy.
        self._buffer = torch.empty(0, dtype=dtype, device=device)
        self._caches: dict[int, _Cache] = {}
        self._offsets = np.arange(block_size)
        self._positions = np.arange(0)

    def plan(self, meta: ForwardMeta) -> None:
        table, lengths, bounds = (part.cpu().numpy() for part in (meta.block_table, meta.seq_lens, meta.cu_seqlens_q))
        self.plan_arrays(table, lengths, bounds, meta.num_decodes)

    def plan_arrays(self, table: np.ndarray, lengths: np.ndarray, bounds: np.ndarray, num_decodes: int) -> None:
        """Like `plan`, with host arrays: block table [n, columns], lengths [n], bounds [n + 1] (cu_seqlens_q)."""
        self._num_decodes = n = num_decodes
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
        keys, values = self._read(layer, decodes.gather, k_cache, v_cache)
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
        keys, values = self._read(layer, chunk.gather, k_cache, v_cache)
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
        self, layer: int, gather: _Gather | _InPlace, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values [n, Hkv, L, D] of this layer, valid until the next call."""
        if self._scales is not None:
            return self._read_fp8(gather, self._scales, k_cache, v_cache)
        cache = self._caches.get(layer)
        if cache is None or cache.k_cache is not k_cache:
            flat = [part.view(-1, *self._heads) for part in (k_cache, v_cache)]
            keys, values = (part[None].transpose(1, 2) for part in flat)
            arrays = [part.numpy() if self._by_numpy else np.empty(0) for part in flat]
            cache = self._caches[layer] = _Cache(k_cache, (arrays[0], arrays[1]), keys, values)
        if isinstance(gather, _InPlace):
            first, length = gather.first, gather.length
            return cache.keys.narrow(2, first, length), cache.values.narrow(2, first, length)
        if gather.arrays is not None:
            for array, out in zip(cache.arrays, gather.arrays, strict=True):
                np.take(array, gather.slots, 0, out, "clip")
        else:
            slots = torch.from_numpy(gather.slots).to(self._device)
            for part, out in zip((k_cache, v_cache), gather.buffers, strict=True):
                torch.index_select(part.view(-1, *self._heads), 0, slots, out=out)
        return gather.keys, gather.values

    def _read_fp8(
        self, gather: _Gather | _InPlace, scales: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`_read` for an 8-bit cache: gather bytes, then convert them to the model's type."""
        n, length = (1, gather.length) if isinstance(gather, _InPlace) else gather.keys.shape[::2]
        found = []
        for cache, scale in zip((k_cache, v_cache), scales, strict=True):
            flat = cache.view(-1, *self._heads).view(torch.uint8)
            if isinstance(gather, _InPlace):
                part = flat.narrow(0, gather.first, gather.length)
            else:
                part = flat.index_select(0, torch.from_numpy(gather.slots).to(self._device))
            wide = kv_fp8.dequantise(part.view(kv_fp8.FP8), scale, self._dtype)
            found.append(wide.view(n, length, *self._heads).transpose(1, 2))
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

    def _gather(self, slots: np.ndarray) -> _Gather | _InPlace:
        """Choose how to read slots [n, L]: in place for one sequence with consecutive slots, else by a copy."""
        if len(slots) == 1 and (slots[0, 1:] - slots[0, :-1] == 1).all():
            return _InPlace(int(slots[0, 0]), len(slots[0]))
        count, shape = slots.size, (*slots.shape, *self._heads)
        elements = count * self._heads[0] * self._heads[1]
        if self._buffer.numel() < 2 * elements:
            self._buffer = torch.empty(2 * elements + elements // 2, dtype=self._dtype, device=self._device)
        buffers = self._buffer[: 2 * elements].view(2, count, *self._heads)
        by_numpy = self._by_numpy and (elements <= SMALL_GATHER or torch.get_num_threads() == 1)
        keys, values = (buffer.view(shape).transpose(1, 2) for buffer in buffers)
        return _Gather(slots.reshape(-1), buffers, buffers.numpy() if by_numpy else None, keys, values)

    def _additive(self, seen: np.ndarray) -> torch.Tensor:
        """Returns the mask that is added to the scores: 0 where `seen` is true, else −inf."""
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(torch.from_numpy(~seen).to(self._device), -torch.inf)
