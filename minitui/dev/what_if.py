"""Measures how right a what-if is, and how long it takes.

    python -m minitui.dev.what_if pairs [--rounds 3] [--only chats] [--json]
    python -m minitui.dev.what_if speed [--requests 10000]

`pairs` compares what-ifs with real runs on a CPU: twenty pairs of a recording and another setting. One engine runs a
workload with the recorded setting, and another runs it with the other setting. Both are real engines with the bundled
model and one thread. They take turns of TURN seconds: it is the turn of the run whose clock is behind, so slow moments
of the machine meet both. A run's clock is the processor time of its own turns: other programs do not count. Time
without requests is skipped. The recording of the first run is then played with the other setting:

- "step": how far the mean time of a step is from the real one; "first": the same of the time to first token (p99)
- "counts": steps, prompt tokens from the cache and preemptions. They must be equal in workloads whose arrivals do not
  depend on time: all first questions come at once, and each next one when its chat has its answer
- "noise": how far the real runs of the rounds are from their median, at most
- "extrapolated": the share of the played steps that do more than any recorded step

A line has the medians of the rounds.

`speed` reads and plays a recording of many requests: these begin with one of twenty texts of 400 tokens, go on with 50
to 600 tokens of their own, and have replies of 20 to 300 tokens. The recorded engine has no device: a step costs about
what a GPU would need, on a clock that counts only this.
"""

from __future__ import annotations

import json as jsonlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from engine.core.engine import Engine
from engine.core.step import StepPlan
from engine.core.step_clock import StepClock
from engine.info import EngineInfo
from engine.llm import LLM
from engine.params import SamplingParams
from engine.trace.records import RecordLog
from minitui import tutor
from minitui.dev.bench import NoDevice, NothingToWaitFor
from minitui.trace.reader import TraceReader
from minitui.trace.recorder import Recorder
from minitui.viewmodel.compare.figures import RunFigures
from minitui.viewmodel.compare.runs import Run, recorded_view
from minitui.whatif.answer import Question, Sweep
from minitui.whatif.settings import Setting, changes, value_of

BASE = Setting(budget=256, seqs=16, blocks=2000, block_size=16, context=1024)
VOCABULARY = 200  # ids of the prompts
TURN = 0.2  # seconds


@dataclass(frozen=True)
class Ask:
    """A request of a workload. `at`: seconds; None: when the request before it in its chat has its answer."""

    chat: str
    at: float | None
    ids: list[int]  # of the question; with `at` None, they follow the chat's text so far
    reply: int


def chats(r: random.Random) -> list[Ask]:
    """Chats with three system prompts; the questions do not depend on time."""
    systems = [_ids(r, 200) for _ in range(3)]
    asks = [Ask(f"chat {i}", 0.0, r.choice(systems) + _ids(r, r.randrange(10, 120)), r.randrange(8, 60))
            for i in range(40)]  # fmt: skip
    return asks + [Ask(ask.chat, None, _ids(r, r.randrange(8, 60)), r.randrange(8, 60)) for ask in asks * 2]


def documents(r: random.Random) -> list[Ask]:
    """Long prompts with short answers, half of them about the same documents; all at once."""
    papers = [_ids(r, 500) for _ in range(4)]
    return [
        Ask(f"paper {i}", 0.0, (r.choice(papers) if i % 2 else _ids(r, 400)) + _ids(r, 40), r.randrange(4, 24))
        for i in range(100)
    ]


def stream(r: random.Random) -> list[Ask]:
    """Single requests of mixed lengths that arrive at random moments."""
    at, asks = 0.0, []
    for i in range(160):
        at += r.expovariate(8.0)
        asks.append(Ask(f"one {i}", at, _ids(r, int(min(600, r.lognormvariate(4.5, 0.9))) + 1), r.randrange(10, 80)))
    return asks


