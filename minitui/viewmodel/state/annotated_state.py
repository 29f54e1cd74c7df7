"""The engine's state; also, for each block, when it last changed and how many prompt tokens it saved from computation.
All these values are folded from records. Folding only the records up to a moment gives the values at that moment."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.trace import kinds
from engine.trace.kind import CHANGES, KINDS, Reader, Record
from engine.trace.state import State
from engine.trace.views import ACTIVE, CACHED, FREE, SHARED, NodeView, RequestView
from minitui.trace.foreign import Store

GROUPS_KEPT = 512
EVICTIONS_KEPT = 3
REUSES_KEPT = 16  # matches of which the blocks are kept
LAST_BLOCKS_KEPT = 4_000_000  # blocks in all kept tables together


@dataclass(frozen=True, slots=True)
class LastTable:
    """The block table of the last request of a group, when this request finished (record `seq`)."""

    request: int
    table: list[int]
    computed: int
    seq: int


class LastTables:
    """The last tables by group. If there are too many, those of the requests that finished first are forgotten."""

    def __init__(self) -> None:
        self._tables: dict[str, LastTable] = {}  # in the order in which the requests finished
        self._blocks = 0  # in all tables

    def __iter__(self) -> Iterator[LastTable]:
        return iter(self._tables.values())

    def get(self, group: str) -> LastTable | None:
        return self._tables.get(group)

    def add(self, group: str, last: LastTable) -> None:
        self._forget(group)  # so that the new entry becomes the last
        self._tables[group] = last
        self._blocks += len(last.table)
        while len(self._tables) > GROUPS_KEPT or self._blocks > LAST_BLOCKS_KEPT:
            self._forget(next(iter(self._tables)))

    def copy(self) -> LastTables:
        other = LastTables()
        other._tables, other._blocks = dict(self._tables), self._blocks
        return other

    def _forget(self, group: str) -> None:
        last = self._tables.pop(group, None)
        if last is not None:
            self._blocks -= len(last.table)


STATE_NAMES = {FREE: "free", ACTIVE: "active", SHARED: "shared", CACHED: "cached"}
LONG_AGO = -1e9
# Kinds of records: those written while a step is planned, and those that the history does not need.
_PLANNING = frozenset({"admit", "hold", "match", "alloc", "evict", "preempt", "wait", "draft", "step"})
_NOT_IN_HISTORY = frozenset(
    {"alloc", "hold", "insert", "extend", "store", "split", "merge", "full", "settle", "withdraw", "order"}
)
EVICTED_IDS_KEPT = 40  # token ids that are kept per eviction, from the first: the event quotes their text


@dataclass(frozen=True, slots=True)
class Eviction:
    """The blocks that an eviction took from the end of a node. `t`: engine time. `ids`: the first token ids (int32)."""

    t: float
    node: int
    parent: int
    tokens: int
    ids: bytes


# Sequence number, engine time and kind of a record, request (for "evict": node), blocks. A flat tuple of numbers and
# texts: thousands are kept, and the garbage collector does not visit such tuples.
BlockEvent = tuple[Any, ...]


class AnnotatedState(Reader):
    """A State and two values for each block. `changed`: the engine time at which the block was last allocated, held,
    released or evicted. `saved`: the prompt tokens that new requests did not compute because the block was in the tree;
    what a preempted request takes again saves nothing that the request had not computed itself."""

    def __init__(self, state: State) -> None:
        n = state.num_blocks
        self.state = state
        # `array`, not numpy: writing one element of a numpy array takes three times as long.
        self._changed = array("d", [LONG_AGO]) * n
        self._saved = array("q", [0]) * n
        self._born = array("q", [0]) * n  # seq of each block's last `alloc` record
        self._maker = array("q", [-1]) * n  # the request of this record
        self.reuses: deque[tuple[float, list[int]]] = deque(maxlen=REUSES_KEPT)  # (engine time, reused blocks)
        self.evicted: deque[Eviction] = deque(maxlen=EVICTIONS_KEPT)
        self.node_changed: dict[int, float] = {}
        self.merged: dict[int, int] = {}  # a node that was merged with another -> the node that is left of both
        self.block_events: list[BlockEvent] = []  # since the last call of `fold` by the view, which takes them
        self._writers: dict[int, int] = {}  # pending block -> the request that computes it
        self.step_began = LONG_AGO  # engine time of the first record of the last step
        self._between_steps = True
        self.last_tables = LastTables()
        self._codes = np.zeros(n, np.uint8)
        self._coded_at = -1

    # ---- folding

    def fold(self, records: Iterable[Record]) -> list[tuple[Record, Any]]:
        """Apply records that follow the state without a gap. Returns the records that the history needs, with what it
        cannot read from the state later: for "submit", the request; for "evict", the first evicted token ids as int32;
        for "match", (the request that still computes the matched blocks, the request that computed the last of them),
        -1 for none; for "finish", "preempt" and "requeue", (tokens with KV, blocks) that the request had."""
        state, changes = self.state, _CHANGES
        between_steps, expected = self._between_steps, state.seq
        kept: list[tuple[Record, Any]] = []
        for record in records:
            expected += 1
            seq, state.t, kind = record[:3]
            if seq != expected:
                raise ValueError(f"record {seq} does not follow record {expected - 1}: a snapshot is needed")
            state.seq = seq
            change, of_own, planning, in_history = changes.get(kind, _NO_CHANGE)
            if between_steps:
                if planning:
                    self.step_began, between_steps = state.t, False
            elif kind == "time":
                between_steps = True
            found = None if change is None else change(self if of_own else state, record)
            if in_history:
                kept.append((record, found))
        self._between_steps = between_steps
        return kept

    def on_alloc(self, seq: int, t: float, request: int, blocks: list[int]) -> None:
        kinds.Alloc.apply(self.state, request, blocks)
        self.block_events.append((seq, t, "alloc", request, *blocks))
        changed, saved, born, maker = self._changed, self._saved, self._born, self._maker
        for block in blocks:  # the block has saved no tokens for its new owner yet
            changed[block] = t
            saved[block] = 0
            born[block] = seq
            maker[block] = request

    def on_extend(self, node: int, request: int, ids: list[int], blocks: list[int], step: int) -> None:
        kinds.Extend.apply(self.state, node, request, ids, blocks, step)
        # The node of a growing reply is not highlighted, so node_changed is not set.
        if step >= 0:
            writers = self._writers
            for block in blocks:
                writers[block] = request

    def on_insert(
        self, t: float, node: int, parent: int, request: int, ids: list[int], blocks: list[int], step: int
    ) -> None:
        kinds.Insert.apply(self.state, node, parent, request, ids, blocks, step)
        self.node_changed[node] = t
        if step >= 0:
            self._writers.update(dict.fromkeys(blocks, request))

    def on_settle(self, step: int) -> None:
        kinds.Settle.apply(self.state, step)
        if self._writers:
            pending = self.state.pending
            self._writers = {b: r for b, r in self._writers.items() if b in pending} if pending else {}

    def _touch(self, blocks: Iterable[int], t: float) -> None:
        changed = self._changed
        for block in blocks:
            changed[block] = t

    def on_hold(self, seq: int, t: float, request: int, node: int, dropped: int) -> None:
        holder = self.state.requests[request]
        start = holder.shared_blocks
        self._touch(holder.table[start : start + dropped], t)
        kinds.Hold.apply(self.state, request, node, dropped)
        held = holder.table[start : holder.shared_blocks]
        self._touch(held, t)
        if held:
            self.block_events.append((seq, t, "hold", request, *held))
        self.node_changed[node] = t

    def on_match(self, t: float, request: int, tokens: int, stop: str, at: int, detail: str) -> tuple[int, int] | None:
        kinds.Match.apply(self.state, request, tokens, stop, at, detail)
        if tokens <= 0:
            return None
        holder = self.state.requests[request]
        size = self.state.block_size
        whole, rest = divmod(tokens, size)
        end = holder.shared_blocks
        taken = holder.table[end - whole : end]
        writer = next((self._writers[b] for b in taken if b in self._writers), -1) if self._writers else -1
        found = writer, self._maker[taken[-1]] if taken else -1
        if holder.preemptions:
            return found
        self.reuses.append((t, taken))
        saved = self._saved
        for block in taken:
            saved[block] += size
        if rest and end > whole:
            saved[holder.table[end - whole - 1]] += rest
        return found

    def on_finish(self, seq: int, t: float, kind: str, request: int) -> tuple[int, int]:
        view = self.state.requests[request]
        self._touch(view.table, t)
        self.block_events.append((seq, t, kind, request, *view.table))
        released = self.state.computed(view), len(view.table)
        if kind == "finish":
            self.last_tables.add(view.group, LastTable(request, view.table, released[0], seq))
        KINDS[kind].apply(self.state, request)
        return released

    on_preempt = on_requeue = on_finish

    def on_store(self, t: float, node: int, parent: int, ids: list[int], blocks: list[int]) -> None:
        Store.apply(self.state, node, parent, ids, blocks)
        self._touch(blocks, t)
        self.node_changed[node] = t

    def on_split(self, t: float, node: int, upper: int, blocks: int) -> None:
        kinds.Split.apply(self.state, node, upper, blocks)
        self.node_changed[upper] = t

    def on_merge(self, upper: int, lower: int) -> None:
        kinds.Merge.apply(self.state, upper, lower)
        kept, gone = sorted((upper, lower))
        self.merged[gone] = kept
        if gone in self.node_changed:
            self.node_changed[kept] = max(self.node_changed.pop(gone), self.node_changed.get(kept, LONG_AGO))

    def on_evict(self, seq: int, t: float, node: int, blocks: int) -> bytes:
        state, changed = self.state, self._changed
        view = state.nodes[node]
        start = (len(view.blocks) - blocks) * state.block_size
        # Thousands of evictions are kept: bytes need less memory than a list, and the garbage collector ignores them.
        ids = view.ids[start : start + EVICTED_IDS_KEPT].tobytes()
        self.evicted.append(Eviction(t, node, view.parent, len(view.ids) - start, ids))
        evicted = kinds.Evict.apply(state, node, blocks)
        for block in evicted:
            changed[block] = t
        self.block_events.append((seq, t, "evict", node, *evicted))
        if not start:
            self.node_changed.pop(node, None)
        return ids

    def on_withdraw(self, t: float, step: int, nodes: list[tuple[int, int]]) -> None:
        for node, keep in nodes:
            self._touch(self.state.nodes[node].blocks[keep:], t)
            if not keep:
                self.node_changed.pop(node, None)
        kinds.Withdraw.apply(self.state, step, nodes)

    # ---- reading

    @property
    def holders(self) -> np.ndarray:
        """int32 [num_blocks]: the number of requests that hold each block. Shares the state's memory: do not write."""
        return np.frombuffer(self.state.holders, np.int32)

    @property
    def node_of(self) -> np.ndarray:
        """int32 [num_blocks]: the tree node of each block, 0 for none. Shares the state's memory: do not write."""
        return np.frombuffer(self.state.node_of, np.int32)

    @property
    def changed(self) -> np.ndarray:
        """float64 [num_blocks]: engine time at which each block was last allocated, held, released or evicted."""
        return np.frombuffer(self._changed, np.float64)

    @property
    def saved(self) -> np.ndarray:
        """int64 [num_blocks]: prompt tokens that were not computed because the block was in the tree. Do not write."""
        return np.frombuffer(self._saved, np.int64)

    @property
    def codes(self) -> np.ndarray:
        """uint8 [num_blocks]: FREE, ACTIVE, SHARED or CACHED."""
        if self._coded_at != self.state.seq:
            self._coded_at = self.state.seq
            holders = self.holders
            self._codes = np.where(
                holders > 1, SHARED, np.where(holders == 1, ACTIVE, np.where(self.node_of > 0, CACHED, FREE))
            ).astype(np.uint8)
        return self._codes

    def copy(self) -> AnnotatedState:
        """Returns an independent copy."""
        other = AnnotatedState(self.state.copy())
        other._changed, other._saved, other._born = self._changed[:], self._saved[:], self._born[:]
        other._maker, other.reuses = self._maker[:], self.reuses.copy()
        other.node_changed = dict(self.node_changed)
        other._writers = dict(self._writers)
        other.last_tables = self.last_tables.copy()
        other.evicted = self.evicted.copy()
        other.step_began, other._between_steps = self.step_began, self._between_steps
        return other

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Numbers of (free, active, shared, cached) blocks, as the allocator counts them; their sum is `total`."""
        free, active, shared, cached = self.state.counts
        return free, active, shared, cached

    @property
    def total(self) -> int:
        """Blocks in the pool, without the null block."""
        return self.state.num_blocks - 1

    @property
    def used(self) -> float:
        """The share of the pool that holds data."""
        return (self.total - self.state.counts[0]) / self.total

    def filling(self) -> list[int]:
        """Returns the partly filled blocks: each receives the next token of a running request."""
        size = self.state.block_size
        found = []
        for request in self.state.requests.values():
            computed = self.state.computed(request)
            if computed % size and computed // size < len(request.table):
                found.append(request.table[computed // size])
        return found

    def fate(self, block: int, since: int) -> str:
        """Returns the present use of a block that a request released at record `since`: "cached" (in the tree, not
        held by a request), "held" (in the tree and held), "free", or "reused" (allocated again for other tokens)."""
        if self._born[block] > since:
            return "reused"
        if not self.state.node_of[block]:
            return "free"
        return "held" if self.state.holders[block] else "cached"

    def holders_of(self, block: int) -> list[RequestView]:
        """Returns the requests whose block table contains this block, in order of id."""
        return [r for r in self.state.requests.values() if block in r.table]

    def users_of(self, node: int) -> list[RequestView]:
        """Returns the requests whose path includes this node."""
        nodes = self.state.nodes
        found = []
        for request in self.state.requests.values():
            at = request.node
            while at > 0:
                if at == node:
                    found.append(request)
                    break
                at = nodes[at].parent
        return found

    def saved_by(self, node: NodeView) -> int:
        """Returns the number of prompt tokens that requests took from this node instead of computing them."""
        return int(self.saved[node.blocks].sum()) if node.blocks else 0


# Kind of record -> (its change; whether this is a method of AnnotatedState, not of State; whether records of this kind
# are written while a step is planned; whether the history needs them).
_NO_CHANGE: tuple[Callable[[Any, Record], Any] | None, bool, bool, bool] = (None, False, False, True)
_CHANGES = {
    kind: (
        AnnotatedState.READS.get(kind, CHANGES.get(kind)), kind in AnnotatedState.READS, kind in _PLANNING,
        kind not in _NOT_IN_HISTORY,
    )
    for kind in KINDS
}
