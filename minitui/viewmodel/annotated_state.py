"""The engine's state; also, for each block, when it last changed and how many prompt tokens it saved from computation.

All these values are folded from records. Folding only the records up to a moment gives the values at that moment.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np

from engine.trace.records import Record
from engine.trace.state import State
from engine.trace.views import ACTIVE, CACHED, FREE, SHARED, NodeView, RequestView
from minitui.viewmodel.last_tables import LastTable, LastTables

STATE_NAMES = {FREE: "free", ACTIVE: "active", SHARED: "shared", CACHED: "cached"}
LONG_AGO = -1e9
# Kinds of records: those written while a step is planned, and those that the history does not need.
_PLANNING = frozenset({"admit", "hold", "match", "alloc", "evict", "preempt", "wait", "draft", "step"})
_NOT_IN_HISTORY = frozenset(
    {"alloc", "hold", "insert", "extend", "store", "split", "merge", "full", "settle", "withdraw", "order"}
)
_ALLOC, _EXTEND, _INSERT, _SETTLE, _HOLD, _MATCH, _SPLIT, _MERGE, _EVICT, _STORE, _WITHDRAW = (
    State.CHANGES[kind]
    for kind in ("alloc", "extend", "insert", "settle", "hold", "match", "split", "merge", "evict", "store", "withdraw")
)
EVICTED_IDS_KEPT = 40  # token ids that are kept per eviction, from the first: the event quotes their text


# Sequence number, engine time and kind of a record, request (for "evict": node), blocks. A flat tuple of numbers and
# texts: thousands are kept, and the garbage collector does not visit such tuples.
BlockEvent = tuple[Any, ...]


class AnnotatedState:
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
        cannot read from the state later: for "evict", the first evicted token ids as int32; for "match", the request
        that still computes the matched blocks, if any; for "finish", "preempt" and "requeue", (tokens with KV, blocks)
        that the request had."""
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

    def _alloc(self, record: Record) -> None:
        _ALLOC(self.state, record)
        seq, t, _kind, request, blocks = record
        self.block_events.append((seq, t, "alloc", request, *blocks))
        changed, saved, born = self._changed, self._saved, self._born
        for block in blocks:  # the block has saved no tokens for its new owner yet
            changed[block] = t
            saved[block] = 0
            born[block] = seq

    def _extend(self, record: Record) -> None:
        _EXTEND(self.state, record)
        # The node of a growing reply is not highlighted, so node_changed is not set.
        if record[7] >= 0:
            writers, request = self._writers, record[4]
            for block in record[6]:
                writers[block] = request

    def _insert(self, record: Record) -> None:
        _seq, t, _kind, node, _parent, request, _ids, blocks, step = record
        _INSERT(self.state, record)
        self.node_changed[node] = t
        if step >= 0:
            self._writers.update(dict.fromkeys(blocks, request))

    def _settle(self, record: Record) -> None:
        _SETTLE(self.state, record)
        if self._writers:
            pending = self.state.pending
            self._writers = {b: r for b, r in self._writers.items() if b in pending} if pending else {}

    def _touch(self, blocks: Iterable[int], t: float) -> None:
        changed = self._changed
        for block in blocks:
            changed[block] = t

    def _hold(self, record: Record) -> None:
        request = self.state.requests[record[3]]
        start, dropped = request.shared_blocks, record[5]
        self._touch(request.table[start : start + dropped], record[1])
        _HOLD(self.state, record)
        held = request.table[start : request.shared_blocks]
        self._touch(held, record[1])
        if held:
            self.block_events.append((record[0], record[1], "hold", record[3], *held))
        self.node_changed[record[4]] = record[1]

    def _match(self, record: Record) -> int | None:
        _MATCH(self.state, record)
        tokens = record[4]
        if tokens <= 0:
            return None
        request = self.state.requests[record[3]]
        size = self.state.block_size
        whole, rest = divmod(tokens, size)
        end = request.shared_blocks
        taken = request.table[end - whole : end]
        writer = next((self._writers[b] for b in taken if b in self._writers), None) if self._writers else None
        if request.preemptions:
            return writer
        saved = self._saved
        for block in taken:
            saved[block] += size
        if rest and end > whole:
            saved[request.table[end - whole - 1]] += rest
        return writer

    def _release(self, record: Record) -> tuple[int, int]:
        request = self.state.requests[record[3]]
        self._touch(request.table, record[1])
        self.block_events.append((*record[:4], *request.table))
        released = self.state.computed(request), len(request.table)
        if record[2] == "finish":
            self.last_tables.add(
                request.group, LastTable(request.id, request.table, self.state.computed(request), record[0])
            )
        State.CHANGES[record[2]](self.state, record)
        return released

    def _store(self, record: Record) -> None:
        _STORE(self.state, record)
        self._touch(record[6], record[1])
        self.node_changed[record[3]] = record[1]

    def _split(self, record: Record) -> None:
        _SPLIT(self.state, record)
        self.node_changed[record[4]] = record[1]

    def _merge(self, record: Record) -> None:
        _MERGE(self.state, record)
        kept, gone = sorted(record[3:])
        self.merged[gone] = kept
        if gone in self.node_changed:
            self.node_changed[kept] = max(self.node_changed.pop(gone), self.node_changed.get(kept, LONG_AGO))

    def _evict(self, record: Record) -> bytes:
        seq, t, _kind, id, n, _reason = record
        state, changed = self.state, self._changed
        node = state.nodes[id]
        start = (len(node.blocks) - n) * state.block_size
        # Thousands of evictions are kept: bytes need less memory than a list, and the garbage collector ignores them.
        ids = node.ids[start : start + EVICTED_IDS_KEPT].tobytes()
        evicted = _EVICT(state, record)
        for block in evicted:
            changed[block] = t
        self.block_events.append((seq, t, "evict", id, *evicted))
        if not start:
            self.node_changed.pop(id, None)
        return ids

    def _withdraw(self, record: Record) -> None:
        for node, keep in record[4]:
            self._touch(self.state.nodes[node].blocks[keep:], record[1])
            if not keep:
                self.node_changed.pop(node, None)
        _WITHDRAW(self.state, record)

    OWN: ClassVar[dict[str, Callable[[Any, Record], Any]]] = {
        "alloc": _alloc, "evict": _evict, "extend": _extend, "insert": _insert, "settle": _settle,
        "hold": _hold, "match": _match, "finish": _release, "preempt": _release, "requeue": _release,
        "store": _store, "split": _split, "merge": _merge, "withdraw": _withdraw,
    }  # fmt: skip

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
        other.node_changed = dict(self.node_changed)
        other._writers = dict(self._writers)
        other.last_tables = self.last_tables.copy()
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
        AnnotatedState.OWN.get(kind, State.CHANGES.get(kind)), kind in AnnotatedState.OWN, kind in _PLANNING,
        kind not in _NOT_IN_HISTORY,
    )
    for kind in {*State.CHANGES, *_PLANNING}
}  # fmt: skip
