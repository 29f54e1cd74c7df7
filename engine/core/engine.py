"""The engine: each step is planned, launched and committed.

A token passes seven stages. The second column says when: before the request's first step, during the plan, launch or
commit of a step, or after the commit.

    1 tokenize     before: the prompt becomes ids (engine/text/tokenizer.py)
    2 schedule     plan:   choose the requests of the step, and how many tokens of each (engine/core/scheduler.py)
    3 allocate     plan:   take the blocks for the KV of these tokens (engine/core/cache.py)
    4 forward      launch: the model computes these tokens (engine/worker/runner.py)
    5 sample       launch: a token is drawn from the logits (engine/worker/sampler.py)
    6 commit       commit: append ids, detect ends, publish and free blocks (engine/core/commit.py)
    7 detokenize   after:  ids become text (engine/text/output.py); with overlap, the next step runs meanwhile

The host plans and commits, and the device computes. With `overlap`, the engine commits step n-1 and plans step n+1
while step n runs. Overlap changes only the order of the calls. With speculation there is no overlap, because the
lengths of the sequences in a step depend on the ids that the previous step drew.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol

from engine.core.cache import KVCache
from engine.core.commit import Committer
from engine.core.gate import Gate
from engine.core.intake import Intake
from engine.core.request import Grammar, Grammars, Request
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.core.step import Emitted, Scheduled, StepPlan, StepResult
from engine.core.step_clock import LAUNCH, PLAN, StepClock, StepTimes
from engine.errors import DeviceLost, InvalidRequest, loses_device
from engine.params import SamplingParams
from engine.trace.records import RecordLog
from engine.trace.runs import runs_of
from engine.trace.side_pool import SideGroup

logger = logging.getLogger("engine")


class Launched(Protocol):
    """A launched step; `wait()` blocks until its ids are on the host."""

    def wait(self) -> StepResult: ...


class StepRunner(Protocol):
    """Computes steps: a runner of engine/worker, or the simulation of the tests."""

    num_blocks: int
    block_size: int
    vocab_size: int
    groups: tuple[SideGroup, ...]  # empty for most models

    @property
    def synchronous(self) -> bool:
        """True if a step has ended when `launch` returns, so that the time of the launch includes the device's time."""

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> Launched:
        """Start a step. `grammars`: index of an entry of the plan -> its grammar, for the entries with a grammar."""


class InFlight(NamedTuple):
    """A step that was launched but is not committed yet."""

    scheduled: Scheduled
    launched: Launched
    times: StepTimes


