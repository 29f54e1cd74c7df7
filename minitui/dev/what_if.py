"""Measures how right a what-if is.

    python -m minitui.dev.what_if pairs [--device cuda] [--rounds 3] [--seed 1] [--only chats] [--keep FOLDER]
    python -m minitui.dev.what_if score FOLDER

`pairs` compares what-ifs with real runs: twenty pairs of a recording and another setting. One engine runs a workload
with the recorded setting, and another runs it with the other setting. The recording of the first run is then played
with the other setting:

- "step": how far the mean time of a step is from the real one; "first": the same of the time to first token (p99)
- "counts": steps, prompt tokens from the cache and preemptions. They must be equal in workloads whose arrivals do not
  depend on time: all first questions come at once, and each next one when its chat has its answer
- "noise": how far the real runs of the rounds are from their median, at most
- "extrapolated": the share of the played steps that do more than any recorded step, or have rows like none

A line has the medians of the rounds. `--keep` keeps all recordings, and `score` plays those kept.

On a CPU, the engines have the bundled model and one thread. The two runs of a pair take turns of TURN seconds: it is
the turn of the run whose clock is behind, so slow moments of the machine meet both. A run's clock is the processor time
of its own turns: other programs do not count. On a GPU, the model has random weights and the shape of Qwen3-0.6B, and
all is larger by SCALE; the runs follow each other in real time, each after one that warms up. Time without requests
is skipped.
"""

from __future__ import annotations

import gc
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

from engine.core.engine import Engine, StepRunner
from engine.core.step_clock import StepClock
from engine.info import EngineInfo
from engine.llm import LLM
from engine.params import SamplingParams
from engine.trace.records import RecordLog
from minitui import tutor
from minitui.bench.limits import write_config
from minitui.trace.reader import TraceReader
from minitui.trace.recorder import Recorder
from minitui.viewmodel.compare.runs import Run, RunFigures, recorded_view
from minitui.whatif.answer import Question
from minitui.whatif.settings import Setting, changes, value_of

BASE = Setting(budget=256, seqs=16, blocks=2000, block_size=16, context=1024)
VOCABULARY = 200  # ids of the prompts
TURN = 0.2  # seconds
# On a GPU, how many times as large are: texts, numbers of requests, seconds between them, and settings.
SCALE = {"tokens": 5, "requests": 2, "seconds": 0.2, "budget": 8, "seqs": 4, "blocks": 20, "context": 8}


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
            for i in range(40)]
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
    ]


WORKLOADS: dict[str, tuple[Callable[[random.Random], list[Ask]], dict[str, Any], tuple[str, ...]]] = {
    # name -> (requests, what its recorded setting has unlike BASE, the changed settings)
    "chats": (chats, {}, ("budget=128", "budget=512", "seqs=8", "seqs=24", "cache=off", "blocks=200")),
    "documents": (documents, {"blocks": 400}, ("budget=96", "budget=512", "blocks=240", "chunking=off", "seqs=6")),
    "stream": (stream, {}, ("budget=96", "seqs=6", "blocks=150", "policy=static")),
    "bursts": (bursts, {}, ("budget=128", "seqs=8", "cache=off", "policy=longest-prefix", "seqs=24,budget=128")),
}


def _ids(r: random.Random, n: int) -> list[int]:
    return [r.randrange(10, VOCABULARY) for _ in range(n)]


class RunClock:
    """Seconds that a run has worked, and the idle time that was skipped. `read`: seconds of a running clock."""

    def __init__(self, read: Callable[[], float]) -> None:
        self.now = 1.0  # at the last pause; 0 means never
        self._read = read
        self._resumed: float | None = None

    def __call__(self) -> float:
        return self.now + (self._read() - self._resumed if self._resumed is not None else 0.0)

    def resume(self) -> None:
        self._resumed = self._read()

    def pause(self) -> None:
        self.now, self._resumed = self(), None

    def skip_to(self, at: float) -> None:
        self.now += max(0.0, at - self())


class OwnStepClock(StepClock):
    """The step clock on a clock of the run's own, which has no pauses."""

    def __init__(self, log: RecordLog, clock: Callable[[], float], synchronous: bool = True) -> None:
        super().__init__(log, synchronous)
        self._clock = clock

    def now(self) -> float:
        return self._clock()

    def _reads_delays(self, took_s: float) -> bool:
        return False


