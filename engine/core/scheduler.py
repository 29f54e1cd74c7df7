"""Stage 2, schedule: who runs in this step, and how many tokens of each.

Works on lengths alone. Every step has a token budget: running requests decode one token each, what is left goes to
prefill in chunks, in the same forward pass (Sarathi-Serve, Agrawal et al. 2024). First come, first served; the
preempted come before the new. `max_tokens` is not reserved: when the pool is full the tree is evicted first, then the
youngest request is preempted, its full blocks staying in the tree until somebody needs them.

`plan()` decides step n+1 and may be called while step n runs: lengths are known before the ids are. `commit()` takes
the ids of the oldest step not yet committed. Between the two a request may have finished, been aborted or failed:
then its entry in the plan is void and is skipped.

With speculation (engine/core/speculation.py) requests that decode are given draft tokens out of what is left of the
budget when decodes and prefill have had theirs. How far such a request comes is known only at commit, so it sits out
until then."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.config import POLICIES
from engine.core.cache import KVCache
from engine.core.masks import dead_end
from engine.core.policy import LongestPrefix
from engine.core.request import Grammar, Request, RequestState
from engine.core.speculation import PromptLookup
from engine.core.step import Emitted, PromptTargets, RowSettings, Scheduled, StepPlan, StepResult, TokenLogprobs
from engine.errors import InvalidRequest
from engine.params import SamplingParams
from engine.trace.records import RecordLog

NOT_FINITE = "the model's logits were not finite numbers"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of the queue. Tokens unless the name says otherwise."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int = 4096
    watermark: float = 0.01  # share of the pool kept free for growth when a request is admitted
    chunked_prefill: bool = True  # off: a prompt is prefilled in one step, over the budget if need be
    policy: str = "fcfs"  # longest-prefix: the best cached first; static: a batch runs to its end before the next
    max_waiting: int | None = None  # requests; None: as many as come
    speculative_tokens: int = 0  # the longest draft of a row and step; 0: no speculation


Entry = tuple[Request, int, int]  # who, from which position, how many tokens


class _Batch(NamedTuple):
    """What stays of a plan while the same requests decode."""

    requests: tuple[Request, ...]
    rows: np.ndarray
    q_lens: np.ndarray
    samples: np.ndarray
    epochs: list[int]
    grammars: dict[int, Grammar]


class Scheduler:
    """Owns the queue, the running set and the rows; asks the cache for blocks."""

    def __init__(self, config: SchedulerConfig, cache: KVCache, log: RecordLog) -> None:
        if config.policy not in POLICIES:
            raise ValueError(f"the policy is {config.policy!r}; there are {', '.join(POLICIES)}")
        self.config = config
        self.cache = cache
        self.log = log
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission: the last is the youngest
        self.requests: dict[int, Request] = {}  # all that are not finished
        self.step = -1  # the last step planned
        self._rows = list(range(config.max_num_seqs))  # a heap of free rows
        self._decoding: dict[int, Request] = {}  # whom the last step record left in the decoding set
        self._decodes: tuple[Request, ...] = ()  # those of the last step, in order
        self._batch: _Batch | None = None  # of the last step, if it had no prefill
        self._committed = -1  # the last step that was
        self._joins: list[Request] = []
        self._last_wait: tuple[int, str] | None = None
        self._watermark = int(config.watermark * cache.allocator.total)
        self._lookup = PromptLookup(config.speculative_tokens) if config.speculative_tokens else None
        self._order = LongestPrefix(cache, log) if config.policy == "longest-prefix" else None

    # ---- the queue

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def is_decoding(self, request_id: int) -> bool:
        """Does the last step record leave it in the set of those that decode?"""
        return request_id in self._decoding

    def limit_for(self, prompt_len: int, params: SamplingParams) -> int:
        """How long prompt and reply may become together; InvalidRequest, with the numbers, if the prompt cannot fit.

        The last token drawn needs no KV, hence one more than the pool holds.
        """
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
        self.waiting.append(request)
        self.log.append("submit", request.id, request.group, request.prompt_len, request.max_total)
        request.submitted_at, request.submitted_work = self.log.t, self.log.worked()

    def finish(self, request: Request, reason: str) -> None:
        """End a request wherever it stands; its blocks and row are free for work launched later. Idempotent."""
        if request.state is RequestState.FINISHED:
            return
        if request.state is RequestState.RUNNING:
            self._leave(request)
        else:
            self.waiting.remove(request)
        clock = self.log.append("finish", request.id, reason, len(request.ids) - request.prompt_len)
        self.cache.release(request, clock)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.epoch += 1  # what it has in flight is void
        del self.requests[request.id]

    def _leave(self, request: Request) -> None:
        """Out of the running set; the row is free for work enqueued later."""
        self.running.remove(request)
        self._decoding.pop(request.id, None)
        heapq.heappush(self._rows, request.row)
        request.row = -1

    # ---- plan

    def plan(self) -> Scheduled | None:
        """The next step, or None if there is nothing to compute before a commit."""
        self.step += 1
        self.cache.tree.step = self.step
        self._joins = []
        entries: list[Entry] = []
        preempted = self._plan_decodes(entries)
        num_decoding = len(entries)
        budget = self.config.max_num_batched_tokens - num_decoding
        budget = self._plan_prefills(entries, budget)
        drafts: dict[int, list[int]] = {}
        if not preempted:
            budget = self._admit(entries, budget)
            drafts = self._plan_drafts(entries, num_decoding, budget)
        if not entries:
            self.step -= 1
            return None
        return self._arrays(entries, num_decoding, drafts)

    def _plan_decodes(self, entries: list[Entry]) -> bool:
        """One token for each request that is past its prompt, the eldest first. True if anybody was preempted."""
        preempted = False
        size, budget = self.cache.block_size, self.config.max_num_batched_tokens
        for request in self.running:  # whoever is preempted stands at the end of it
            start = request.planned  # where its next token stands, drawn but perhaps still in flight
            if not request.decoding or start + 1 >= request.max_total:
                continue  # inside its prompt; or its last token is in flight
            if request.grammar is not None and request.in_flight:
                continue  # a grammar must see a token before the next
            if request.drafted:
                continue  # how far it comes is not known before its step has committed
            if len(entries) >= budget:
                break
            if start >= len(request.table) * size:
                while not self.cache.grow(request, start + 1):
                    preempted = True
                    # The youngest stands later in this loop than all that have an entry.
                    victim = self.running[-1]
                    self._preempt(victim, f"r{request.id} needs a block and all {self.cache.allocator.total} are held")
                    if victim is request:
                        return True
            entries.append((request, start, 1))
            request.planned = start + 1
        return preempted

    def _plan_drafts(self, entries: list[Entry], num_decoding: int, budget: int) -> dict[int, list[int]]:
        """Draft tokens by request, for those that decode, the eldest first; their entries move behind the others'.

        For drafts the tree may be evicted, as for any token, but nobody is preempted.
        """
        drafts: dict[int, list[int]] = {}
        if self._lookup is None:
            return drafts
        size = self.cache.block_size
        self._lookup.begin_step()
        for i, (request, start, _) in enumerate(entries[:num_decoding]):
            draft = self._lookup.draft(request, start, budget)
            if draft and not self.cache.grow(request, start + 1 + len(draft)):
                draft = draft[: len(request.table) * size - start - 1]
            if draft:
                drafts[request.id] = draft
                request.drafted = len(draft)
                entries[i] = (request, start, 1 + len(draft))
                budget -= len(draft)
        if drafts:
            entries[:num_decoding] = sorted(entries[:num_decoding], key=lambda entry: entry[2] > 1)
            self.log.append("draft", self.step, [(id, len(draft)) for id, draft in drafts.items()])
        return drafts

    def _plan_prefills(self, entries: list[Entry], budget: int) -> int:
        """Chunks for the requests that are inside their prompt; returns what is left of the budget."""
        for request in self.running:
            if budget <= 0:
                break
            if not request.decoding:
                budget -= self._chunk(request, entries, budget)
        return budget

    def _chunk(self, request: Request, entries: list[Entry], budget: int) -> int:
        """Plan as much of the prompt as budget and pool allow, after what the tree knows by now. Tokens planned."""
        self._match(request)
        left = len(request.ids) - request.planned
        n = min(left, budget) if self.config.chunked_prefill else left
        while n > 0 and not self.cache.grow(request, request.planned + n):
            slots = (len(request.table) + self.cache.available) * self.cache.block_size
            n = min(n - 1, slots - request.planned)
        if n <= 0:
            return 0  # every block is held by requests that decode: they finish, or are preempted
        entries.append((request, request.planned, n))
        request.planned += n
        self.cache.publish_planned(request, self.step)  # now, so that the next in this very step may share it
        return n

    def _match(self, request: Request) -> None:
        match = self.cache.look_up(request)
        if match is None:
            return
        before = request.planned
        gained = self.cache.take(request, match)
        if request.preemptions == 0:
            request.cached_tokens += min(request.planned, request.prompt_len) - min(before, request.prompt_len)
        if gained or before == 0:
            detail = f"{request.planned:,} of {len(request.ids):,} tokens"
            if request.preemptions == 0:
                request.match = (match.stop, match.at, detail)
            self.log.append("match", request.id, gained, match.stop, match.at, detail)

    def _admit(self, entries: list[Entry], budget: int) -> int:
        """Take requests from the queue while budget, rows and blocks last; returns what is left of the budget."""
        if self.config.policy == "static" and self.running:
            return budget
        order = self._order if budget > 0 and self._rows else None
        if order is not None:
            order.sort(self.waiting)
        while self.waiting:
            request = self.waiting[0]
            reason = self._obstacle(request, budget)
            if reason:
                told = (request.id, reason.split(":")[0])
                if self._last_wait != told:
                    self._last_wait = told
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
            budget -= self._chunk(request, entries, budget)
        if order is not None:
            order.count_overtaken(self.waiting, self._joins)
        return budget

    def _obstacle(self, request: Request, budget: int) -> str:
        """Why the head of the queue is not admitted now; empty if it is."""
        if budget <= 0:
            return f"budget: the {self.config.max_num_batched_tokens} tokens of this step are taken"
        if not self._rows:
            return f"rows: all {self.config.max_num_seqs} are taken"
        if request.last_step > self._committed:
            return "flight: its last step has not committed"
        needed = self.cache.blocks_for(len(request.ids))
        match = self.cache.look_up(request)
        if match is not None:
            # Cached blocks that it takes over are no longer there to be evicted.
            needed -= sum(1 for block in match.blocks if self.cache.allocator.holders(block))
        if self.running:
            # Those inside their prompt need not be counted: there is budget left only when they have all they need.
            needed += self._watermark
        if needed > self.cache.available:
            return f"blocks: it needs {needed}, {self.cache.available} can be had"
        return ""

    def _arrays(self, entries: list[Entry], num_decoding: int, drafts: dict[int, list[int]]) -> Scheduled:
        """Write the plan down."""
        step, num_decodes = self.step, num_decoding - len(drafts)
        requests, starts, q_lens = zip(*entries, strict=True)
        for request in requests:
            request.last_step = step
        decodes = requests[:num_decoding]
        token_ids = [
            request.ids[-1] if len(request.ids) == request.planned else -1 for request in decodes[:num_decodes]
        ]
        for request in decodes[num_decodes:]:
            token_ids += [request.ids[-1], *drafts[request.id]]
        prefills: list[tuple[int, int, int, bool]] = []
        targets: dict[int, PromptTargets] = {}
        for request, start, q in entries[num_decoding:]:
            token_ids += request.ids[start : start + q]
            if request.params.prompt_logprobs is not None:
                predicted = request.ids[start + 1 : min(start + q + 1, request.prompt_len)]
                targets[num_decoding + len(prefills)] = PromptTargets(predicted, request.params.prompt_logprobs)
            request.decoding = start + q == len(request.ids)
            prefills.append((request.id, start, q, request.decoding))
        joined, left = self._who_decodes(decodes)
        self.log.append("step", step, prefills, joined, left, len(token_ids), len(self.waiting))
        batch = self._batch
        if prefills or drafts or batch is None or requests != batch.requests:
            batch = _Batch(
                requests,
                rows=np.array([request.row for request in requests], np.int32),
                q_lens=np.array(q_lens, np.int32),
                samples=np.array([True] * num_decoding + [samples for *_, samples in prefills], bool),
                epochs=[request.epoch for request in requests],
                grammars={i: request.grammar for i, request in enumerate(requests) if request.grammar is not None},
            )
            self._batch = None if prefills or drafts else batch
        table_rows, table_columns, table_blocks = self.cache.take_table_changes()
        plan = StepPlan(
            step=step,
            rows=batch.rows,
            starts=np.array(starts, np.int32),
            q_lens=batch.q_lens,
            samples=batch.samples,
            token_ids=np.array(token_ids, np.int32),
            num_decodes=num_decodes,
            num_drafted=len(drafts),
            table_rows=table_rows,
            table_columns=table_columns,
            table_blocks=table_blocks,
            joins=[RowSettings.of(request) for request in self._joins],
            prompt_targets=targets,
        )
        return Scheduled(plan, requests, batch.epochs, batch.grammars)

    def _who_decodes(self, decodes: tuple[Request, ...]) -> tuple[list[int], list[int]]:
        """The ids that joined the decoding set with this step, and those that left it while they run on."""
        if decodes == self._decodes:
            return [], []
        before = self._decoding
        now = {request.id: request for request in decodes}
        self._decodes, self._decoding = decodes, now
        return [id for id in now if id not in before], [id for id in before if id not in now]

    def _preempt(self, request: Request, reason: str) -> None:
        """Give back row and blocks; it rejoins the head of the queue and keeps the token that is in flight."""
        self._leave(request)
        clock = self.log.append("preempt", request.id, reason, len(request.table))
        self._requeue(request, clock)

    def _requeue(self, request: Request, clock: int) -> None:
        self.cache.release(request, clock)
        request.decoding = False
        request.drafted = 0
        request.preemptions += 1
        request.state = RequestState.PREEMPTED
        self.waiting.appendleft(request)

    # ---- commit

    def commit(self, scheduled: Scheduled, result: StepResult) -> list[Emitted]:
        """Append the ids a step drew, detect the end of replies, publish what is now written."""
        plan = scheduled.plan
        self._committed = plan.step
        self.cache.tree.settle(plan.step)
        emitted: list[Emitted] = []
        size, running = self.cache.block_size, RequestState.RUNNING
        bad, extras = set(result.bad), bool(result.logprobs or result.prompt_logprobs)
        ends, samples = (plan.starts + plan.q_lens).tolist(), plan.samples.tolist()
        checked = self._accept_drafts(scheduled, result) if plan.num_drafted else {}
        entries = zip(scheduled.requests, scheduled.epochs, ends, samples, result.ids, strict=True)
        for i, (request, epoch, end, sampled, drawn) in enumerate(entries):
            if request.epoch != epoch:
                continue  # void: it ended while this step was in flight
            token: int | None = None
            reason = masked = ""
            if i in checked:
                *accepted, drawn = checked[i]
                emitted += self._append_accepted(request, accepted, result.logprobs.get(i))
                end = len(request.ids)
                if drawn < 0:
                    bad.add(i)
            failed = request.grammar.failed if sampled and request.grammar is not None else ""
            if sampled and i not in bad and not failed:
                token = drawn
                request.ids.append(token)
                if token in request.stop_ids or (request.grammar is not None and request.grammar.advance(token)):
                    reason = "stop"
                elif len(request.ids) >= request.max_total:
                    reason = "length"
            elif sampled:
                masked = failed or dead_end(request)
                reason = f"error: {masked or NOT_FINITE}"
            if end // size > request.shared_blocks and request.state is running:
                self.cache.publish_committed(request, end)
            if reason:
                leaf = request.node
                self.finish(request, reason)
                if i in bad and leaf is not None and not masked:
                    self.cache.forget(leaf)  # its KV may be what is not finite
            if token is not None or reason or extras:
                item = Emitted(request, token, reason)
                if extras:
                    item.logprobs = result.logprobs[i][-1] if i in result.logprobs else None
                    item.prompt_logprobs = _new_prompt_logprobs(request, int(plan.starts[i]), result, i)
                emitted.append(item)
        return emitted

    def _accept_drafts(self, scheduled: Scheduled, result: StepResult) -> dict[int, list[int]]:
        """By entry with drafts, what it has drawn: the drafts that are its own draws, up to the first that is not or
        that ends the reply, and then that draw."""
        assert self._lookup is not None
        checked: dict[int, list[int]] = {}
        told: list[tuple[int, int, int]] = []
        for entry, draft in scheduled.plan.drafts():
            request, draws = scheduled.requests[entry], result.checked[entry]
            if request.epoch != scheduled.epochs[entry]:
                continue
            wrong = (i for i, token in enumerate(draft) if token != draws[i] or token in request.stop_ids)
            accepted = next(wrong, len(draft))
            checked[entry] = draws[: accepted + 1]
            if entry in result.logprobs:
                del result.logprobs[entry][accepted + 1 :]
            request.drafted = 0
            self._lookup.learn(request, len(draft), accepted)
            if request.state is RequestState.RUNNING:
                told.append((request.id, len(draft), accepted))
        if told:
            self.log.append("accept", scheduled.plan.step, told)
        return checked

    @staticmethod
    def _append_accepted(request: Request, accepted: list[int], logprobs: list[TokenLogprobs] | None) -> list[Emitted]:
        """Drafts that were right are tokens like others: known, computed, and told one by one."""
        request.ids += accepted
        if request.state is RequestState.RUNNING:
            request.planned += len(accepted)
        return [Emitted(request, token, logprobs=logprobs[i] if logprobs else None) for i, token in enumerate(accepted)]

    def fail(self, scheduled: Scheduled, error: str) -> list[Emitted]:
        """End the requests of a step that raised; withdraw what it published and requeue those who relied on it."""
        plan = scheduled.plan
        self.log.append("fail", plan.step, error)
        emitted = []
        doomed, blocks = self.cache.tree.doomed_by(plan.step)
        for request, epoch in zip(scheduled.requests, scheduled.epochs, strict=True):
            if request.epoch == epoch:
                emitted.append(Emitted(request, None, f"error: {error}"))
                self.finish(request, f"error: {error}")
        for request in [r for r in reversed(self.running) if not blocks.isdisjoint(r.table)]:
            self._leave(request)
            request.epoch += 1
            request.last_step = -1
            clock = self.log.append("requeue", request.id, f"step {plan.step} failed, and its blocks may rest on it")
            self._requeue(request, clock)
        self.cache.tree.withdraw(plan.step, doomed)
        for request in self.running:
            self.cache.resend_table(request)  # the plan's changes may not have reached the device
        return emitted


def _new_prompt_logprobs(request: Request, start: int, result: StepResult, entry: int) -> list[TokenLogprobs] | None:
    """Those of the chunk that begins at `start` that were not given before: a preempted prompt is computed twice."""
    found = result.prompt_logprobs.get(entry)
    if found is None:
        return None
    new = found[max(0, request.prompt_logprobs_given - start) :]
    request.prompt_logprobs_given += len(new)
    return new
