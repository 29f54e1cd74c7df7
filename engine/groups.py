"""Divides the layers of a model into cache groups: layers whose keys and values, or whose states, live in one pool.

Group 0 has the layers with full attention. Layers with a sliding window have other groups, with block tables of their
own: the blocks behind a window are released. Layers with a recurrent state form the last group. vLLM calls the same
division KV cache groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch  # for types only: a client must not load torch

Kind = Literal["full", "window", "state"]


@dataclass(frozen=True)
class StateShape:
    """The recurrent state of a layer after some token (engine/model/delta.py)."""

    conv: tuple[int, ...]  # [C, K - 1], the last inputs of the convolution, in the model's dtype
    recurrent: tuple[int, ...]  # [Hv, Dk, Dv], fp32 (float64 in a float64 model)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of the state in a model of this dtype."""
        return math.prod(self.conv) * dtype.itemsize + math.prod(self.recurrent) * max(4, dtype.itemsize)


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share a pool and, for "full" and "window", one block table for each sequence."""

    name: str  # unique in its model: "full", "window 512", "state"
    kind: Kind
    layers: tuple[int, ...]  # the layers whose keys and values, or states, the pool holds; ascending
    window: int = 0  # keys that a query sees, its own included; 0: all keys, and blocks are not released
    num_kv_heads: int = 0  # of each layer, like head_dim; 0 in the state group
    head_dim: int = 0
    readers: tuple[int, ...] = ()  # layers without keys and values, which read those of one of `layers`; ascending
    state: StateShape | None = None  # of each layer in the state group

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Returns the bytes that one token takes in the group's pool. The state group has no pages: 0."""
        return 2 * len(self.layers) * self.num_kv_heads * self.head_dim * dtype.itemsize

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Returns the bytes of a block or page of `block_size` tokens, or of a slot of states, for all layers."""
        if self.state is not None:
            return len(self.layers) * self.state.nbytes(dtype)
        return block_size * self.bytes_per_token(dtype)


class LayerShapes(Protocol):
    """What a model's layers keep of each token. ModelConfig (engine/model/config.py) has these attributes."""

    @property
    def num_layers(self) -> int: ...
    @property
    def state_layers(self) -> tuple[int, ...]: ...  # layers with a recurrent state instead of keys and values
    @property
    def state_shape(self) -> StateShape | None: ...  # None: there are no such layers

    def window(self, layer: int) -> int:
        """Returns how many keys a query of this layer attends to, the key of its own token included; 0: no limit."""

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Returns the number of key/value heads of a layer, and the size of its heads."""

    def source_of(self, layer: int) -> int:
        """Returns the layer whose keys and values this layer reads: itself, or an earlier layer."""


def cache_groups(config: LayerShapes) -> tuple[CacheGroup, ...]:
    """Returns the groups of a model or of one rank's shard: full attention, then windows, then states. A model whose
    layers all have windows, or none, has one paged group: group 0, which keeps every block."""
    states = config.state_layers
    attention = [i for i in range(config.num_layers) if i not in states]
    mixed = not all(config.window(i) for i in attention)
    shapes: dict[tuple[int, int, int], list[int]] = {}  # (window, kv heads, head dim) -> layers
    for i in attention:
        shapes.setdefault((config.window(i) if mixed else 0, *config.heads_of(i)), []).append(i)
    windows = [window for window, _, _ in shapes]
    groups = []
    for (window, kv_heads, dim), layers in sorted(shapes.items()):
        name = f"window {window}" if window else "full"
        groups.append(
            CacheGroup(
                name if windows.count(window) == 1 else f"{name}, {kv_heads} x {dim}", "window" if window else "full",
                tuple(i for i in layers if config.source_of(i) == i), window, kv_heads, dim,
                tuple(i for i in layers if config.source_of(i) != i),
            )
        )
    if sum(group.kind == "full" for group in groups) > 1:
        raise ValueError("the layers with full attention differ in their heads: one block table cannot serve them")
    return (*groups, CacheGroup("state", "state", states, state=config.state_shape)) if states else tuple(groups)


def paged_groups(config: LayerShapes) -> tuple[CacheGroup, ...]:
    """Returns the groups with pages: all but that of the states."""
    return tuple(group for group in cache_groups(config) if group.kind != "state")


def group_of_layers(config: LayerShapes) -> list[int]:
    """Returns for each layer the index of its group in cache_groups."""
    groups = cache_groups(config)
    found = {layer: i for i, group in enumerate(groups) for layer in (*group.layers, *group.readers)}
    return [found[layer] for layer in range(config.num_layers)]
