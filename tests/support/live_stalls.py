"""Puts stalls of known kinds into a live run; the longest gap near each must have the stall as its largest cause."""

from __future__ import annotations

import gc
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.core.engine import Engine
from engine.core.request import Request
from engine.params import SamplingParams
from minitui.viewmodel.explain.stalls import Reason, explain_gap
from minitui.viewmodel.history.lane import Gap, Lane
from minitui.viewmodel.view import View

ROWS = 4  # requests that decode
AFTER_S = 0.05  # a gap that begins this long after the stall's end still counts
STALL_S = (0.04, 0.12)  # the range of a stall's duration
MORE = 12  # requests that fill the pool
OVERFILL = 1.3  # their tokens, as a multiple of the pool's
BALLAST = 1_000_000  # objects that a garbage collection visits
NAMES = {  # kind of the stall -> how the cause begins, as a regular expression
    "plan": "plan", "launch": "launch", "commit": "commit", "emit": "output and commands",
    "collection": "garbage collection",
    "prompt": r"(device in the )?prefill of r|launch of next step [\d,]+ \(prefill of |output and commands \(r\d+ came",
    "pool": "queue after a preemption|computing ",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A stall and the reason that the inspector gives for the longest gap at this time."""

    kind: str
    step: int
    stalled_ms: float
    gap_ms: float
    reason: str
    named: bool


class Rig:
    """An engine, and the view that folds its records."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.view = engine, View()
        self.random = random.Random(seed)
        vocab, most = min(1_000, engine.runner.vocab_size), engine.scheduler.config.max_num_batched_tokens
        self.ids = self.random.choices(range(vocab), k=2 * most)
        self.view.reset(engine.snapshot())
        self.ballast = [[] for _ in range(BALLAST)]  # type: ignore[var-annotated]
        self._late: dict[str, float] = {}
        scheduler, runner = engine.scheduler, engine.runner
        for owner, name in ((scheduler, "plan"), (runner, "launch"), (engine.committer, "commit")):
            setattr(owner, name, self._delayed(name, getattr(owner, name)))

    def _delayed(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def late(*args: Any, **named: Any) -> Any:
            time.sleep(self._late.pop(kind, 0.0))
            return call(*args, **named)

        return late

    def step(self) -> None:
        """Runs a step with ROWS requests and folds its records."""
        while len(self.engine.scheduler.requests) < ROWS:
            self.ask(self.random.randint(8, 48), self.random.randint(100, 400))
        self.engine.step()
        self.view.fold(self.engine.log.drain())

    def ask(self, prompt: int, reply: int) -> Request:
        at = self.random.randrange(len(self.ids) - prompt)
        ids = self.ids[at : at + prompt]
        return self.engine.add_request(ids, SamplingParams(max_tokens=reply, ignore_eos=True, temperature=1.0))

    def stall(self, kind: str) -> Finding:
        """Adds a stall of this kind and returns what the inspector says about it."""
        if kind == "pool":
            return self.full_pool()
        self.step()
        duration = self.random.uniform(*STALL_S)
        # With overlap, the ids of the step in flight are fetched after the next step is planned and launched.
        first, began = self.view.history.live.state.step + 1 - self.engine.delay, time.perf_counter()
        if kind == "prompt":
            self.ask(self.engine.scheduler.config.max_num_batched_tokens - 2 * ROWS, 20)
        elif kind == "collection":
            gc.collect()
            duration = time.perf_counter() - began
        elif kind == "emit":
            time.sleep(duration)
        else:
            self._late[kind] = duration
        self.step()
        end = began + duration + AFTER_S
        while time.perf_counter() < end:
            self.step()
        for _ in range(4):  # with overlap, the times of a step are recorded later
            self.step()
        gap, lane = max(self.gaps(first), key=lambda item: item[0].ms)
        return self.finding(kind, duration * 1e3, gap, lane)

    def full_pool(self) -> Finding:
        """Adds requests until one is preempted and has drawn a token again; returns what is said about this gap."""
        first = self.view.history.live.state.step + 1
        tokens = int(OVERFILL * self.view.history.live.total * self.engine.cache.block_size / MORE)
        more = [self.ask(tokens - 200, 200) for _ in range(MORE)]
        found: list[tuple[Gap, Lane]] = []
        while not found:
            if not any(request.id in self.engine.scheduler.requests for request in more):
                more = [self.ask(tokens - 200, 200) for _ in range(MORE)]  # they ended without a preemption
            for _ in range(32):  # `gaps` takes longer than a step
                self.step()
            found = [(gap, lane) for gap, lane in self.gaps(first) if lane.preempted_in(gap.since, gap.step)]
        for request in more:
            self.engine.abort(request.id)
        return self.finding("pool", found[0][0].ms, *found[0])

    def finding(self, kind: str, stalled_ms: float, gap: Gap, lane: Lane) -> Finding:
        reason = explain_gap(self.view, lane, gap)
        return Finding(kind, gap.step, stalled_ms, gap.ms, str(reason), names(kind, reason))

    def gaps(self, first: int) -> list[tuple[Gap, Lane]]:
        """Returns the gaps between two tokens that ended at step `first` or later."""
        found = []
        for lane in self.view.history.lanes.lanes.values():
            if lane.finish_step >= first:  # OPEN is larger than any step
                arrivals = self.view.history.tokens.arrivals(lane, self.view.moment.horizon)
                found += [(arrivals.gap(i), lane) for i in range(1, len(arrivals)) if arrivals.steps[i] >= first]
        return found


def names(kind: str, reason: Reason) -> bool:
    """Returns True if the largest cause is the stall's, and larger than what is unexplained."""
    worst = max(reason.causes, key=lambda cause: cause.ms, default=None)
    if worst is None or worst.ms < reason.unexplained:
        return False
    return re.match(NAMES[kind], worst.name) is not None
