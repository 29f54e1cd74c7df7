"""The interface of paged attention: planned once per step, run once per layer.

A backend gets the shape of the model (AttentionShape) and of each step (ForwardMeta), never a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class AttentionShape(Protocol):
    """The shape of a model, as attention needs it; engine.model.config.ModelConfig is one."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...

    def window(self, layer: int) -> int:
        """The keys that a query of this layer sees, its own included; 0: all."""


@dataclass(slots=True)
class ForwardMeta:
    """The shape of one forward pass over T tokens of n sequences, laid end to end.

    The first `num_decodes` sequences decode exactly one token. Then come sequences of several tokens: decodes with
    drafts, and chunks of prompts.
    Token i of a sequence attends to that sequence's keys 0 … seq_len − q_len + i. Each layer writes the keys and values
    of all T tokens to the cache before it attends, so all these keys are there.

    Padding (in the block table, or in a batch filled up to a graph's size) points at block 0, the null block.
    """

    positions: torch.Tensor  # int64 [T]     absolute position of each token in its sequence
    slot_mapping: torch.Tensor  # int64 [T]  the slot of its key and value: block · block_size + offset
    cu_seqlens_q: torch.Tensor  # int32 [n + 1]  sequence i owns the tokens [cu[i], cu[i + 1])
    seq_lens: torch.Tensor  # int32 [n]      keys of each sequence, this step's tokens included
    block_table: torch.Tensor  # int32 [n, max_blocks]  physical block of each sequence's i-th block
    max_q_len: int  # tokens of the longest chunk
    max_seq_len: int  # the largest of seq_lens
    num_decodes: int
    logit_rows: torch.Tensor | None  # int64 [s]  tokens whose logits are needed, ascending; None: all T
    # In a batch filled up to a graph's size, the number of entries before the padding; None: there is no padding.
    live: torch.Tensor | None = None  # int32 [1]  of the T tokens
    live_rows: torch.Tensor | None = None  # int32 [1]  of logit_rows
    fresh: bool = False  # every chunk begins its sequence, so it attends only to keys of this step


class AttentionBackend(Protocol):
    """Causal grouped-query attention over the paged KV cache."""

    name: str

    def plan(self, meta: ForwardMeta) -> None:
        """Prepare a step; all its layers share the result."""

    def run(
        self, layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """q [T, Hq, D], caches [num_blocks, block_size, Hkv, D] -> [T, Hq · D].

        kv_scales: fp32 [2, Hkv] of 8-bit caches (engine/attention/kv_fp8.py).

        Token i of a sequence attends to its keys 0 … seq_len − q_len + i, or to the last `window` of them. Other slots
        have no influence, even if they hold NaN.
        """
