"""Plays what was asked through the real engine, on a simulated device that knows each reply and each step's cost.

Scheduler, allocator, tree, commit and their order in a step are engine/core's own. The device is simulated: it draws
the tokens that the recording has, and a virtual clock advances by what a step costs (cost.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count as numbers
from operator import gt
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.config import MOST_SPECULATIVE_TOKENS
from engine.core.engine import Engine
from engine.core.host_pauses import NO_PAUSES
from engine.core.request import Grammar, Request
from engine.core.step import Emitted, StepPlan, StepResult
from engine.core.step_clock import StepClock, StepTimes
from engine.errors import EngineError, InvalidRequest
from engine.info import EngineInfo
from engine.params import SamplingParams
from engine.trace.kind import Record
from engine.trace.records import RecordLog
from engine.trace.side_pool import SideGroup
from minitui.text import count
from minitui.trace.recorder import Recorder
from minitui.viewmodel.compare.runs import RunFigures
from minitui.viewmodel.history.steps import IDLE_SHOWN
from minitui.viewmodel.history.tokens import percentiles
from minitui.viewmodel.view import View
from minitui.whatif.asked import Asked, Recorded
from minitui.whatif.cost import (
    FEATURES,
    NO_GRAPH,
    Costs,
    Deviations,
    StepPath,
    Timeline,
    beside_no_graph,
    path_of,
    work_of,
)
from minitui.whatif.settings import Setting
from minitui.whatif.stretches import STOP, KnownCommitter, KnownPlan, KnownScheduler

STOPS = frozenset({STOP})
AFTER = [STOP] * (MOST_SPECULATIVE_TOKENS + 2)  # what may be drawn after the last token of a reply
EARLIER_STEPS = 16  # steps without cost, in which requests that ran before the recording take their place
ARRIVALS = ("recorded", "closed")
"""recorded: each request comes when it came; closed: as long after the answer before it in its chat as it did."""


@dataclass(slots=True)
class Played:
    """One played request. Times in seconds of the virtual clock; `tokens`: when its tokens came."""

    asked: Asked
    submitted: float
    cached: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    left: int = 0  # tokens of its prompt that were not computed when it was aborted
    finished: bool = False
    running: bool = False  # since before the recording: the run computes no token of its prompt
    tokens: list[float] = field(default_factory=list)

    @property
    def first_ms(self) -> float:
        """Time to first token. Needs a token."""
        return (self.tokens[0] - self.submitted) * 1e3

    @property
    def gap_ms(self) -> float:
        """The mean time between two tokens; 0 with less than two."""
        n = len(self.tokens) - 1
        return (self.tokens[-1] - self.tokens[0]) / n * 1e3 if n > 0 else 0.0


class Device:
    """A runner that computes nothing. `now`: the virtual clock in seconds; it begins at 1, because 0 means never."""

    synchronous = False
    groups: tuple[SideGroup, ...] = ()  # windows and recurrent states are not played
    vocab_size = STOP + 1

    def __init__(self, setting: Setting) -> None:
        self.num_blocks, self.block_size = setting.blocks + 1, setting.block_size
        self.now, self.own_s = 1.0, 0.0  # own_s: of the last step that ended
        self._costs: Costs | None = None  # None: steps take no time
        self.most = [0.0] * len(FEATURES)
        self.extrapolated = 0  # steps that do more than any recorded step, or have a number of rows like none
        self.replies: dict[int, list[int]] = {}  # request -> its prompt and reply, and the end that may follow
        self.running: Callable[[], Iterable[Request]]
        self.held: Callable[[], int]  # blocks that requests hold
        self._rows: dict[int, list[int]] = {}
        self._timeline, self._slowly = Timeline(), False  # since the last results, a step without a graph was launched
        self._alone = False  # the oldest step in flight was launched when none was

    def charge(self, costs: Costs) -> None:
        """Let the following steps take time."""
        self._costs, self._deviations, self._limits = costs, Deviations(costs), costs.limits
        self._timeline = Timeline(costs.tail)

    def launch(self, plan: StepPlan | KnownPlan, grammars: Mapping[int, Grammar]) -> Launch:
        """Draw the known tokens, and say when the step ends."""
        if isinstance(plan, KnownPlan):  # its committer knows the ids
            return Launch(self, StepResult([]), self._cost(plan))
        if plan.joins:
            joined = {settings.row for settings in plan.joins}
            self._rows.update({r.row: self.replies[r.id] for r in self.running() if r.row in joined})
        rows, ends, n, k = plan.rows.tolist(), (plan.starts + plan.q_lens).tolist(), plan.num_decodes, plan.num_decoding
        known = self._rows
        ids = [known[row][end] for row, end in zip(rows[:n], ends[:n], strict=True)]
        ids += [-1] * (k - n)
        for row, end, samples in zip(rows[k:], ends[k:], plan.samples[k:].tolist(), strict=True):
            ids.append(known[row][end] if samples else -1)
        result = StepResult(ids)
        for i, draft in plan.drafts() if k > n else ():
            text, end = known[rows[i]], ends[i]
            result.checked[i] = text[end - len(draft) : end + 1]
        return Launch(self, result, self._cost(plan))

    def _cost(self, plan: StepPlan | KnownPlan) -> tuple[Sequence[float], StepPath]:
        """Note what a step costs; return its work and path."""
        costs = self._costs
        if costs is None:
            return (), StepPath(0, 0, 0, 0)
        n, drafted = plan.num_decoding, 0
        if isinstance(plan, KnownPlan):
            keys, longest, chunks = plan.keys, plan.longest, [chunk[:2] for chunk in plan.chunks]
        else:
            keys, longest = int(plan.starts[:n].sum()), int(plan.starts[:n].max()) if n else 0
            chunks = list(zip(plan.starts[n:].tolist(), plan.q_lens[n:].tolist(), strict=True))
            drafted = plan.num_tokens - n - sum(length for _, length in chunks)
        work = work_of(n, drafted, keys, longest, chunks, self.held() * self.block_size, costs.graphs)
        self.most = list(map(max, self.most, work))
        path = path_of(work, len(chunks), longest, costs.graphs)
        self._alone |= self._timeline.idle
        self._timeline.launch(*costs.of(work, path.kind), path.kind)
        self._slowly |= path.kind == NO_GRAPH
        return work, path

    def arrive(self, work: Sequence[float], path: StepPath) -> None:
        """Advance the clock to the results of a step."""
        if self._costs is not None and work:
            self.own_s = max(self._costs.of(work, path.kind)) / 1e3
            path, self._slowly = beside_no_graph(path) if self._slowly else path, False
            alone, self._alone = self._alone, False
            self.now += self._deviations.took(path, self._timeline.arrive(), alone) / 1e3
            self.extrapolated += self._deviations.extrapolated or any(map(gt, work, self._limits))


class Launch(NamedTuple):
    """A step on the simulated device. `cost`: its features and its path."""

    device: Device
    result: StepResult
    cost: tuple[Sequence[float], StepPath]

    def wait(self) -> StepResult:
        """Wait until the virtual clock is at the step's end."""
        self.device.arrive(*self.cost)
        return self.result


