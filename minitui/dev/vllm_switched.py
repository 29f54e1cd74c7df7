"""vLLM's scheduler with a recorder that goes on and off: one process shows what recording costs, without and with it.

    vllm serve MODEL --scheduler-cls minitui.dev.vllm_switched.SwitchedScheduler

Two processes of the same vLLM differ by several percent from each other; two periods of one process do not. Each period
appends a line to the file that MINITUI_SWITCHED names: its end in seconds since 1970, 1 if the recorder was on, its
seconds, its steps, and the tokens that they sampled.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from minitui.vllm.hooks import now
from minitui.vllm.scheduler import RecordingAsync

PERIOD_S = 1.0
ORDER = (False, True, True, False)  # a load that changes slowly is the same in both


class SwitchedScheduler(RecordingAsync):
    """Records in every second period on average. Needs vLLM's asynchronous scheduling, which is the default."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self._recorder is not None
        self._switched, self._periods = self._recorder, 0
        self._file = Path(os.environ["MINITUI_SWITCHED"])
        self._switch(ORDER[0])
        self._begin()

    def _begin(self) -> None:
        self._steps = self._tokens = 0
        self._began = now()

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        if now() > self._began + PERIOD_S:
            self._end()
        return super().schedule(*arguments, **options)

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any, *arguments: Any, **options: Any
    ) -> Any:
        self._steps += 1
        self._tokens += sum(map(len, model_runner_output.sampled_token_ids))
        return super().update_from_output(scheduler_output, model_runner_output, *arguments, **options)

    def _end(self) -> None:
        on = self._recorder is not None
        line = f"{time.time():.3f} {on:d} {now() - self._began:.6f} {self._steps} {self._tokens}\n"
        with self._file.open("a") as file:
            file.write(line)
        self._periods += 1
        self._switch(ORDER[self._periods % len(ORDER)])
        self._begin()

    def _switch(self, on: bool) -> None:
        recorder = self._switched
        if on == (self._recorder is not None):
            return
        if on:
            recorder.hooks.attach()
            recorder.hooks.take()
            recorder._in_flight.clear()
            recorder.send_whole_state()
            self._recorder = recorder
        else:
            recorder.pipe.flush()
            recorder.hooks.detach()
            self._recorder = None
