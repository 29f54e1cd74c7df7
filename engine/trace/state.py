"""The engine's state, computed from a snapshot and the records after it. Panels, traces and servers read only this.

`State.snapshot()` is equal to `Engine.snapshot()` at the same record; a property test compares them. What each kind of
record changes is in engine/trace/kinds.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from operator import attrgetter
from typing import Any

from engine.trace.kind import CHANGES, Bound, Record
from engine.trace.runs import blocks_of, runs_of
from engine.trace.side_pool import GROUP, SideGroup, SidePool, new_pool
from engine.trace.views import (
    ACTIVE,
    BLOCKS,
    CACHED,
    FREE,
    NODE,
    REQUEST,
    SHARED,
    WASTE,
    NodeView,
    RequestView,
    Waste,
)

CONTROL = ("seq", "t", "step", "eviction_policy", "gate", "pace")  # fields of State and of a snapshot
SIZES = ("num_blocks", "block_size", "budget", "max_num_seqs")
_REQUEST_FIELDS, _NODE_FIELDS = (attrgetter(*(each.name for each in fields(view))) for view in (RequestView, NodeView))


class State:
    """The state after a record. `counts` is kept up to date, so that reading it takes O(1)."""

    def __init__(self, num_blocks: int, block_size: int, budget: int, max_num_seqs: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size  # the null block included
        self.budget, self.max_num_seqs = budget, max_num_seqs
        self.seq = 0
        self.t = 0.0
        self.step = -1
        self.ticks = 0  # number of steps applied; each advances every member of the decoding set by one token
        self.requests: dict[int, RequestView] = {}
        self.queue: list[int] = []
        self.nodes: dict[int, NodeView] = {0: NodeView(0, -1, array("i"), [], 0, 0)}
        self.pending: dict[int, int] = {}  # block -> the step that writes it
        self.holders = array("i", [0]) * num_blocks  # block -> its requests; an array: numpy views it without a copy
        self.node_of = array("i", [0]) * num_blocks  # block -> its tree node; 0: not in the tree
        self.copies: dict[int, list[int]] = {}  # block of a node -> its copies, the oldest first
        # The free blocks; an allocation takes the last of them. None: unknown (an older recording, or vLLM).
        self.free: list[int] | None = list(range(num_blocks - 1, 0, -1))
        self.counts = [num_blocks - 1, 0, 0, 0]  # number of blocks that are FREE, ACTIVE, SHARED, CACHED
        self.groups: list[SidePool] = []  # the side groups; most models have none
        self.waste: Waste | None = Waste()  # None: not counted (an older recording, or vLLM)
        self.eviction_policy = "lru"
        self.gate = "open"
        self.pace = 1.0

    # ---- applying records

    def apply(self, record: Record) -> None:
        """Apply the next record; raise ValueError if records before it are missing."""
        seq, self.t, kind = record[:3]
        if seq != self.seq + 1:
            raise ValueError(f"record {seq} does not follow record {self.seq}: a snapshot is needed")
        self.seq = seq
        change = CHANGES.get(kind)
        if change is not None:
            change(self, record)

    def apply_all(self, records: Iterable[Record]) -> None:
        """Apply records in order; raise ValueError as `apply` does."""
        for record in records:
            self.apply(record)

    # ---- reading

    def computed(self, request: RequestView) -> int:
        """Returns the number of this request's tokens with KV, including the tokens of the step in flight."""
        return request.base + (self.ticks - request.joined_at if request.joined_at >= 0 else 0)

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

    def blocks_below(self, above: int, node: int) -> int | None:
        """Returns the number of blocks on the path from below `above` to `node`; None if `node` is not below it."""
        blocks = 0
        while node and node != above:
            blocks += len(self.nodes[node].blocks)
            node = self.nodes[node].parent
        return blocks if node == above else None

    # ---- changes, for engine/trace/kinds.py

    def hold_blocks(self, blocks: Iterable[int]) -> None:
        """Count one more holder of each block."""
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

    def release_blocks(self, blocks: Iterable[int]) -> None:
        """Count one holder less of each block."""
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

    def leave_tree(self, blocks: Sequence[int]) -> None:
        """Take blocks out of the tree; those without a holder become free."""
        node_of, holders, pending = self.node_of, self.holders, self.pending
        freed: list[int] = []
        for block in blocks:
            node_of[block] = 0
            if pending:
                pending.pop(block, None)
            if not holders[block]:
                freed.append(block)
        for pool in self.groups:
            pool.forget(blocks)
        if self.free is not None:
            self.free += freed
        self.counts[CACHED] -= len(freed)
        self.counts[FREE] += len(freed)

    def cut(self, id: int, keep: int) -> list[int]:
        """Remove the blocks of a leaf after the first `keep`. Returns them, without copies."""
        node = self.nodes[id]
        gone = node.blocks[keep:]
        self.leave_tree(gone)
        if self.copies:
            for block in gone:
                self.leave_tree(self.copies.pop(block, ()))
        if keep:
            del node.ids[keep * self.block_size :], node.blocks[keep:]
        else:
            self.nodes[node.parent].children.remove(id)
            del self.nodes[id]
        return gone

    def move_blocks(self, blocks: Iterable[int], node: int) -> None:
        """Note that blocks of the tree, and their copies, now belong to `node`."""
        for block in blocks:
            self.node_of[block] = node
            for copy in self.copies.get(block, ()):
                self.node_of[copy] = node
            for pool in self.groups:
                pool.move(block, node)

    def stop_decoding(self, request: RequestView) -> None:
        request.base = self.computed(request)
        request.joined_at = -1

    def release_all(self, request: RequestView) -> None:
        """Release the blocks, the node and the row of a request."""
        for view in self.path(request.node):
            view.users -= 1
            view.last_used = self.seq
        self.release_blocks(reversed(request.table))
        for pool, pages in zip(self.groups, request.side, strict=True):
            pool.release(pages.values())
            pages.clear()
        request.table, request.contents = [], []
        request.node = request.shared_blocks = request.base = 0
        request.joined_at = request.row = -1

    # ---- snapshots

    def copy(self) -> State:
        """Returns an independent copy."""
        other = State(self.num_blocks, self.block_size, self.budget, self.max_num_seqs)
        for name in (*CONTROL, "ticks"):
            setattr(other, name, getattr(self, name))
        for name in BLOCKS:
            setattr(other, name, {block: _own(value) for block, value in getattr(self, name).items()})
        other.queue, other.counts = list(self.queue), list(self.counts)
        other.waste = None if self.waste is None else replace(self.waste)
        other.free = None if self.free is None else list(self.free)
        other.holders, other.node_of = self.holders[:], self.node_of[:]
        other.groups = [pool.copy(other) for pool in self.groups]
        for id, n in self.nodes.items():
            node = other.nodes[id] = NodeView(*_NODE_FIELDS(n))
            node.ids, node.blocks, node.children = n.ids[:], n.blocks[:], n.children[:]
        for id, r in self.requests.items():
            request = other.requests[id] = RequestView(*_REQUEST_FIELDS(r))
            request.table, request.contents, request.side = r.table[:], r.contents[:], [dict(each) for each in r.side]
        return other

    def snapshot(self) -> dict[str, Any]:
        """Returns plain data, equal to `Engine.snapshot()` at the same sequence number."""
        requests = {
            r.id: _plain(r, REQUEST) | {"computed": self.computed(r), "decoding": r.joined_at >= 0}
            for r in self.requests.values()
        }
        blocks = {name: {block: _own(value) for block, value in getattr(self, name).items()} for name in BLOCKS}
        return {
            **{name: getattr(self, name) for name in CONTROL + SIZES},
            "queue": list(self.queue),
            "requests": requests,
            "nodes": {n.id: _plain(n, NODE) for n in self.nodes.values() if n.id},
            **{name: values for name, values in blocks.items() if values or not BLOCKS[name].later},
            **({} if self.free is None else {"free": runs_of(self.free)}),
            **({"groups": [pool.snapshot() for pool in self.groups]} if self.groups else {}),
            **({} if self.waste is None else {"waste": asdict(self.waste)}),
        }

    @classmethod
    def from_snapshot(cls, data: dict[str, Any]) -> State:
        """Returns the state of a snapshot. The next record to apply is the first record after the snapshot's `seq`.
        Fields that an older version did not write have their defaults."""
        state = cls(**{name: data[name] for name in SIZES})
        for name in CONTROL:
            setattr(state, name, data.get(name, getattr(state, name)))
        for name in BLOCKS:
            setattr(state, name, {block: _own(value) for block, value in data.get(name, {}).items()})
        state.queue = list(data["queue"])
        for id, n in data["nodes"].items():
            values = _fields(n, NODE) | {"ids": array("i", n["ids"])}
            state.nodes[id] = NodeView(id, **values)
            state.counts[FREE] -= len(n["blocks"])
            state.counts[CACHED] += len(n["blocks"])
            for block in n["blocks"]:
                state.node_of[block] = id
        for block, copies in state.copies.items():
            state.counts[FREE] -= len(copies)
            state.counts[CACHED] += len(copies)
            for copy in copies:
                state.node_of[copy] = state.node_of[block]
        for id in data["nodes"]:
            state.nodes[state.nodes[id].parent].children.append(id)
        for id, r in data["requests"].items():
            joined_at = 0 if r["decoding"] else -1
            state.requests[id] = RequestView(id, base=r["computed"], joined_at=joined_at, **_fields(r, REQUEST))
            state.hold_blocks(r["table"])
        for i, group in enumerate(data.get("groups", ())):
            held = [page for request in state.requests.values() for page in request.side[i].values()]
            pool = new_pool(SideGroup(**{name: group[name] for name in GROUP if name in group}), state)
            pool.fill(group, held)
            state.groups.append(pool)
        state.waste = Waste(**_fields(data["waste"], WASTE)) if "waste" in data else None
        state.free = blocks_of(data["free"]) if "free" in data else None
        return state


def _own(value: Any) -> Any:
    """Returns a value that can be changed without changing the original. In snapshots, sequences are lists, and a dict
    is the list of its pairs."""
    if isinstance(value, dict):
        return [list(pair) for pair in value.items()]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return list(map(_own, value))
    return list(value) if isinstance(value, (list, tuple, array)) else value


def _plain(view: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: _own(getattr(view, name)) for name in names}


def _fields(data: dict[str, Any], bounds: dict[str, Bound]) -> dict[str, Any]:
    """Returns the fields of a view from its part of a snapshot."""
    return {
        name: _own(data[name]) if bound.convert is None else bound.convert(data[name])
        for name, bound in bounds.items() if name in data
    }
