"""Combines attention backends: one for each cache group with pages, or one for decodes and one for all else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.attention.base import AttentionBackend, ForwardMeta


class GroupedAttention:
    """Plans each group's backend with the group's slots and table, and runs each layer on its group's backend."""

    def __init__(self, backends: Sequence[AttentionBackend], group_of: Sequence[int]) -> None:
        """`backends`: of each paged group, in the order of cache_groups. `group_of`: the group of each layer."""
        self.backends, self._group_of = backends, group_of
        self.name = " / ".join(dict.fromkeys(backend.name for backend in backends))

    def plan(self, meta: ForwardMeta) -> None:
        for backend, own in zip(self.backends, meta.by_group(), strict=True):
            backend.plan(own)

    def run(
        self, layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend.run."""
        return self.backends[self._group_of[layer]].run(layer, q, k_cache, v_cache, kv_scales)


def backends_of(attention: AttentionBackend) -> Sequence[AttentionBackend]:
    """Returns the backend of each cache group with pages."""
    return attention.backends if isinstance(attention, GroupedAttention) else [attention]


class TwoBackends:
    """Runs the sequences that decode one token on one backend, and the other sequences of the step on another."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.name = f"{prefill.name} + {decode.name}"
        self._prefill, self._decode = prefill, decode
        self._num_decodes = 0

    def plan(self, meta: ForwardMeta) -> None:
        n = self._num_decodes = meta.num_decodes
        if n:
            self._decode.plan(
                replace(
                    meta, cu_seqlens_q=meta.cu_seqlens_q[: n + 1], seq_lens=meta.seq_lens[:n],
                    block_table=meta.block_table[:n], max_q_len=1,
                )
            )
        if n < len(meta.seq_lens):
            self._prefill.plan(
                replace(
                    meta, cu_seqlens_q=meta.cu_seqlens_q[n:] - n, seq_lens=meta.seq_lens[n:],
                    block_table=meta.block_table[n:], num_decodes=0,
                )
            )

    def run(
        self, layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend.run."""
        n, parts = self._num_decodes, []
        if n:
            parts.append(self._decode.run(layer, q[:n], k_cache, v_cache, kv_scales))
        if n < len(q):
            parts.append(self._prefill.run(layer, q[n:], k_cache, v_cache, kv_scales))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
