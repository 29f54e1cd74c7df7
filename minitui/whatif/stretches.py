"""The scheduler of a device that knows all replies: of the rows that decode, it visits only those that need something.

After its last chunk, a request decodes one token in each step until it ends or is preempted: a stretch. Its place in
the text follows from the number of the step, and the steps in which it takes a block, publishes one or ends are known
before. In these, the code of engine/core decides and acts; in all others the row is only counted. The decisions and the
records are those of a scheduler that visits each row in each step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np

from engine.core.commit import Committer
from engine.core.engine import Engine
from engine.core.plan_writer import Entry, PlanWriter
from engine.core.request import Request, RequestState
from engine.core.scheduler import Scheduler
from engine.core.step import Emitted, Scheduled, StepPlan, StepResult

STOP = (1 << 31) - 2  # the id that ends a reply
NEVER = 1 << 62  # a step


@dataclass(slots=True, eq=False)
class Stretch:
    """In step s, the request computes token `base` + s of `text`, which is its prompt and its reply up to STOP."""

    request: Request
    text: list[int]
    base: int
    age: int  # number of its admission: the order of rows in a step
    first: int
    epoch: int
    counted: int  # commits whose tokens are in the request's list of times
    until: int = NEVER  # the first step without it


Due = defaultdict[int, dict[int, Stretch]]  # step -> age -> the stretch that needs something


class KnownScheduler(Scheduler):
    """Needs a budget with a token for each row, and plans no drafts. `texts`: of all requests, up to STOP. `came`: when
    their tokens came; of a request that decodes, the times are added later."""

    def __init__(self, engine: Engine, texts: dict[int, list[int]], came: dict[int, list[float]]) -> None:
        super().__init__(engine.scheduler.config, engine.cache, engine.log)
        self.writer: KnownWriter = KnownWriter(self)
        self.cache.sends_tables = False
        self.texts, self.came = texts, came
        self.times: list[float] = []  # of the commits
        self.stretches: dict[int, Stretch] = {}  # by request
        self.ready: list[Request] = []  # whose last chunk is in the last step
        self.begun: list[Stretch] = []  # by the step that is being planned
        self.spent: list[tuple[int, int]] = []  # (age, request): nothing to compute, the last token is in flight
        self.ages: dict[int, int] = {}  # by request
        self.bases = 0  # the sum of those of the stretches
        self.longest: list[tuple[int, int, Stretch]] = []  # a heap of (-base, age, stretch)
        self._plans: Due = defaultdict(dict)
        self._commits: Due = defaultdict(dict)

    # ---- plan

    def _plan_decodes(self, entries: list[Entry]) -> bool:
        step, size, running = self.step, self.cache.block_size, len(self.running)
        self.begun = [self._begin(request) for request in self.ready if _goes_on(request)]
        self.ready = []
        for age, one in sorted(self._plans.pop(step, {}).items()):
            request, start = one.request, one.base + step
            if one.until <= step:
                continue
            if start + 1 >= request.max_total:
                self.spent.append((age, request.id))
                self._end(self.stretches.pop(request.id))
            elif self._make_room(request, start, entries):
                self._plans[step + size][age] = one
        if self.stretches:
            entries += [(self.running[0], 0, 1)] * len(self.stretches)  # they only count: the writer knows them
        return len(self.running) < running

    def _begin(self, request: Request) -> Stretch:
        """Begin a stretch with the step that is being planned."""
        size, text, age = self.cache.block_size, self.texts[request.id], self.ages[request.id]
        start, base = request.planned, request.planned - self.step
        one = Stretch(request, text, base, age, self.step, request.epoch, len(self.times))
        self.stretches[request.id] = one
        self.bases += base
        heappush(self.longest, (-base, age, one))
        self._plans[len(request.table) * size - base][age] = one
        self._plans[request.max_total - 1 - base][age] = one
        self._commits[(start // size + 1) * size - 1 - base][age] = one
        self._commits[min(text.index(STOP, start + 1), request.max_total - 1) - 1 - base][age] = one
        return one

    def _leave(self, request: Request) -> None:
        one = self.stretches.pop(request.id, None)
        if one is not None:
            self._end(one)
        super()._leave(request)

    def _end(self, one: Stretch) -> None:
        """Bring the request up to date: the step that is being planned, and later ones, are without it."""
        before = self.step - 1
        one.until, self.bases = self.step, self.bases - one.base
        if one.first <= before > self._committed:  # its token is in flight
            self._commits[before][one.age] = one
        self.catch_up(one, self._committed)
        one.request.planned, one.request.last_step = one.base + self.step, before
        self.came[one.request.id] += self.times[one.counted :]

    def catch_up(self, one: Stretch, committed: int) -> None:
        """Append the ids that were drawn up to this step."""
        ids = one.request.ids
        ids += one.text[len(ids) : one.base + committed + 2]
        one.request.planned = one.base + self.step + 1

    def forget_times(self) -> None:
        """Forget when tokens came so far, and bring all requests up to date. Call it without a step in flight."""
        for one in self.stretches.values():
            self.catch_up(one, self.step)
            one.counted = len(self.times)

    # ---- commit

    def due(self, step: int) -> list[Stretch]:
        """Returns the stretches whose token of this step needs more than being counted, up to date before it."""
        size, found = self.cache.block_size, []
        for age, one in sorted(self._commits.pop(step, {}).items()):
            if one.first <= step < one.until and one.epoch == one.request.epoch:
                found.append(one)
                if one.until == NEVER:
                    self.catch_up(one, step - 1)
                    if (one.base + step + 1) % size == 0:
                        self._commits[step + size][age] = one
        return found


def _goes_on(request: Request) -> bool:
    running = request.state is RequestState.RUNNING and request.decoding
    return running and request.planned + 1 < request.max_total


class KnownPlan(NamedTuple):
    """A plan without what the simulated device does not read: rows, ids and block tables."""

    step: int
    num_decoding: int
    keys: int  # that the decodes read
    longest: int  # of the texts that decode
    chunks: list[tuple[int, int, bool]]  # (start, tokens, whether the last one is sampled)

    @property
    def rows(self) -> range:
        return range(self.num_decoding + len(self.chunks))

    @property
    def q_lens(self) -> np.ndarray:
        return np.array([1] * self.num_decoding + [q for _, q, _ in self.chunks])


class KnownWriter(PlanWriter):
    """Writes these plans."""

    def __init__(self, scheduler: KnownScheduler) -> None:
        super().__init__(scheduler.cache, scheduler.log)
        self._scheduler, self._next_age = scheduler, count()

    def write(
        self, step: int, entries: list[Entry], num_decoding: int, drafts: dict[int, list[int]], joins: list[Request],
        num_waiting: int,
    ) -> Scheduled:
        known, n = self._scheduler, num_decoding
        for request in joins:
            known.ages[request.id] = next(self._next_age)
        chunks, requests = entries[n:], tuple(request for request, _, _ in entries[n:])
        for request, start, q in chunks:
            request.last_step = step
            request.decoding = start + q == len(request.ids)
        known.ready = [request for request in requests if request.decoding]
        joined = [one.request for one in sorted(known.begun, key=lambda one: one.age) if one.until == NEVER]
        left = [id for _, id in sorted(known.spent) if self.decoding.pop(id, None) is not None]
        known.spent = []
        self.decoding |= {request.id: request for request in joined}
        prefills = [(request.id, start, q, request.decoding) for request, start, q in chunks]
        tokens, ids = n + sum(q for _, _, q in chunks), [request.id for request in joined]
        self._log.append("step", step, prefills, ids, left, tokens, num_waiting)
        heap = known.longest
        while heap and heap[0][2].until != NEVER:
            heappop(heap)
        longest = step - heap[0][0] if heap else 0
        plan = KnownPlan(step, n, known.bases + n * step, longest, [chunk[1:] for chunk in prefills])
        return Scheduled(cast(StepPlan, plan), requests, [request.epoch for request in requests], {})


class KnownCommitter(Committer):
    """Commits the chunks of a step, and the rows to which more happens than a token."""

    def __init__(self, scheduler: KnownScheduler) -> None:
        super().__init__(scheduler)
        self._known = scheduler

    def commit(self, scheduled: Scheduled, result: StepResult) -> list[Emitted]:
        known, plan = self._known, cast(KnownPlan, scheduled.plan)
        step, texts, now, found = plan.step, known.texts, self.log.now(), known.due(plan.step)
        rows = [(one.base + step, 1, True) for one in found] + plan.chunks
        emitted: list[Emitted] = []
        if rows:
            result.ids = [one.text[one.base + step + 1] for one in found]
            for request, (start, q, _) in zip(scheduled.requests, plan.chunks, strict=True):
                result.ids.append(texts[request.id][start + q] if request.id in texts else -1)  # -1: it has ended
            requests = (*(one.request for one in found), *scheduled.requests)
            epochs = [*(one.epoch for one in found), *scheduled.epochs]
            starts, q_lens, samples = map(np.array, zip(*rows, strict=True))
            visited = SimpleNamespace(step=step, starts=starts, q_lens=q_lens, samples=samples, num_drafted=0)
            emitted = super().commit(Scheduled(cast(StepPlan, visited), requests, epochs, {}), result)
        else:
            known.settle(step)
        for item in emitted:  # a stretch that goes on counts its commits
            if item.token_id is not None and item.request.id not in known.stretches:
                known.came[item.request.id].append(now)
        known.times.append(now)
        return emitted
