"""What clients do to vLLM's scheduler at its worst: they cancel at any moment, ask for several samples, share prefixes.
Import this only where vLLM is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.v1.request import RequestStatus

from tests.support.vllm_direct import watch_steps
from tests.support.vllm_driver import Load, make_scheduler

KINDS: list[dict[str, Any]] = [
    {"asynchronous": True}, {"asynchronous": True, "resumed_are_new": True}, {"resumed_are_new": True}, {},
    {"asynchronous": True, "policy": "priority"}, {"policy": "priority", "resumed_are_new": True},
    {"drafts": 3}, {"drafts": 3, "policy": "priority", "resumed_are_new": True},
    {"asynchronous": True, "caching": False},
]
MOST = 60  # requests at once


class Wild(Load):
    """A load in which something happens at every moment between two calls of the scheduler."""

    def __init__(self, scheduler: Any, seed: int, in_flight: int = 1, drafts: int = 0) -> None:
        vocabulary = (2, 40)[seed % 2]  # of two tokens: different requests compute the same blocks
        super().__init__(scheduler, seed, in_flight, vocabulary, drafts, longest=400, schemas=0.05)
        self.pipe = watch_steps(scheduler)
        self.resets, self.losses = 0.002, (0.0, 0.02)[seed // 2 % 2]
        self._texts: list[list[int]] = []  # of requests that have been there

    def add_random(self) -> None:
        """Submit a request, several samples of one, or one that continues what another one has computed."""
        rnd, before = self.random, self.requests
        if self._texts and rnd.random() < 0.4:
            text = rnd.choice(self._texts[-12:])
            more = [rnd.randrange(self.vocabulary) for _ in range(rnd.choice([0, 1, 16, 40]))]
            prompt = (text[: rnd.randrange(1, len(text) + 1)] + more)[:900]
            self.add(prompt, rnd.choice([1, 40, 300]), rnd.randrange(3))
        else:
            super().add_random()
        request = self.scheduler.requests.get(f"chatcmpl-{before:08x}")
        if request is not None and rnd.random() < 0.15:
            for _ in range(rnd.randrange(1, 4)):
                self.add(list(request.prompt_token_ids), request.max_tokens, request.priority)

    def disturb(self) -> None:
        """Do what may happen between two calls."""
        rnd, scheduler = self.random, self.scheduler
        requests = list(scheduler.requests.values())
        if requests and rnd.random() < 0.2:
            self._texts.append(list(rnd.choice(requests).all_token_ids))
        while requests and rnd.random() < 0.06:
            scheduler.finish_requests(rnd.choice(requests).request_id, RequestStatus.FINISHED_ABORTED)
        if rnd.random() < 0.01:
            preempted = [r.request_id for r in requests if r.status == RequestStatus.PREEMPTED]
            scheduler.finish_requests(preempted or None, RequestStatus.FINISHED_ABORTED)
        if rnd.random() < self.resets:
            scheduler.reset_prefix_cache(reset_running_requests=rnd.random() < 0.5)
        if rnd.random() < self.losses:
            if self.pipe.lost:
                self.pipe.reads = True
            else:
                self.pipe.lose()
                self.pipe.reads = rnd.random() < 0.5  # else messages are lost for some steps
        if rnd.random() < 0.05 and len(scheduler.requests) < MOST:
            self.add_random()
            if rnd.random() < 0.2:
                scheduler.finish_requests(f"chatcmpl-{self.requests - 1:08x}", RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        self.disturb()
        super().step()
        self.disturb()

    def _end_step(self, output: Any, chunks: set[str]) -> None:
        self.disturb()
        super()._end_step(output, chunks)


def make_wild(directory: Path, seed: int, kind: dict[str, Any]) -> Wild:
    """Returns a load for a scheduler with few blocks."""
    rows, blocks, budget = ((8, 100, 128), (24, 160, 512), (24, 110, 64))[seed % 3]
    options = dict(kind)
    new = options.pop("resumed_are_new", False)
    scheduler = make_scheduler(directory, blocks, rows, budget, **options)
    scheduler.use_v2_model_runner = new  # with the GPU's second model runner, resumed requests come after new ones
    return Wild(scheduler, seed, 2 if options.get("asynchronous") else 1, options.get("drafts", 0))
