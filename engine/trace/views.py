"""The parts of a State: its requests, the nodes of its tree, its waste, and the states of a block."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Annotated

from engine.trace import kind

FREE, ACTIVE, SHARED, CACHED = range(4)

# A field with a bound is in snapshots. `later`: older recordings lack it, and the field's default applies.


@dataclass(slots=True)
class RequestView:
    """A request that has not finished. `State.computed` returns the number of its tokens with KV."""

    id: int
    group: kind.Text
    prompt_tokens: kind.Count
    max_total: kind.Count
    state: kind.RequestState = "waiting"
    row: kind.OrNone = -1
    table: kind.Blocks = field(default_factory=list)
    node: kind.Count = 0
    shared_blocks: kind.Count = 0
    base: int = 0  # number of tokens with KV when the request joined the decoding set (if not decoding: now)
    joined_at: int = -1  # `State.ticks` when the request joined the decoding set; -1: not decoding
    submitted: kind.Duration = 0.0
    admitted: kind.Duration = 0.0
    cached_tokens: kind.Count = 0  # prompt tokens taken from the cache before any preemption
    match: kind.Match = ("", 0, "")  # stop, at, detail of its last match before any preemption
    preemptions: kind.Count = 0
    lost: Annotated[int, kind.later(kind.count)] = 0  # the most tokens with KV that it had at a preemption
    # Without a prefix cache: the numbers of its full blocks' texts.
    contents: Annotated[list[int], kind.later(kind.blocks)] = field(default_factory=list)
    # For each side group, its pages by the index of their block, or its slots (engine/trace/side_pool.py).
    side: Annotated[list[dict[int, int]], kind.later(kind.pages)] = field(default_factory=list)


@dataclass(slots=True)
class Waste:
    """Tokens whose KV was computed more than once since the engine began. Engine and State count them independently.

    `evicted`: prompt tokens that a request would have taken from the tree, but their blocks had been evicted; only
    evictions that are still remembered count (`evicted` in engine/core/radix.py). `preempted`: tokens
    computed again by a request that had lost its blocks, by a preemption or with a failed step. `duplicate`: tokens
    of blocks that were freed because the tree had a block with the same text: two requests computed them at the
    same time, an answer repeats a cached text, or the block had the last token of a prompt. Answers and the last
    token are always computed.
    """

    evicted: kind.Sequence = 0
    preempted: kind.Sequence = 0
    duplicate: kind.Sequence = 0


@dataclass(slots=True)
class NodeView:
    """A node of the tree. `ids` are the tokens of its blocks, in order; an array is cheap to copy."""

    id: int
    parent: kind.Count
    ids: Annotated[array, kind.counts]
    blocks: kind.Blocks
    users: kind.Count
    last_used: kind.Sequence
    children: list[int] = field(default_factory=list)


REQUEST, NODE, WASTE = kind.bounds_of(RequestView), kind.bounds_of(NodeView), kind.bounds_of(Waste)
BLOCKS: dict[str, kind.Bound] = {  # the fields of blocks in State and in snapshots: dicts of block -> value
    "pending": kind.position,  # the step that writes the block
    "copies": kind.later(kind.blocks),  # of a node's block: its copies, the oldest first
}
