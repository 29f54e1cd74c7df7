"""The order in which the engine will evict nodes of the tree, and the blocks that its next allocations take."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice

from engine.trace.eviction import RECORDED_POLICIES
from engine.trace.state import State
from engine.trace.views import CACHED, FREE, NodeView
from minitui.text import count

PRESSURE_BLOCKS, PRESSURE_SHARE = 4, 0.05  # a pool is under pressure from this number of free blocks down


class EvictionOrder:
    """The nodes that no request holds, in the order in which the engine evicts them, in one state. As in the engine,
    the leaf with the smallest age comes next, and a node becomes a leaf with its last child. Without nodes if the order
    is not known."""

    def __init__(self, state: State) -> None:
        _, age, self.is_known = RECORDED_POLICIES[state.eviction_policy]
        nodes = state.nodes if self.is_known else {}
        children = {node.id: len(node.children) for node in nodes.values() if not node.users and node.id}
        leaves = [(age(nodes[id]), id) for id, number in children.items() if not number]
        heapq.heapify(leaves)
        self.nodes: list[NodeView] = []
        while leaves:
            node = nodes[heapq.heappop(leaves)[1]]
            self.nodes.append(node)
            if node.parent in children:
                children[node.parent] -= 1
                if not children[node.parent]:
                    heapq.heappush(leaves, (age(nodes[node.parent]), node.parent))
        self._ranks = {node.id: rank for rank, node in enumerate(self.nodes, 1)}

    def rank(self, node: NodeView) -> int:
        """Returns the place of a node in the order, from 1; 0 if requests hold the node, or the order is not known."""
        return self._ranks.get(node.id, 0)

    def blocks(self) -> Iterator[tuple[NodeView, int]]:
        """Yields (node, block) for each block that can be evicted, in order: the last block of a node first."""
        return ((node, block) for node in self.nodes for block in reversed(node.blocks))


def next_blocks(state: State, order: EvictionOrder, most: int) -> tuple[list[int], list[tuple[NodeView, int]]]:
    """Returns the first `most` blocks that allocations take, if no request takes cached blocks before: the free blocks,
    and then evicted blocks with their nodes. The state must know the order of the free blocks, or have none."""
    assert state.free is not None or not state.counts[FREE]
    free = state.free or []
    return free[: -most - 1 : -1], list(islice(order.blocks(), max(0, most - len(free))))


def is_under_pressure(state: State) -> bool:
    """Returns True if so few blocks are free that an allocation will soon evict or preempt."""
    return state.counts[FREE] <= max(PRESSURE_BLOCKS, int((state.num_blocks - 1) * PRESSURE_SHARE))


def free_words(state: State, brief: bool = False) -> str:
    """Returns when the next eviction comes: "after 46,654 free blocks are used", "no block is free"; if `brief`,
    without the verb."""
    free = state.counts[FREE]
    used = "" if brief else " is used" if free == 1 else " are used"
    return f"after {count(free, 'free block')}{used}" if free else "no block is free"


def pressure_words(state: State, order: EvictionOrder, most: int, brief: bool = False) -> str:
    """Returns which blocks the next allocations take, at most `most`, and how many come after these: "blocks 7, 12
    (free), then evict 33, 32, 15 …; after 40 more a request is preempted"; if `brief`, without the last part and in
    fewer words."""
    if state.free is None and state.counts[FREE]:
        return "unknown: their order is not recorded"
    if not order.is_known:
        return "your function chooses"
    free, evicted = next_blocks(state, order, most)
    more = state.counts[FREE] + state.counts[CACHED] - most
    numbers = [", ".join(map(str, blocks)) for blocks in (free, [block for _, block in evicted])]
    lead = "" if brief else f"block{'s' * (len(free) > 1)} "
    text = f"{lead}{numbers[0]} (free)" if free else ""
    if evicted:
        text += f"{', then ' * bool(free)}evict {numbers[1]}"
    if more > 0:
        return f"{text} …" if brief else f"{text} …; after {more:,} more a request is preempted"
    end = "then preempt" if brief else "then a request is preempted"
    return f"{text}, {end}" if text else f"none, {end}"