class RealRun:
    """A real run of a workload under a setting, recorded in a file."""

    def __init__(self, machine: Machine, setting: Setting, asks: list[Ask], path: Path) -> None:
        self._turns = machine.device == "cpu"
        self.clock = RunClock(time.process_time if self._turns else time.perf_counter)
        log, runner = RecordLog(clock=self.clock), machine.runner(setting)
        self.engine = Engine(
            runner, setting.scheduler(), overlap=not self._turns, prefix_caching=setting.cache,
            eviction_policy=setting.eviction, log=log, clock=OwnStepClock(log, self.clock, runner.synchronous),
        )
        self.path, self._records, self._first = path, log.drain(), self.engine.snapshot()
        self._info = setting.info(EngineInfo(
            model="none", device=machine.device, overlap=not self._turns, graphs=machine.graphs,
        ))
        self._due = [(ask.at + 1.0, i) for i, ask in enumerate(asks) if ask.at is not None]
        heapify(self._due)
        self._asks = asks
        self._later: dict[str, list[int]] = {}
        for i, ask in enumerate(asks):
            if ask.at is None:
                self._later.setdefault(ask.chat, []).append(i)
        self._numbers: dict[int, int] = {}
        if not self._turns:
            self.clock.resume()

    def step(self) -> bool:
        """Run a step. Returns False when all requests have their answers."""
        if not self._due and not self.engine.has_work:
            return False
        if not self.engine.has_work:
            self.clock.skip_to(self._due[0][0])
        now = self.clock()
        while self._due and self._due[0][0] <= now:
            self._ask(heappop(self._due)[1], [])
        if self._turns:
            self.clock.resume()
        emitted = self.engine.step()
        if self._turns:
            self.clock.pause()
        for item in emitted:
            if item.finish_reason:
                number = self._numbers.pop(item.request.id)
                if self._later.get(chat := self._asks[number].chat):
                    self._ask(self._later[chat].pop(0), item.request.ids)
        self._records += self.engine.log.drain()
        return True

    def _ask(self, number: int, before: list[int]) -> None:
        ask = self._asks[number]
        params = SamplingParams(max_tokens=ask.reply, ignore_eos=True, temperature=0.0)
        self._numbers[self.engine.add_request([*before, *ask.ids], params, ask.chat).id] = number

    def write(self) -> None:
        """Write the recording."""
        recorder = Recorder(self.path)
        recorder.begin(self._info, self._first)
        recorder.feed(self._records)
        recorder.close()


class Part:
    """A part of a runner's pool."""

    def __init__(self, runner: StepRunner, blocks: int) -> None:
        self.num_blocks, self.block_size, self.vocab_size = blocks + 1, runner.block_size, runner.vocab_size
        self.groups, self.synchronous, self.launch = runner.groups, runner.synchronous, runner.launch


