"""The engine's state, computed from a snapshot and the records after it. Panels, traces and servers read only this.

`State.snapshot()` is equal to `Engine.snapshot()` at the same record; a property test compares them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from engine.trace.records import Record
from engine.trace.runs import blocks_of, runs_of

FREE, ACTIVE, SHARED, CACHED = range(4)
CONTROL = ("seq", "t", "step", "gate", "pace")  # fields of State and of a snapshot
SIZES = ("num_blocks", "block_size", "budget", "max_num_seqs")
REQUEST = (  # fields of RequestView and of a request in a snapshot
    "group", "prompt_tokens", "max_total", "state", "row", "node", "shared_blocks", "cached_tokens", "preemptions",
    "submitted", "admitted",
)  # fmt: skip


@dataclass(slots=True)
class RequestView:
    """A request that has not finished. `State.computed` returns the number of its tokens with KV."""

    id: int
    group: str
    prompt_tokens: int
    max_total: int
    state: str = "waiting"  # waiting | running | preempted
    row: int = -1
    table: list[int] = field(default_factory=list)
    node: int = 0
    shared_blocks: int = 0
    base: int = 0  # number of tokens with KV when the request joined the decoding set (if not decoding: now)
    joined_at: int = -1  # `State.ticks` when the request joined the decoding set; -1: not decoding
    submitted: float = 0.0
    admitted: float = 0.0
    cached_tokens: int = 0  # prompt tokens taken from the cache before any preemption
    match: tuple[str, int, str] = ("", 0, "")  # stop, at, detail of its last match before any preemption
    preemptions: int = 0
    lost: int = 0  # the most tokens with KV that it had at a preemption
    contents: list[int] = field(default_factory=list)  # without a prefix cache: the numbers of its full blocks' texts


@dataclass(slots=True)
class Waste:
    """Tokens whose KV was computed more than once since the engine began. Engine and State count them independently.

    `evicted`: prompt tokens that a request would have taken from the tree, but their blocks had been evicted; only
    evictions that are still remembered count (engine/core/evicted.py). `preempted`: tokens computed again by a request
    that had lost its blocks, by a preemption or with a failed step. `duplicate`: tokens of blocks that were freed
    because the tree had a block with the same text: two requests computed them at the same time, or the block had the
    last token of a prompt, which is always computed.
    """

    evicted: int = 0
    preempted: int = 0
    duplicate: int = 0


@dataclass(slots=True)
class NodeView:
    """A node of the tree. `ids` are the tokens of its blocks, in order; an array is cheap to copy."""

    id: int
    parent: int
    ids: array[int]
    blocks: list[int]
    users: int
    last_used: int
    children: list[int] = field(default_factory=list)


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
        self.waste: Waste | None = Waste()  # None: not counted (an older recording, or vLLM)
        self.counts = [num_blocks - 1, 0, 0, 0]  # number of blocks that are FREE, ACTIVE, SHARED, CACHED
        self.gate = "open"
        self.pace = 1.0

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

    # ---- applying records

    def apply(self, record: Record) -> None:
        """Apply the next record; raise ValueError if records before it are missing."""
        self.follow(record)
        change = self.CHANGES.get(record[2])
        if change is not None:
            change(self, *record[3:])

    def follow(self, record: Record) -> None:
        """Set `seq` and `t` from the next record, but do not apply its change.

        The caller applies the change from CHANGES itself, so it can read the state before and after it.
        """
        if record[0] != self.seq + 1:
            raise ValueError(f"record {record[0]} does not follow record {self.seq}: a snapshot is needed")
        self.seq = record[0]
        self.t = record[1]

    def apply_all(self, records: Iterable[Record]) -> None:
        """Apply records in order; raise ValueError as `apply` does."""
        for record in records:
            self.apply(record)

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

    def _submit(self, id: int, group: str, prompt_tokens: int, max_total: int) -> None:
        self.requests[id] = RequestView(id, group, prompt_tokens, max_total, submitted=self.t)
        self.queue.append(id)

    def _order(self, queue: list[int]) -> None:
        self.queue[: len(queue)] = queue

    def _admit(self, id: int, row: int, reason: str) -> None:
        request = self.requests[id]
        request.state, request.row = "running", row
        request.admitted = request.admitted or self.t
        self.queue.remove(id)

    def _match(self, id: int, tokens: int, stop: str, at: int, detail: str) -> None:
        request = self.requests[id]
        before = request.base
        request.base += tokens
        if not request.preemptions:
            request.cached_tokens += min(request.base, request.prompt_tokens) - min(before, request.prompt_tokens)
            request.match = (stop, at, detail)

    def _alloc(self, id: int, blocks: list[int]) -> None:
        self.requests[id].table += blocks
        holders, counts = self.holders, self.counts
        for block in blocks:  # free blocks: no holders, not in the tree
            holders[block] = 1
        if self.free is not None:
            del self.free[len(self.free) - len(blocks) :]
        counts[FREE] -= len(blocks)
        counts[ACTIVE] += len(blocks)

    def _hold(self, id: int, node: int, dropped: int) -> None:
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

    def _copy(self, id: int, node: int, blocks: list[int]) -> None:
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

    def original_of(self, block: int) -> int:
        """Returns the block of the tree that `block` is a copy of; `block` itself if it is no copy."""
        view = self.nodes[self.node_of[block]]
        return next((own for own in view.blocks if block in self.copies.get(own, ())), block)

    def _uncopy(self, block: int) -> None:
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

    def _leave_tree(self, blocks: Iterable[int]) -> None:
        freed: list[int] = []
        for block in blocks:
            self.node_of[block] = 0
            self.pending.pop(block, None)
            if not self.holders[block]:
                freed.append(block)
        if self.free is not None:
            self.free += freed
        self.counts[CACHED] -= len(freed)
        self.counts[FREE] += len(freed)

    def _grown(self, view: NodeView, request: int, ids: list[int], blocks: list[int], step: int) -> None:
        view.ids.fromlist(ids)
        view.blocks += blocks
        view.last_used = self.seq
        node_of, node = self.node_of, view.id
        for block in blocks:
            node_of[block] = node
        if step >= 0:
            self.pending.update(dict.fromkeys(blocks, step))
        holder = self.requests[request]
        holder.node = view.id
        holder.shared_blocks += len(blocks)

    def _insert(self, id: int, parent: int, request: int, ids: list[int], blocks: list[int], step: int) -> None:
        view = self.nodes[id] = NodeView(id, parent, array("i"), [], 1, self.seq)
        self.nodes[parent].children.append(id)
        self._grown(view, request, ids, blocks, step)

    def _extend(self, id: int, request: int, ids: list[int], blocks: list[int], step: int) -> None:
        self._grown(self.nodes[id], request, ids, blocks, step)

    def _store(self, id: int, parent: int, ids: list[int], blocks: list[int]) -> None:
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

    def _again(self, request: int, tokens: int) -> None:
        if self.waste is not None:
            self.waste.evicted += tokens

    def _full(self, request: int, contents: list[int]) -> None:
        self.requests[request].contents += contents

    def _split(self, id: int, upper_id: int, n: int) -> None:
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

    def _merge(self, upper: int, lower: int) -> None:
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
        for request in self.requests.values():
            if request.node == lower:
                request.node = id
        node.id, node.children, node.last_used = id, child.children, max(node.last_used, child.last_used)
        node.ids += child.ids
        node.blocks += child.blocks
        self.nodes[id] = node

    def _cut(self, id: int, keep: int) -> None:
        node = self.nodes[id]
        self._leave_tree(node.blocks[keep:])
        for block in node.blocks[keep:] if self.copies else ():
            self._leave_tree(self.copies.pop(block, ()))
        del node.ids[keep * self.block_size :], node.blocks[keep:]
        if not keep:
            self.nodes[node.parent].children.remove(id)
            del self.nodes[id]

    def _evict(self, id: int, n: int, reason: str) -> None:
        self._cut(id, len(self.nodes[id].blocks) - n)

    def _withdraw(self, step: int, nodes: list[tuple[int, int]]) -> None:
        for id, keep in nodes:
            self._cut(id, keep)
        self._settle(step)

    def _settle(self, step: int) -> None:
        for block in [block for block, at in self.pending.items() if at == step]:
            del self.pending[block]

    def _step(
        self, step: int, prefills: list[tuple[int, int, int, bool]], joined: list[int], left: list[int], *_: int
    ) -> None:
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

    def _accept(self, step: int, drafts: list[tuple[int, int, int]]) -> None:
        for id, _drafted, accepted in drafts:
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

    def _preempt(self, id: int, *_: Any) -> None:
        request = self.requests[id]
        request.lost = max(request.lost, self.computed(request))
        self._release_all(request)
        request.state = "preempted"
        request.preemptions += 1
        self.queue.insert(0, id)

    def _finish(self, id: int, reason: str, output_tokens: int) -> None:
        request = self.requests.pop(id)
        self._release_all(request)
        if request.state != "running":
            self.queue.remove(id)

    def _gate(self, state: str, reason: str) -> None:
        self.gate = state

    def _pace(self, factor: float) -> None:
        self.pace = factor

    CHANGES: ClassVar[dict[str, Callable[..., None]]] = {
        "submit": _submit, "order": _order, "admit": _admit, "match": _match, "preempt": _preempt, "requeue": _preempt,
        "finish": _finish, "alloc": _alloc, "hold": _hold, "copy": _copy, "uncopy": _uncopy, "insert": _insert,
        "extend": _extend, "store": _store, "again": _again, "full": _full, "split": _split, "merge": _merge,
        "evict": _evict, "settle": _settle, "withdraw": _withdraw,
        "step": _step, "accept": _accept, "gate": _gate, "pace": _pace,
    }  # kind of record -> its change, called with the state and the record's fields

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
        other.requests = {
            r.id: replace(r, table=list(r.table), contents=list(r.contents)) for r in self.requests.values()
        }
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
