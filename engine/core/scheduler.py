"""Stage 2, schedule: chooses the requests of each step, and how many tokens of each request are computed.

Every step has a token budget. Running requests decode one token each; the rest of the budget is used for chunks of
prompts, in the same forward pass (Sarathi-Serve, Agrawal et al. 2024). With a target for the gaps between tokens, the
budget is smaller while replies run (engine/core/gap_target.py), and a long prompt leaves half of the rest to much
shorter ones that came after it, so it neither stops them nor is stopped by them. By default, requests are admitted in
the order of arrival, but preempted requests before new ones. No blocks are reserved for `max_tokens`. When the pool is
full, cached blocks are evicted first, then the youngest request is preempted (with the policy "priority", the least
urgent). The full blocks of a preempted request stay in the tree until they are evicted.

`plan()` may plan step n+1 while step n runs: planning needs the lengths of sequences, which are known before step n
has drawn its ids. The ids are committed later (engine/core/commit.py).

With speculation (engine/core/speculation.py), drafts use the part of the budget that decodes and chunks do not use. A
request with drafts is not planned again before these drafts are committed, because its length depends on how many of
them are accepted.
"""

from __future__ import annotations

import heapq
import secrets
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

from engine.core.cache import KVCache
from engine.core.gap_target import GapTarget
from engine.core.node import Match
from engine.core.plan_writer import Entry, PlanWriter
from engine.core.policy import CHUNKS, ORDERS, VICTIMS, QueueOrder, Victim, youngest
from engine.core.request import Request, RequestState
from engine.core.speculation import PromptLookup
from engine.core.step import Scheduled
from engine.errors import InvalidRequest
from engine.params import SamplingParams
from engine.trace.kind import MOST, MOST_RECORDS
from engine.trace.records import RecordLog

SALT_KEY = secrets.token_bytes(16)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of the queue, in tokens unless the comment says otherwise."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256  # requests
    max_model_len: int = 4096
    watermark: float = 0.01  # share of the pool that stays free at an admission, so that running requests can grow
    chunked_prefill: bool = True  # False: a prompt is prefilled in one step, even above the budget
    policy: str = "fcfs"  # longest-prefix, priority: sort the queue (policy.py); static: one batch after another
    max_waiting: int | None = None  # requests; None: no limit
    checkpoint_interval: int = 1024  # between two checkpoints of recurrent states in a long prompt
    speculative_tokens: int = 0  # the longest draft of a request in one step; 0: no speculation
    max_gap_ms: float | None = None  # target for the time of a step while replies run; None: the whole budget


