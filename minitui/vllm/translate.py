"""Turns the messages of minitui/vllm/recorder.py into minitui's records.

The messages, in order; times are seconds of one clock:

    init      t, facts about the engine
    add       t, id, prompt ids, largest number of tokens, None or (hashes, name): see Recorder._more_than_tokens
    schedule  began, ended, step (-1: nothing to compute), events, admissions, grown, left out, several, drafts,
              total, running, waiting, check
    update    began, ended, step, events, accepted drafts, new tokens, ids, check
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

from dataclasses import dataclass
from typing import Any

from engine.trace.records import Record
from minitui.vllm.blocks import Inconsistent
from minitui.vllm.requests import Known, Requests, group_of
from minitui.vllm.tokens import Tokens, checksum

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
    ) -> None:  # fmt: skip
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
        tokens: bytes | list[list[int]], ids: list[str] | None, check: Any,
    ) -> None:  # fmt: skip
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
            ]  # fmt: skip
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
            self.blocks.write("time", step, plan_us, None, commit_us, max(0.0, wall_ms), None, planned.work)
        self._compare(check)

    # ---- a new beginning

    def _whole(
        self, t: float, step: int, requests: list[Any], waiting: list[str], running: list[str]
    ) -> None:
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
