"""Follows vLLM's blocks: keeps minitui's state, and writes the records that change it.

vLLM identifies the content of a full block by a hash of the block and everything before it. It never replaces a block
of a request, so several blocks may have the same content: the tree refers to the first of them, the others are copies.
It does not evict; the cached content of a block is lost when the block is taken from the pool for other tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from engine.trace.records import Record
from engine.trace.state import State
from engine.trace.views import CACHED, FREE, NodeView
from minitui.vllm.side_groups import SideGroups
from minitui.vllm.tokens import Tokens

MOST_COMPARED = 64  # siblings that a missing block is compared with
MOST_GHOSTS = 8192  # evicted prefixes that are remembered
NOBODY = -1  # a request that never was
MOST_RECORDS = 200_000  # kept until they are drained


class Inconsistent(Exception):
    """A message does not fit the state."""


class Blocks:
    """Owns the state. `t`: the time of the next records, in seconds since the recording began."""

    def __init__(self, info: dict[str, Any]) -> None:
        self._sizes = (info["num_blocks"], info["block_size"], info["max_num_batched_tokens"], info["max_num_seqs"])
        self.size: int = info["block_size"]
        self.caching: bool = info["prefix_caching"]
        self.unit: int = info.get("hash_unit", self.size)  # tokens of one hash
        self._groups: list[dict[str, Any]] = info.get("side_groups", [])
        self._alignment: int = info.get("hit_alignment", self.size)
        self._predictable: bool = info.get("predictable_hits", False)  # the groups decide alone how long a hit is
        self.complete = True  # all that is cached in the other groups is known
        self.sides: SideGroups | None = None  # the other KV cache groups
        self.t = 0.0
        self.state = self._empty()
        self.counts: Counter[str] = Counter()  # records by kind
        self._records: list[Record] = []
        self._forget()

    def _empty(self) -> State:
        """Returns an empty state. vLLM takes blocks in another order, and does not report what it computes again."""
        state = State(*self._sizes)
        state.free = state.waste = None
        if self._groups:
            self.sides = SideGroups(state, self._groups, self.write)
        return state

    def _forget(self) -> None:
        self._next_node = 1
        self._hashes: dict[int, list[bytes]] = {0: []}  # node -> the hash of each of its blocks
        self._first: dict[bytes, int] = {}  # hash of the first block of a node -> the node
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()  # hash of an evicted block -> the step of its eviction
        self._pending: set[int] = set()  # steps with pending blocks
        self._faults: list[str] = []

    def begin_again(self, step: int) -> None:
        """Begin with an empty state; its record number leaves a gap."""
        seq = self.state.seq
        self.state = self._empty()
        self.state.seq, self.state.step, self.state.t = seq + 2, step, self.t
        self.complete = False  # vLLM knows cached blocks that no request holds
        self._forget()

    def write(self, kind: str, *fields: Any) -> None:
        """Append a record and apply it."""
        record = (self.state.seq + 1, self.t, kind, *fields)
        self.state.apply(record)
        self.counts[kind] += 1
        self._records.append(record)

    def drain(self) -> list[Record]:
        """Returns the records since the last call, at most the last MOST_RECORDS."""
        records, self._records = self._records, []
        return records[-MOST_RECORDS:]

    def take_faults(self) -> list[str]:
        """Returns where vLLM's prefix cache did not do what the tree predicts."""
        faults, self._faults = self._faults, []
        return faults

    @property
    def available(self) -> int:
        """The number of blocks that vLLM counts as free: it can take them for other tokens."""
        return self.state.counts[FREE] + self.state.counts[CACHED]

    # ---- requests

    def alloc(self, request: int, blocks: list[int]) -> None:
        """Append private blocks to a table."""
        state = self.state
        wrong = [block for block in blocks if state.holders[block] or state.node_of[block]]
        if wrong:
            raise Inconsistent(f"block {wrong[0]} is in use")
        if blocks:
            self.write("alloc", request, blocks)

    def take_new(self, request: int, blocks: list[int], others: list[list[int]] | None = None) -> None:
        """Append blocks that are taken from the pool to a table; `others`: to those of the other groups."""
        self.reuse(blocks, f"r{request} needs {len(blocks)}")
        self.alloc(request, blocks)
        if self.sides is not None and others:
            for pages in others:
                self.reuse([page for page in pages if page], f"r{request} needs a page")
            self.sides.take_new(request, others)

    def take_table(
        self, request: int, tokens: Tokens, computed: int, table: list[int], others: list[list[int]] | None = None
    ) -> None:
        """Give an admitted request its table, and in `others` those of the other groups. The first `computed` tokens
        are cached. The tree may not have them: vLLM cached them before the last `whole` message, or a connector loaded
        them."""
        whole = computed // self.size
        cut = self._cut(request, tokens, computed) if self.sides is not None and self.caching else None
        self.restore(request, tokens, table[:whole], whole)
        if self.sides is not None and others:
            new = [
                page for side, pages in zip(self.sides.all, others, strict=True)
                for page in pages[computed // side.size :] if page
            ]
            self.reuse([*table[whole:], *new], f"r{request} needs {len(table[whole:]) + len(new)}")
            self.alloc(request, table[whole:])
            self.sides.take_table(request, tokens, computed, others)
        else:
            self.take_new(request, table[whole:])
        if not self.caching:
            return
        stop, at, more = cut or (*self._reason(request, tokens, whole), "")
        self.write("match", request, computed, stop, at, f"{computed:,} of {len(tokens.ids):,} tokens{more}")

    def _cut(self, request: int, tokens: Tokens, computed: int) -> tuple[str, int, str] | None:
        """Returns the group that cut a hit short, as `stop`, `at` and the end of `detail` of a match record."""
        assert self.sides is not None
        depth, common, side = self.sides.explain(tokens, len(tokens.ids) - 1, self._alignment)
        if self._predictable and (common > computed or (self.complete and common < computed)):
            self._faults.append(f"r{request}: vLLM took {computed:,} tokens, its groups have {common:,}")
        return (side.group.kind, depth, f", cut by {side.group.name}") if side and computed < depth else None

    def restore(self, request: int, tokens: Tokens, table: list[int], cached: int) -> None:
        """Give a request its table in a new state. Its first `cached` blocks are cached."""
        node_of, i = self.state.node_of, 0
        while i < cached:
            known = bool(node_of[table[i]])
            end = next((j for j in range(i, cached) if bool(node_of[table[j]]) != known), cached)
            if known:
                self.write("hold", request, self._node_at(table[:end]), 0)
            else:
                self.alloc(request, table[i:end])
                self.publish(request, tokens, i, table[i:end], -1)
            i = end
        self.alloc(request, table[i:])

    def remember(self, tokens: Tokens, table: list[int]) -> None:
        """Put cached blocks into a new state; no request holds them."""
        if table:
            self.write("submit", NOBODY, "", 0, 0)
            self.write("admit", NOBODY, 0, "new")
            self.restore(NOBODY, tokens, table, len(table))
            self.write("finish", NOBODY, "stop", 0)

    def _node_at(self, blocks: list[int]) -> int:
        """Returns the node whose path has exactly these blocks; splits a node if necessary. vLLM takes the oldest of
        equal blocks. The tree may have a younger one: a `whole` message leaves out the cached blocks that no request
        holds, so vLLM knows older ones. Then the older block takes the younger one's place."""
        state = self.state
        node = state.node_of[blocks[-1]]
        path: list[int] = []
        for view in state.path(node):
            path[:0] = view.blocks
        if path[: len(blocks)] != [state.original_of(block) for block in blocks]:
            raise Inconsistent(f"the cached blocks {blocks[-3:]} are not a path of the tree")
        for own, block in zip(path, blocks, strict=False):
            if own != block:
                self.write("swap", block)
                self._renamed(block)
        last = state.nodes[node]
        rest = len(path) - len(blocks)
        return node if not rest else self._split(last, len(last.blocks) - rest)

    def _renamed(self, block: int) -> None:
        """A block has taken the place of one of its copies in the tree."""
        if self.sides is not None:
            node = self.state.node_of[block]
            self.sides.renamed(self._hashes[node][self.state.nodes[node].blocks.index(block)], block)

    def _split(self, node: NodeView, n: int) -> int:
        upper, self._next_node = self._next_node, self._next_node + 1
        self.write("split", node.id, upper, n)
        hashes = self._hashes[node.id]
        self._hashes[upper], self._hashes[node.id] = hashes[:n], hashes[n:]
        self._first[hashes[0]], self._first[hashes[n]] = upper, node.id
        return upper

    def _reason(self, request: int, tokens: Tokens, depth: int) -> tuple[str, int]:
        """Returns why the match ended: `stop` and `at` of a match record."""
        limit = (len(tokens.ids) - 1) // self.size
        if depth >= limit:
            return ("whole" if limit else "short"), depth * self.size
        following = tokens.hashes(depth + 1)[depth]
        if following in self._first and self.sides is None:
            self._faults.append(f"r{request}: vLLM took {depth} blocks, the tree has at least {depth + 1}")
        if following in self._ghosts:
            return "evicted", self._ghosts[following]
        start = depth * self.size
        key = tokens.ids[start : start + self.size]
        nodes, children = self.state.nodes, self.state.nodes[self.state.requests[request].node].children
        common = 0
        for child in children[:MOST_COMPARED]:
            ids = nodes[child].ids
            common = max(common, next((i for i, token in enumerate(key) if ids[i] != token), len(key)))
        stop = "differs" if common or (depth and children) else "ends" if depth else "empty"
        return stop, start + common

    # ---- the tree

    def publish(self, request: int, tokens: Tokens, start: int, blocks: list[int], step: int) -> None:
        """Cache full blocks of a request. `step`: writes them; -1: they are written."""
        state, size, end = self.state, self.size, start + len(blocks)
        view = state.requests[request]
        if view.shared_blocks != start or len(tokens.ids) < end * size:
            raise Inconsistent(
                f"r{request} caches blocks {start} to {end}, shares {view.shared_blocks}, has {len(tokens.ids)} tokens"
            )
        hashes, ids = tokens.hashes(end)[start:], tokens.ids[start * size : end * size]
        n = 0
        while n < len(blocks):
            child = self._first.get(hashes[n])
            if child is None:
                self._grow(request, blocks[n:], hashes[n:], ids[n * size :], step)
                return
            same = self._hashes[child]
            most = min(len(same), len(blocks) - n)
            k = next((i for i in range(most) if same[i] != hashes[n + i]), most)
            node = child if k == len(same) else self._split(state.nodes[child], k)
            self.write("copy", request, node, blocks[n : n + k])
            n += k

    def _grow(self, request: int, blocks: list[int], hashes: list[bytes], ids: list[int], step: int) -> None:
        node = self.state.requests[request].node
        view = self.state.nodes[node]
        if node and view.users == 1 and not view.children:
            self.write("extend", node, request, ids, blocks, step)
            self._hashes[node] += hashes
        else:
            leaf, self._next_node = self._next_node, self._next_node + 1
            self.write("insert", leaf, node, request, ids, blocks, step)
            self._hashes[leaf] = list(hashes)
            self._first[hashes[0]] = leaf
        if step >= 0:
            self._pending.add(step)
        if self.sides is not None:
            self.sides.appeared(request, hashes, blocks)

    def settle(self, step: int) -> None:
        """The blocks that this step writes are written."""
        if step in self._pending:
            self._pending.discard(step)
            self.write("settle", step)

    # ---- eviction

    def reuse(self, blocks: list[int], reason: str) -> None:
        """Evict the content of blocks that are taken from the pool."""
        node_of, run = self.state.node_of, 0  # run: blocks at the end of `node` to evict
        node = -1
        for block in blocks:
            if self.sides is not None and self.sides.uncache(block):
                continue
            at = node_of[block]
            if not at:
                continue
            view = self.state.nodes[at]
            if block in self.state.copies or (block not in view.blocks):
                self._evict(node, run, reason)
                node, run = -1, 0
                copies = self.state.copies.get(block)
                self.write("uncopy", block)
                if copies:
                    self._renamed(copies[0])
                continue
            if at == node and len(view.blocks) > run and view.blocks[-1 - run] == block:
                run += 1
                continue
            self._evict(node, run, reason)
            node, run = -1, 0
            view = self.state.nodes[at]
            if view.blocks[-1] == block and not view.children:
                node, run = at, 1
            else:
                self._evict_below(view, view.blocks.index(block), reason)
        if run:
            self._evict(node, run, reason)

    def _evict(self, node: int, n: int, reason: str) -> None:
        """Evict the last `n` blocks of a leaf."""
        if not n:
            return
        view, hashes = self.state.nodes[node], self._hashes[node]
        if view.users:
            raise Inconsistent(f"node {node} is evicted while it is in use")
        keep = len(view.blocks) - n
        self._ghosts[hashes[keep]] = self.state.step + 1
        self._ghosts.move_to_end(hashes[keep])
        if len(self._ghosts) > MOST_GHOSTS:
            self._ghosts.popitem(last=False)
        for block in view.blocks[keep:]:
            for copy in list(self.state.copies.get(block, ())):
                if self.state.holders[copy]:
                    raise Inconsistent(f"block {copy} is evicted while it is in use")
                self.write("uncopy", copy)
        first = hashes[0]
        if self.sides is not None:
            self.sides.vanished(hashes[keep:])
        del hashes[keep:]
        if not keep:
            del self._hashes[node], self._first[first]
        self.write("evict", node, n, reason or "vLLM removed it")

    def _evict_below(self, view: NodeView, keep: int, reason: str) -> None:
        """Evict the blocks of a node from index `keep` on, and everything below: no prefix leads there any more."""
        for child in list(view.children):
            self._evict_below(self.state.nodes[child], 0, reason)
        self._evict(view.id, len(view.blocks) - keep, reason)

    def clear(self, reason: str) -> None:
        """Evict everything that no request holds."""
        for child in list(self.state.nodes[0].children):
            view = self.state.nodes[child]
            if not view.users:
                self._evict_below(view, 0, reason)
        if self.sides is not None:
            self.sides.clear()
        self._ghosts.clear()
