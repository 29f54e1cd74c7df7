"""Attention of a model with several cache groups: one backend for each paged group, with the group's block table."""

from __future__ import annotations

from collections.abc import Sequence

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