class Scheduler:
    """Owns the queue, the running requests and the rows; the cache owns the blocks. `order`, `chunk` and `victim` are
    the decisions of policy.py; others may replace them before the first request. The tree has a fourth one,
    `next_leaf`."""

    def __init__(self, config: SchedulerConfig, cache: KVCache, log: RecordLog) -> None:
        self.config = config
        self.cache = cache
        self.log = log
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission: the last is the youngest
        self.requests: dict[int, Request] = {}  # all requests that are not finished
        self.step = -1  # the last step planned
        self._rows = list(range(config.max_num_seqs))  # a heap of free rows
        self._committed = -1  # the last step committed
        self._joins: list[Request] = []  # the requests that this step admits
        self._partial: list[Request] = []  # those whose prompts this step does not finish
        self._last_wait: tuple[int, str] | None = None  # the request and the obstacle in the last "wait" record
        self.writer = PlanWriter(cache, log)
        self._watermark = int(config.watermark * cache.allocator.total)
        self.lookup = PromptLookup(config.speculative_tokens) if config.speculative_tokens else None
        self.order: QueueOrder | None = ORDERS[config.policy](cache, log) if config.policy in ORDERS else None
        self.chunk = CHUNKS[config.chunked_prefill]
        self.budget = config.max_num_batched_tokens  # of the last step planned
        self.gaps = GapTarget(config.max_gap_ms, self.budget) if config.max_gap_ms is not None else None
        self.victim: Victim = VICTIMS.get(config.policy, youngest)

    # ---- the queue

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def limit_for(self, prompt_len: int, params: SamplingParams) -> int:
        """Returns the largest number of tokens that prompt and reply may have together. The last token needs no KV, so
        the limit may be one token more than the pool holds. Raises InvalidRequest if the prompt is empty or too
        long."""
        total, size = self.cache.allocator.total, self.cache.block_size
        if prompt_len == 0:
            raise InvalidRequest("the prompt is empty: it needs at least one token")
        if prompt_len > total * size:
            raise InvalidRequest(
                f"the prompt has {prompt_len:,} tokens; this pool holds {total * size:,} ({total:,} blocks of {size}): "
                "raise --kv-blocks or shorten the prompt"
            )
        if prompt_len >= self.config.max_model_len:
            raise InvalidRequest(
                f"the prompt has {prompt_len:,} tokens; the context of {self.config.max_model_len:,} must leave room "
                "for at least one more: shorten the prompt or raise --max-model-len"
            )
        limit = min(self.config.max_model_len, total * size + 1)
        return limit if params.max_tokens is None else min(limit, prompt_len + params.max_tokens)

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        if self.config.max_waiting is not None and len(self.waiting) >= self.config.max_waiting:
            raise InvalidRequest(
                f"{len(self.waiting):,} requests are waiting, which is the limit: try again when some have finished",
                "queue",
            )
        self.requests[request.id] = request
        request.side = [{} for _ in self.cache.sides]
        self.waiting.append(request)
        priority = max(-MOST_RECORDS, min(MOST_RECORDS, request.priority))
        request.arrived = self.log.append(
            "submit", request.id, request.group, request.prompt_len, request.max_total, priority,
            _salt_number(request.cache_salt),
        )
        request.submitted_at, request.submitted_work = self.log.t, self.log.worked()

    def finish(self, request: Request, reason: str, output_tokens: int | None = None) -> None:
        """End a request in any state; later steps may use its blocks and its row. Idempotent. `output_tokens`: of the
        reply, if a stop string ends it before the last drawn token (None: all are in the reply)."""
        if request.state is RequestState.FINISHED:
            return
        if request.state is RequestState.RUNNING:
            self._leave(request)
        else:
            self.waiting.remove(request)
        drawn = len(request.ids) - request.prompt_len
        clock = self.log.append("finish", request.id, reason, drawn if output_tokens is None else output_tokens)
        self.cache.release(request, clock)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.epoch += 1  # its work in flight is void
        del self.requests[request.id]

    def settle(self, step: int) -> None:
        """Note that a step is committed: its blocks are written, and its preempted requests may be admitted again."""
        self._committed = step
        self.cache.tree.settle(step)

    def requeue(self, request: Request, step: int) -> None:
        """Put a running request back in the queue, because its blocks may depend on `step`, which failed."""
        self._leave(request)
        request.epoch += 1  # its work in flight is void
        request.last_step = -1
        clock = self.log.append("requeue", request.id, f"its blocks may depend on step {step}, which failed")
        self._put_back(request, clock)

    def _leave(self, request: Request) -> None:
        """Remove a request from `running`; later steps may use its row."""
        self.running.remove(request)
        self.writer.decoding.pop(request.id, None)  # the next step record does not name it
        heapq.heappush(self._rows, request.row)
        request.row = -1

    # ---- plan

    def plan(self) -> Scheduled | None:
        """Plan the next step. Returns None if there is nothing to compute before the next commit."""
        self.step += 1
        self.cache.tree.step = self.step
        self._joins, self._partial = [], []
        entries: list[Entry] = []
        preempted = self._plan_decodes(entries)
        num_decoding = len(entries)
        self._set_budget(num_decoding)
        budget = self._plan_prefills(entries, self.budget - num_decoding)
        drafts: dict[int, list[int]] = {}
        if not preempted:
            budget = self._admit(entries, budget)
            drafts = self._plan_drafts(entries, num_decoding, budget)
        if not entries and self.cache.sides and len(self.running) > 1 and not any(r.decoding for r in self.running):
            # With small side pools, prompts can hold all pages that any of them needs to go on.
            self._preempt(self.running[-1], "every running request needs pages of a side group, and none is available")
            self.step -= 1
            return self.plan()
        if not entries:
            self.step -= 1
            return None
        return self.writer.write(self.step, entries, num_decoding, drafts, self._joins, len(self.waiting))

    def _plan_decodes(self, entries: list[Entry]) -> bool:
        """Plan one token for each decoding request, the oldest first. Returns True if a request was preempted."""
        size, budget, running = self.cache.block_size, self.config.max_num_batched_tokens, len(self.running)
        for request in tuple(self.running):  # a preempted request is not `decoding` any more
            start = request.planned  # the position of its last token, which may still be in flight
            if not request.decoding or start + 1 >= request.max_total:
                continue  # the prefill is not finished, or the token in flight is the last
            if request.grammar is not None and request.in_flight:
                continue  # the token in flight must advance the grammar before the next draw
            if request.drafted:
                continue  # its length is not known before the commit
            if len(entries) >= budget:
                break
            if start >= len(request.table) * size and not self._make_room(request, start, entries):
                continue
            entries.append((request, start, 1))
            request.planned = start + 1
        return len(self.running) < running

    def _make_room(self, request: Request, start: int, entries: list[Entry]) -> bool:
        """Give a request the block of its token `start`, and preempt others for it. Returns False if it was preempted
        itself."""
        while not self.cache.grow(request, start + 1, start):
            victim = self.victim(self.running, request)
            for entry in entries:
                if entry[0] is victim:  # not the youngest: this step has planned its token already
                    entries.remove(entry)
                    victim.planned = entry[1]
                    break
            self._preempt(victim, f"r{request.id} needs a block and all {self.cache.allocator.total} are held")
            if victim is request:
                return False
        return True

    def _plan_drafts(self, entries: list[Entry], num_decoding: int, budget: int) -> dict[int, list[int]]:
        """Make drafts for decoding requests, the oldest first; return the draft tokens by request id. Entries with
        drafts move behind the other decodes. Cached blocks may be evicted to make room for drafts, but no request is
        preempted."""
        drafts: dict[int, list[int]] = {}
        if self.lookup is None:
            return drafts
        size = self.cache.block_size
        self.lookup.begin_step()
        for i, (request, start, _) in enumerate(entries[:num_decoding]):
            draft = self.lookup.draft(request, start, budget)
            if draft and not self.cache.grow(request, start + 1 + len(draft), start):
                draft = draft[: len(request.table) * size - start - 1]
            if draft and self.cache.states is not None:
                draft = draft[: self.cache.states.slots_for_drafts(request, len(draft))]
            if draft:
                drafts[request.id] = draft
                request.drafted = len(draft)
                entries[i] = (request, start, 1 + len(draft))
                budget -= len(draft)
        if drafts:
            entries[:num_decoding] = sorted(entries[:num_decoding], key=lambda entry: entry[2] > 1)
            self.log.append("draft", self.step, [(id, len(draft)) for id, draft in drafts.items()])
        return drafts

    def _set_budget(self, num_decoding: int) -> None:
        """Set the budget of this step; record a change. The target for gaps only limits prompts beside decodes."""
        budget = self.config.max_num_batched_tokens
        gaps = self.gaps if num_decoding else None
        if gaps is not None and (self.waiting or not all(request.decoding for request in self.running)):
            budget = min(budget, num_decoding + gaps.tokens)
        if budget != self.budget:
            self.budget = budget
            self.log.append("budget", budget)

    def _plan_prefills(self, entries: list[Entry], budget: int) -> int:
        """Plan chunks for running requests whose prefill is not finished; return the rest of the budget."""
        for request in self.running:
            if budget <= 0:
                break
            if not request.decoding:
                budget -= self._chunk(request, entries, budget, self.cache.look_up(request))
        return budget

    def _chunk(self, request: Request, entries: list[Entry], budget: int, match: Match | None) -> int:
        """Plan as much of the prompt as budget and pool allow, after its cached prefix, which `match` found; return the
        number of tokens."""
        self._take(request, match)
        left = len(request.ids) - request.planned
        if left > budget:
            self._partial.append(request)
        if self.gaps is not None and left > self.budget:
            budget = self._share(request, left, budget)
        n = self.chunk(request, left, budget)
        while n > 0 and not self.cache.grow(request, request.planned + n, request.planned):
            n = min(n - 1, self.cache.room(request) - request.planned)
        if n <= 0:
            return 0  # decoding requests hold all blocks; they will finish or be preempted
        entries.append((request, request.planned, n))
        self.cache.waste.preempted += max(0, min(n, request.lost - request.planned))
        request.planned += n
        self.cache.publish_planned(request, self.step)  # now, so that later requests of this step can share the blocks
        return n

    def _share(self, request: Request, left: int, budget: int) -> int:
        """Returns how much of the budget a prompt may use that is longer than a whole step: what later prompts of at
        most half its length leave, but at least half of the budget."""
        younger = [other for other in self.running if not other.decoding and other.arrived > request.arrived]
        if self.waiting and self.config.policy != "static" and not self._admissible(self.waiting[0], budget)[1]:
            younger += islice(self.waiting, len(self._rows))
        needed, half = 0, budget // 2
        for other in younger:
            length = len(other.ids) - other.planned
            if 2 * length <= left:
                needed += length
            if needed >= half:
                return budget - half
        return budget - needed

    def _take(self, request: Request, match: Match | None) -> None:
        """Take the cached blocks of a match, if there are any."""
        if match is None:
            return
        before = request.planned
        gained = self.cache.take(request, match)
        if request.preemptions == 0:
            request.cached_tokens += min(request.planned, request.prompt_len) - min(before, request.prompt_len)
        if gained or before == 0:
            detail = f"{request.planned:,} of {len(request.ids):,} tokens"
            detail += match.cut_by and f", cut by {match.cut_by}"
            if request.preemptions == 0:
                request.match = (match.stop, match.at, detail)
            self.log.append("match", request.id, gained, match.stop, match.at, detail)

    def _admit(self, entries: list[Entry], budget: int) -> int:
        """Admit requests from the queue while budget, rows and blocks are left; return the rest of the budget."""
        if self.config.policy == "static" and self.running:
            return budget
        order = self.order if budget > 0 and self._rows else None
        if order is not None:
            order.sort(self.waiting)
        while self.waiting:
            request = self.waiting[0]
            match, reason = self._admissible(request, budget)
            if reason:
                wait = (request.id, reason.split(":")[0])
                if self._last_wait != wait:
                    self._last_wait = wait
                    self.log.append("wait", request.id, reason)
                break
            self.waiting.popleft()
            resumed = request.state is RequestState.PREEMPTED
            request.state = RequestState.RUNNING
            request.row = heapq.heappop(self._rows)
            self.running.append(request)
            self._joins.append(request)
            self.log.append("admit", request.id, request.row, "resumed" if resumed else "new")
            if not request.admitted_at:
                request.admitted_at, request.admitted_work = self.log.t, self.log.worked()
            budget -= self._chunk(request, entries, budget, match)
        if order is not None:
            order.count_overtaken(self.waiting, self._joins)
        return budget

    def _admissible(self, request: Request, budget: int) -> tuple[Match | None, str]:
        """Returns what the tree has of `request`, the head of the queue, and why it cannot be admitted; "" if it can
        be admitted."""
        if budget <= 0:
            return None, f"budget: the {self.budget} tokens of this step are used"
        if not self._rows:
            return None, f"rows: all {self.config.max_num_seqs} are used"
        if request.last_step > self._committed:
            return None, "commit: its last step is not committed yet"
        needed = self.cache.blocks_for(len(request.ids))
        match = self.cache.look_up(request)
        if match is not None:
            # Matched blocks that another request holds do not use up available blocks. Other matched blocks do: they
            # count as available now, but cannot be evicted once this request holds them.
            needed -= sum(1 for block in match.blocks if self.cache.allocator.holders(block))
        if self.running:
            # Besides a reserve for decodes, prompts that are not finished must get all of their blocks: else several
            # prompts could hold blocks that none of them can go on without.
            needed += self._watermark + sum(self.cache.blocks_for(len(r.ids)) - len(r.table) for r in self._partial)
        if needed > self.cache.available:
            return match, f"blocks: needs {needed}, {self.cache.available} available"
        for side in self.cache.sides:
            if (needed := side.needs(len(request.ids))) > side.pool.available:
                return match, f"{side.group.name}: needs {needed}, {side.pool.available} available"
        return match, ""

    def preempt_all(self, reason: str) -> None:
        """Preempt all running requests; the oldest is admitted first again. Call this between two steps."""
        for request in sorted(self.running, key=lambda request: request.arrived, reverse=True):
            self._preempt(request, reason)

    def _preempt(self, request: Request, reason: str) -> None:
        """Release a request's row and blocks, and put it at the head of the queue; its token in flight stays valid."""
        self._leave(request)
        clock = self.log.append("preempt", request.id, reason, len(request.table))
        self._put_back(request, clock)

    def _put_back(self, request: Request, clock: int) -> None:
        """Release the blocks of a request that left `running`, and put it at the head of the queue."""
        request.lost = max(request.lost, request.planned)
        self.cache.release(request, clock)
        request.decoding = False
        request.drafted = 0
        request.preemptions += 1
        request.state = RequestState.PREEMPTED
        self.waiting.appendleft(request)


def _salt_number(salt: str) -> int:
    """Returns a number for the records, the same for equal salts. It does not tell the salt, which can be a secret."""
    if not salt:
        return 0
    digest = blake2b(salt.encode("utf-8", "replace"), digest_size=4, key=SALT_KEY).digest()
    return int.from_bytes(digest, "big") % MOST + 1
