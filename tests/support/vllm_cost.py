"""Measures what the recorder costs vLLM's scheduler per step, without a model. Needs vLLM.

    python -m tests.support.vllm_cost [rows ...]

Two schedulers take turns, BLOCK steps each: one records to a real watcher process, the other does not. On a machine
that does other work, too, the recorder's own time per step is the better figure: its median leaves out interruptions.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.vllm_driver import Load, make_scheduler

BLOCKS, BLOCK = 24, 50  # steps
PROMPT, OUTPUT = 128, 256  # tokens


class Timed(Load):
    """A load of `rows` requests. A new request takes the place of one that has ended."""

    def __init__(self, scheduler: Any, rows: int) -> None:
        super().__init__(scheduler, 1, 2, vocabulary=1000)
        self.rows = rows
        self.own: list[float] = []  # microseconds of each step that the recorder measured

    def block(self) -> float:
        """Returns the mean microseconds of a step in a block of steps; notes the recorder's own time of each."""
        began, recorder = time.perf_counter(), self.scheduler._recorder
        for _ in range(BLOCK):
            while len(self.scheduler.requests) < self.rows:
                prompt = [self.random.randrange(1000) for _ in range(PROMPT)]
                self.add(prompt, self.random.randrange(OUTPUT // 2, OUTPUT * 3 // 2))
            before = recorder.seconds if recorder else 0.0
            self.step()
            self.own.append(((recorder.seconds if recorder else 0.0) - before) * 1e6)
        return (time.perf_counter() - began) / BLOCK * 1e6


def main() -> None:
    """Print the figures for each number of rows."""
    for rows in map(int, sys.argv[1:] or ["64", "256"]):
        with tempfile.TemporaryDirectory() as directory:
            loads = []
            for recorded in (False, True):
                os.environ["MINITUI_TELEMETRY_PORT"] = str(random.randrange(20_000, 30_000))
                options = {"blocks": rows * 40, "rows": rows, "budget": 8192, "asynchronous": True, "log_stats": True}
                scheduler = make_scheduler(Path(directory), **options)
                if not recorded:
                    recorder, scheduler._recorder = scheduler._recorder, None
                    recorder.stop()
                loads.append(Timed(scheduler, rows))
            for load in loads:
                load.block()
                load.own.clear()
            times: list[list[float]] = [[], []]
            for i in range(BLOCKS):
                for k in (0, 1) if i % 2 else (1, 0):
                    times[k].append(loads[k].block())
            more = [recorded - plain for plain, recorded in zip(*times, strict=True)]
            own = loads[1].own
            print(
                f"{rows} rows: {statistics.median(times[0]):.0f} us a step, recorded {statistics.median(more):+.0f} "
                f"(mean {statistics.mean(more):+.0f}, SE {statistics.stdev(more) / BLOCKS**0.5:.0f}); the recorder "
                f"says {statistics.median(own):.1f} (mean {statistics.mean(own):.1f})", flush=True,
            )
            loads[1].scheduler._recorder.stop()


if __name__ == "__main__":
    main()
