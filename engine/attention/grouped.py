"""Attention of a model with several cache groups: one backend for each paged group, with the group's block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend, AttentionShape, ForwardMeta
from engine.groups import CacheGroup, StateShape


@dataclass(frozen=True)
class GroupShape:
    """The AttentionShape of the layers of one group. It numbers the layers as the model does."""

    model: AttentionShape
    group: CacheGroup

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def state_layers(self) -> tuple[int, ...]:
        return self.model.state_layers

    @property
    def state_shape(self) -> StateShape | None:
        return self.model.state_shape

    @property
    def num_heads(self) -> int:
        return self.model.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.group.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.group.head_dim

    @property
    def scale(self) -> float:
        return self.model.scale

    @property
    def sinks(self) -> bool:
        return self.model.sinks

    @property
    def softcap(self) -> float:
        return self.model.softcap

    def window(self, layer: int) -> int:
        return self.group.window

    def heads_of(self, layer: int) -> tuple[int, int]:
        return self.group.num_kv_heads, self.group.head_dim

    def source_of(self, layer: int) -> int:
        return self.model.source_of(layer)


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
