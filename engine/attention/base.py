"""The interface of the attention backends: `plan` is called once per step, `run` once per layer.

A backend gets the shape of the model (AttentionShape) and of each step (ForwardMeta), never a request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from engine.groups import CacheGroup, LayerShapes


class AttentionShape(LayerShapes, Protocol):
    """The sizes of a model that attention backends need. ModelConfig (engine/model/config.py) has these attributes.
    num_kv_heads and head_dim are those of every layer for which the backend computes attention."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def scale(self) -> float: ...  # the factor of query · key
    @property
    def sinks(self) -> bool: ...  # True: each query head has a sink
    @property
    def softcap(self) -> float: ...  # scores become softcap · tanh(score / softcap); 0: scores stay
    def of_group(self, group: CacheGroup) -> AttentionShape:
        """Returns the sizes of the layers of one group, in which all layers have the group's heads and window."""


@dataclass(slots=True)
class PagedGroup:
    """Where a cache group with a window (engine/groups.py) keeps the keys and values of a step's sequences. Entries of
    the block table behind a sequence's window are 0 (the null block), like those after its last block. A block is
    behind the window if no query of this step or of a later one sees any of its keys."""

    slot_mapping: torch.Tensor  # int64 [T], like ForwardMeta's, in the group's own pool
    block_table: torch.Tensor  # int32 [n, max_blocks]


@dataclass(slots=True)
class StateMeta:
    """Where the layers with a recurrent state read and write the states of a step's sequences.

    A segment is a run of one sequence's tokens: (first token, end token, source slot, target slot). Segments are in the
    order of the tokens. The first segment of a sequence begins with the state in its source; each other segment
    continues the one before, whose target is its source. The state after a segment's last token is written to its
    target; with target 0 nothing is written. Slot 0 holds zeros, the state before the first token. A target may be its
    segment's own source. No sequence writes a slot that another sequence of the step reads. If there are as many
    segments as tokens, each segment has one token or none: also in a captured step, whose numbers include the padding.
    """

    segments: torch.Tensor  # int32 [m, 4]
    cu_segments: torch.Tensor  # int32 [n + 1]  sequence i has the segments [cu[i], cu[i + 1])
    host: list[tuple[int, int, int, int]] | None  # the same as `segments`; None in captured steps
    num_decodes: int  # the first sequences that have one segment of one token


@dataclass(slots=True)
class ForwardMeta:
    """The shape of one forward pass over T tokens of n sequences, laid end to end.

    The first `num_decodes` sequences decode exactly one token each. The next sequences decode with drafts, so they have
    several tokens each. The last sequences are chunks of prompts.
    Token i of a sequence attends to that sequence's keys 0 … seq_len − q_len + i. Each layer writes the keys and values
    of all T tokens to the cache before attention reads the cache.

    The entries of the block table after a sequence's last block are padding: 0 (the null block), or a block of another
    sequence. The entries of a batch that is padded to the size of a CUDA graph have a length of 0.
    """

    positions: torch.Tensor  # int64 [T]     absolute position of each token in its sequence
    slot_mapping: torch.Tensor  # int64 [T]  cache slot of each token's key and value: block · block_size + offset
    cu_seqlens_q: torch.Tensor  # int32 [n + 1]  sequence i has the tokens [cu[i], cu[i + 1])
    seq_lens: torch.Tensor  # int32 [n]      number of keys of each sequence, including this step's
    block_table: torch.Tensor  # int32 [n, max_blocks]  row: a sequence; column i: the physical block of its i-th block
    max_q_len: int  # the largest number of tokens of one sequence in this step
    max_seq_len: int  # the largest of seq_lens
    num_decodes: int
    logit_rows: torch.Tensor | None  # int64 [s]  indices of the tokens whose logits are needed, ascending; None: all T
    # For a batch padded to the size of a CUDA graph: how many entries are not padding. None: the batch has no padding.
    live: torch.Tensor | None = None  # int32 [1]  of the T tokens
    live_rows: torch.Tensor | None = None  # int32 [1]  of logit_rows
    fresh: bool = False  # True: every chunk starts at position 0, so it attends only to keys of this step
    # For each cache group with a window, in the order of cache_groups; slot_mapping and block_table are group 0's.
    groups: tuple[PagedGroup, ...] = ()
    states: StateMeta | None = None  # None: no layer has a recurrent state

    def by_group(self) -> list[ForwardMeta]:
        """Returns what the backend of each group plans with: the group's own slots and block table."""
        return [
            self,
            *(replace(self, slot_mapping=g.slot_mapping, block_table=g.block_table, groups=()) for g in self.groups),
        ]


Sinks = list[torch.Tensor] | None  # of each layer: [Hq], one more score of each query head, without a value


class AttentionBackend(Protocol):
    """Causal grouped-query attention over the paged KV cache. A score is scale · query · key, then capped if the model
    has a soft cap. If the model has sinks (Xiao et al. 2023), the sink of the query head takes part in the softmax as
    one more score, and its weight is dropped."""

    name: str

    def plan(self, meta: ForwardMeta) -> None:
        """Prepare the attention of one step; `run` uses the result in every layer."""

    def run(
        self, layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the attention output [T, Hq · D] of q [T, Hq, D] over caches [num_blocks, block_size, Hkv, D].

        kv_scales: fp32 [2, Hkv], the scales of an 8-bit cache (engine/attention/kv_fp8.py); None for other caches.

        Token i of a sequence attends to that sequence's keys 0 … seq_len − q_len + i, or to the last `window` of these
        keys. Other cache slots do not influence the output, even if they hold NaN.
        """
