"""The only module that changes the block tables of requests. A table has two regions::

    table[0 : shared_blocks]   blocks on the tree's path to `request.node`: held by the request, not written again
    table[shared_blocks : ]    private blocks: this request writes and frees them

`publish_*` moves full blocks from the second region to the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from engine.core.allocator import BlockAllocator
from engine.core.node import Match, Node, block_key
from engine.core.radix import RadixTree
from engine.core.request import Request
from engine.core.side_groups import Changes, States, Window, make_sides
from engine.core.step import TableChanges
from engine.trace.eviction import EVICTION_POLICIES
from engine.trace.records import CLEARED, RecordLog
from engine.trace.side_pool import OWN, SideGroup
from engine.trace.views import Waste

NO_CHANGES = TableChanges(*[np.empty(0, np.int32)] * 3)


class KVCache:
    """Owns the allocator and the radix tree of one pool. The scheduler calls its methods to change them."""

    def __init__(
        self, num_blocks: int, block_size: int, log: RecordLog, prefix_caching: bool = True,
        eviction_policy: str = "lru", groups: Iterable[SideGroup] = (), checkpoint_interval: int = 1024,
    ) -> None:
        """`groups`: the side groups. `checkpoint_interval`: tokens between two checkpoints of a long prompt."""
        self.block_size = block_size
        self.log = log
        self.prefix_caching = prefix_caching
        self.allocator = BlockAllocator(num_blocks)
        self.eviction_policy = eviction_policy
        self.tree = RadixTree(block_size, self.allocator, log, EVICTION_POLICIES[eviction_policy])
        self.sides = make_sides(groups, block_size, log, checkpoint_interval)
        self.tree.side_pools = [side.pool for side in self.sides]
        self.states = next((side for side in self.sides if isinstance(side, States)), None)
        self.windows = [side for side in self.sides if isinstance(side, Window)]
        self.waste = Waste()
        self._copies = Copies()
        self.sends_tables = True  # False: no device reads the block tables
        self._table_changes: Changes = {}

    @property
    def available(self) -> int:
        """The number of blocks that are free or evictable."""
        return self.allocator.num_free + self.allocator.num_cached

    def blocks_for(self, tokens: int) -> int:
        """Returns the number of blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    # ---- reading from the tree

    def look_up(self, request: Request) -> Match | None:
        """Match the request's next tokens with the tree: the longest prefix that every group can serve. Returns None if
        the request may not read the tree now.

        The last token is never matched, because its logits are needed. A request with full blocks that are not yet
        published may not read the tree until `publish_committed` has published them.
        """
        if not self.may_read(request) or request.shared_blocks != request.planned // self.block_size:
            return None
        limit = (len(request.ids) - 1) // self.block_size
        node, depth = request.node or self.tree.root, request.shared_blocks
        match = self.tree.match(request.ids, limit, node, depth, request.cache_salt)
        return self._cut(request, match, node, depth) if self.sides and match.blocks else match

    def _cut(self, request: Request, match: Match, node: Node, depth: int) -> Match:
        """Returns the part of a match that every side group can serve."""
        blocks, cut_by = request.table[:depth] + match.blocks, None
        most = len(blocks)
        while most > depth:
            served = {side: max(depth, side.serves(blocks, most)) for side in self.sides}
            shortest = min(served, key=served.__getitem__)
            if served[shortest] == most:
                break
            most, cut_by = served[shortest], shortest.group
        if cut_by is None:
            return match
        cut = self.tree.match(request.ids, most, node, depth, request.cache_salt)
        request.branch = len(blocks) * self.block_size
        cut.stop, cut.at, cut.cut_by = cut_by.kind, request.branch, cut_by.name
        return cut

    def may_read(self, request: Request) -> bool:
        """Returns False if the request still needs the logits of its whole prompt, or if prefix caching is off."""
        needs_logits = request.params.prompt_logprobs is not None and len(request.ids) == request.prompt_len
        return self.prefix_caching and not needs_logits

    def take(self, request: Request, match: Match) -> int:
        """Replace the request's private blocks by the blocks of `match`. Returns the number of tokens that the request
        need no longer compute."""
        if not match.blocks:
            return 0
        private = request.table[request.shared_blocks :]
        self._hold(request, self.tree.claim(match), match.blocks, dropped=private)
        before, request.planned = request.planned, request.shared_blocks * self.block_size
        for side in self.sides:
            side.resume(request, request.shared_blocks)
        return request.planned - before

    def _hold(self, request: Request, node: Node, blocks: list[int], dropped: list[int]) -> None:
        """Let the request hold the path to `node`. `blocks` replace `dropped`, the request's first private blocks."""
        above = request.node or self.tree.root
        clock = self.log.append("hold", request.id, node.id, len(dropped))
        self.allocator.hold(blocks)
        self.tree.lock(node, above, clock)
        start = request.shared_blocks
        self.waste.duplicate += max(0, min(len(dropped) * self.block_size, request.planned - start * self.block_size))
        request.table[start : start + len(dropped)] = blocks
        self._changed(request, start, start + len(blocks))
        self.allocator.release(dropped)
        request.node = node
        request.shared_blocks = start + len(blocks)

    # ---- growing

    def grow(self, request: Request, tokens: int, first: int = 0) -> bool:
        """Give the request the blocks of its tokens up to `tokens`, with evictions if necessary.

        `first`: the first of these tokens that the next step computes.

        Returns False if a pool does not have enough blocks. Then the request has at most lost what it needs no more.
        """
        for side in self.sides:
            if not side.make_room(request, first, tokens):
                return False
        start = len(request.table)
        needed = -(-tokens // self.block_size) - start
        if needed > 0 and not self._grow_table(request, start, needed):
            return False
        for side in self.sides:
            side.grow(request, first, tokens)
        return True

    def room(self, request: Request) -> int:
        """Returns up to which token the request can grow."""
        room = (len(request.table) + self.available) * self.block_size
        return min([room, *(side.room(request) for side in self.sides)])

    def _grow_table(self, request: Request, start: int, needed: int) -> bool:
        blocks = self.allocator.allocate(needed)
        if blocks is None and needed <= self.available:
            self.tree.evict(needed - self.allocator.num_free, f"r{request.id} needs {needed}")
            blocks = self.allocator.allocate(needed)
        if blocks is None:
            return False
        request.table += blocks
        self._changed(request, start, start + needed)
        self.log.append("alloc", request.id, blocks)
        return True

    def resend_table(self, request: Request) -> None:
        """Send the request's whole table to the device with the next plan."""
        self._changed(request, 0, len(request.table))
        for window in self.windows:
            window.resend(request)

    def _changed(self, request: Request, start: int, end: int) -> None:
        if not self.sends_tables:
            return
        row, table, changes = request.row << 32, request.table, self._table_changes
        for column in range(start, end):
            changes[row | column] = table[column]

    def take_table_changes(self) -> list[TableChanges]:
        """Returns the changes since the last call to the block table of each group with pages."""
        return [_arrays(self._table_changes), *(_arrays(window.changes) for window in self.windows)]

    # ---- publishing to the tree

    def publish_planned(self, request: Request, step: int) -> None:
        """Publish the full blocks that `step` will write, as pending: other requests may share them from now on. If the
        tree already has the first of these blocks, nothing is published. `publish_committed` later replaces the
        request's blocks by the tree's."""
        end = min(request.planned, len(request.ids)) // self.block_size
        if not self.prefix_caching or end <= request.shared_blocks:
            return
        start = request.shared_blocks
        keys = self._keys(request, start, end)
        if keys[0] not in (request.node or self.tree.root).children:
            evicted = self._append(request, keys, step)
            for window in self.windows:
                window.keep_published(request)
            if evicted:
                self._count_again(request, [start + i for i in evicted])

    def _count_again(self, request: Request, evicted: list[int]) -> None:
        """Count the tokens of a prompt's blocks `evicted` that would not be computed without an eviction. Tokens that
        the request lost itself are not counted here, nor the block of the last token, which is always computed."""
        size = self.block_size
        last = (len(request.ids) - 1) // size if self.may_read(request) else 0
        tokens = sum(max(0, size - max(0, request.lost - i * size)) for i in evicted if i < last)
        if tokens:
            self.waste.evicted += tokens
            self.log.append("again", request.id, tokens)

    def publish_committed(self, request: Request, written: int) -> None:
        """Publish the full blocks of the first `written` tokens, whose KV and ids are known. If the tree already has a
        block, the request takes the tree's copy and frees its own. Without a prefix cache, equal blocks are only found
        and recorded."""
        end = min(written, len(request.ids)) // self.block_size
        if not self.prefix_caching:
            contents = self._copies.add(request, end, self.block_size)
            if contents:
                self.log.append("full", request.id, contents)
            return
        while request.shared_blocks < end:
            start, node = request.shared_blocks, request.node or self.tree.root
            keys = self._keys(request, start, end)
            if keys[0] not in node.children:
                self._append(request, keys, -1)
                break
            match = self.tree.match(request.ids, end, node, start, request.cache_salt)
            copies = request.table[start : start + len(match.blocks)]
            self._hold(request, self.tree.claim(match), match.blocks, dropped=copies)
        for side in self.sides:
            side.keep_published(request)

    def _append(self, request: Request, keys: list[tuple[int, ...]], step: int) -> list[int]:
        """Move the request's next private blocks to the tree. Return the indices of those that were evicted before."""
        start = request.shared_blocks
        blocks = request.table[start : start + len(keys)]
        request.node = self.tree.add(request.node or self.tree.root, request.id, keys, blocks, step)
        request.shared_blocks = start + len(keys)
        if not (evicted := self.tree.evicted):
            return []
        prefixes = request.node.hashes[-len(keys) :]
        return [i for i, prefix in enumerate(prefixes) if evicted.pop(prefix, None) is not None]

    def _keys(self, request: Request, start: int, end: int) -> list[tuple[int, ...]]:
        return [block_key(request.ids, i, self.block_size, request.cache_salt) for i in range(start, end)]

    # ---- releasing

    def release(self, request: Request, clock: int) -> None:
        """Release all blocks of a request. Blocks in the tree stay cached. `clock`: the sequence number of the record
        that reports the release."""
        if request.node is not None:
            self.tree.unlock(request.node, clock)
        # Release the last block first: the free list is a stack, so a later request gets the blocks in their old order.
        self.allocator.release(reversed(request.table))
        self._copies.release(request)
        for side in self.sides:
            side.release(request)
        request.state_at = OWN
        request.table = []
        request.node = None
        request.shared_blocks = request.planned = 0

    def forget(self, leaf: Node) -> None:
        """Evict this leaf and its unused ancestors, because their contents may be wrong."""
        for node in list(leaf.path()):
            if node.evictable:
                self.tree.drop(node, "its request failed")

    def clear(self) -> int:
        """Evict every block that no request holds; return how many. Later cache misses do not name these evictions."""
        freed = self.tree.evict(self.allocator.num_cached, CLEARED)
        for side in self.sides:
            side.clear(CLEARED)
        self.tree.evicted.clear()
        return freed

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless holders, tables, tree and counts all agree."""
        holders = [0] * self.allocator.num_blocks
        users: dict[int, int] = dict.fromkeys(self.tree.nodes, 0)
        for request in requests:
            for block in request.table:
                holders[block] += 1
            path = list(request.node.path())[::-1] if request.node is not None else []
            for node in path:
                users[node.id] += 1
            blocks = [block for node in path for block in node.blocks]
            keys = [key for node in path for key in node.keys]
            assert blocks == request.table[: request.shared_blocks], f"r{request.id}: table and path differ"
            assert keys == self._keys(request, 0, len(keys)), f"r{request.id}: its tokens differ from the path's"
            assert request.planned <= len(request.table) * self.block_size, f"r{request.id}: table too short"
            for block in request.table[request.shared_blocks :]:
                assert not self.allocator.in_tree(block), f"r{request.id}: private block {block} is in the tree"
        for block in range(self.allocator.num_blocks):
            kept = self.allocator.holders(block)
            assert kept == holders[block], f"block {block}: {kept} holders counted, {holders[block]} found"
        for node in self.tree.nodes.values():
            if node is not self.tree.root:
                found = users[node.id]
                assert node.users == found, f"node {node.id}: {node.users} users counted, {found} found"
        self.allocator.check()
        self.tree.check()
        for side in self.sides:
            held = [page for request in requests for page in side.held(request).values()]
            faults = [*side.pool.check(held)]
            assert not faults, faults
            assert all(map(self.allocator.in_tree, side.pool.kept)), f"{side.group.name} is kept for other blocks"


def _arrays(changes: Changes) -> TableChanges:
    """Returns changes to a block table as arrays, and forgets them."""
    if not changes:
        return NO_CHANGES
    places, blocks = np.fromiter(changes, np.int64), np.fromiter(changes.values(), np.int32)
    changes.clear()
    return TableChanges((places >> 32).astype(np.int32), places.astype(np.int32), blocks)


KEPT = 1 << 16  # texts


class Copies:
    """Gives the full blocks of requests numbers: two blocks have the same number if their texts are equal.

    It is used while the prefix cache is off. With it, the tree finds such blocks, and requests share one of them.

    The record of a block has the number and not the hash of its text, because a hash would let a viewer test guesses of
    a hidden text.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        # Hash of a text -> [its number, the number of blocks that hold the text]. Texts that no block holds stay
        # until there are KEPT of them: a text that comes again has its number again.
        self._of: dict[int, list[int]] = {}
        self._unheld: dict[int, None] = {}

    def add(self, request: Request, end: int, size: int) -> list[int]:
        """Number the request's blocks up to block `end`, which are full; return the new numbers."""
        ids, prefixes = request.ids, request.prefixes
        start = len(prefixes)
        for i in range(start, end):
            prefix = hash((prefixes[-1] if i else 0, tuple(ids[i * size : (i + 1) * size])))
            prefixes.append(prefix)
            entry = self._of.get(prefix)
            if entry is None:
                entry = self._of[prefix] = [next(self._numbers), 0]
            self._unheld.pop(prefix, None)
            entry[1] += 1
            request.contents.append(entry[0])
        return request.contents[start:]

    def release(self, request: Request) -> None:
        """Forget the blocks of a request."""
        for prefix in request.prefixes:
            entry = self._of[prefix]
            entry[1] -= 1
            if not entry[1]:
                self._unheld[prefix] = None
        while len(self._unheld) > KEPT:
            oldest = next(iter(self._unheld))
            del self._of[oldest], self._unheld[oldest]
        request.prefixes, request.contents = [], []
