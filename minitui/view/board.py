"""The engine's state with what a reader wants besides: when each block last changed, and what each has saved.

A board is folded from records like the state inside it, so a board of the past can be made by folding up to there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from engine.records import Record
from engine.state import ACTIVE, CACHED, FREE, SHARED, NodeView, RequestView, State

STATE_NAMES = {FREE: "free", ACTIVE: "active", SHARED: "shared", CACHED: "cached"}
LONG_AGO = -1e9
_PLANNING = frozenset({"admit", "hold", "match", "alloc", "evict", "preempt", "wait", "draft", "step"})
GROUPS_KEPT = 512
EVICTED_IDS_KEPT = 40  # of an evicted run of tokens, so that the event can quote it


@dataclass(frozen=True, slots=True)
class LastTable:
    """The block table of a group's last request, as it stood when that finished with record `seq`."""

    request: int
    table: list[int]
    computed: int
    seq: int


class Board:
    """A State and, by block: `changed` (engine seconds of its last change of hands) and `saved` (prompt tokens that
    were not computed because this block was in the tree)."""

    def __init__(self, state: State, saved: np.ndarray | None = None) -> None:
        n = state.num_blocks
        self.state = state
        self.changed = np.full(n, LONG_AGO)
        self.saved = np.zeros(n, np.int64) if saved is None else saved.copy()
        self.node_changed: dict[int, float] = {}
        self.evicted: dict[int, Sequence[int]] = {}  # seq of an evict record -> the first ids that left
        self.computing: dict[int, int] = {}  # seq of a match record -> the request still computing what it took
        self._writers: dict[int, int] = {}  # pending block -> the request that computes it
        self.step_began = LONG_AGO  # engine seconds at which the records of the last step began
        self._between_steps = True
        self.born = np.zeros(n, np.int64)  # seq of the record that last gave each block out
        self.last_tables: dict[str, LastTable] = {}  # by group
        self._anew: list[Record] = []  # alloc records since `saved` and `born` were last brought up to date
        self._touched: list[list[int]] = []
        self._touched_at: list[float] = []
        self._codes = np.zeros(n, np.uint8)
        self._coded_at = -1

    # ---- folding

    def fold(self, records: Iterable[Record]) -> None:
        """Apply records that follow the state without a gap."""
        apply, handlers, node_changed = self.state.apply, self._HANDLERS, self.node_changed
        touched, touched_at, anew = self._touched, self._touched_at, self._anew
        for record in records:
            kind = record[2]
            if self._between_steps and kind in _PLANNING:
                self.step_began, self._between_steps = record[1], False
            if kind == "alloc":  # the commonest, with evictions in a full pool
                apply(record)
                touched.append(record[4])
                touched_at.append(record[1])
                anew.append(record)
                continue
            handler = handlers.get(kind)
            if handler is not None:
                handler(self, record)
                continue
            apply(record)
            if kind == "time":
                self._between_steps = True
            elif kind == "extend":  # a reply that grows is no news: its node does not glow
                if record[7] >= 0:
                    self._writers.update(dict.fromkeys(record[6], record[4]))
            elif kind == "insert":
                node_changed[record[3]] = record[1]
                if record[8] >= 0:
                    self._writers.update(dict.fromkeys(record[7], record[5]))
            elif kind == "settle" and self._writers:
                pending = self.state.pending
                self._writers = {b: r for b, r in self._writers.items() if b in pending}
        if self._touched:
            self._settle()

    def _reset_saved(self) -> None:
        """A block that was given out anew has saved nothing yet."""
        if self._anew:
            blocks = np.fromiter(chain.from_iterable(record[4] for record in self._anew), np.int64)
            self.saved[blocks] = 0
            self.born[blocks] = np.repeat([r[0] for r in self._anew], [len(r[4]) for r in self._anew])
            self._anew.clear()

    def _settle(self) -> None:
        self._reset_saved()
        blocks = np.fromiter(chain.from_iterable(self._touched), np.int64)
        self.changed[blocks] = np.repeat(self._touched_at, [len(some) for some in self._touched])
        self._touched.clear()
        self._touched_at.clear()

    def _touch(self, blocks: list[int], record: Record) -> None:
        self._touched.append(blocks)
        self._touched_at.append(record[1])

    def _hold(self, record: Record) -> None:
        request = self.state.requests[record[3]]
        start, dropped = request.shared_blocks, record[5]
        gone = request.table[start : start + dropped]
        self.state.apply(record)
        self._touch(request.table[start : request.shared_blocks] + gone, record)
        self.node_changed[record[4]] = record[1]

    def _match(self, record: Record) -> None:
        self.state.apply(record)
        tokens = record[4]
        if tokens <= 0:
            return
        self._reset_saved()
        request = self.state.requests[record[3]]
        size = self.state.block_size
        whole, rest = divmod(tokens, size)
        end = request.shared_blocks
        if self._writers:
            writer = next((self._writers[b] for b in request.table[end - whole : end] if b in self._writers), None)
            if writer is not None:
                self.computing[record[0]] = writer
        self.saved[request.table[end - whole : end]] += size
        if rest and end > whole:
            self.saved[request.table[end - whole - 1]] += rest

    def _give_back(self, record: Record) -> None:
        request = self.state.requests[record[3]]
        self._touch(request.table, record)
        if record[2] == "finish":
            self.last_tables.pop(request.group, None)  # so that the dictionary is in order of time
            self.last_tables[request.group] = LastTable(
                request.id, request.table, self.state.computed(request), record[0]
            )
            if len(self.last_tables) > GROUPS_KEPT:
                del self.last_tables[next(iter(self.last_tables))]
        self.state.apply(record)

    def _split(self, record: Record) -> None:
        self.state.apply(record)
        self.node_changed[record[4]] = record[1]

    def _evict(self, record: Record) -> None:
        node = self.state.nodes[record[3]]
        keep = len(node.blocks) - record[4]
        start = keep * self.state.block_size
        self.evicted[record[0]] = node.ids[start : start + EVICTED_IDS_KEPT]
        self._touched.append(node.blocks[keep:])
        self._touched_at.append(record[1])
        self.state.apply(record)
        if not keep:
            self.node_changed.pop(record[3], None)

    def _withdraw(self, record: Record) -> None:
        for node, keep in record[4]:
            self._touch(self.state.nodes[node].blocks[keep:], record)
            if not keep:
                self.node_changed.pop(node, None)
        self.state.apply(record)

    _HANDLERS = {  # noqa: RUF012  a table of methods, never changed
        "hold": _hold, "match": _match, "finish": _give_back, "preempt": _give_back,
        "requeue": _give_back, "split": _split, "evict": _evict, "withdraw": _withdraw,
    }  # fmt: skip

    # ---- reading

    @property
    def holders(self) -> np.ndarray:
        """int32 [num_blocks]: how many requests hold each block. A view of the state: do not write."""
        return np.frombuffer(self.state.holders, np.int32)

    @property
    def node_of(self) -> np.ndarray:
        """int32 [num_blocks]: the node each block stands in, 0 for none. A view of the state: do not write."""
        return np.frombuffer(self.state.node_of, np.int32)

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

    def copy(self) -> Board:
        """An independent copy, to be folded further by itself."""
        other = Board(self.state.copy(), self.saved)
        other.changed = self.changed.copy()
        other.node_changed = dict(self.node_changed)
        other._writers = dict(self._writers)
        other.born, other.last_tables = self.born.copy(), dict(self.last_tables)
        other.step_began, other._between_steps = self.step_began, self._between_steps
        return other

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """(free, active, shared, cached) blocks, as the allocator counts them; their sum is `total`."""
        free, active, shared, cached = self.state.counts
        return free, active, shared, cached

    @property
    def total(self) -> int:
        """Blocks of the pool, without the null block."""
        return self.state.num_blocks - 1

    def filling(self) -> list[int]:
        """The blocks that are partly written: where the next token of each running request goes."""
        size = self.state.block_size
        found = []
        for request in self.state.requests.values():
            computed = self.state.computed(request)
            if computed % size and computed // size < len(request.table):
                found.append(request.table[computed // size])
        return found

    def fate(self, block: int, since: int) -> str:
        """What became of a block that a request gave back with record `since`: "cached" (the tree keeps it), "held"
        (it keeps it and somebody uses it again), "free", or "reused" (it holds other tokens now)."""
        if self.born[block] > since:
            return "reused"
        if not self.state.node_of[block]:
            return "free"
        return "held" if self.state.holders[block] else "cached"

    def holders_of(self, block: int) -> list[RequestView]:
        """The requests whose table has this block, in order of their ids."""
        return [r for r in self.state.requests.values() if block in r.table]

    def users_of(self, node: int) -> list[RequestView]:
        """The requests whose path runs through this node."""
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
        """Prompt tokens that requests took from this node instead of computing them."""
        return int(self.saved[node.blocks].sum()) if node.blocks else 0

    def path_ids(self, node: int) -> list[int]:
        """Token ids from the root to the end of this node."""
        parts = [view.ids for view in self.state.path(node)]
        return [token for ids in reversed(parts) for token in ids]
