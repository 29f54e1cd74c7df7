"""The blocks and the tree of a State, and the records that change nothing else."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from engine.trace.records import Record
from engine.trace.views import ACTIVE, CACHED, FREE, SHARED, NodeView


class TreeState:
    """The blocks and the tree after a record. `counts` is kept up to date, so that reading it takes O(1)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size  # the null block included
        self.seq = 0
        self.nodes: dict[int, NodeView] = {0: NodeView(0, -1, array("i"), [], 0, 0)}
        self.pending: dict[int, int] = {}  # block -> the step that writes it
        self.holders = array("i", [0]) * num_blocks  # block -> its requests; an array: numpy views it without a copy
        self.node_of = array("i", [0]) * num_blocks  # block -> its tree node; 0: not in the tree
        self.copies: dict[int, list[int]] = {}  # block of a node -> its copies, the oldest first
        # The free blocks; an allocation takes the last of them. None: unknown (an older recording, or vLLM).
        self.free: list[int] | None = list(range(num_blocks - 1, 0, -1))
        self.counts = [num_blocks - 1, 0, 0, 0]  # number of blocks that are FREE, ACTIVE, SHARED, CACHED

    # ---- reading

    def block_state(self, block: int) -> int:
        """Returns FREE, ACTIVE, SHARED or CACHED."""
        holders = self.holders[block]
        if holders:
            return ACTIVE if holders == 1 else SHARED
        return CACHED if self.node_of[block] else FREE

    def path(self, node: int) -> Iterator[NodeView]:
        """Yields the node and its ancestors, without the root."""
        while node > 0:
            view = self.nodes[node]
            yield view
            node = view.parent

    def original_of(self, block: int) -> int:
        """Returns the block of the tree that `block` is a copy of; `block` itself if it is no copy."""
        view = self.nodes[self.node_of[block]]
        return next((own for own in view.blocks if block in self.copies.get(own, ())), block)

    # ---- changes

    def _hold_blocks(self, blocks: Iterable[int]) -> None:
        holders, counts, node_of = self.holders, self.counts, self.node_of
        for block in blocks:
            before = holders[block]
            holders[block] = before + 1
            if before == 0:
                counts[CACHED if node_of[block] else FREE] -= 1
                counts[ACTIVE] += 1
            elif before == 1:
                counts[ACTIVE] -= 1
                counts[SHARED] += 1

    def _release_blocks(self, blocks: Iterable[int]) -> None:
        holders, counts, node_of = self.holders, self.counts, self.node_of
        freed: list[int] = []
        cached = unshared = 0
        for block in blocks:
            holders[block] = after = holders[block] - 1
            if after == 0:
                if node_of[block]:
                    cached += 1
                else:
                    freed.append(block)
            elif after == 1:
                unshared += 1
        if self.free is not None:
            self.free += freed
        counts[FREE] += len(freed)
        counts[ACTIVE] += unshared - cached - len(freed)
        counts[SHARED] -= unshared
        counts[CACHED] += cached

    def _uncopy(self, record: Record) -> None:
        block = record[3]
        original = self.original_of(block)
        copies = self.copies[original]
        if original == block:
            view = self.nodes[self.node_of[block]]
            view.blocks[view.blocks.index(block)] = copies[0]
            del self.copies[block]
            original, copies = copies[0], copies[1:]
        else:
            copies.remove(block)
        if copies:
            self.copies[original] = copies
        else:
            self.copies.pop(original, None)
        self._leave_tree([block])

    def _swap(self, record: Record) -> None:
        block = record[3]
        original = self.original_of(block)
        view, copies = self.nodes[self.node_of[block]], self.copies.pop(original)
        view.blocks[view.blocks.index(original)] = block
        copies.remove(block)
        self.copies[block] = [original, *copies]

    def _leave_tree(self, blocks: Iterable[int]) -> None:
        node_of, holders, pending = self.node_of, self.holders, self.pending
        freed: list[int] = []
        for block in blocks:
            node_of[block] = 0
            if pending:
                pending.pop(block, None)
            if not holders[block]:
                freed.append(block)
        if self.free is not None:
            self.free += freed
        self.counts[CACHED] -= len(freed)
        self.counts[FREE] += len(freed)

    def _store(self, record: Record) -> None:
        _, _, _, id, parent, ids, blocks = record
        view = self.nodes.get(id)
        if view is None:
            view = self.nodes[id] = NodeView(id, parent, array("i"), [], 0, self.seq)
            self.nodes[parent].children.append(id)
        view.ids.fromlist(ids)
        view.blocks += blocks
        view.last_used = self.seq
        for block in blocks:
            self.node_of[block] = id
        self.counts[FREE] -= len(blocks)
        self.counts[CACHED] += len(blocks)

    def _split(self, record: Record) -> None:
        _, _, _, id, upper_id, n = record
        node = self.nodes[id]
        cut = n * self.block_size
        upper = NodeView(upper_id, node.parent, node.ids[:cut], node.blocks[:n], node.users, node.last_used, [id])
        siblings = self.nodes[node.parent].children
        siblings[siblings.index(id)] = upper_id
        node.ids, node.blocks, node.parent = node.ids[cut:], node.blocks[n:], upper_id
        self.nodes[upper_id] = upper
        for block in upper.blocks:
            self.node_of[block] = upper_id
            for copy in self.copies.get(block, ()):
                self.node_of[copy] = upper_id

    def _merge_nodes(self, upper: int, lower: int) -> int:
        """Make one node of a node and its only child. Returns its id."""
        node, child = self.nodes.pop(upper), self.nodes.pop(lower)
        id = min(upper, lower)
        for block in child.blocks if id == upper else node.blocks:
            self.node_of[block] = id
            for copy in self.copies.get(block, ()):
                self.node_of[copy] = id
        siblings = self.nodes[node.parent].children
        siblings[siblings.index(upper)] = id
        for each in child.children:
            self.nodes[each].parent = id
        node.id, node.children, node.last_used = id, child.children, max(node.last_used, child.last_used)
        node.ids += child.ids
        node.blocks += child.blocks
        self.nodes[id] = node
        return id

    def _cut(self, id: int, keep: int) -> list[int]:
        """Remove the blocks of a leaf after the first `keep`. Returns them, without copies."""
        node = self.nodes[id]
        gone = node.blocks[keep:]
        self._leave_tree(gone)
        if self.copies:
            for block in gone:
                self._leave_tree(self.copies.pop(block, ()))
        if keep:
            del node.ids[keep * self.block_size :], node.blocks[keep:]
        else:
            self.nodes[node.parent].children.remove(id)
            del self.nodes[id]
        return gone

    def _evict(self, record: Record) -> list[int]:
        _, _, _, id, n, _reason = record
        return self._cut(id, len(self.nodes[id].blocks) - n)

    def _settle(self, record: Record) -> None:
        step = record[3]
        for block in [block for block, at in self.pending.items() if at == step]:
            del self.pending[block]

    def _withdraw(self, record: Record) -> None:
        for id, keep in record[4]:
            self._cut(id, keep)
        self._settle(record)

    CHANGES: ClassVar[dict[str, Callable[[Any, Record], Any]]] = {
        "uncopy": _uncopy, "swap": _swap, "store": _store, "split": _split, "evict": _evict, "settle": _settle,
        "withdraw": _withdraw,
    }  # fmt: skip
