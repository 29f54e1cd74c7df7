"""Puts stalls of known kinds into a live run and checks which causes the inspector names.

    python -m minitui.dev.stalls [--model NAME] [--device cuda] [--stalls 200] [--json]

A few requests decode all the time. At random steps one stall is added: a pause of the host in one part of a step, a
garbage collection, programs on the engine's cores, SIGSTOP, a long prompt, a full pool or, on a GPU, another program on
the device. The longest gap between two tokens near this step must then have the stall as its largest cause. The steps
between the stalls are the controls. The run needs a machine on which nothing else computes.
"""

from __future__ import annotations

import gc
import json as json_module
import multiprocessing as mp
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Annotated, Any

import typer

from engine.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.host_pauses import watch_stops
from engine.core.request import Request
from engine.params import SamplingParams
from minitui import tutor
from minitui.viewmodel.causes import explain
from minitui.viewmodel.lane import Lane
from minitui.viewmodel.model import View
from minitui.viewmodel.stalls import Reason, explain_gap
from minitui.viewmodel.token_gaps import Gap

ROWS = 4  # requests that decode
BEFORE = 200  # steps before the first stall
AFTER_S = 0.05  # a gap that begins this long after the stall's end still counts
HELPED = ("stop", "program", "device")  # kinds that the helper process causes
STALL_S = (0.04, 0.12)  # the range of a stall's duration
MORE = 12  # requests that fill the pool
OVERFILL = 1.3  # their tokens, as a multiple of the pool's
BALLAST = 1_000_000  # objects that a garbage collection visits
NAMES = {  # kind of the stall -> how the cause begins, as a regular expression
    "plan": "plan", "launch": "launch", "commit": "commit", "emit": "output and commands",
    "collection": "garbage collection", "stop": "process stopped", "program": "another program on the core",
    "prompt": r"(device in the )?prefill of r|launch of next step [\d,]+ \(prefill of |output and commands \(r\d+ came",
    "pool": "queue after a preemption|computing ", "device": "device",
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

    def __init__(self, engine: Engine, seed: int, on_gpu: bool) -> None:
        self.engine, self.view = engine, View()
        self.random = random.Random(seed)
        self.kinds = [kind for kind in NAMES if kind != "device" or on_gpu]
        vocab, most = min(1_000, engine.runner.vocab_size), engine.scheduler.config.max_num_batched_tokens
        self.ids = self.random.choices(range(vocab), k=2 * most)
        self.view.reset(engine.snapshot())
        self.ballast = [[] for _ in range(BALLAST)]  # type: ignore[var-annotated]
        self._late: dict[str, float] = {}
        scheduler, runner = engine.scheduler, engine.runner
        for owner, name in ((scheduler, "plan"), (runner, "launch"), (engine.committer, "commit")):
            setattr(owner, name, self._delayed(name, getattr(owner, name)))
        self._on_gpu = on_gpu

    @cached_property
    def helper(self) -> Connection:
        """The pipe to the helper process, which is started when it is first needed."""
        ours, theirs = mp.get_context("spawn").Pipe()
        cores = sorted(os.sched_getaffinity(0))
        helper = mp.get_context("spawn").Process(
            target=disturb, args=(theirs, os.getpid(), cores, self._on_gpu), daemon=True
        )
        helper.start()
        theirs.close()  # if the helper ends, `recv` raises EOFError
        ours.recv()  # the helper is ready
        return ours

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
        helped = self.helper if kind in HELPED else None
        self.step()  # the start of the helper delays this step
        duration = self.random.uniform(*STALL_S)
        # With overlap, the ids of the step in flight are fetched after the next step is planned and launched.
        first, began = self.view.live.state.step + 1 - self.engine.delay, time.perf_counter()
        if kind == "prompt":
            self.ask(self.engine.scheduler.config.max_num_batched_tokens - 2 * ROWS, 20)
        elif kind == "collection":
            gc.collect()
            duration = time.perf_counter() - began
        elif kind == "emit":
            time.sleep(duration)
        elif helped is not None:
            helped.send((kind, duration))
        else:
            self._late[kind] = duration
        self.step()
        end = began + duration + AFTER_S
        while time.perf_counter() < end or (helped is not None and not helped.poll()):
            self.step()
        if helped is not None:
            helped.recv()
        for _ in range(4):  # with overlap, the times of a step are recorded later
            self.step()
        gap, lane = max(self.gaps(first), key=lambda item: item[0].ms)
        return self.finding(kind, duration * 1e3, gap, lane)

    def full_pool(self) -> Finding:
        """Adds requests until one is preempted and has drawn a token again; returns what is said about this gap."""
        first = self.view.live.state.step + 1
        tokens = int(OVERFILL * self.view.live.total * self.engine.cache.block_size / MORE)
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
        for lane in self.view.lanes.lanes.values():
            if lane.finish_step >= first:  # OPEN is larger than any step
                arrivals = self.view.tokens.arrivals(lane, self.view.horizon)
                found += [(arrivals.gap(i), lane) for i in range(1, len(arrivals)) if arrivals.steps[i] >= first]
        return found


def names(kind: str, reason: Reason) -> bool:
    """Returns True if the largest cause is the stall's, and larger than what is unexplained."""
    worst = max(reason.causes, key=lambda cause: cause.ms, default=None)
    if worst is None or worst.ms < reason.unexplained:
        return False
    return re.match(NAMES[kind], worst.name) is not None


def disturb(pipe: Connection, engine: int, cores: list[int], on_gpu: bool) -> None:
    """The helper process: stops the engine, or uses its cores or its device, for the seconds that it is sent."""
    burn: Callable[[], Any] = lambda: None  # noqa: E731
    if on_gpu:
        import torch

        matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

        def burn() -> None:
            for _ in range(4):
                matrix @ matrix
            torch.cuda.synchronize()

        burn()
    pipe.send("ready")
    while True:
        try:
            kind, seconds = pipe.recv()
        except EOFError:
            return
        if kind == "stop":
            os.kill(engine, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(engine, signal.SIGCONT)
        elif kind == "device":
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                burn()
        else:
            spinners = [spin(core, seconds) for core in cores]
            for spinner in spinners:
                os.waitpid(spinner, 0)
        pipe.send("done")


def spin(core: int, seconds: float) -> int:
    """Starts a process that uses one core; returns its id."""
    process = os.fork()
    if process == 0:
        os.sched_setaffinity(0, {core})
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass
        os._exit(0)
    return process


def measure(rig: Rig, stalls: int) -> tuple[list[Finding], list[str], int]:
    """Returns the findings, the reasons of slow steps among the controls, and the number of controls."""
    findings, slow, controls = [], [], 0
    for _ in range(BEFORE):
        rig.step()
    for i in range(stalls):
        for _ in range(8):  # what this loop does between two steps delays the next step
            rig.step()
        findings.append(rig.stall(rig.kinds[i % len(rig.kinds)]))
        for _ in range(8):
            rig.step()
        first = rig.view.live.state.step + 1
        for _ in range(rig.random.randint(20, 40)):
            rig.step()
        for step in range(first, rig.view.horizon - 1):
            row = rig.view.steps.get(step)
            model = rig.view.models.of(step)
            found = explain(row, model) if row is not None and model is not None else None
            controls += 1
            if found is not None and found.slow:
                slow.append(", ".join(f"{cause.name} {cause.ms:.1f}" for cause in found.causes) or "unexplained")
    return findings, slow, controls


def main(
    model: Annotated[str, typer.Option(help="The model, as for minitui chat; by default the bundled one.")] = "",
    device: str = "auto",
    dummy_weights: Annotated[bool, typer.Option("--dummy-weights", help="Use random weights.")] = False,
    blocks: Annotated[int, typer.Option(help="Size of the pool, in blocks.")] = 200,
    budget: Annotated[int, typer.Option(help="Tokens of a step; a long prompt has almost as many.")] = 512,
    stalls: Annotated[int, typer.Option(help="Number of stalls.")] = 200,
    seed: int = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Put stalls of known kinds into a live run and check which causes are named."""
    watch_stops()
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:2]))
    config = EngineConfig(
        model=model or str(tutor.model_dir()), device=device, dummy_weights=dummy_weights, num_blocks=blocks,
        max_num_seqs=16, max_num_batched_tokens=budget, load_tokenizer=False,
    )  # fmt: skip
    built = build_engine(config)
    rig = Rig(built.engine, seed, on_gpu=not built.engine.runner.synchronous)
    findings, slow, controls = measure(rig, stalls)
    print(report(findings, slow, controls, json))


def report(findings: list[Finding], slow: list[str], controls: int, json: bool) -> str:
    """Returns the result as text, or as JSON."""
    named, all_of = Counter(f.kind for f in findings if f.named), Counter(f.kind for f in findings)
    if json:
        rows = [vars(finding) for finding in findings]
        return json_module.dumps({"stalls": rows, "controls": controls, "slow_controls": slow})
    lines = [f"{sum(named.values())} of {len(findings)} stalls named"]
    lines += [f"  {kind:12} {named[kind]:4} of {n}" for kind, n in all_of.items()]
    for f in findings:
        if not f.named:
            lines.append(f"  missed: {f.kind} of {f.stalled_ms:.0f} ms, step {f.step}, {f.gap_ms:.1f} ms: {f.reason}")
    lines.append(f"{controls:,} controls, of which {len(slow)} were slow")
    lines += [f"  {n} x {text}" for text, n in Counter(slow).most_common(12)]
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
