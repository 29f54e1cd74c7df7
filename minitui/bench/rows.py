"""A row of the benchmark's report, helpers that run an engine for a measurement, and the cost of engine records."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from engine.llm import LLM
from engine.params import SamplingParams
from engine.trace.kind import Record, kind_of, named, seq_of
from engine.trace.records import RecordLog, packets
from engine.trace.state import State
from engine.trace.waste import waste_of

COUNT = 20_000


@dataclass(frozen=True)
class Row:
    """A measured value.

    `limit`: the best value that the machine's limits allow. `other`: the value of another engine.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None
    goal: float | None = None
    other: float | None = None
    note: str = ""
    sustained: float | None = None  # `limit`, but computed with Limits.sustained
    tokens_per_s: float | None = None  # if the unit is a time

    @property
    def share(self) -> float | None:
        """The share of the limit that is reached, 0 to 1; None if there is no limit."""
        return self._share_of(self.limit)

    def _share_of(self, limit: float | None) -> float | None:
        if not limit:
            return None
        return self.value / limit if self.unit.endswith("/s") else limit / self.value

    def line(self) -> str:
        share = f"{self.share:6.0%} of limit {_number(self.limit or 0)}" if self.share is not None else " " * 23
        steady = self._share_of(self.sustained)
        share += f" ({steady:4.0%} sustained)" if steady is not None else ""
        parts = [f"{self.name:34s} {_number(self.value)} {self.unit:9s} {share}"]
        if self.tokens_per_s is not None:
            parts.append(f"{_number(self.tokens_per_s)} tok/s")
        if self.other is not None:
            parts.append(f"best other {_number(self.other)}")
        if self.goal is not None:
            reached = self.value >= self.goal if self.unit.endswith("/s") else self.value <= self.goal
            parts.append(f"goal {_number(self.goal)} {'reached' if reached else 'missed'}")
        return "   ".join([*parts, self.note]).rstrip()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share}


def _number(value: float) -> str:
    return f"{value:10,.0f}" if value >= 1000 else f"{value:10.2f}"


