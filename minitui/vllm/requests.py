"""Follows vLLM's requests: their ids, rows and block tables, from the events in its messages (translate.py)."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from engine.trace.records import CLEARED
from minitui.vllm.blocks import Blocks, Inconsistent
from minitui.vllm.tokens import Tokens

CHAT = re.compile(r"-minitui\.([0-9a-f]{8})\.")
REASONS = {
    "FINISHED_STOPPED": "stop", "FINISHED_LENGTH_CAPPED": "length", "FINISHED_IGNORED": "length",
    "FINISHED_ABORTED": "abort", "FINISHED_REPETITION": "stop", "FINISHED_ERROR": "error: vLLM reports no more",
}  # fmt: skip


@dataclass(slots=True)
class Known:
    """A request that has not finished. `done`, `target`: tokens with KV, and tokens that its prefill computes."""

    id: int
    tokens: Tokens
    submitted: float
    row: int = -1
    done: int = 0
    target: int = 0
    admitted: float = 0.0
    answered: bool = False  # it has its first token


class Requests:
    """Writes the records about requests. `blocks.state` is the state after the last record."""

    def __init__(self, t: float, info: dict[str, Any]) -> None:
        self.blocks = Blocks(info)
        self.totals: Counter[str] = Counter()  # to compare with vLLM's /metrics
        self._origin = t
        self._next_id = 0
        self._forget()

    def _forget(self) -> None:
        self._known: dict[str, Known] = {}
        self._rows: list[int] = []
        self._most_rows = 0
        self._prefilling: dict[str, Known] = {}
        self._decoding: set[str] = set()
        self._running: dict[str, None] = {}  # in vLLM's order
        self._admissions: dict[str, tuple[Any, ...]] = {}
        # New blocks of requests, and those of other groups, in the order in which vLLM took them.
        self._taking: dict[str, tuple[list[int], list[list[int]]]] = {}
        self._places: dict[str, int] = {}  # the order in which vLLM scheduled the requests of this step
        self._in_step = -1  # the step whose `schedule` message is being translated

    def _at(self, t: float) -> None:
        self.blocks.t = max(self.blocks.t, int((t - self._origin) * 1e6) / 1e6)

    def _add(self, t: float, id: str, prompt: list[int], most: int, more: tuple[list[bytes], bytes] | None) -> None:
        self._at(t)
        number, self._next_id = self._next_id, self._next_id + 1
        self._known[id] = Known(number, Tokens(prompt, self.blocks.size, more, self.blocks.unit), self.blocks.t)
        self.blocks.write("submit", number, group_of(id), len(prompt), most)

    def _admit(self, id: str) -> None:
        _, computed, table, tokens, others = self._admissions.pop(id)
        request = self._known[id]
        if len(request.tokens.ids) != tokens:
            raise Inconsistent(f"r{request.id} has {tokens} tokens, and {len(request.tokens.ids)} follow from messages")
        if not self._rows:
            self._rows, self._most_rows = [self._most_rows], self._most_rows + 1
        request.row = heapq.heappop(self._rows)
        resumed = self.blocks.state.requests[request.id].state == "preempted"
        self.blocks.write("admit", request.id, request.row, "resumed" if resumed else "new")
        request.admitted = request.admitted or self.blocks.t
        self.blocks.take_table(request.id, request.tokens, computed, table, others)
        request.done, request.target = computed, tokens
        self._prefilling[id] = request
        self._running[id] = None
        if not resumed:
            self.totals["queries"] += tokens
            self.totals["hits"] += computed

    def _begin_taking(self, events: list[tuple[Any, ...]], admissions: list[Any], grown: list[Any]) -> None:
        """Collect the new blocks of a step. A request that the step preempts may have got some before."""
        self._admissions = {admission[0]: admission for admission in admissions}
        self._places = {id: i for i, id in enumerate([*self._running, *self._admissions])}
        self._taking = {id: (blocks, others) for id, blocks, others in grown}
        requests, sides = self.blocks.state.requests, self.blocks.sides
        for _, id, table, others in (event for event in events if event[0] == "p"):
            request = self._known[id].id
            new = sides.new_pages(request, others) if sides is not None and id in self._running else []
            if (blocks := table[len(requests[request].table) :]) or any(new):
                self._taking[id] = blocks, new
        places = sorted((self._places[id], id) for id in self._taking)
        self._taking = {id: self._taking[id] for _, id in places} | {id: ([], []) for id in self._admissions}

    def _touch(self, id: str, own: bool = True) -> None:
        """Apply the new blocks that vLLM took until a request had its turn, if they are not applied yet. `own`: and
        those of this request."""
        while self._taking:
            first = next(iter(self._taking))
            if self._places[first] > self._places[id] or (first == id and not own):
                return
            blocks, others = self._taking.pop(first)
            if first in self._admissions:
                self._admit(first)
            else:
                self.blocks.take_new(self._known[first].id, blocks, others)

    def _leave(self, id: str) -> Known:
        request = self._known[id]
        if request.row >= 0:
            heapq.heappush(self._rows, request.row)
            request.row = -1
        self._running.pop(id, None)
        self._prefilling.pop(id, None)
        self._decoding.discard(id)
        if self.blocks.sides is not None:
            self.blocks.sides.left(request.id)
        return request

    # ---- events

    def _apply(self, events: list[tuple[Any, ...]]) -> None:
        for kind, *fields in events:
            if kind == "g":
                self.blocks.reuse(fields[0], "a request needs it")
            elif kind == "c":
                self._cached(*fields)
            elif kind == "p":
                if fields[0] in self._taking:
                    self._touch(fields[0])
                request = self._leave(fields[0])
                self.totals["preemptions"] += 1
                blocks = len(fields[1])
                self.blocks.write("preempt", request.id, "another request needs a block and all are held", blocks)
            elif kind == "f":
                id, status, tokens = fields
                request = self._leave(id)
                if (known := request.tokens.output) != tokens:
                    raise Inconsistent(f"r{request.id} has {tokens} new tokens, and {known} follow from messages")
                del self._known[id]
                self.totals[status] += 1
                self.totals["tokens"] += tokens
                self.blocks.write("finish", request.id, REASONS.get(status, status.lower()), tokens)
            elif kind == "l":
                self._running.pop(fields[0], None)
                self._prefilling.pop(fields[0], None)
            elif kind == "e":
                self.blocks.reuse(fields[0], "")
            elif kind == "r":
                self.blocks.clear(CLEARED)
            elif self.blocks.sides is not None:
                self._apply_to_sides(kind, fields)

    def _apply_to_sides(self, kind: str, fields: list[Any]) -> None:
        """Apply an event of the other KV cache groups."""
        sides, id = self.blocks.sides, fields[0]
        assert sides is not None
        if kind == "m":
            self.blocks.reuse(fields[1:], "vLLM copies a state into it")
            sides.move(*fields)
            return
        self._touch(id, own=kind != "d")
        request = self._known[id]
        if kind == "d":
            sides.drop(request.id, fields[1])
        elif kind == "s":
            _, group, ends, pages = fields
            for end, page in zip(ends, pages, strict=True):
                sides.cache(group, request.id, request.tokens.at(end), page, alone=True)
        elif kind == "t":
            _, group, end, page, alone = fields
            sides.cache(group, request.id, request.tokens.at(end), page, alone)

    def _append(self, rows: list[str], tokens: bytes | list[list[int]]) -> None:
        """Append new tokens of these requests: an array with one of each, or a list of each."""
        if isinstance(tokens, bytes):
            tokens = [[token] for token in memoryview(tokens).cast("i")]
        for id, ids in zip(rows, tokens, strict=True):
            self._known[id].tokens.ids += ids

    def _cached(self, rows: list[str], starts: list[int], ends: list[int]) -> None:
        for id, start, end in zip(rows, starts, ends, strict=True):
            self._touch(id)
            request = self._known[id]
            table = self.blocks.state.requests[request.id].table
            self.blocks.publish(request.id, request.tokens, start, table[start:end], self._in_step)


def group_of(id: str) -> str:
    """Returns the chat in an id of vLLM's: "cmpl-minitui.GROUP.TAG-0-1234abcd" (minitui/sources/vllm.py)."""
    found = CHAT.search(id)
    return found[1] if found else ""
