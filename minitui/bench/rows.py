"""A row of the benchmark's report, and helpers that run an engine for a measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from engine.llm import LLM
from engine.params import SamplingParams
from engine.trace.kind import Record, kind_of, named, seq_of
from engine.trace.state import State
from engine.trace.waste import waste_of


@dataclass(frozen=True)
class Row:
    """A measured value. `limit`: the best value that the machine's limits allow. `other`: the value of another engine.
    `ratio`: the median of value / other, if both were measured in pairs."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    other: float | None = None
    note: str = ""
    sustained: float | None = None  # `limit`, but computed with Limits.sustained
    other_name: str = "best other"
    ratio: float | None = None
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
        limit = f"of limit {_number(self.limit or 0).strip():>6} {self.unit:5s}"
        share = f"{self.share:6.0%} {limit}" if self.share is not None else " " * 28
        steady = self._share_of(self.sustained)
        share += f" ({steady:4.0%} sustained)" if steady is not None else ""
        parts = [f"{self.name:34s} {_number(self.value)} {self.unit:9s} {share}"]
        if self.tokens_per_s is not None:
            parts.append(f"{_number(self.tokens_per_s)} tok/s")
        if self.other is not None:
            parts.append(f"{self.other_name} {_number(self.other)}")
        if self.ratio is not None:
            parts.append(f"ratio {self.ratio:.2f}")
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
    """Returns the median times of the decode steps in these records, without the first five steps. Returns None if
    fewer than five steps are left."""
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