class PlayedClock(StepClock):
    """The virtual clock of a device: its host has no pauses."""

    def __init__(self, log: RecordLog, device: Device) -> None:
        super().__init__(log, synchronous=False)
        self._device = device

    def now(self) -> float:
        return self._device.now

    def record(self, times: StepTimes, plan: StepPlan, result: StepResult, emitted: list[Emitted]) -> float:
        """Record a step if records are kept; return its wall time in seconds."""
        return super().record(times, plan, result, emitted) if self._log.enabled else self.took(times)

    def own_s(self, times: StepTimes, result: StepResult, wall_s: float) -> float:
        return self._device.own_s

    def arrive(self, times: StepTimes, result: StepResult) -> None:
        super().arrive(times, result)
        times.pauses = NO_PAUSES  # not those of the process that plays

    def _reads_delays(self, worked_us: float) -> bool:
        return False


class Player:
    """One run of the requests of a recording under a setting. `run` plays it."""

    visits_all_rows = False  # in each step: for those who replace decisions, and read the requests

    def __init__(
        self, recorded: Recorded, costs: Costs, setting: Setting, arrivals: str = "recorded", traced: bool = False
    ) -> None:
        """`traced`: keep records, for `write`. Raises EngineError if the recording cannot tell the answer."""
        if setting.speculation and recorded.hidden:
            raise EngineError("the texts of this recording are hidden: drafts are made from texts and cannot be played")
        self.recorded, self.setting, self._closed = recorded, setting, arrivals == "closed"
        self.device = Device(setting)
        self._costs = costs
        self.log = RecordLog(clock=lambda: self.device.now, limit=1 << 62)
        self.engine = Engine(
            self.device, setting.scheduler(), overlap=costs.overlap, prefix_caching=setting.cache,
            eviction_policy=setting.eviction, log=self.log, clock=PlayedClock(self.log, self.device),
        )
        self.played: dict[int, Played] = {}  # by the engine's number
        self._came: dict[int, list[float]] = {}  # the same: when the tokens of each request came
        self.known: KnownScheduler | None = None
        if not self.visits_all_rows and not setting.speculation and setting.budget >= setting.seqs:
            self.known = self.engine.scheduler = KnownScheduler(self.engine, self.device.replies, self._came)
            self.engine.committer = KnownCommitter(self.known)
        self.device.running = lambda: self.engine.scheduler.running
        pool = self.engine.cache.allocator
        self.device.held = lambda: pool.num_active + pool.num_shared
        self.log.enabled = False
        self.refused: list[Asked] = []
        self.cut = 0  # replies that the pool or the context ends earlier
        self.steps = self.evicted = self.twice = 0  # blocks evicted; tokens computed twice
        self.began = self.ended = self._idle = 0.0  # seconds
        self._due: list[tuple[float, int, Asked]] = []
        self._leaves: list[tuple[float, int, int]] = []  # requests that end before their first token
        self._followers: dict[int, list[Asked]] = {}
        self._order, self._unknown = numbers(), numbers(recorded.unknown)
        self.snapshot: dict[str, object] = {}
        self.records: list[Record] = []
        self._traced = traced

    def run(self) -> Player:
        """Play all requests; returns this player."""
        self.began = self.device.now
        for asked in (one for one in self.recorded.requests if not one.before):
            if self._closed and asked.after is not None:
                self._followers.setdefault(asked.after.id, []).append(asked)
            else:
                self._due.append((self.began + asked.at, next(self._order), asked))
        heapq.heapify(self._due)
        self._begin()
        self.device.charge(self._costs)
        self.snapshot = self.engine.snapshot()
        self.log.enabled = self._traced
        tree, self.twice = self.engine.cache.tree, -self.engine.cache.waste.preempted
        self._evict, tree.evict = tree.evict, self._count_evicted  # type: ignore[method-assign]
        first_step = self.engine.scheduler.step
        device, engine = self.device, self.engine
        while self._due or engine.has_work:
            while self._due and self._due[0][0] <= device.now:
                self._submit(heapq.heappop(self._due)[2])
            while self._leaves and self._leaves[0][0] <= device.now:
                self._abort(heapq.heappop(self._leaves)[2])
            if not engine.has_work:
                if self._due:
                    shown = IDLE_SHOWN / 1e3 if self.played else 0.0  # a run begins with its first step
                    self._idle += max(0.0, self._due[0][0] - device.now - shown)
                    device.now = max(device.now, self._due[0][0])
                continue
            self._emitted(engine.step())
            if self._traced:
                self.records += self.log.drain()
        self.steps = engine.scheduler.step - first_step
        self.ended = device.now
        self.twice += self.engine.cache.waste.preempted
        return self

    def _count_evicted(self, n: int, reason: str) -> int:
        freed = self._evict(n, reason)
        self.evicted += freed
        return freed

    # ---- requests

    def _begin(self) -> None:
        """Fill the cache, and let the requests that ran before the recording take their place, without cost. Those
        that finish meanwhile are not in the run."""
        cache = self.engine.cache
        if self.setting.cache:
            for n, (text, salt) in enumerate(self.recorded.warm):
                self._cache(n, text, salt)
            cache.take_table_changes()
        for asked in sorted((one for one in self.recorded.requests if one.before), key=lambda one: one.id):
            self._submit(asked, min(asked.total, max(asked.prompt, asked.before)))
        scheduler, waiting = self.engine.scheduler, -1
        for _ in range(EARLIER_STEPS):
            if all(r.decoding for r in scheduler.running) and len(scheduler.waiting) in (0, waiting):
                break  # a pool that is too small for all lets some wait
            waiting = len(scheduler.waiting)
            self._emitted(self.engine.step())
        if last := self.engine.drain():
            self._emitted(last)
        self.played = {id: self.played[id] for id in scheduler.requests}
        for id, request in scheduler.requests.items():
            self.played[id].tokens.clear()  # they came before the recording
            request.ttft_ms = 0.0, 0.0  # so did its first token: no record tells it
            self.played[id].running = request.decoding
        if self.known is not None:
            self.known.forget_times()

    def _cache(self, number: int, text: Iterable[int], salt: int) -> None:
        """Put a text into the tree, which nobody uses."""
        cache, ids = self.engine.cache, list(text)[: self.setting.blocks * self.setting.block_size]
        request = Request(-1 - number, ids, SamplingParams(), 0, len(ids), cache_salt=_salt(salt), prompt_len=len(ids))
        match = cache.tree.match(ids, len(ids) // cache.block_size, cache.tree.root, 0, request.cache_salt)
        cache.take(request, match)
        if cache.grow(request, len(ids) // cache.block_size * cache.block_size):
            request.planned = len(request.table) * cache.block_size
            cache.publish_committed(request, request.planned)
        cache.release(request, self.log.seq)

    def _submit(self, asked: Asked, begin: int = 0) -> None:
        """Submit a request; `begin`: its tokens so far, if its reply has begun."""
        ids, n, scheduler = self.recorded.ids(asked, self._unknown), begin or asked.prompt, self.engine.scheduler
        params = SamplingParams(max_tokens=max(1, asked.most - n))
        number = 1 + next(reversed(self._came), 0)  # a recording numbers requests in the order of their arrival
        if not self._closed:  # the same order as in the recording
            number = max(number, asked.id)
        try:  # not Engine.add_request: a recording's ids need no check
            request = Request(
                number, ids[:n], params, 0, scheduler.limit_for(n, params), STOPS, asked.group,
                priority=asked.priority, cache_salt=_salt(asked.salt), prompt_len=n,
            )
            scheduler.add(request)
        except InvalidRequest as error:
            self.log.append("refuse", asked.group, str(error))
            self.refused.append(asked)
            self._answered(asked)
            return
        if begin:
            request.prompt_len = asked.prompt
        if asked.reason != "length" and asked.reply:
            ids[-1] = STOP
        elif asked.reply and asked.total > request.max_total:
            self.cut += 1
        ids += AFTER
        self.device.replies[request.id] = ids
        self.played[request.id] = Played(asked, request.submitted_at)
        self._came[request.id] = self.played[request.id].tokens
        if not asked.reply:
            stayed = (asked.ended or asked.at) - asked.at
            heapq.heappush(self._leaves, (self.device.now + stayed, next(self._order), request.id))

    def _abort(self, id: int) -> None:
        if (request := self.engine.scheduler.requests.get(id)) is not None:
            self.played[id].left = max(0, request.prompt_len - max(request.planned, request.lost))
            self.engine.abort(id)
            self._finished(id, request)

    def _emitted(self, emitted: list[Emitted]) -> None:
        now, played = self.log.now(), self.played
        for item in emitted:
            id = item.request.id
            if item.token_id is not None and self.known is None:
                played[id].tokens.append(now)
            if item.finish_reason:
                self._finished(id, item.request)

    def _finished(self, id: int, request: Request) -> None:
        self.device.replies.pop(id, None)
        one = self.played[id]
        one.finished, one.cached, one.preemptions = True, request.cached_tokens, request.preemptions
        one.drafted, one.accepted = request.drafted_tokens, request.accepted_tokens
        self._answered(one.asked)

    def _answered(self, asked: Asked) -> None:
        for follower in self._followers.pop(asked.id, ()):
            heapq.heappush(self._due, (self.device.now + max(0.0, follower.thought), next(self._order), follower))

    # ---- the result

    @property
    def figures(self) -> RunFigures:
        """The totals of the run, as Run.figures has them. Requests from before the recording have no first token."""
        every = list(self.played.values())
        firsts = np.array([one.first_ms for one in every if one.tokens and not one.asked.before])
        first_p50, first_p99 = percentiles(firsts) if len(firsts) else (None, None)
        gaps = np.concatenate([np.empty(0), *(np.diff(one.tokens) * 1e3 for one in every)])
        gaps = gaps[gaps > 0]  # accepted drafts come with the token of their step
        gap_p50, gap_p99 = percentiles(gaps) if len(gaps) else (None, None)
        time = (self.ended - self.began - self._idle) * 1e3
        replies, prompts = sum(len(one.tokens) for one in every), sum(one.asked.prompt for one in every)
        joined = [one for one in every if not one.running]
        cached = sum(one.cached for one in joined)
        return RunFigures(
            requests=len(every), finished=sum(one.finished for one in every), time=time, steps=self.steps,
            replies=replies, tok_s=replies / time * 1e3 if time else None,
            tokens_a_step=replies / self.steps if self.steps else None, prompt_tokens=prompts, cached=cached,
            computed=sum(one.asked.prompt - one.left for one in joined) - cached, twice=self.twice, firsts=len(firsts),
            first_p50=first_p50, first_p99=first_p99, gaps=len(gaps), gap_p50=gap_p50, gap_p99=gap_p99,
            gap_longest=float(gaps.max()) if len(gaps) else None, longest=None, delayed=None,
            preemptions=sum(one.preemptions for one in every), evicted=self.evicted,
            drafted=sum(one.drafted for one in every), accepted=sum(one.accepted for one in every),
        )

    @property
    def notes(self) -> list[str]:
        """Sentences about this run: what was refused, cut or extrapolated."""
        notes = []
        if ended := len(self._came) - len(self.played):
            notes.append(f"{count(ended, 'request')} from before the recording ended before the first played step.")
        if self.refused:
            notes.append(f"{count(len(self.refused), 'request')} did not fit into this setting and had no answer.")
        if self.cut:
            words = "reply is" if self.cut == 1 else "replies are"
            notes.append(f"{self.cut:,} {words} cut: pool or context are too small for the rest.")
        if self.device.extrapolated:
            some = f"{self.device.extrapolated:,} of {count(self.steps, 'step')}"
            reasons = "; ".join(self._costs.beyond(self.device.most)) or "none of those decodes about as many rows"
            notes.append(f"extrapolated: {some}, with work like no recorded step: {reasons}.")
        return notes

    def view(self, name: str) -> View:
        """Returns the run as a view, with this name. Needs `traced`."""
        view = View()
        view.reset(self.snapshot, self.records)
        view.fold(self.records)
        view.history.caching, view.run_name = self.setting.cache, name
        return view

    def write(self, path: Path, info: EngineInfo) -> None:
        """Write the run as a recording. Needs `traced`."""
        recorder = Recorder(path)
        recorder.begin(self.setting.info(replace(info, random_text=True)), self.snapshot)
        recorder.feed(self.records)
        recorder.close()


def _salt(number: int) -> str:
    return f"salt {number}" if number else ""
