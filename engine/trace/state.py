"""The engine's state, computed from a snapshot and the records after it. Panels, traces and servers read only this.

`State.snapshot()` is equal to `Engine.snapshot()` at the same record; a property test compares them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, replace
from operator import attrgetter
from typing import Any, ClassVar

from engine.trace.records import Record
from engine.trace.runs import blocks_of, runs_of
from engine.trace.tree_state import TreeState
from engine.trace.views import ACTIVE, CACHED, FREE, NodeView, RequestView, Waste

CONTROL = ("seq", "t", "step", "gate", "pace")  # fields of State and of a snapshot
SIZES = ("num_blocks", "block_size", "budget", "max_num_seqs")
REQUEST = (  # fields of RequestView and of a request in a snapshot
    "group", "prompt_tokens", "max_total", "state", "row", "node", "shared_blocks", "cached_tokens", "preemptions",
    "submitted", "admitted",
)  # fmt: skip


_FIELDS = attrgetter(*(each.name for each in fields(RequestView)))


class State(TreeState):
    """The state after a record."""

    def __init__(self, num_blocks: int, block_size: int, budget: int, max_num_seqs: int) -> None:
        super().__init__(num_blocks, block_size)
        self.budget, self.max_num_seqs = budget, max_num_seqs
        self.t = 0.0
        self.step = -1
        self.ticks = 0  # number of steps applied; each advances every member of the decoding set by one token
        self.requests: dict[int, RequestView] = {}
        self.queue: list[int] = []
        self.waste: Waste | None = Waste()  # None: not counted (an older recording, or vLLM)
        self.gate = "open"
        self.pace = 1.0

    # ---- reading

    def computed(self, request: RequestView) -> int:
        """Returns the number of this request's tokens with KV, including the tokens of the step in flight."""
        return request.base + (self.ticks - request.joined_at if request.joined_at >= 0 else 0)

    # ---- applying records

    def apply(self, record: Record) -> None:
        """Apply the next record; raise ValueError if records before it are missing."""
        seq, self.t, kind = record[:3]
        if seq != self.seq + 1:
            raise ValueError(f"record {seq} does not follow record {self.seq}: a snapshot is needed")
        self.seq = seq
        change = self.CHANGES.get(kind)
        if change is not None:
            change(self, record)

    def apply_all(self, records: Iterable[Record]) -> None:
        """Apply records in order; raise ValueError as `apply` does."""
        for record in records:
            self.apply(record)

    def _submit(self, record: Record) -> None:
        _, _, _, id, group, prompt_tokens, max_total = record
        self.requests[id] = RequestView(id, group, prompt_tokens, max_total, submitted=self.t)
        self.queue.append(id)

    def _order(self, record: Record) -> None:
        queue = record[3]
        self.queue[: len(queue)] = queue

    def _admit(self, record: Record) -> None:
        _, _, _, id, row, _ = record
        request = self.requests[id]
        request.state, request.row = "running", row
        request.admitted = request.admitted or self.t
        self.queue.remove(id)

    def _match(self, record: Record) -> None:
        _, _, _, id, tokens, stop, at, detail = record
        request = self.requests[id]
        before = request.base
        request.base += tokens
        if not request.preemptions:
            request.cached_tokens += min(request.base, request.prompt_tokens) - min(before, request.prompt_tokens)
            request.match = (stop, at, detail)

    def _alloc(self, record: Record) -> None:
        _, _, _, id, blocks = record
        self.requests[id].table += blocks
        holders, counts = self.holders, self.counts
        for block in blocks:  # free blocks: no holders, not in the tree
            holders[block] = 1
        if self.free is not None:
            del self.free[len(self.free) - len(blocks) :]
        counts[FREE] -= len(blocks)
        counts[ACTIVE] += len(blocks)

    def _hold(self, record: Record) -> None:
        _, _, _, id, node, dropped = record
        request = self.requests[id]
        new: list[int] = []
        held_node = request.node
        held = False
        for view in self.path(node):
            held = held or view.id == held_node
            if not held:
                view.users += 1
                new[:0] = view.blocks
            view.last_used = self.seq
        start, size = request.shared_blocks, self.block_size
        if self.waste is not None and dropped:
            self.waste.duplicate += max(0, min(dropped * size, self.computed(request) - start * size))
        released = request.table[start : start + dropped]
        request.table[start : start + dropped] = new
        self._hold_blocks(new)
        self._release_blocks(released)
        request.node = node
        request.shared_blocks = start + len(new)

    def _copy(self, record: Record) -> None:
        _, _, _, id, node, blocks = record
        request = self.requests[id]
        originals: list[int] = []
        for view in self.path(node):
            if view.id == request.node:
                break
            view.users += 1
            view.last_used = self.seq
            originals[:0] = view.blocks
        for original, block in zip(originals, blocks, strict=True):
            self.copies.setdefault(original, []).append(block)
            self.node_of[block] = self.node_of[original]
        request.node = node
        request.shared_blocks += len(blocks)

    def _grown(self, view: NodeView, request: int, ids: list[int], blocks: list[int], step: int) -> None:
        view.ids.fromlist(ids)
        view.blocks += blocks
        view.last_used = self.seq
        node_of, pending, node = self.node_of, self.pending, view.id
        for block in blocks:
            node_of[block] = node
            if step >= 0:
                pending[block] = step
        holder = self.requests[request]
        holder.node = view.id
        holder.shared_blocks += len(blocks)

    def _insert(self, record: Record) -> None:
        _, _, _, id, parent, request, ids, blocks, step = record
        view = self.nodes[id] = NodeView(id, parent, array("i"), [], 1, self.seq)
        self.nodes[parent].children.append(id)
        self._grown(view, request, ids, blocks, step)

    def _extend(self, record: Record) -> None:
        _, _, _, id, request, ids, blocks, step = record
        self._grown(self.nodes[id], request, ids, blocks, step)

    def _again(self, record: Record) -> None:
        if self.waste is not None:
            self.waste.evicted += record[4]

    def _full(self, record: Record) -> None:
        _, _, _, id, contents = record
        self.requests[id].contents += contents

    def _merge(self, record: Record) -> None:
        _, _, _, upper, lower = record
        id = self._merge_nodes(upper, lower)
        for request in self.requests.values():
            if request.node == lower:
                request.node = id

    def _step(self, record: Record) -> None:
        _, _, _, step, prefills, joined, left, _tokens, _waiting = record
        for id in left:
            self._stop_decoding(self.requests[id])
        for id in joined:
            self.requests[id].joined_at = self.ticks
        self.ticks += 1
        self.step = step
        for id, start, n, _samples in prefills:
            request = self.requests[id]
            request.base = start + n
            if request.lost > start and self.waste is not None:
                self.waste.preempted += min(n, request.lost - start)

    def _accept(self, record: Record) -> None:
        for id, _drafted, accepted in record[4]:
            self.requests[id].base += accepted

    def _stop_decoding(self, request: RequestView) -> None:
        request.base = self.computed(request)
        request.joined_at = -1

    def _release_all(self, request: RequestView) -> None:
        for view in self.path(request.node):
            view.users -= 1
            view.last_used = self.seq
        self._release_blocks(reversed(request.table))
        request.table, request.contents = [], []
        request.node = request.shared_blocks = request.base = 0
        request.joined_at = request.row = -1

    def _preempt(self, record: Record) -> None:
        id = record[3]
        request = self.requests[id]
        request.lost = max(request.lost, self.computed(request))
        self._release_all(request)
        request.state = "preempted"
        request.preemptions += 1
        self.queue.insert(0, id)

    def _finish(self, record: Record) -> None:
        id = record[3]
        request = self.requests.pop(id)
        self._release_all(request)
        if request.state != "running":
            self.queue.remove(id)

    def _gate(self, record: Record) -> None:
        self.gate = record[3]

    def _pace(self, record: Record) -> None:
        self.pace = record[3]

    CHANGES: ClassVar[dict[str, Callable[[Any, Record], Any]]] = {
        **TreeState.CHANGES,
        "submit": _submit, "order": _order, "admit": _admit, "match": _match, "preempt": _preempt, "requeue": _preempt,
        "finish": _finish, "alloc": _alloc, "hold": _hold, "copy": _copy, "insert": _insert, "extend": _extend,
        "again": _again, "full": _full, "merge": _merge, "step": _step, "accept": _accept, "gate": _gate, "pace": _pace,
    }  # kind of record -> its change, called with the state and the record

    # ---- snapshots

    def copy(self) -> State:
        """Returns an independent copy."""
        other = State(self.num_blocks, self.block_size, self.budget, self.max_num_seqs)
        for name in (*CONTROL, "ticks"):
            setattr(other, name, getattr(self, name))
        other.queue, other.pending, other.counts = list(self.queue), dict(self.pending), list(self.counts)
        other.copies = {block: copies[:] for block, copies in self.copies.items()}
        other.waste = None if self.waste is None else replace(self.waste)
        other.free = None if self.free is None else list(self.free)
        other.holders, other.node_of = self.holders[:], self.node_of[:]
        other.nodes = {
            n.id: NodeView(n.id, n.parent, n.ids[:], n.blocks[:], n.users, n.last_used, n.children[:])
            for n in self.nodes.values()
        }
        for id, r in self.requests.items():
            request = other.requests[id] = RequestView(*_FIELDS(r))
            request.table, request.contents = r.table[:], r.contents[:]
        return other

    def snapshot(self) -> dict[str, Any]:
        """Returns plain data, equal to `Engine.snapshot()` at the same sequence number."""
        return {
            **{name: getattr(self, name) for name in CONTROL + SIZES},
            "queue": list(self.queue),
            "requests": {
                r.id: {
                    **{name: getattr(r, name) for name in REQUEST},
                    "table": list(r.table), "match": list(r.match),
                    "computed": self.computed(r), "decoding": r.joined_at >= 0, "lost": r.lost,
                    "contents": list(r.contents),
                }
                for r in self.requests.values()
            },
            "nodes": {
                n.id: {
                    "parent": n.parent, "ids": list(n.ids), "blocks": list(n.blocks),
                    "users": n.users, "last_used": n.last_used,
                }
                for n in self.nodes.values() if n.id
            },
            "pending": dict(self.pending),
            **({"copies": {block: list(copies) for block, copies in self.copies.items()}} if self.copies else {}),
            **({} if self.free is None else {"free": runs_of(self.free)}),
            **({} if self.waste is None else {"waste": asdict(self.waste)}),
        }  # fmt: skip

    @classmethod
    def from_snapshot(cls, data: dict[str, Any]) -> State:
        """Returns the state of a snapshot. The next record to apply is the first record after the snapshot's `seq`."""
        state = cls(**{name: data[name] for name in SIZES})
        for name in CONTROL:
            setattr(state, name, data[name])
        state.queue = list(data["queue"])
        state.pending = dict(data["pending"])
        for id, n in data["nodes"].items():
            ids, blocks = array("i", n["ids"]), list(n["blocks"])
            state.nodes[id] = NodeView(id, n["parent"], ids, blocks, n["users"], n["last_used"])
            state.counts[FREE] -= len(n["blocks"])
            state.counts[CACHED] += len(n["blocks"])
            for block in n["blocks"]:
                state.node_of[block] = id
        for block, copies in data.get("copies", {}).items():
            state.copies[block] = list(copies)
            state.counts[FREE] -= len(copies)
            state.counts[CACHED] += len(copies)
            for copy in copies:
                state.node_of[copy] = state.node_of[block]
        for id in data["nodes"]:
            state.nodes[state.nodes[id].parent].children.append(id)
        for id, r in data["requests"].items():
            stop, at, detail = r["match"]
            state.requests[id] = RequestView(
                id, **{name: r[name] for name in REQUEST}, table=list(r["table"]), match=(stop, at, detail),
                base=r["computed"], joined_at=0 if r["decoding"] else -1, lost=r.get("lost", 0),
                contents=list(r.get("contents", ())),
            )  # fmt: skip
            state._hold_blocks(r["table"])
        state.waste = Waste(**data["waste"]) if "waste" in data else None
        state.free = blocks_of(data["free"]) if "free" in data else None
        return state
