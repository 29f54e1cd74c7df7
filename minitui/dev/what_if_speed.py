"""Measures how long a what-if of many requests takes: to read the recording, and to play it.

    python -m minitui.dev.what_if_speed [--requests 10000]

The requests begin with one of twenty texts of 400 tokens, go on with 50 to 600 tokens of their own, and have replies of
20 to 300 tokens. They arrive faster than 256 rows serve them at first. The recorded engine has no device: a step costs
what a GPU would need, on a clock that only counts this.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from engine.core.engine import Engine
from engine.core.step import StepPlan
from engine.core.step_clock import StepClock
from engine.info import EngineInfo
from engine.params import SamplingParams
from engine.trace.records import RecordLog
from minitui.dev.bench import NoDevice, NothingToWaitFor
from minitui.trace.recorder import Recorder
from minitui.whatif.answer import Question, Sweep
from minitui.whatif.settings import Setting

SETTING = Setting(budget=8192, seqs=256, blocks=20_000, block_size=16, context=8192)
RATE = 75.0  # requests a second


class TimedDevice(NoDevice):
    """A device that takes time on a clock of its own."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.now = 1.0

    def launch(self, plan: StepPlan, grammars: object) -> NothingToWaitFor:
        self.now += 8e-3 + 2e-5 * len(plan.rows) + 1e-5 * (plan.num_tokens - len(plan.rows))
        return super().launch(plan, grammars)


class DeviceClock(StepClock):
    """The step clock on a device's clock."""

    def __init__(self, log: RecordLog, device: TimedDevice) -> None:
        super().__init__(log, synchronous=True)
        self._device = device

    def now(self) -> float:
        return self._device.now


def record(path: Path, requests: int) -> int:
    """Records requests; returns the number of steps."""
    r, device = random.Random(1), TimedDevice(SETTING.blocks + 1)
    log = RecordLog(clock=lambda: device.now)
    engine = Engine(device, SETTING.scheduler(), log=log, clock=DeviceClock(log, device))
    recorder = Recorder(path)
    recorder.begin(SETTING.info(EngineInfo(model="none", device="none")), engine.snapshot())
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


def main(requests: Annotated[int, typer.Option(help="Requests of the recording.", min=100)] = 10_000) -> None:
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
    typer.run(main)
