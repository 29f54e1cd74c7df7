"""The worker that vLLM runs with --worker-cls minitui.vllm.RecordingWorker: vLLM's own, which also times each step on
the device. Runs inside vLLM's worker process, with the model runner of vLLM 0.33 (Model Runner V2).

Two CUDA events are recorded: before the forward pass, and behind the sampling. vLLM copies the sampled tokens behind
the second one and waits for this copy, so both have occurred when the results are read: nothing here waits. The time
travels to the scheduler as an attribute of vLLM's results. The first exception ends the timing, with one line in
vLLM's log.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from minitui.vllm.facts import explain
from minitui.vllm.recorder import DEVICE_MS

logger = init_logger("vllm.minitui")


class RecordingWorker(Worker):
    """vLLM's worker. `_timer` is None if the steps are not timed."""

    _timer: StepTimer | None = None

    def init_device(self) -> None:
        super().init_device()
        try:
            self._timer = StepTimer(self.model_runner)
        except Exception as error:
            logger.warning("minitui does not time the steps of this worker: %s", explain(error))

    def sample_tokens(self, *arguments: Any, **options: Any) -> Any:
        output = super().sample_tokens(*arguments, **options)
        return output if self._timer is None else self._timer.attached(output)


class StepTimer:
    """Times the steps of one model runner."""

    def __init__(self, runner: Any) -> None:
        """Raises an exception if the runner is not as expected."""
        stages = runner.vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1:
            raise ValueError(f"a step takes the devices of {stages} pipeline stages, and only one can be timed")
        self._failed = False
        self._begun: torch.cuda.Event | None = None
        self._times: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # of the step that was launched last
        forward, sample = runner.step_timing.forward_start, runner.sample

        def forward_start(*arguments: Any, **options: Any) -> Any:
            result = forward(*arguments, **options)
            self._begun = self._event()
            return result

        def sampled(*arguments: Any, **options: Any) -> Any:
            result = sample(*arguments, **options)
            begun, self._begun = self._begun, None
            self._times = (begun, ended) if begun is not None and (ended := self._event()) is not None else None
            return result

        runner.step_timing.forward_start, runner.sample = forward_start, sampled

    def attached(self, output: Any) -> Any:
        """Returns vLLM's output of the step, which puts the step's time into its results when it is read."""
        times, self._times = self._times, None
        if times is None or not hasattr(output, "get_output"):
            return output
        read = output.get_output

        def get_output() -> Any:
            result = read()
            try:
                setattr(result, DEVICE_MS, times[0].elapsed_time(times[1]))
            except Exception as error:
                self._fail(error)
            return result

        output.get_output = get_output
        return output

    def _event(self) -> torch.cuda.Event | None:
        """Returns an event that was recorded now; None after a failure."""
        if self._failed:
            return None
        try:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        except Exception as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            logger.warning("minitui does not time the steps any more: %s", explain(error))
        self._failed = True
