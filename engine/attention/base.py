"""Paged attention behind one small interface: planned once per step, run once per layer.

What a backend is given: the shape of the model (AttentionShape), and of each step (ForwardMeta), never a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class AttentionShape(Protocol):
    """What attention needs to know of a model; engine.model.config.ModelConfig has it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...

    def window(self, layer: int) -> int:
        """Keys that a query of this layer sees, its own included; 0: all."""


@dataclass(slots=True)
class ForwardMeta:
    """The shape of one forward pass over T tokens of n sequences, laid end to end.

    Sequences that decode exactly one token come first, `num_decodes` of them; then those of several tokens, which are
    decodes with drafts behind them, and chunks of prompts.
    Token i of a sequence attends to that sequence's keys 0 … seq_len − q_len + i, all of which are in the cache
    once this layer has stored its own: every layer writes the keys and values of all T tokens before it attends.

    Padding (of the block table, or of a batch filled up to a graph's size) points at block 0, the null block.
    """

    positions: torch.Tensor  # int64 [T]     absolute position of each token in its sequence
    slot_mapping: torch.Tensor  # int64 [T]  where its key and value go: block · block_size + offset
    cu_seqlens_q: torch.Tensor  # int32 [n + 1]  sequence i owns the tokens [cu[i], cu[i + 1])
    seq_lens: torch.Tensor  # int32 [n]      keys of each sequence, this step's tokens included
    block_table: torch.Tensor  # int32 [n, max_blocks]  physical block of each sequence's i-th block
    max_q_len: int  # the longest of the n chunks
    max_seq_len: int  # the largest of seq_lens
    num_decodes: int
    logit_rows: torch.Tensor | None  # int64 [s]  tokens whose logits are wanted, ascending; None: all T, in order
    # Of a batch filled up to a graph's size, how much of it comes first and is no padding; None: there is no padding.
    live: torch.Tensor | None = None  # int32 [1]  of the T tokens
    live_rows: torch.Tensor | None = None  # int32 [1]  of logit_rows
    fresh: bool = False  # every chunk begins its sequence: this step's own keys are all that they attend to


class AttentionBackend(Protocol):
    """Causal grouped-query attention over the paged KV cache."""

    name: str

    def plan(self, meta: ForwardMeta) -> None:
        """Prepare what all layers of this step share."""

    def run(
        self, layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """q [T, Hq, D], caches [num_blocks, block_size, Hkv, D] -> [T, Hq · D].

        kv_scales: fp32 [2, Hkv] of caches of 8-bit numbers (engine/attention/kv_fp8.py).

        Token i of a sequence attends to its keys 0 … seq_len − q_len + i, or to the last `window` of those. What lies
        in other slots, NaN included, has no influence.
        """
