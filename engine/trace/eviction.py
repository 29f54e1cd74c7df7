"""Eviction policies: which cached text leaves the tree first. The tree, predictions and sentences use these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class EvictionPolicy(NamedTuple):
    """Leaves without users are evicted in the order of `age(node)`, the smallest first; a parent follows its children.
    `age` reads what a Node of the tree and a NodeView of the panels both have and a split keeps: `id`, `last_used`."""

    words: str  # completes "the … blocks are evicted first"
    age: Callable[[Any], int]
    is_known: bool = True  # False: `age` is not the order of the engine, which nothing tells in advance


EVICTION_POLICIES = {
    "lru": EvictionPolicy("least recently used", lambda node: node.last_used),
    "fifo": EvictionPolicy("oldest", lambda node: node.id),  # node ids count up
}
STUDENT = "student"  # of `minitui exercise evict`; no engine can be started with it
RECORDED_POLICIES = EVICTION_POLICIES | {
    STUDENT: EvictionPolicy("student's choice", EVICTION_POLICIES["lru"].age, is_known=False)
}
