"""The time of a step on the device, from vLLM's worker class to the records. Needs vLLM, no GPU: events are fakes."""

from __future__ import annotations

import inspect
import pickle
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed", exc_type=ImportError)
pytest.importorskip("vllm.v1.worker.gpu.async_utils", reason="vLLM without the second runner", exc_type=ImportError)

import torch
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu import async_utils as utils
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

if "step_timing" not in inspect.getsource(GPUModelRunner):
    pytest.skip("vLLM before 0.33 does not say when a step begins", allow_module_level=True)

import minitui.vllm
import minitui.vllm.recorder as recording
from minitui.vllm.recorder import DEVICE_MS
from minitui.vllm.worker import logger
from tests.support.vllm_direct import Direct, watch_steps
from tests.support.vllm_driver import Load, make_scheduler


class Event:
    """An event of a device which has done all work as soon as `done` says so. Its clock: one per recorded event."""

    recorded: ClassVar[list[Event]] = []
    done = True

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded.append(self)

    def elapsed_time(self, end: Event) -> float:
        if not Event.done:
            raise RuntimeError("device not ready")
        return 1.5 * (Event.recorded.index(end) - Event.recorded.index(self))


class Runner:
    """What a timer sees of vLLM's model runner, with vLLM's own collector of timings and its own kind of results."""

    def __init__(self, stages: int = 1) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=stages))
        self.step_timing = utils.StepTimingCollector()
        self.output: Any = None

    def sample(self, *_: Any) -> tuple[int]:
        return (7,)

    def sample_tokens(self, _: Any) -> Any:
        assert self.sample(1, 2, 3) == (7,)
        output = object.__new__(utils.AsyncOutput)  # its constructor needs streams of a GPU
        output.get_output = lambda: self.output  # type: ignore[method-assign]
        return output


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "recorded", [])
    monkeypatch.setattr(Worker, "init_device", lambda self: None)
    made = object.__new__(minitui.vllm.RecordingWorker)
    made.model_runner = Runner()
    made.init_device()
    return made


def a_step(worker: Any, output: Any) -> Any:
    """What a step of vLLM's engine calls: the forward pass, the sampling, and the results as a scheduler gets them."""
    worker.model_runner.output = output
    worker.model_runner.step_timing.forward_start()
    return pickle.loads(pickle.dumps(worker.sample_tokens(None).get_output()))  # as between vLLM's processes


def an_output() -> ModelRunnerOutput:
    return ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[[5]])


def test_results_bring_the_time_of_their_step(worker: Any) -> None:
    for _ in range(3):
        found = a_step(worker, an_output())
        assert getattr(found, DEVICE_MS) == 1.5 and found.sampled_token_ids == [[5]]
    assert len(Event.recorded) == 6
    worker.model_runner.output = an_output()
    late = worker.sample_tokens(None).get_output()  # without a forward pass, as after an error
    assert not hasattr(late, DEVICE_MS) and len(Event.recorded) == 6


def test_an_event_that_has_not_occurred_ends_the_timing_and_nothing_waits(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda form, *rest: said.append(form % rest))
    monkeypatch.setattr(Event, "done", False)
    for _ in range(2):
        found = a_step(worker, an_output())
        assert not hasattr(found, DEVICE_MS) and found.sampled_token_ids == [[5]]
    assert len(said) == 1 and "device not ready" in said[0]
    assert len(Event.recorded) == 2, "no more events after the failure"


def test_a_runner_that_is_not_as_expected_is_not_timed(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda form, *rest: said.append(form % rest))
    for runner, reason in ((SimpleNamespace(), "vllm_config"), (Runner(stages=2), "2 pipeline stages")):
        other = object.__new__(minitui.vllm.RecordingWorker)
        other.model_runner = runner
        other.init_device()
        assert reason in said.pop() and other._timer is None
    worker.model_runner = Runner(stages=2)
    worker._timer = None
    assert not hasattr(a_step(worker, an_output()), DEVICE_MS)


def test_vllms_own_model_runner_has_what_is_timed() -> None:
    """`forward_start` is called in the forward pass only, and the sampling ends before the results are copied."""
    forward, after = (inspect.getsource(each) for each in (GPUModelRunner.execute_model, GPUModelRunner.sample_tokens))
    assert forward.count("self.step_timing.forward_start()") == 1
    assert after.index("self.sample(") < after.index("AsyncOutput(")
    assert "self.step_timing = StepTimingCollector()" in inspect.getsource(GPUModelRunner.__init__)
    assert "copy_event.synchronize()" in inspect.getsource(utils.AsyncOutput.get_output)


def test_times_of_the_worker_are_in_the_records(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, worker: Any) -> None:
    monkeypatch.setattr(recording, "Pipe", Direct)
    scheduler = make_scheduler(tmp_path, asynchronous=True)
    load = Load(scheduler, 1, 2)
    times: list[float | None] = []
    pipe = watch_steps(scheduler)
    take, result_of = pipe.follower.take, load.result_of

    def taken(record: Any) -> None:
        take(record)
        if record[2] == "time":
            times.append(record[8])

    pipe.follower.take = taken  # type: ignore[method-assign]
    load.result_of = lambda *given: a_step(worker, result_of(*given))  # type: ignore[method-assign]
    load.run(20)
    load.finish()
    assert scheduler._recorder is not None and pipe.wrong == []
    assert len(times) >= 20 and set(times) == {1.5}