def random_prompts(lengths: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Returns prompts of uniformly random ids. The last 600 ids are left out: special tokens are among them."""
    rng = np.random.default_rng(seed)
    high = max(2, vocab_size - 600)
    return [rng.integers(0, high, size=n).tolist() for n in lengths]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def seconds(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> float:
    """Returns the wall-clock seconds until every reply is complete."""
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


@dataclass(frozen=True)
class StepTimes:
    """Medians over the decode steps of a run."""

    steps: int
    plan_us: float
    launch_us: float
    commit_us: float
    wall_ms: float
    device_ms: float

    @property
    def host_us(self) -> float:
        """The host's time for a step: plan, launch and commit."""
        return self.plan_us + self.launch_us + self.commit_us


def recorded(llm: LLM, work: Callable[[], float]) -> tuple[float, State, list[Record]]:
    """Returns (what `work` returned, the state before it, its records)."""
    llm.engine.log.drain()
    before = State.from_snapshot(llm.engine.snapshot())
    return work(), before, llm.engine.log.drain()


def waste_rows(name: str, state: State, records: list[Record]) -> Iterator[Row]:
    """Yields the waste of a run: unused slots as a mean over its steps, and tokens computed again. Yields nothing if
    the log dropped records. Folds the records into `state`."""
    assert state.waste is not None
    if not records or seq_of(records[0]) != state.seq + 1:
        return
    before, unused, slots = asdict(state.waste), 0, 0
    for record in records:
        state.apply(record)
        if kind_of(record) == "step":
            waste = waste_of(state)
            unused, slots = unused + waste.unused_slots, slots + waste.slots
    share = 100 * unused / max(1, slots)
    yield Row(f"{name}, unused slots", share, "%", note="of the requests' blocks, mean over the steps")
    again = {why: tokens - before[why] for why, tokens in asdict(state.waste).items()}
    note = ", ".join(f"{tokens:,} {why}" for why, tokens in again.items())
    yield Row(f"{name}, tokens computed again", sum(again.values()), "tokens", note=note)


def decode_steps(records: list[Record]) -> StepTimes | None:
    """Returns the median times of the decode steps in these records, without the first five steps.

    Returns None if fewer than five steps are left.
    """
    times = (named(record) for record in records if kind_of(record) == "time")
    found = [time for time in times if time.work == "decode"][5:]
    if len(found) < 5:
        return None
    plan, launch, commit, wall, device = (
        median(float(getattr(time, name) or 0.0) for time in found)
        for name in ("plan_us", "launch_us", "commit_us", "wall_ms", "device_ms")
    )
    return StepTimes(len(found), plan, launch, commit, wall, device)


def said(rows: Iterator[Row], say: Any) -> list[dict[str, Any]]:
    """Calls `say` with each row as soon as it is measured; returns the rows as data."""
    found = []
    for row in rows:
        say(row.line())
        found.append(row.as_dict())
    return found


def record_cost() -> dict[str, float]:
    """Returns the microseconds to append a typical record, and to pack it for sending."""
    log = RecordLog(limit=COUNT)
    started = time.perf_counter()
    for step in range(COUNT):
        log.append("step", step, [], [], [], 64, 0)
    appended = time.perf_counter() - started
    records = log.drain()
    started = time.perf_counter()
    packets(records)
    return {"append_us": appended / COUNT * 1e6, "pack_us": (time.perf_counter() - started) / COUNT * 1e6}


def watched_runs(llm: LLM, rows: int, tokens: int, pairs: int) -> dict[str, Any]:
    """Runs `rows` replies of `tokens` tokens each, `pairs` times with and without records; returns the slowdown and
    the half width of its 95 % interval."""
    log = llm.engine.log
    vocab, ratios, per_step = int(llm.info.vocab_size), [], []
    params = greedy(tokens)
    seconds(llm, random_prompts([32] * rows, vocab, 10_000), params)
    try:
        for pair in range(pairs):
            times = {}
            for enabled in (False, True) if pair % 2 else (True, False):
                log.drain()
                log.enabled = enabled
                before = log.seq
                prompts = random_prompts([32] * rows, vocab, 20_000 + 2 * pair + enabled)
                times[enabled] = seconds(llm, prompts, params)
                if enabled:
                    per_step.append((log.seq - before) / tokens)
            ratios.append(times[True] / times[False] - 1.0)
    finally:
        log.enabled = True
        log.drain()
    slowdown, interval = mean_interval(ratios)
    return {
        "rows": rows, "pairs": pairs, "slowdown": slowdown, "interval": interval,
        "records_per_step": statistics.mean(per_step),
    }  # fmt: skip


def mean_interval(values: list[float]) -> tuple[float, float]:
    """Returns the mean and the half width of its 95 % confidence interval (nan for one value).

    The quantile of Student's t is computed as the normal quantile plus three terms of an expansion; for five or more
    values its error is below 0.3 %.
    """
    n, z = len(values), 1.959964
    if n < 2:
        return statistics.mean(values), float("nan")
    t = z + (z**3 + z) / (4 * (n - 1)) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * (n - 1) ** 2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * (n - 1) ** 3)
    return statistics.mean(values), t * statistics.stdev(values) / n**0.5


def watching(llm: LLM, rows: int, tokens: int = 128, pairs: int = 8) -> tuple[dict[str, Any], list[str]]:
    """Measures the cost of a record and the slowdown of runs; returns the data and lines of text."""
    cost, runs = record_cost(), watched_runs(llm, rows, tokens, pairs)
    mean, half = runs["slowdown"], runs["interval"]
    lines = [
        f"a record takes {cost['append_us']:.2f} us to write and {cost['pack_us']:.2f} us to pack; "
        f"a decode step of {rows} rows writes {runs['records_per_step']:.1f} records",
        f"records slow a run down by {mean:+.2%} (95 % interval {mean - half:+.2%} to {mean + half:+.2%}): {pairs} "
        f"pairs of runs with {rows} rows, with and without records",
    ]
    return {**cost, **runs}, lines
