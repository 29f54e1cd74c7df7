"""Turns the messages of minitui/vllm/recorder.py into minitui's records.

The messages, in order; times are seconds of one clock:

    init      t, facts about the engine
    add       t, id, prompt ids, largest number of tokens, None or (hashes, name): see Recorder._more_than_tokens
    schedule  began, ended, step (-1: nothing to compute), events, admissions, grown, left out, several, drafts,
              total, running, waiting, check
    update    began, ended, step, events, accepted drafts, new tokens, ids, ms on the device or None, check
    events    t, events: what happened outside of a step
    cost      steps, seconds that they took in vLLM's process for this recording
    whole     t, step, every request, the queue, the running ones: instead of messages that were lost

Events: ("c", ids, starts, ends) blocks of these requests are cached; ("p", id, block table, others) preempted; ("f",
id, status, tokens) finished; ("r",) the prefix cache was cleared; ("e", blocks) evicted; with a KV connector: ("l", id)
ended, but its blocks are kept; ("g", blocks) taken from the pool.
With several KV cache groups: `others` are block tables of the groups beside full attention, with 0 for empty entries;
("d", id, blocks) a request gave back blocks of other groups, ("s", id, group, ends, blocks) blocks of a group are
cached, each for the text before its end, ("t", id, group, end, block, whether for this text only) a block is,
("m", block, block) what was cached in the first is in the second.
An admission is (id, cached tokens, block table, tokens, others); grown is [(id, new blocks, others)]. A step computes
one token, and its drafts, for each running request. Exceptions: for those left out it computes nothing, and several is
[(id, tokens)] of those for which it computes more. New tokens are lists for the requests `ids`; None: an array with one
for each request that the step samples.

Running requests take blocks first, in the order in which they were admitted, then those that the step admits. vLLM
takes the blocks of a request before it reports them, so new blocks are applied when an event first names their request
or one whose turn came later, and at the end of the step at the latest. What follows from earlier messages is compared
with vLLM's number of running requests and of tokens in each step; a difference leads to a `whole` message.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from engine.trace.records import CLEARED, Record
from minitui.vllm.blocks import Blocks, Inconsistent
from minitui.vllm.tokens import Tokens, checksum

CHAT = re.compile(r"-minitui\.([0-9a-f]{8})\.")
REASONS = {
    "FINISHED_STOPPED": "stop", "FINISHED_LENGTH_CAPPED": "length", "FINISHED_IGNORED": "length",
    "FINISHED_ABORTED": "abort", "FINISHED_REPETITION": "stop", "FINISHED_ERROR": "error: vLLM reports no more",
}


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


MOST_FAULTS = 1000


@dataclass(slots=True)
class Planned:
    """A step in flight. `firsts`: the requests whose prefill it completes; `sampled`: those that get tokens."""

    began: float
    ended: float
    work: str
    firsts: list[str]
    sampled: list[str]


class Translator(Requests):
    """Takes messages, and yields records. `blocks.state` is the state after the last record."""

    def __init__(self, t: float, info: dict[str, Any]) -> None:
        super().__init__(t, info)
        self.info = info
        self.faults: list[str] = []  # differences between vLLM's numbers and the state, if vLLM sends its numbers
        self.checked = 0
        self.cost_us = 0.0  # mean time per step that vLLM's process spends on the recording
        self._arrived = 0.0  # when the results of the last step arrived

    def _forget(self) -> None:
        super()._forget()
        self._tokens: dict[str, int] = {}  # the requests of the last step -> tokens
        self._planned: dict[int, Planned] = {}
        self._wait: tuple[int, str] | None = None

    def take(self, message: tuple[Any, ...]) -> None:
        """Translate a message. Raises Inconsistent if it does not fit the state: then a `whole` message is needed."""
        kind, *fields = message
        try:
            getattr(self, f"_{kind}")(*fields)
        except Inconsistent:
            raise
        except Exception as error:
            raise Inconsistent(f"{kind}: {type(error).__name__}: {error}") from error

    def drain(self) -> list[Record]:
        """Returns the records since the last call."""
        return self.blocks.drain()

    def _cost(self, steps: int, seconds: float) -> None:
        self.cost_us = round(seconds / steps * 1e6, 1)

    def _events(self, t: float, events: list[tuple[Any, ...]]) -> None:
        self._at(t)
        self._apply(events)

    # ---- steps

    def _schedule(
        self, began: float, ended: float, step: int, events: list[Any], admissions: list[Any], grown: list[Any],
        left_out: list[str], several: list[Any], drafts: dict[str, int], planned: int, running: int, waiting: int,
        check: Any,
    ) -> None:
        self._at(ended)
        self._begin_taking(events, admissions, grown)
        self._in_step = step
        self._apply(events)
        for id in list(self._taking):
            self._touch(id)
        self._in_step = -1
        if len(self._running) != running:
            raise Inconsistent(f"vLLM runs {running} requests, and {len(self._running)} follow from its messages")
        if step >= 0:
            self._tokens = dict.fromkeys(self._running, 1)
            for id in left_out:
                del self._tokens[id]
            self._tokens |= {id: n + 1 for id, n in drafts.items()} | dict(several)
            if (total := sum(self._tokens.values())) != planned:
                raise Inconsistent(f"step {step} has {planned} tokens, and {total} follow from its messages")
            if waiting:
                self._tell_wait(planned, running, any(kind == "p" for kind, *_ in events))
            self._step(step, began, ended, drafts, waiting)
        self._compare(check)

    def _step(self, step: int, began: float, ended: float, drafts: dict[str, int], waiting: int) -> None:
        tokens, known = self._tokens, self._known
        prefills, firsts, done = [], [], []
        drafted = [(known[id].id, n) for id, n in drafts.items() if n]
        for id, request in self._prefilling.items():
            n = tokens.get(id)
            if n is None:
                continue
            n = min(n, request.target - request.done)  # the rest are drafts
            samples = request.done + n >= request.target
            prefills.append((request.id, request.done, n, samples))
            request.done += n
            done.append(id)
            if samples:
                firsts.append(id)
        sampled = [id for id in tokens if id not in self._prefilling or id in firsts]
        chunks = set(done)
        decoding = {id for id in tokens if id not in chunks}
        joined, left = decoding - self._decoding, self._decoding - decoding
        self._decoding = decoding
        for id in firsts:
            del self._prefilling[id]
        if drafted:
            self.blocks.write("draft", step, drafted)
        numbers = [sorted(known[id].id for id in ids) for ids in (joined, left)]
        self.blocks.write("step", step, prefills, *numbers, sum(tokens.values()), waiting)
        work = "decode" if not prefills else "mixed" if decoding else "prefill"
        self._planned[step] = Planned(began, ended, work, firsts, sampled)

    def _tell_wait(self, total: int, running: int, preempted: bool) -> None:
        """Write why the head of the queue was not admitted; vLLM's code names these obstacles in this order."""
        queue = self.blocks.state.queue
        if not queue:
            return
        info = self.info
        if preempted:
            reason = "blocks: this step preempted a request"
        elif total >= info["max_num_batched_tokens"]:
            reason = f"budget: the {info['max_num_batched_tokens']} tokens of this step are used"
        elif running >= info["max_num_seqs"]:
            reason = f"rows: all {info['max_num_seqs']} are used"
        else:
            reason = f"blocks: {self.blocks.available} left after those of this step"
        wait = (queue[0], reason.split(":")[0])
        if wait != self._wait:
            self._wait = wait
            self.blocks.write("wait", queue[0], reason)

    def _update(
        self, began: float, ended: float, step: int, events: list[Any], accepted: list[Any] | None,
        tokens: bytes | list[list[int]], ids: list[str] | None, device_ms: float | None, check: Any,
    ) -> None:
        self._at(began)
        planned = self._planned.pop(step, None)
        if ids is None:
            if planned is None:
                raise Inconsistent(f"step {step} ended, but its beginning is unknown")
            ids = planned.sampled
        self._append(ids, tokens)
        answered = [self._known[id] for id in planned.firsts if id in self._known] if planned is not None else []
        if planned is not None:
            self.blocks.settle(step)
        if accepted:
            running = [
                (self._known[id].id, drafted, n) for id, drafted, n in accepted
                if id in self._known and self._known[id].row >= 0
            ]
            if running:
                self.blocks.write("accept", step, running)
        for request in answered:
            if not request.answered:
                request.answered = True
                queued, prefill = request.admitted - request.submitted, self.blocks.t - request.admitted
                self.blocks.write("first", request.id, round(queued * 1e3, 3), round(prefill * 1e3, 3))
        self._apply(events)
        self._at(ended)
        if planned is not None:
            wall_ms = round((began - max(planned.began, self._arrived)) * 1e6) / 1e3
            self._arrived = began
            plan_us, commit_us = round((planned.ended - planned.began) * 1e6), round((ended - began) * 1e6)
            device_ms = None if device_ms is None else round(device_ms, 3)
            self.blocks.write("time", step, plan_us, None, commit_us, max(0.0, wall_ms), device_ms, planned.work)
        self._compare(check)

    # ---- a new beginning

    def _whole(self, t: float, step: int, requests: list[Any], waiting: list[str], running: list[str]) -> None:
        """Begin with a new state; the record numbers have a gap, so readers ask for a snapshot."""
        numbers = {id: (known.id, known.submitted, known.admitted, known.answered) for id, known in self._known.items()}
        self._forget()
        self._at(t)
        self.blocks.begin_again(step)
        order = {id: place for place, id in enumerate(waiting)}
        requests = sorted(requests, key=lambda row: order.get(row[0], -1))
        self._running = dict.fromkeys(running)
        known = {row[0]: Tokens(row[1], self.blocks.size, row[3], self.blocks.unit) for row in requests}
        for row in requests:
            known[row[0]].ids = row[5]
        for row in requests:  # the oldest of equal blocks first: vLLM hits these
            self.blocks.remember(known[row[0]], row[8])
        for id, prompt, most, _, computed, ids, prefills, table, hits, preemptions, others, cached in requests:
            if id not in numbers:
                numbers[id] = (self._next_id, self.blocks.t, 0.0, False)
                self._next_id += 1
            number, submitted, admitted, answered = numbers[id]
            request = self._known[id] = Known(number, known[id], submitted, admitted=admitted, answered=answered)
            self.blocks.write("submit", number, group_of(id), len(prompt), most)
            view = self.blocks.state.requests[number]
            view.preemptions, view.submitted = preemptions, submitted
            if id in order:
                view.state = "preempted" if preemptions else "waiting"
                continue
            request.row, self._most_rows = self._most_rows, self._most_rows + 1
            request.admitted = admitted or self.blocks.t
            self.blocks.write("admit", number, request.row, "new")
            view.admitted = request.admitted
            self.blocks.restore(number, known[id], table, len(hits))
            if self.blocks.sides is not None:
                self.blocks.sides.restore(number, known[id], others, cached)
            view.base, request.done, request.target = computed, computed, len(ids)
            if prefills and id in self._running:
                self._prefilling[id] = request
        self.blocks.drain()  # readers get these as a snapshot

    # ---- the truth

    def _compare(self, check: tuple[int, dict[str, list[int]], dict[str, int], Any] | None) -> None:
        """Note where vLLM's own numbers differ from the state."""
        if check is None or len(self.faults) > MOST_FAULTS:
            return
        self.checked += 1
        free, tables, sums, others = check
        if others is not None:
            self._compare_others(*others)
        if free != self.blocks.available:
            self.faults.append(f"step {self.blocks.state.step}: {self.blocks.available} blocks free, vLLM has {free}")
        for id, request in self._known.items():
            table = self.blocks.state.requests[request.id].table
            if table != tables.get(id, []):
                self.faults.append(
                    f"step {self.blocks.state.step}: r{request.id}'s table is {table}, vLLM's {tables.get(id)}"
                )
            if checksum(request.tokens.ids) != sums.get(id):
                self.faults.append(f"step {self.blocks.state.step}: r{request.id} has other tokens")
        if extra := set(tables) - set(self._known):
            self.faults.append(f"step {self.blocks.state.step}: vLLM holds blocks for {sorted(extra)[:3]}")
        self.faults += self.blocks.take_faults()

    def _compare_others(self, tables: dict[str, list[list[int]]], cached: list[list[int]]) -> None:
        """Note where the tables and the cached blocks of the other KV cache groups differ."""
        sides, step = self.blocks.sides, self.blocks.state.step
        assert sides is not None
        for id, request in self._known.items():
            own = sides.tables(request.id)
            if own != (theirs := tables.get(id, [[] for _ in own])):
                self.faults.append(f"step {step}: r{request.id}'s other tables are {own}, vLLM's {theirs}")
        for side, blocks in zip(sides.all, cached, strict=True):
            pool = self.blocks.state.groups[side.index]
            if pool.available != self.blocks.available:
                self.faults.append(f"step {step}: {side.group.name} has {pool.available} blocks free")
            if set(side.texts) - set(blocks) or (self.blocks.complete and set(blocks) != set(side.texts)):
                self.faults.append(f"step {step}: {side.group.name} caches {sorted(set(side.texts) ^ set(blocks))[:5]}")
