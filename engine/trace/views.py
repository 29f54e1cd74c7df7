"""The parts of a State: its requests, the nodes of its tree, its waste, and the states of a block."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

FREE, ACTIVE, SHARED, CACHED = range(4)


@dataclass(slots=True)
class RequestView:
    """A request that has not finished. `State.computed` returns the number of its tokens with KV."""

    id: int
    group: str
    prompt_tokens: int
    max_total: int
    state: str = "waiting"  # waiting | running | preempted
    row: int = -1
    table: list[int] = field(default_factory=list)
    node: int = 0
    shared_blocks: int = 0
    base: int = 0  # number of tokens with KV when the request joined the decoding set (if not decoding: now)
    joined_at: int = -1  # `State.ticks` when the request joined the decoding set; -1: not decoding
    submitted: float = 0.0
    admitted: float = 0.0
    cached_tokens: int = 0  # prompt tokens taken from the cache before any preemption
    match: tuple[str, int, str] = ("", 0, "")  # stop, at, detail of its last match before any preemption
    preemptions: int = 0
    lost: int = 0  # the most tokens with KV that it had at a preemption
    contents: list[int] = field(default_factory=list)  # without a prefix cache: the numbers of its full blocks' texts


@dataclass(slots=True)
class Waste:
    """Tokens whose KV was computed more than once since the engine began. Engine and State count them independently.

    `evicted`: prompt tokens that a request would have taken from the tree, but their blocks had been evicted; only
    evictions that are still remembered count (engine/core/evicted.py). `preempted`: tokens computed again by a request
    that had lost its blocks, by a preemption or with a failed step. `duplicate`: tokens of blocks that were freed
    because the tree had a block with the same text: two requests computed them at the same time, an answer repeats a
    cached text, or the block had the last token of a prompt. Answers and the last token are always computed.
    """

    evicted: int = 0
    preempted: int = 0
    duplicate: int = 0


@dataclass(slots=True)
class NodeView:
    """A node of the tree. `ids` are the tokens of its blocks, in order; an array is cheap to copy."""

    id: int
    parent: int
    ids: array[int]
    blocks: list[int]
    users: int
    last_used: int
    children: list[int] = field(default_factory=list)