def bursts(r: random.Random) -> list[Ask]:
    """Bursts of twenty requests with one system prompt, at times."""
    system = _ids(r, 160)
    return [
        Ask(f"burst {i}", i // 20 * 1.4, system + _ids(r, r.randrange(20, 150)), r.randrange(10, 50))
        for i in range(140)
    ]  # fmt: skip


WORKLOADS: dict[str, tuple[Callable[[random.Random], list[Ask]], dict[str, Any], tuple[str, ...]]] = {
    # name -> (requests, what its recorded setting has unlike BASE, the changed settings)
    "chats": (chats, {}, ("budget=128", "budget=512", "seqs=8", "seqs=24", "cache=off", "blocks=200")),
    "documents": (documents, {"blocks": 400}, ("budget=96", "budget=512", "blocks=240", "chunking=off", "seqs=6")),
    "stream": (stream, {}, ("budget=96", "seqs=6", "blocks=150", "policy=static")),
    "bursts": (bursts, {}, ("budget=128", "seqs=8", "cache=off", "policy=longest-prefix", "seqs=24,budget=128")),
}


def _ids(r: random.Random, n: int) -> list[int]:
    return [r.randrange(10, VOCABULARY) for _ in range(n)]


class TurnClock:
    """Seconds of processor time in the turns of one run, and the idle time that was skipped."""

    def __init__(self) -> None:
        self.now = 1.0  # 0 means never
        self._resumed: float | None = None

    def __call__(self) -> float:
        return self.now + (time.process_time() - self._resumed if self._resumed is not None else 0.0)

    def resume(self) -> None:
        self._resumed = time.process_time()

    def pause(self) -> None:
        self.now, self._resumed = self(), None


class OwnStepClock(StepClock):
    """The step clock on a clock of the run's own, which has no pauses."""

    def __init__(self, log: RecordLog, clock: Callable[[], float]) -> None:
        super().__init__(log, synchronous=True)
        self._clock = clock

    def now(self) -> float:
        return self._clock()

    def _reads_delays(self, took_s: float) -> bool:
        return False


class RealRun:
    """A real run of a workload under a setting, recorded in a file."""

    def __init__(self, llm: LLM, setting: Setting, asks: list[Ask], path: Path) -> None:
        self.clock = TurnClock()
        log = RecordLog(clock=self.clock)
        self.engine = Engine(
            llm.engine.runner, setting.scheduler(), prefix_caching=setting.cache, eviction_policy=setting.eviction,
            log=log, clock=OwnStepClock(log, self.clock),
        )  # fmt: skip
        self.path, self._recorder = path, Recorder(path)
        self._recorder.begin(setting.info(EngineInfo(model="tutor", device="cpu")), self.engine.snapshot())
        self._due = [(ask.at + 1.0, i) for i, ask in enumerate(asks) if ask.at is not None]
        heapify(self._due)
        self._asks = asks
        self._later: dict[str, list[int]] = {}
        for i, ask in enumerate(asks):
            if ask.at is None:
                self._later.setdefault(ask.chat, []).append(i)
        self._numbers: dict[int, int] = {}

    def step(self) -> bool:
        """Run a step. Returns False when all requests have their answers."""
        if not self._due and not self.engine.has_work:
            return False
        if not self.engine.has_work:
            self.clock.now = max(self.clock.now, self._due[0][0])
        while self._due and self._due[0][0] <= self.clock.now:
            self._ask(heappop(self._due)[1], [])
        self.clock.resume()
        emitted = self.engine.step()
        self.clock.pause()
        for item in emitted:
            if item.finish_reason:
                number = self._numbers.pop(item.request.id)
                if self._later.get(chat := self._asks[number].chat):
                    self._ask(self._later[chat].pop(0), item.request.ids)
        self._recorder.feed(self.engine.log.drain())
        return True

    def _ask(self, number: int, before: list[int]) -> None:
        ask = self._asks[number]
        params = SamplingParams(max_tokens=ask.reply, ignore_eos=True, temperature=0.0)
        self._numbers[self.engine.add_request([*before, *ask.ids], params, ask.chat).id] = number

    def figures(self) -> RunFigures:
        """Close the recording; return what it says."""
        self._recorder.close()
        return Run(recorded_view(TraceReader(self.path))).figures


def engine_for(setting: Setting) -> LLM:
    """Returns a real engine with this setting; its runner is what is used."""
    return LLM(
        str(tutor.model_dir()), device="cpu", cpu_threads=1, load_tokenizer=False, block_size=setting.block_size,
        num_blocks=setting.blocks, max_num_seqs=setting.seqs, max_num_batched_tokens=setting.budget,
        max_model_len=setting.context,
    )  # fmt: skip


def measures(figures: RunFigures) -> dict[str, float]:
    """Returns what is compared."""
    assert figures.first_p99 is not None
    return {"step": figures.time / figures.steps, "first": figures.first_p99}


def pair(workload: str, change: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Measures one pair."""
    make, unlike, _ = WORKLOADS[workload]
    asks = make(random.Random(1))
    timeless = all(not ask.at for ask in asks)
    before = replace(BASE, **unlike)
    found: dict[str, Any] = {"workload": workload, "change": change, "exact": None}
    played: list[dict[str, float]] = []
    real: list[dict[str, float]] = []
    for n in range(rounds):
        path = folder / f"{workload}-{change}-{n}.trace".replace("|", "-")
        after = setting_after(before, change)
        runs = {}
        for setting, file in [(before, path), (after, path.with_suffix(".real.trace"))][:: -1 if n % 2 else 1]:
            runs[file] = RealRun(engine_for(setting), setting, asks, file)  # in odd rounds in the other order
        first, second = runs[path], runs[path.with_suffix(".real.trace")]
        more = list(runs.values())
        while more:
            run = min(more, key=lambda run: run.clock.now)
            end = run.clock.now + TURN
            while run.clock.now < end:
                if not run.step():
                    more.remove(run)
                    break
        _, then = first.figures(), second.figures()
        question = Question(path, "closed" if timeless else "recorded")
        answer = question.play(question.changed(changes(change)))
        figures = answer.figures
        played.append(_relative(measures(figures), measures(then)))
        real.append(measures(then))
        found |= {"requests": then.requests, "steps": then.steps, "preemptions": then.preemptions,
                  "extrapolated": answer.device.extrapolated / answer.steps,
                  "step_ms": real[-1]["step"], "first_ms": real[-1]["first"], "fit": question.costs.error}  # fmt: skip
        if timeless:
            same = all(getattr(figures, name) == getattr(then, name) for name in ("steps", "cached", "preemptions"))
            found["exact"] = same and found["exact"] is not False
    for name in ("step", "first"):
        found[name] = median(each[name] for each in played)
        middle = median(each[name] for each in real)
        found[f"{name}_noise"] = max(abs(each[name] / middle - 1) for each in real)
    return found


def setting_after(before: Setting, change: str) -> Setting:
    """Returns a setting with a change."""
    return replace(before, **{name: value_of(name, text) for name, text in changes(change).items()})


def _relative(played: dict[str, float], real: dict[str, float]) -> dict[str, float]:
    return {name: played[name] / real[name] - 1 for name in real}


def pairs(only: str) -> Iterator[tuple[str, str]]:
    """Yields the pairs whose names contain a text."""
    for workload, (_, _, changed) in WORKLOADS.items():
        yield from ((workload, change) for change in changed if only in f"{workload} {change}")


app = typer.Typer()


@app.command("pairs")
def compare(
    rounds: Annotated[int, typer.Option(help="Real runs of each pair.")] = 3,
    only: Annotated[str, typer.Option(help="Only pairs whose names contain this.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each pair.")] = False,
) -> None:
    """Compare what-ifs with real runs."""
    shown = ("step", "step_noise", "first", "first_noise", "extrapolated")
    if not json:
        print(f"{'pair':32s}{'steps':>7s}{'counts':>8s}" + "".join(f"{name:>13s}" for name in shown))
    with tempfile.TemporaryDirectory() as folder:
        for workload, change in pairs(only):
            one = pair(workload, change, rounds, Path(folder))
            if json:
                print(jsonlib.dumps(one), flush=True)
                continue
            counts = {True: "exact", False: "differ", None: "-"}[one["exact"]]
            figures = "".join(f"{one[name]:>+13.1%}" for name in shown)
            print(f"{workload + ' ' + change:32s}{one['steps']:7,}{counts:>8s}{figures}", flush=True)


LARGE = Setting(budget=8192, seqs=256, blocks=20_000, block_size=16, context=8192)
RATE = 75.0  # requests a second


class TimedDevice(NoDevice):
    """A device that takes time on a clock of its own."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.now = 1.0

    def launch(self, plan: StepPlan, grammars: object) -> NothingToWaitFor:
        self.now += 8e-3 + 2e-5 * len(plan.rows) + 1e-5 * (plan.num_tokens - len(plan.rows))
        return super().launch(plan, grammars)


def record(path: Path, requests: int) -> int:
    """Records requests; returns the number of steps."""
    r, device = random.Random(1), TimedDevice(LARGE.blocks + 1)
    log = RecordLog(clock=lambda: device.now)
    engine = Engine(device, LARGE.scheduler(), log=log, clock=OwnStepClock(log, lambda: device.now))
    recorder = Recorder(path)
    recorder.begin(LARGE.info(EngineInfo(model="none", device="none")), engine.snapshot())
    texts = [[r.randrange(50_000) for _ in range(400)] for _ in range(20)]
    at = device.now
    while requests or engine.has_work:
        while requests and at <= device.now:
            ids = r.choice(texts) + [r.randrange(50_000) for _ in range(r.randrange(50, 600))]
            engine.add_request(ids, SamplingParams(max_tokens=r.randrange(20, 300), ignore_eos=True), f"r{requests}")
            at += r.expovariate(RATE)
            requests -= 1
        if engine.has_work:
            engine.step()
        else:
            device.now = at
        recorder.feed(log.drain())
    recorder.close()
    return engine.scheduler.step


@app.command()
def speed(requests: Annotated[int, typer.Option(help="Requests of the recording.", min=100)] = 10_000) -> None:
    """Measure reading, playing, and playing two settings at once."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.trace")
        print(f"{requests:,} requests, {record(path, requests):,} steps, {path.stat().st_size / 1e6:.1f} MB")
        for name in ("read", "play", "play two settings"):
            wall, cpu = time.perf_counter(), time.process_time()
            if name == "read":
                question = Question(path)
            elif name == "play":
                question.play(question.changed({"budget": "4096"}))
            else:
                with Sweep(question) as sweep:
                    list(sweep.play([{"budget": "4096"}, {"seqs": "128"}]))
            print(f"{name:18s}{time.perf_counter() - wall:6.1f} s, {time.process_time() - cpu:6.1f} s in this process")


if __name__ == "__main__":
    app()