class Engine:
    """Turns requests into tokens, one `step()` at a time. Not thread-safe."""

    def __init__(
        self, runner: StepRunner, config: SchedulerConfig, *, overlap: bool = False, prefix_caching: bool = True,
        eviction_policy: str = "lru", eos_ids: frozenset[int] = frozenset(), log: RecordLog | None = None,
        grammars: Grammars | None = None, clock: StepClock | None = None,
    ) -> None:
        self.runner = runner
        self.log = log or RecordLog()
        self.cache = KVCache(
            runner.num_blocks, runner.block_size, self.log, prefix_caching, eviction_policy, runner.groups,
            config.checkpoint_interval,
        )
        self.scheduler = Scheduler(config, self.cache, self.log)
        self.committer = Committer(self.scheduler)
        self.gate = Gate(self.log)
        self.clock = clock or StepClock(self.log, runner.synchronous)
        # The number of steps in flight when step() returns. It is 0 with speculation, because the lengths and drafts of
        # a step depend on the ids that the previous step drew.
        self.delay = 1 if overlap and not config.speculative_tokens else 0
        self._intake = Intake(self.scheduler.limit_for, runner.vocab_size, eos_ids, grammars)
        self._flight: deque[InFlight] = deque()
        self._next_id = 1

    # ---- requests

    def add_request(
        self, ids: list[int], params: SamplingParams, group: str = "", sample_index: int = 0, *, priority: int = 0,
        cache_salt: str = "", compiled: Callable[[], Grammar] | None = None,
    ) -> Request:
        """Queue a prompt and return its request.

        `priority`: with the policy "priority", requests with a lower number are admitted first. `cache_salt`: cached
        blocks are shared only between requests with the same salt. `compiled`: returns the result of `compile`; None:
        compile the reply's grammar now.

        Raises InvalidRequest, and queues nothing, if an argument is invalid, the prompt can never run or the queue is
        full.
        """
        try:
            request = self._intake.make(
                self._next_id, ids, params, group, sample_index, priority=priority, cache_salt=cache_salt,
                compiled=compiled,
            )
            self.scheduler.add(request)
        except InvalidRequest as error:
            self.log.append("refuse", group if isinstance(group, str) else "", str(error))
            raise
        self._next_id += 1
        return request

    def compile(self, params: SamplingParams) -> Grammar:
        """Returns the grammar of a reply. Any thread may call this. Raises InvalidRequest if it cannot be compiled."""
        return self._intake.compile(params)

    def abort(self, request_id: int, reason: str = "abort", output_tokens: int | None = None) -> bool:
        """End a request in any state. Returns False if there is no such request. `output_tokens`: see
        Scheduler.finish."""
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return False
        self.scheduler.finish(request, reason, output_tokens)
        return True

    @property
    def has_work(self) -> bool:
        """True if there is something to plan or to commit."""
        return self.scheduler.has_work or bool(self._flight)

    # ---- the step

    def step(self) -> list[Emitted]:
        """Plan and launch a step, then commit the previous step and return the output of the commit. Without overlap,
        commit the launched step instead."""
        times = self.clock.begin()
        scheduled = self.scheduler.plan()
        if scheduled is not None:
            try:
                self._launch(scheduled, times)
            except Exception as error:
                return self._failed(scheduled, error)
        overlapped = scheduled is not None and self.gate.free_running
        return self._commit_all_but(self.delay if overlapped else 0)

    def drain(self) -> list[Emitted]:
        """Commit the steps in flight, without planning another step."""
        return self._commit_all_but(0)

    def _launch(self, scheduled: Scheduled, times: StepTimes) -> None:
        times.planned = self.clock.lap(PLAN)
        launched = self.runner.launch(scheduled.plan, scheduled.grammars)
        times.launched = self.clock.lap(LAUNCH)
        self._flight.append(InFlight(scheduled, launched, times))

    def _commit_all_but(self, delay: int) -> list[Emitted]:
        """Commit the steps in flight, the oldest first, until `delay` steps are left."""
        emitted: list[Emitted] = []
        while len(self._flight) > delay:
            emitted += self._commit(*self._flight.popleft())
        if not self.has_work:
            self.clock.idle()
        return emitted

    def _commit(self, scheduled: Scheduled, launched: Launched, times: StepTimes) -> list[Emitted]:
        plan = scheduled.plan
        try:
            result = launched.wait()
        except Exception as error:
            return self._failed(scheduled, error)
        self.clock.arrive(times, result)
        emitted = self.committer.commit(scheduled, result)
        wall_s = self.clock.record(times, plan, result, emitted)
        if self.scheduler.gaps is not None:
            took_s = self.clock.own_s(times, result, wall_s) if self.delay else wall_s
            self.scheduler.gaps.measured(plan.num_decoding, int(plan.q_lens[plan.num_decoding :].sum()), took_s)
        if result.expert_load is not None:
            self.log.append("experts", plan.step, result.expert_load)
        self.gate.committed(wall_s)
        return emitted

    def _failed(self, scheduled: Scheduled, error: Exception) -> list[Emitted]:
        """End the requests of a step that raised an error. Other requests continue, unless the device is lost."""
        logger.exception("step %d failed", scheduled.plan.step)
        emitted = self.committer.fail(scheduled, f"{type(error).__name__}: {error}")
        if isinstance(error, DeviceLost):
            raise error
        if loses_device(error):
            raise DeviceLost(str(error)) from error
        self.gate.committed(0.0)  # a failed step counts as one of the steps that the gate allowed
        return emitted

    # ---- state

    def clear_cache(self, preempt: bool = False) -> int:
        """Evict every block that no request holds; return the number of blocks. `preempt`: first preempt all running
        requests, which are computed again."""
        if preempt:
            self.scheduler.preempt_all("the cache is cleared")
        return self.cache.clear()

    def check(self) -> None:
        """Raise AssertionError unless allocator, tree, tables and rows agree."""
        live = self.scheduler.requests.values()
        self.cache.check(live)
        rows = [request.row for request in self.scheduler.running]
        assert len(set(rows)) == len(rows) and -1 not in rows, f"rows are not distinct: {rows}"
        assert {id(r) for r in live} == {id(r) for r in [*self.scheduler.running, *self.scheduler.waiting]}

    def snapshot(self) -> dict[str, Any]:
        """Returns the state after the last record as plain data; "seq" is that record's number. `State.snapshot`
        (engine/trace/state.py) returns the same data, folded from the records."""
        scheduler, tree, decoding = self.scheduler, self.cache.tree, self.scheduler.writer.decoding
        return {
            "seq": self.log.seq,
            "t": self.log.t,
            "step": scheduler.step,
            "num_blocks": self.cache.allocator.num_blocks,
            "block_size": self.cache.block_size,
            "budget": scheduler.budget,
            "max_num_seqs": scheduler.config.max_num_seqs,
            "eviction_policy": self.cache.eviction_policy,
            "gate": self.gate.state,
            "pace": self.gate.pace,
            "queue": [request.id for request in scheduler.waiting],
            "requests": {
                r.id: {
                    "group": r.group, "prompt_tokens": r.prompt_len, "max_total": r.max_total, "state": r.state.value,
                    "row": r.row, "table": list(r.table), "node": r.node.id if r.node is not None else 0,
                    "shared_blocks": r.shared_blocks, "computed": r.planned, "decoding": r.id in decoding,
                    "cached_tokens": r.cached_tokens, "match": list(r.match), "preemptions": r.preemptions,
                    "submitted": r.submitted_at, "admitted": r.admitted_at, "lost": r.lost,
                    "contents": list(r.contents), "side": [list(map(list, pages.items())) for pages in r.side],
                }
                for r in scheduler.requests.values()
            },
            "nodes": {
                n.id: {
                    "parent": n.parent.id, "ids": [token for key in n.keys for token in key],
                    "blocks": list(n.blocks), "users": n.users, "last_used": n.last_used,
                }
                for n in tree.nodes.values() if n.parent is not None
            },
            "pending": dict(tree.pending),
            "free": runs_of(self.cache.allocator.free_blocks),
            **({"groups": [side.pool.snapshot() for side in self.cache.sides]} if self.cache.sides else {}),
            "waste": asdict(self.cache.waste),
        }
