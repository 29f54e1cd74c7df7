"""Checks that each record of a trace is possible in the state before it.

State.apply trusts its records, so records from a file or from another server must be checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from engine.trace.records import Record
from engine.trace.state import State
from minitui.trace.check import MOST_HELD


class Follower:
    """Checks each record, then folds it into the state."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._youngest = max(state.requests, default=-1)  # the highest request id so far
        self._held = sum(len(request.table) for request in state.requests.values())  # blocks in all block tables

    def take(self, record: Record) -> None:
        """Fold a record that `check.record` returned. Raises ValueError with the reason if the record is impossible."""
        kind = record[2]
        check = self._CHECKS.get(kind)
        if check is not None:
            reason: str = next(check(self, *record[3:]), "")
            if reason:
                raise ValueError(f"record {record[0]:,} ({kind}) is impossible: {reason}")
        self.state.apply(record)
        if self._held > MOST_HELD:
            raise ValueError(f"the block tables of the requests have more than {MOST_HELD:,} entries")

    def _known(self, id: int) -> Iterator[str]:
        if id not in self.state.requests:
            yield f"there is no request r{id}"

    def _submit(self, id: int, *_: Any) -> Iterator[str]:
        if id <= self._youngest:
            yield f"r{id} is not newer than r{self._youngest}"
        self._youngest = id

    def _order(self, queue: list[int]) -> Iterator[str]:
        if sorted(queue) != sorted(self.state.queue[: len(queue)]):
            yield "its requests are not the first requests of the queue"

    def _admit(self, id: int, row: int, _reason: str) -> Iterator[str]:
        yield from self._known(id)
        if self.state.requests[id].state == "running":
            yield f"r{id} is running already"

    def _match(self, id: int, tokens: int, *_: Any) -> Iterator[str]:
        yield from self._running(id)
        if tokens > len(self.state.requests[id].table) * self.state.block_size:
            yield f"r{id} holds too few blocks for {tokens:,} tokens"

    def _running(self, id: int, *_: Any) -> Iterator[str]:
        yield from self._known(id)
        if self.state.requests[id].state != "running":
            yield f"r{id} is not running"

    def _alloc(self, id: int, blocks: list[int]) -> Iterator[str]:
        yield from self._running(id)
        state = self.state
        for block in blocks:
            if block >= state.num_blocks:
                yield f"block {block:,} is not in the pool"
            if state.holders[block] or state.node_of[block]:
                yield f"block {block:,} is not free"
        if len(set(blocks)) != len(blocks):
            yield "a block is allocated twice"
        if state.free is not None and state.free[len(state.free) - len(blocks) :] != blocks[::-1]:
            yield "its blocks are not the free blocks that are next"
        self._held += len(blocks)

    def _hold(self, id: int, node: int, dropped: int) -> Iterator[str]:
        yield from self._running(id)
        state = self.state
        request = state.requests[id]
        if node not in state.nodes:
            yield f"there is no node {node}"
        if dropped > len(request.table) - request.shared_blocks:
            yield f"r{id} has fewer than {dropped:,} private blocks"
        above, new = node, 0
        while above and above != request.node:
            new += len(state.nodes[above].blocks)
            above = state.nodes[above].parent
        if above != request.node:
            yield f"node {node} is not below node {request.node}, which r{id} holds"
        self._held += new - dropped

    def _copy(self, id: int, node: int, blocks: list[int]) -> Iterator[str]:
        yield from self._running(id)
        state = self.state
        request = state.requests[id]
        if node not in state.nodes:
            yield f"there is no node {node}"
        above, length = node, 0
        while above and above != request.node:
            length += len(state.nodes[above].blocks)
            above = state.nodes[above].parent
        if above != request.node or length != len(blocks):
            yield f"node {node} is not {len(blocks):,} blocks below node {request.node}, which r{id} holds"
        start = request.shared_blocks
        if request.table[start : start + len(blocks)] != blocks:
            yield f"its blocks are not the next private blocks of r{id}"

    def _uncopy(self, block: int) -> Iterator[str]:
        state = self.state
        if block >= state.num_blocks or not state.node_of[block] or not state.copies.get(state.original_of(block)):
            yield f"block {block:,} is no copy and has no copies"
        if state.holders[block]:
            yield f"block {block:,} is in use"

    def _swap(self, block: int) -> Iterator[str]:
        state = self.state
        if block >= state.num_blocks or not state.node_of[block] or state.original_of(block) == block:
            yield f"block {block:,} is no copy"

    def _grown(self, request: int, ids: list[int], blocks: list[int]) -> Iterator[str]:
        yield from self._running(request)
        holder = self.state.requests[request]
        start = holder.shared_blocks
        if not blocks or len(ids) != len(blocks) * self.state.block_size:
            yield f"{len(ids):,} ids do not fill {len(blocks):,} blocks"
        if holder.table[start : start + len(blocks)] != blocks:
            yield f"its blocks are not the next private blocks of r{request}"

    def _insert(self, id: int, parent: int, request: int, ids: list[int], blocks: list[int], _: int) -> Iterator[str]:
        yield from self._grown(request, ids, blocks)
        if id in self.state.nodes:
            yield f"node {id} exists already"
        if parent != self.state.requests[request].node:
            yield f"r{request} does not hold node {parent}"

    def _extend(self, id: int, request: int, ids: list[int], blocks: list[int], _: int) -> Iterator[str]:
        yield from self._grown(request, ids, blocks)
        if not id or id != self.state.requests[request].node or self.state.nodes[id].children:
            yield f"node {id} is not a leaf held by r{request}"

    def _store(self, id: int, parent: int, ids: list[int], blocks: list[int]) -> Iterator[str]:
        state = self.state
        node = state.nodes.get(id)
        if not id or (node.parent if node else parent) != parent or parent not in state.nodes or parent == id:
            yield f"node {id} cannot be below node {parent}"
        if node is not None and node.children:
            yield f"node {id} is not a leaf"
        if not blocks or len(ids) != len(blocks) * state.block_size or len(set(blocks)) != len(blocks):
            yield f"{len(ids):,} ids do not fill {len(set(blocks)):,} blocks"
        if any(block >= state.num_blocks or state.holders[block] or state.node_of[block] for block in blocks):
            yield "its blocks are not free"

    def _full(self, request: int, contents: list[int]) -> Iterator[str]:
        yield from self._running(request)
        holder = self.state.requests[request]
        if len(holder.contents) + len(contents) > len(holder.table):
            yield f"r{request} has fewer blocks"

    def _split(self, id: int, upper: int, n: int) -> Iterator[str]:
        if not id or id not in self.state.nodes or n >= len(self.state.nodes[id].blocks):
            yield f"node {id} does not exist or has no more than {n:,} blocks"
        if upper in self.state.nodes:
            yield f"node {upper} exists already"

    def _merge(self, upper: int, lower: int) -> Iterator[str]:
        node, child = self.state.nodes.get(upper), self.state.nodes.get(lower)
        if node is None or child is None or not upper or node.children != [lower]:
            yield f"node {lower} is not the only child of node {upper}"
        elif node.users != child.users:
            yield f"node {upper} has {node.users:,} users, node {lower} has {child.users:,}"

    def _evict(self, id: int, n: int, _reason: str) -> Iterator[str]:
        node = self.state.nodes.get(id)
        if node is None or not id or node.children or n > len(node.blocks):
            yield f"node {id} is not a leaf with at least {n:,} blocks"
        elif node.users > 0:
            yield f"node {id} is in use"
        elif any(block in self.state.copies for block in node.blocks[-n:]):
            yield f"blocks of node {id} have copies"

    def _withdraw(self, _step: int, nodes: list[tuple[int, int]]) -> Iterator[str]:
        left = {id: len(self.state.nodes[id].children) for id, _ in nodes if id and id in self.state.nodes}
        for id, keep in nodes:
            if id not in left or keep > len(self.state.nodes[id].blocks) or (not keep and left[id]):
                yield f"node {id} cannot be cut to {keep:,} blocks"
            if self.state.nodes[id].users > 0:
                yield f"node {id} is in use"
            parent = self.state.nodes[id].parent
            if not keep:
                del left[id]
                if parent in left:
                    left[parent] -= 1

    def _step(
        self, step: int, prefills: list[Any], joined: list[int], left: list[int], tokens: int, _: int
    ) -> Iterator[str]:
        state = self.state
        if step != state.step + 1:
            yield f"step {step:,} does not follow step {state.step:,}"
        for id in (*(chunk[0] for chunk in prefills), *joined, *left):
            yield from self._known(id)
        if any(state.requests[id].joined_at < 0 for id in left):
            yield "a request leaves the decoding set but was not in it"
        if sum(chunk[2] for chunk in prefills) > tokens:
            yield "its prompt chunks have more tokens than the step"

    def _drafted(self, _step: int, drafts: list[tuple[int, ...]]) -> Iterator[str]:
        for id, drafted, *accepted in drafts:
            yield from self._known(id)
            if accepted and accepted[0] > drafted:
                yield f"r{id} has more accepted drafts than drafts"

    def _timed(self, step: int, *_: Any) -> Iterator[str]:
        if step > self.state.step:
            yield f"step {step:,} has not been planned"

    def _released(self, id: int, *_: Any) -> Iterator[str]:
        yield from self._running(id)
        self._held -= len(self.state.requests[id].table)

    def _finish(self, id: int, *_: Any) -> Iterator[str]:
        yield from self._known(id)
        self._held -= len(self.state.requests[id].table)

    def _one_request(self, id: int, *_: Any) -> Iterator[str]:
        yield from self._known(id)

    _CHECKS: ClassVar[dict[str, Callable[..., Iterator[str]]]] = {
        "submit": _submit, "order": _order, "admit": _admit, "match": _match, "alloc": _alloc, "hold": _hold,
        "copy": _copy, "uncopy": _uncopy, "swap": _swap, "insert": _insert, "extend": _extend, "store": _store,
        "split": _split, "merge": _merge, "again": _running, "full": _full, "evict": _evict, "withdraw": _withdraw,
        "step": _step, "draft": _drafted, "accept": _drafted, "time": _timed, "comm": _timed, "parts": _timed,
        "fail": _timed, "experts": _timed, "preempt": _released, "requeue": _released, "finish": _finish,
        "wait": _one_request,
    }  # fmt: skip