class Machine:
    """Where real runs are made: "cpu" or "cuda". `seed`: of the requests."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device, self._seed = device, seed
        self.scale: dict[str, Any] = {} if device == "cpu" else SCALE
        self.base = replace(BASE, **{name: value * getattr(BASE, name) for name, value in self.scale.items()
                                     if hasattr(BASE, name)})
        self.graphs: dict[str, Any] = {}  # EngineInfo.graphs
        self._shared: StepRunner | None = None  # on a GPU all runs share it: a step costs the same in all of them

    def asks(self, workload: str) -> list[Ask]:
        """Returns the requests of a workload."""
        times, seconds = self.scale.get("tokens", 1), self.scale.get("seconds", 1.0)
        seeds = [1000 * self._seed + n + 1 for n in range(self.scale.get("requests", 1))]
        return [
            Ask(f"{ask.chat}.{n}", ask.at and ask.at * seconds, [id + i for id in ask.ids for i in range(times)],
                ask.reply * times)
            for n in seeds for ask in WORKLOADS[workload][0](random.Random(n))
        ]

    def change(self, change: str) -> str:
        """Returns a change of WORKLOADS as it is on this machine."""
        parts = (part.split("=") for part in change.split(","))
        return ",".join(f"{name}={int(v) * self.scale.get(name, 1) if v.isdigit() else v}" for name, v in parts)

    def setting(self, workload: str, change: str = "") -> Setting:
        """Returns the recorded setting of a workload, or that with a change."""
        unlike = ",".join(f"{name}={value}" for name, value in WORKLOADS[workload][1].items())
        setting = self.base
        for each in filter(None, (unlike, change)):
            values = changes(self.change(each)).items()
            setting = replace(setting, **{name: value_of(name, text) for name, text in values})
        return setting

    def runner(self, setting: Setting) -> StepRunner:
        """Returns a runner for an engine with this setting."""
        if self.device == "cpu":
            return self._load(str(tutor.model_dir()), setting, cpu_threads=1)
        if self._shared is None:
            most = replace(self.base, seqs=2 * self.base.seqs, budget=self.base.context)
            with tempfile.TemporaryDirectory() as folder:
                self._shared = self._load(str(write_config("0.6B", Path(folder))), most, dummy_weights=True)
            gc.collect()
            gc.freeze()
        return Part(self._shared, setting.blocks)

    def _load(self, model: str, setting: Setting, **options: Any) -> StepRunner:
        llm = LLM(
            model, device=self.device, load_tokenizer=False, block_size=setting.block_size, num_blocks=setting.blocks,
            max_num_seqs=setting.seqs, max_num_batched_tokens=setting.budget, max_model_len=setting.context, **options,
        )
        self.graphs = llm.info.graphs
        return llm.engine.runner


def measures(figures: RunFigures) -> dict[str, float]:
    """Returns what is compared."""
    assert figures.first_p99 is not None
    return {"step": figures.time / figures.steps, "first": figures.first_p99}


def run_pair(machine: Machine, workload: str, change: str, n: int, folder: Path) -> None:
    """Makes the two real runs of a pair in their turns, and keeps their recordings."""
    path, asks, runs = folder / _name(workload, change, n), machine.asks(workload), []
    both = [(machine.setting(workload), path), (machine.setting(workload, change), path.with_suffix(".real.trace"))]
    for setting, file in both[:: -1 if n % 2 else 1]:  # in odd rounds in the other order
        runs.append(RealRun(machine, setting, asks, file))
    more = list(runs)
    while more:
        run = min(more, key=lambda run: run.clock.now)
        end = run.clock.now + TURN
        while run.clock.now < end:
            if not run.step():
                more.remove(run)
                break
    for run in runs:
        run.write()


def run_warm(machine: Machine, setting: Setting, workload: str, path: Path) -> None:
    """Makes a real run after one of a quarter of its requests, which compiles kernels for its steps."""
    asks = machine.asks(workload)
    for n in (len(asks) // 4, len(asks)):
        run = RealRun(machine, setting, asks[:n], path)
        while run.step():
            pass
    run.write()


def _name(workload: str, change: str, n: int | str) -> str:
    return f"{workload}-{change}-{n}.trace"


def _real_runs(folder: Path, workload: str, change: str) -> list[Path]:
    return sorted(folder.glob(_name(workload, change, "?.real")))


def pair(machine: Machine, workload: str, change: str, folder: Path) -> dict[str, Any]:
    """Plays the recordings of one pair and compares them with its real runs."""
    timeless = all(not ask.at for ask in machine.asks(workload))
    found: dict[str, Any] = {"workload": workload, "change": machine.change(change), "exact": None}
    played: list[dict[str, float]] = []
    real: list[dict[str, float]] = []
    for file in _real_runs(folder, workload, change):
        then = Run(recorded_view(TraceReader(file))).figures
        shared, own = folder / f"{workload}-{file.name[-12]}.trace", Path(str(file).replace(".real", ""))
        question = Question(shared if shared.exists() else own, "closed" if timeless else "recorded")
        answer = question.play(question.changed(changes(machine.change(change))))
        figures = answer.figures
        real.append(measures(then))
        played.append({name: value / real[-1][name] - 1 for name, value in measures(figures).items()})
        found |= {"steps": then.steps, "extrapolated": answer.device.extrapolated / answer.steps}
        if timeless:
            same = all(getattr(figures, name) == getattr(then, name) for name in ("steps", "cached", "preemptions"))
            found["exact"] = same and found["exact"] is not False
    for name in ("step", "first"):
        found[name] = median(each[name] for each in played)
        middle = median(each[name] for each in real)
        found[f"{name}_noise"] = max(abs(each[name] / middle - 1) for each in real)
    return found


def pairs(only: str) -> Iterator[tuple[str, str]]:
    """Yields the pairs whose names contain one of these texts (with "|" between them)."""
    for workload, (_, _, changed) in WORKLOADS.items():
        yield from ((workload, one) for one in changed if any(text in f"{workload} {one}" for text in only.split("|")))


app = typer.Typer()
SHOWN = ("step", "step_noise", "first", "first_noise", "extrapolated")


def line(one: dict[str, Any]) -> str:
    """Returns what was found about a pair as a line."""
    counts = {True: "exact", False: "differ", None: "-"}[one["exact"]]
    figures = "".join(f"{one[name]:>+13.1%}" for name in SHOWN)
    return f"{one['workload'] + ' ' + one['change']:32s}{one['steps']:7,}{counts:>8s}{figures}"


@app.command("pairs")
def compare(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Real runs of each pair.", max=9)] = 3,
    only: Annotated[str, typer.Option(help="Only pairs whose names contain this.")] = "",
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0,
    keep: Annotated[Path | None, typer.Option(help="Keep the recordings in this folder, and do not play them.")] = None,
) -> None:
    """Compare what-ifs with real runs."""
    machine = Machine(device, seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        (folder / "device").write_text(device)
        for n in range(rounds):
            before = ""
            for workload, change in pairs(only):
                path = folder / _name(workload, change, n)
                if device == "cpu":
                    run_pair(machine, workload, change, n, folder)
                    continue
                if workload != before:
                    run_warm(machine, machine.setting(workload), workload, folder / f"{workload}-{n}.trace")
                before = workload
                run_warm(machine, machine.setting(workload, change), workload, path.with_suffix(".real.trace"))
        if keep is None:
            score(folder)


@app.command()
def score(folder: Path) -> None:
    """Compare what-ifs with the real runs that `pairs --keep` kept."""
    machine = Machine((folder / "device").read_text())
    print(f"{'pair':32s}{'steps':>7s}{'counts':>8s}" + "".join(f"{name:>13s}" for name in SHOWN))
    for workload, change in pairs(""):
        if _real_runs(folder, workload, change):
            print(line(pair(machine, workload, change, folder)), flush=True)


if __name__ == "__main__":
    app()
