"""The step clock: the parts of the host's time add up to the time between two arrivals."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

import pytest

from engine.core import host_pauses, step_clock
from engine.core.commit import Committer
from engine.core.engine import Engine
from engine.core.scheduler import SchedulerConfig
from engine.core.step import StepPlan, StepResult
from engine.params import SamplingParams

PLAN, LAUNCH, COMMIT, DEVICE, EMIT = 1.0, 2.0, 4.0, 8.0, 16.0  # seconds of the counting clock


class Timed:
    """A runner on a clock that moves only by its calls. The device works alone once a step is launched."""

    num_blocks, block_size, vocab_size, synchronous, groups = 64, 16, 1_000, False, ()

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._free_at = 1_000.0, 0.0
        monkeypatch.setattr(step_clock, "now", lambda: self.now)

    def launch(self, plan: StepPlan, grammars: Any) -> Any:
        self.now += LAUNCH
        self._free_at = done = max(self.now, self._free_at) + DEVICE
        runner, device_ms = self, DEVICE * 1e3

        class Launched:
            def wait(self) -> StepResult:
                runner.now = max(runner.now, done)
                return StepResult([7] * len(plan.rows), device_ms=device_ms)

        return Launched()


def recorded(runner: Timed, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    """Returns the records "parts" and "time" of one request's steps."""
    engine = Engine(runner, SchedulerConfig(max_num_seqs=2), overlap=overlap)
    for owner, name, seconds in ((engine.scheduler, "plan", PLAN), (engine.committer, "commit", COMMIT)):
        original = getattr(owner, name)

        def slow(*args: Any, original: Any = original, seconds: float = seconds) -> Any:
            runner.now += seconds
            return original(*args)

        monkeypatch.setattr(owner, name, slow)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
    while engine.has_work:
        engine.step()
        runner.now += EMIT
    records = engine.log.drain()
    return [r for r in records if r[2] == "parts"], [r for r in records if r[2] == "time"]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_parts_of_the_hosts_time_add_up_to_the_time_between_arrivals(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, times = recorded(Timed(monkeypatch), overlap, monkeypatch)
    assert len(parts) == len(times) == 8
    assert [part[3] for part in parts] == [timed[3] for timed in times]
    commit, emit, gate, plan, launch, wait = (us / 1e6 for us in parts[4][4:10])
    assert (commit, emit, gate, plan, launch) == (COMMIT, EMIT, 0.0, PLAN, LAUNCH)
    if overlap:  # the device works during all of it: nothing is left to wait for
        assert wait == 0.0 and times[4][7] == 1e3 * (commit + emit + plan + launch)
    else:
        assert wait == DEVICE and times[4][7] == 1e3 * (plan + launch + wait)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_delay_counts_for_the_step_whose_parts_contain_it(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit is a part of the time of the next step: so is the time in which another program delayed the commit."""
    runner, unread = Timed(monkeypatch), list[float]()

    def delays(self: host_pauses.HostPauses) -> float:
        found, unread[:] = sum(unread), []
        return found

    monkeypatch.setattr(host_pauses.HostPauses, "_read_delays", delays)
    commit, late = Committer.commit, {4: 7.0, 5: 9.0}

    def delayed(committer: Committer, scheduled: Any, result: Any) -> Any:
        pause = late.get(scheduled.plan.step, 0.0)
        runner.now += pause
        unread.append(pause)
        return commit(committer, scheduled, result)

    monkeypatch.setattr(Committer, "commit", delayed)
    parts, _ = recorded(runner, overlap, monkeypatch)
    found = {part[3]: (part[4] / 1e6 - COMMIT, part[11] / 1e6) for part in parts[1:]}
    assert found[5] == (7.0, 7.0) and found[6] == (9.0, 9.0)
    assert all(delay == 0.0 for step, (_, delay) in found.items() if step not in (5, 6)), "each step was read"


def test_time_without_work_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Timed(monkeypatch)
    engine = Engine(runner, SchedulerConfig(max_num_seqs=2))
    for _ in range(2):
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=1))
        while engine.has_work:
            engine.step()
        runner.now += 500.0
    assert [sum(r[4:10]) for r in engine.log.drain() if r[2] == "parts"] == [(LAUNCH + DEVICE) * 1e6] * 2


def test_a_garbage_collection_counts_once() -> None:
    pauses = host_pauses.HostPauses(computes=False)
    garbage: list[Any] = [[] for _ in range(200_000)]
    pauses.since_last()
    began = time.perf_counter()
    gc.collect()
    took = time.perf_counter() - began
    assert 0.3 * took < pauses.since_last().gc_s <= took
    assert pauses.since_last().gc_s < took and len(garbage) == 200_000


def test_a_stopped_process_notices_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGCONT)
    try:
        host_pauses.watch_stops()
        pauses = host_pauses.HostPauses(computes=False)
        pauses.since_last()
        os.kill(os.getpid(), signal.SIGCONT)  # what continues a stopped process
        assert pauses.since_last().stops == 1 and pauses.since_last().stops == 0
    finally:
        signal.signal(signal.SIGCONT, before)


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="the system does not tell")
def test_the_wait_for_a_core_is_measured_or_unknown() -> None:
    pauses = host_pauses.HostPauses(computes=True)
    pauses.since_last()
    delayed = pauses.since_last().delayed_s
    assert delayed is not None and 0.0 <= delayed < 10.0
    pauses._files.clear()
    assert pauses.since_last().delayed_s is None
