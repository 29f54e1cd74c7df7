"""The prefix tree records the token sequences whose KV is in the pool.

The tree works in whole blocks. A node is a run of blocks, and its children are keyed by the tokens of their first
block. So siblings differ in their first block, and a lookup costs one dictionary access per node. Nodes are split
between blocks only, and a node is merged with its only child if the same requests hold both. A request's partly filled
last block is never in the tree. (The idea is SGLang's RadixAttention, Zheng et al. 2024.)

Ownership: the tree keeps the blocks of a node, and the requests that hold the node hold its blocks too. `users` counts
these requests. A request holds the whole path from the root, so a node has at least as many users as its children
together. If no request holds a node, no request holds the nodes below it: all of them can be evicted, leaves first.

A block is *pending* from the planning to the commit of the step that writes it. Later steps may read it, because the
device runs steps in order. If the step fails, `withdraw` removes its blocks and all blocks below them.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import chain, islice

from engine.core.allocator import BlockAllocator
from engine.core.node import Key, Match, Node, block_key, common_tokens
from engine.trace.eviction import EVICTION_POLICIES, EvictionPolicy
from engine.trace.records import RecordLog
from engine.trace.side_pool import SidePool

MOST_EVICTED = 32_768  # blocks; older evictions are forgotten
MAX_COMPARED = 64  # a missing block is compared with at most this many siblings, to find the first token that differs


class RadixTree:
    """All nodes, the order of eviction, and the pending blocks."""

    def __init__(
        self, block_size: int, allocator: BlockAllocator, log: RecordLog,
        policy: EvictionPolicy = EVICTION_POLICIES["lru"],
    ) -> None:
        self.block_size = block_size
        self.allocator = allocator
        self.log = log
        self._age = policy.age
        self.next_leaf = self._next_by_age  # what `evict` asks for each leaf; others may replace it
        self.root = Node(0, None, [], [], 0, 0)
        self.nodes: dict[int, Node] = {0: self.root}
        self.step = -1  # the step that is being planned; it is remembered with each eviction
        self.prefixes: set[int] = set()  # `hashes` of all nodes
        self._next_id = 1
        self.pending: dict[int, int] = {}  # block -> the step that writes it
        self._next: list[tuple[int, int]] = []  # heap of (age, node id); stale entries are skipped
        # Prefix of an evicted block -> the step of the eviction, so that a later miss can name it and tokens computed
        # again are counted. A prefix is the hash of all tokens up to and including the block.
        self.evicted: OrderedDict[int, int] = OrderedDict()
        self.side_pools: list[SidePool] = []  # which keep pages and checkpoints for blocks of the tree

    # ---- looking up

    def match(self, ids: list[int], limit: int, node: Node | None = None, depth: int = 0, salt: str = "") -> Match:
        """Returns which of the blocks [depth, limit) of `ids` are below `node` (None: the root). Change nothing. The
        path to `node` has the first `depth` blocks of `ids`. `salt`: the cache salt of the request."""
        node = node or self.root
        size = self.block_size
        blocks: list[int] = []
        while depth < limit:
            key = block_key(ids, depth, size, salt)
            child = node.children.get(key)
            if child is None:
                return self._miss(ids, node, node.end_hash, depth, key, None, 0, blocks)
            n, most = 1, min(len(child.keys), limit - depth)
            while n < most and child.keys[n] == (key := tuple(ids[(depth + n) * size : (depth + n + 1) * size])):
                n += 1
            blocks += child.blocks[:n]
            depth += n
            if n < len(child.keys):
                if depth >= limit:
                    return Match(node, child, n, blocks, "whole", depth * size)
                return self._miss(ids, node, child.hashes[n - 1], depth, key, child, n, blocks)
            node = child
        stop = "whole" if limit > 0 else "short"
        return Match(node, None, 0, blocks, stop, depth * size)

    def _miss(
        self, ids: list[int], node: Node, end: int, depth: int, key: Key, part: Node | None, n: int, blocks: list[int]
    ) -> Match:
        """Returns the match of `blocks`, with the reason why `key` did not match. `end`: hash of the matched prefix."""
        step = self.evicted.get(hash((end, key)))
        if step is not None:
            return Match(node, part, n, blocks, "evicted", step)
        others = [part.keys[n]] if part is not None else list(islice(node.children, MAX_COMPARED))
        common = max((common_tokens(key, other) for other in others if other[0] == key[0]), default=0)
        stop = "differs" if common or (depth and others) else "ends" if depth else "empty"
        return Match(node, part, n, blocks, stop, depth * self.block_size + common)

    # ---- holding

    def claim(self, match: Match) -> Node:
        """Returns the node that ends where the match ends. A node that matched in part is split."""
        return match.node if match.part is None else self._split(match.part, match.part_blocks)

    def lock(self, node: Node, above: Node, clock: int) -> None:
        """Let a request hold the path to `node`; it already holds the path to `above`, an ancestor of `node`."""
        held = False
        for each in node.path():
            held = held or each is above
            if not held:
                each.users += 1
            each.last_used = clock
        self._merge_path(node)

    def unlock(self, node: Node, clock: int) -> None:
        """Let a request release the path to `node`."""
        for each in node.path():
            each.users -= 1
            each.last_used = clock
            if each.evictable:
                self._push(each)
        self._merge_path(node)

    # ---- growing

    def add(self, node: Node, request: int, keys: list[Key], blocks: list[int], step: int) -> Node:
        """Add blocks below `node`, the node that the request holds; return the node that the request holds now. A leaf
        that only this request holds is extended in place, so a reply becomes one node, not one node per block. `step`
        is the step that will write the blocks, or -1 if they are already written."""
        ids = list(chain.from_iterable(keys))
        if node.parent is not None and node.users == 1 and not node.children:
            clock = self.log.append("extend", node.id, request, ids, blocks, step)
            node.keys += keys
            node.blocks += blocks
            node.last_used = clock
            leaf = node
        else:
            clock = self.log.append("insert", self._next_id, node.id, request, ids, blocks, step)
            leaf = Node(self._next_id, node, keys, list(blocks), 1, clock)
            node.children[keys[0]] = leaf
            self.nodes[leaf.id] = leaf
            self._next_id += 1
        end = leaf.end_hash or node.end_hash
        for key in keys:
            end = hash((end, key))
            leaf.hashes.append(end)
            self.prefixes.add(end)
        self.allocator.tree_add(blocks)
        if step >= 0:
            self.pending.update(dict.fromkeys(blocks, step))
        return leaf

    def _split(self, node: Node, n: int) -> Node:
        """Move the first `n` blocks of `node` to a new parent; return the parent. Holders of `node` now hold both."""
        parent = node.parent
        assert parent is not None
        self.log.append("split", node.id, self._next_id, n)
        upper = Node(self._next_id, parent, node.keys[:n], node.blocks[:n], node.users, node.last_used)
        upper.hashes, node.hashes = node.hashes[:n], node.hashes[n:]
        self._next_id += 1
        self.nodes[upper.id] = upper
        parent.children[upper.keys[0]] = upper
        node.keys, node.blocks, node.parent = node.keys[n:], node.blocks[n:], upper
        upper.children[node.keys[0]] = node
        return upper

    def _merge_path(self, node: Node) -> None:
        """Merge each node from `node` up to the root with its only child, where `_merge` allows it."""
        while node.parent is not None:
            if len(node.children) == 1:
                node = self._merge(node)
            node = node.parent or self.root

    def _merge(self, upper: Node) -> Node:
        """Merge a node with its only child if the same requests hold both; return the node that has `upper`'s blocks.
        These requests refer to the child, so its object stays. It takes the older of the two ids, so a node that was
        split gets its id back."""
        lower = upper.same_child
        if lower is None:
            return upper
        self.log.append("merge", upper.id, lower.id)
        upper.keys += lower.keys  # the list of `upper` grows, because the child is usually shorter
        upper.blocks += lower.blocks
        upper.hashes += lower.hashes
        lower.keys, lower.blocks, lower.hashes = upper.keys, upper.blocks, upper.hashes
        lower.parent = upper.parent
        if lower.parent is not None:
            lower.parent.children[lower.keys[0]] = lower
        lower.last_used = max(upper.last_used, lower.last_used)
        lower.id, gone = sorted((upper.id, lower.id))
        self.nodes[lower.id] = lower
        del self.nodes[gone]
        if lower.evictable:
            self._push(lower)
        return lower

    # ---- shrinking

    def evict(self, n: int, reason: str) -> int:
        """Evict up to `n` blocks, leaves in the order of the policy; return the number of evicted blocks. If a leaf has
        more blocks than are still needed, only its last blocks are evicted."""
        freed = 0
        while freed < n and (node := self.next_leaf()) is not None:
            take = min(n - freed, len(node.blocks))
            keep = len(node.blocks) - take
            for prefix in node.hashes[keep:]:
                self.evicted[prefix] = self.step
            self.log.append("evict", node.id, take, reason)
            self._cut(node, keep)
            if not keep and node.parent is not None and len(node.parent.children) == 1:
                self._merge(node.parent)
            freed += take
        while len(self.evicted) > MOST_EVICTED:
            self.evicted.popitem(last=False)
        return freed

    def _next_by_age(self) -> Node | None:
        """Returns the leaf that is evicted next; None if every node is in use. The leaf stays in the heap: often only
        some of its blocks are evicted."""
        while self._next:
            age, node_id = self._next[0]
            node = self.nodes.get(node_id)
            if node is not None and node.evictable and self._age(node) == age:
                return node
            heapq.heappop(self._next)
        return None  # all entries were stale: their nodes were used again or removed

    def drop(self, node: Node, reason: str) -> None:
        """Evict a whole leaf."""
        self.log.append("evict", node.id, len(node.blocks), reason)
        self._cut(node, 0)
        if node.parent is not None:
            self._merge(node.parent)

    def _cut(self, node: Node, keep: int) -> None:
        """Drop all but the first `keep` blocks of a node without children. A node that becomes empty is removed."""
        parent = node.parent
        assert parent is not None and not node.children
        dropped, first = node.blocks[keep:], node.keys[0]
        self.prefixes.difference_update(node.hashes[keep:])
        del node.keys[keep:], node.blocks[keep:], node.hashes[keep:]
        if self.pending:
            for block in dropped:
                self.pending.pop(block, None)
        self.allocator.tree_drop(dropped)
        for pool in self.side_pools:
            pool.forget(dropped)
        if not keep:
            del parent.children[first]
            del self.nodes[node.id]
            if parent.evictable:
                self._push(parent)

    def _push(self, node: Node) -> None:
        if len(self._next) > 64 + 2 * len(self.nodes):  # most entries are stale: rebuild the heap
            self._next = [(self._age(n), n.id) for n in self.nodes.values() if n.evictable]
            heapq.heapify(self._next)
        heapq.heappush(self._next, (self._age(node), node.id))

    # ---- steps that end

    def settle(self, step: int) -> None:
        """Mark the blocks of a committed step as written."""
        if written := [block for block, at in self.pending.items() if at == step]:
            for block in written:
                del self.pending[block]
            self.log.append("settle", step)

    def invalidated_by(self, step: int) -> set[int]:
        """Returns the blocks that a failed step makes invalid: those that it writes, and all below them. Blocks that
        later steps complete are among them: their first tokens may be tokens of the failed step."""
        found: set[int] = set()
        stack = [(self.root, False)]
        while stack:
            node, below = stack.pop()
            pending = (i for i, block in enumerate(node.blocks) if self.pending.get(block, -1) >= step)
            valid = 0 if below else next(pending, None)
            if valid is not None:
                found.update(node.blocks[valid:])
            stack += [(child, valid is not None) for child in node.children.values()]
        return found

    def withdraw(self, step: int, blocks: set[int]) -> None:
        """Remove the blocks that `invalidated_by(step)` found. No request may hold them any more."""
        invalid: list[tuple[Node, int]] = []  # (node, number of blocks that stay valid): since then, nodes were merged
        for node in self.nodes.values():
            keep = next((i for i, block in enumerate(node.blocks) if block in blocks), None)
            if keep is not None:
                invalid.append((node, keep))
        invalid.sort(key=lambda item: -sum(1 for _ in item[0].path()))  # the deepest first
        self.log.append("withdraw", step, [(node.id, keep) for node, keep in invalid])
        for node, keep in invalid:
            self._cut(node, keep)
            if keep and node.evictable:
                self._push(node)
        for node, keep in invalid:  # after all cuts, because one record reports them
            if not keep and node.parent is not None and self.nodes.get(node.parent.id) is node.parent:
                self._merge(node.parent)

    # ---- checking

    def check(self) -> None:
        """Raise AssertionError unless parents, children, keys and users are consistent."""
        seen: set[int] = set()
        stack = [self.root]
        while stack:
            node = stack.pop()
            assert self.nodes.get(node.id) is node, f"node {node.id} is not in the index"
            assert len(node.keys) == len(node.blocks) == len(node.hashes), f"node {node.id} has {len(node.keys)} keys"
            assert node is self.root or node.keys, f"node {node.id} is empty"
            for block in node.blocks:
                assert block not in seen, f"block {block} is in two nodes"
                seen.add(block)
                assert self.allocator.in_tree(block), f"block {block} of node {node.id} is not marked as in the tree"
                assert self.allocator.holders(block) == node.users, f"block {block}: holders differ from users"
            users = 0
            for key, child in node.children.items():
                assert child.parent is node and child.keys[0] == key, f"child {child.id}: wrong parent or key"
                users += child.users
                stack.append(child)
            assert node is self.root or node.users >= users, f"node {node.id}: {node.users} users, children {users}"
            assert node.same_child is None, f"node {node.id} is not merged with its child"
            assert not node.evictable or (self._age(node), node.id) in self._next, f"leaf {node.id} cannot be evicted"
        assert self.prefixes == {prefix for node in self.nodes.values() for prefix in node.hashes}
        assert self.pending.keys() <= seen, "a pending block is not in the tree"
        in_tree = sum(self.allocator.in_tree(b) for b in range(self.allocator.num_blocks))
        assert in_tree == len(seen), f"{in_tree} blocks are marked as in the tree, {len(seen)} are in nodes"
