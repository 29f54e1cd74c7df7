"""Measures what the recorder costs vLLM's scheduler per step, without a model. Needs vLLM.

    python -m tests.support.vllm_cost [rows ...]

Two schedulers take turns, one step each: one records to a real watcher process, the other does not.
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

STEPS = 1000
PROMPT, OUTPUT = 128, 256  # tokens, as in `minitui.dev.bench_vllm cost`


class Timed(Load):
    """Adds up the time in the scheduler's own methods."""

    def __init__(self, scheduler: Any, rows: int) -> None:
        super().__init__(scheduler, 1, 2, vocabulary=1000)
        self.rows, self.us = rows, 0.0
        for name in ("schedule", "update_from_output", "add_request"):
            setattr(scheduler, name, self._timed(getattr(scheduler, name)))

    def _timed(self, method: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = method(*arguments)
            self.us += (time.perf_counter() - began) * 1e6
            return result

        return timed

    def take_us(self) -> float:
        """Returns the microseconds of one step at full rows. A new request takes the place of one that has ended."""
        while len(self.scheduler.requests) < self.rows:
            prompt = [self.random.randrange(1000) for _ in range(PROMPT)]
            self.add(prompt, self.random.randrange(OUTPUT // 2, OUTPUT * 3 // 2))
        self.us = 0.0
        self.step()
        return self.us


def main() -> None:
    """Print the medians and means for each number of rows."""
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
                for _ in range(50):
                    load.take_us()
            times: list[list[float]] = [[], []]
            for i in range(STEPS):
                for k in (0, 1) if i % 2 else (1, 0):
                    times[k].append(loads[k].take_us())
            recorder = loads[1].scheduler._recorder
            plain, with_recorder = (statistics.median(t) for t in times)
            means = [statistics.mean(t) for t in times]
            print(
                f"{rows} rows: median {plain:.1f} -> {with_recorder:.1f} us a step (+{with_recorder - plain:.1f}), "
                f"mean {means[0]:.1f} -> {means[1]:.1f} (+{means[1] - means[0]:.1f}); "
                f"the recorder says {recorder.seconds / (recorder.step + 1) * 1e6:.1f} us",
                flush=True,
            )
            recorder.stop()


if __name__ == "__main__":
    main()
