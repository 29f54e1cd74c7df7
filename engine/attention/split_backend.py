"""Combines two attention backends: one for sequences that decode one token, one for all others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from engine.attention.base import ForwardMeta

if TYPE_CHECKING:
    from engine.attention.base import AttentionBackend


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
