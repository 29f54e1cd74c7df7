"""The scheduler that vLLM runs with --scheduler-cls minitui.vllm.RecordingScheduler. Runs inside vLLM's engine process.
It is vLLM's own scheduler; minitui/vllm/recorder.py writes down what it decided. Nothing here may disturb vLLM: the
first exception ends the recording, with one line in vLLM's log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from minitui.vllm.facts import explain
from minitui.vllm.hooks import now
from minitui.vllm.recorder import Recorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.minitui")  # below "vllm": else vLLM's log would not show it


def recording_scheduler(vllm_config: VllmConfig, *arguments: Any, **options: Any) -> Scheduler:
    """Returns a scheduler that records its decisions: vLLM's asynchronous one, unless that is switched off."""
    kind = RecordingAsync if vllm_config.scheduler_config.async_scheduling else RecordingSync
    return kind(vllm_config, *arguments, **options)


class _Recording(Scheduler):
    """Overrides the methods that decide something, with any arguments. `_recorder` is None after a failure."""

    _recorder: Recorder | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        try:
            self._recorder = Recorder(self)
        except Exception as error:
            logger.warning("minitui does not record this engine: %s", explain(error))

    def _stop_recording(self, error: Exception) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        gone = isinstance(error, BrokenPipeError)
        if not gone or not recorder.pipe.reason_given:
            logger.warning("minitui's recording ends: %s", "its watcher has ended" if gone else explain(error))
        _stop(recorder)

    def add_request(self, request: Request, *arguments: Any, **options: Any) -> Any:
        result = super().add_request(request, *arguments, **options)
        if self._recorder is not None:
            try:
                if self.requests.get(request.request_id) is request:  # else: more input for a known request
                    self._recorder.added(request)
            except Exception as error:
                self._stop_recording(error)
        return result

    def schedule(self, *arguments: Any, **options: Any) -> SchedulerOutput:
        recorder = self._recorder
        if recorder is None:
            return super().schedule(*arguments, **options)
        began = now()
        output = super().schedule(*arguments, **options)
        try:
            recorder.scheduled(output, began)
        except Exception as error:
            self._stop_recording(error)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput, *arguments: Any, **options: Any
    ) -> Any:
        recorder, began = self._recorder, now()
        outputs = super().update_from_output(scheduler_output, model_runner_output, *arguments, **options)
        if recorder is not None:
            try:
                recorder.updated(scheduler_output, model_runner_output, outputs, began)
            except Exception as error:
                self._stop_recording(error)
        return outputs

    def finish_requests(self, *arguments: Any, **options: Any) -> Any:
        finished = super().finish_requests(*arguments, **options)
        self._send_events()
        return finished

    def reset_prefix_cache(self, *arguments: Any, **options: Any) -> bool:
        done = False
        try:
            done = super().reset_prefix_cache(*arguments, **options)
            if self._recorder is not None and done:
                self._recorder.hooks.note("r")
        finally:
            self._send_events()  # it may have preempted requests
        return done

    def _send_events(self) -> None:
        if self._recorder is not None:
            try:
                self._recorder.send_events()
            except Exception as error:
                self._stop_recording(error)

    def _preempt_request(self, request: Request, *arguments: Any, **options: Any) -> Any:
        if self._recorder is not None:
            self._recorder.hooks.observe(self._recorder.hooks.preempted, request)
        return super()._preempt_request(request, *arguments, **options)

    def _free_request(self, request: Request, *arguments: Any, **options: Any) -> Any:
        result = super()._free_request(request, *arguments, **options)
        if self._recorder is not None:
            self._recorder.hooks.observe(self._recorder.hooks.left, request)
        return result

    def _free_blocks(self, request: Request, *arguments: Any, **options: Any) -> Any:
        result = super()._free_blocks(request, *arguments, **options)
        if self._recorder is not None:
            self._recorder.hooks.observe(self._recorder.hooks.freed, request)
        return result

    def shutdown(self) -> None:
        super().shutdown()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            _stop(recorder)


def _stop(recorder: Recorder) -> None:
    try:
        recorder.stop()
    except Exception:
        logger.debug("minitui's recorder could not be removed", exc_info=True)


class RecordingSync(_Recording):
    """vLLM's synchronous scheduler, recorded."""


class RecordingAsync(_Recording, AsyncScheduler):
    """vLLM's asynchronous scheduler, recorded."""
