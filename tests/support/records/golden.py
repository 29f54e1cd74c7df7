"""The golden trace: fixed seeds on the simulated device, and a clock that counts. `python -m
tests.support.records.golden` writes golden.trace anew, after a change of the scheduler that is meant."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from engine.core.engine import Engine
from engine.core.scheduler import SchedulerConfig
from engine.info import EngineInfo
from engine.params import SamplingParams
from engine.trace.records import Record, RecordLog
from minitui.trace.reader import TraceReader
from minitui.trace.recorder import Recorder
from tests.support.simulation import SimulatedRunner, simulated

GOLDEN = Path(__file__).with_name("golden.trace")
STEPS = 140
INFO = EngineInfo(model="simulation", device="cpu", dtype="none", num_blocks=48, block_size=4)


class Clock:
    """A millisecond passes whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now = round(self.now + 0.001, 3)
        return self.now


def make_engine() -> Engine:
    """48 blocks of 4 tokens, 8 rows, 24 tokens a step: small enough to evict and preempt."""
    runner = SimulatedRunner(INFO.num_blocks + 1, INFO.block_size, 8)
    config = SchedulerConfig(24, 8, max_model_len=120)
    return simulated(Engine(runner, config, log=RecordLog(clock=Clock()), eos_ids=frozenset({0})))


def play(engine: Engine, seed: int = 7) -> None:
    """Prompts that begin alike and then differ, some of them aborted."""
    rng = random.Random(seed)
    system = [rng.randrange(1, 50) for _ in range(13)]
    live: list[int] = []
    for step in range(STEPS):
        if rng.random() < 0.3 and len(live) < 40:
            prompt = system[: rng.choice((3, 8, 13, 13))] + [rng.randrange(1, 50) for _ in range(rng.randrange(1, 30))]
            params = SamplingParams(max_tokens=rng.randrange(1, 40), seed=rng.randrange(1000))
            live.append(engine.add_request(prompt, params, group=f"chat-{step % 5}").id)
        if live and rng.random() < 0.02:
            engine.abort(rng.choice(live))
        if engine.has_work:
            engine.step()


def untimed(record: Record) -> Record:
    """The decision alone: how often somebody looks at the clock is none."""
    seq, _, kind, *fields = record
    if kind == "time":
        fields = [fields[0], fields[6]]
    elif kind in ("first", "parts"):
        fields = fields[:1]
    return (seq, 0.0, kind, *fields)


def random_trace(path: Path) -> Path:
    """The golden run as a recording of random text."""
    reader = TraceReader(GOLDEN)
    recorder = Recorder(path)
    recorder.begin(replace(INFO, random_text=True, model_dir="/somewhere/else"), reader.part(0).snapshot)
    recorder.feed(reader.records())
    recorder.close()
    return path


def main() -> None:
    engine = make_engine()
    recorder = Recorder(GOLDEN, keyframe_every=400)
    recorder.begin(INFO, engine.snapshot())
    play(engine)
    recorder.feed(engine.log.drain())
    recorder.close()
    print(f"{GOLDEN}: {recorder.records} records, {recorder.steps} steps, {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
