"""The target for gaps and the shares of prompts, on a simulated device whose clock only its steps advance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from engine.core.engine import Engine
from engine.core.gap_target import LEAST
from engine.core.request import Grammar
from engine.core.scheduler import SchedulerConfig
from engine.core.step import StepPlan
from engine.core.step_clock import StepClock
from engine.params import SamplingParams
from engine.trace.kind import as_dict
from engine.trace.records import RecordLog
from engine.trace.state import State
from tests.support.simulation import SimulatedLaunch, SimulatedRunner, simulated

STEP_S, TOKEN_S = 0.004, 8e-5  # of a step, and of each token in it
LAUNCH_S = 0.009
ROWS, BUDGET = 96, 512
LOOSE = 1e6  # ms; a target that limits nothing


class Device(SimulatedRunner):
    """Takes STEP_S and TOKEN_S, and `pair_s` for each token of a prompt and token before it; `jumps`: step -> further
    seconds of it."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks + 1, 16, ROWS)
        self.t = self.pair_s = 0.0
        self.jumps: dict[int, float] = {}

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> SimulatedLaunch:
        pairs = float((plan.starts * plan.q_lens)[plan.num_decodes :].sum())
        self.t += STEP_S + TOKEN_S * plan.num_tokens + self.pair_s * pairs + self.jumps.get(plan.step, 0.0)
        return super().launch(plan, grammars)


class Beside(Device):
    """Computes beside the host, which needs LAUNCH_S to launch a step with prompts."""

    synchronous = False
    ends = 0.0

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> SimulatedLaunch:
        begin = self.t
        launched = super().launch(plan, grammars)
        device_s, self.t = self.t - begin, begin + LAUNCH_S * (plan.num_tokens > plan.num_decodes)
        self.ends = end = max(self.ends, self.t) + device_s
        launched.result.device_ms = device_s * 1e3
        launched.wait = lambda: setattr(self, "t", max(self.t, end)) or launched.result  # type: ignore[method-assign]
        return launched


class DeviceClock(StepClock):
    def __init__(self, log: RecordLog, device: Device) -> None:
        self._device = device
        super().__init__(log, device.synchronous)

    def now(self) -> float:
        return self._device.t


class Run:
    """An engine, and when each of its requests was submitted and got its tokens."""

    def __init__(self, blocks: int = 1024, kind: type[Device] = Device, **options: Any) -> None:
        self.device = kind(blocks)
        log = RecordLog(clock=lambda: self.device.t)
        config = SchedulerConfig(max_num_batched_tokens=BUDGET, max_num_seqs=ROWS, max_model_len=110_000, **options)
        overlap, clock = not self.device.synchronous, DeviceClock(log, self.device)
        self.engine = simulated(Engine(self.device, config, overlap=overlap, log=log, clock=clock))
        self.submitted: dict[int, float] = {}
        self.tokens: dict[int, list[float]] = {}

    def add(self, length: int, output: int = 1) -> int:
        number = len(self.submitted)
        ids = [(number * 31 + i * i) % 50 for i in range(length)]
        request = self.engine.add_request(ids, SamplingParams(max_tokens=output, ignore_eos=True))
        self.submitted[request.id] = self.device.t
        return request.id

    def step(self) -> None:
        for item in self.engine.step():
            self.tokens.setdefault(item.request.id, []).append(self.device.t)

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(100_000):
            if done():
                return
            self.step()
        raise AssertionError("the run does not end")

    def first(self, request: int) -> float:
        return self.tokens[request][0] - self.submitted[request]

    def gaps(self, requests: list[int], since: float = 0.0) -> list[float]:
        return [b - a for r in requests for a, b in zip(self.tokens[r], self.tokens[r][1:], strict=False) if a >= since]


@pytest.mark.parametrize(("chats", "tokens", "pair_s"), [(16, 8_000, 0), (64, 100_000, 0), (64, 50_000, 9.3e-9)])
def test_a_long_prompt_stretches_the_gaps_of_chats_to_less_than_twice_what_they_were(
    chats: int, tokens: int, pair_s: float
) -> None:
    alone = STEP_S + chats * TOKEN_S
    for target in 1.9e3 * alone, None:
        run = Run(blocks=12_000, max_gap_ms=target)
        run.device.pair_s = pair_s
        writers = [run.add(10 + i % 7, 4000) for i in range(chats)]
        run.until(lambda run=run: len(run.tokens) == chats)
        for _ in range(20):
            run.step()
        before = run.device.t
        long = run.add(tokens)
        run.until(lambda run=run, long=long: long in run.tokens)
        gaps = sorted(run.gaps(writers, before))
        if target is None:
            assert gaps[-1] > 4 * alone
        else:
            assert gaps[len(gaps) * 99 // 100] < 2 * alone and gaps[len(gaps) // 2] > 1.7 * alone, "it uses its part"


def test_one_slow_step_does_not_stop_the_prompts() -> None:
    run = Run(max_gap_ms=30.0)
    run.add(16, 4000)
    run.until(lambda: bool(run.tokens))
    run.add(8_000)
    for _ in range(10):
        run.step()
    gaps = run.engine.scheduler.gaps
    assert gaps is not None
    usual = gaps.tokens
    run.device.jumps[run.engine.scheduler.step + 1] = 1.0
    run.step()
    assert usual // 3 < gaps.tokens < usual
    for _ in range(4):
        run.step()
    assert gaps.tokens > 0.9 * usual


def test_a_target_that_the_decodes_alone_miss_leaves_prompts_a_part_of_each_step() -> None:
    run = Run(max_gap_ms=1.0)
    run.add(16, 4000)
    run.until(lambda: bool(run.tokens))
    long = run.add(1000)
    run.until(lambda: long in run.tokens)
    alone = (STEP_S + TOKEN_S) / TOKEN_S  # tokens that take as long as the decodes
    assert run.engine.scheduler.gaps is not None and alone / 2 < run.engine.scheduler.gaps.tokens <= alone


def test_with_overlap_a_step_counts_with_its_own_launch_and_not_with_that_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(kind=Beside, max_gap_ms=15.0)
    gaps, told = run.engine.scheduler.gaps, []
    assert gaps is not None
    learn = gaps.measured
    monkeypatch.setattr(gaps, "measured", lambda *step: (told.append(step), learn(*step)))
    run.add(16, 60)
    run.until(lambda: bool(run.tokens))
    run.add(1500)
    run.until(lambda: not run.engine.has_work)
    assert sum(prompts > 0 for _, prompts, _ in told) > 10
    for decodes, prompts, took_s in told:
        device_s = STEP_S + TOKEN_S * (decodes + prompts)
        assert took_s == pytest.approx(max(device_s, LAUNCH_S) if prompts else device_s)


def test_the_budget_is_recorded_and_whole_again_without_replies_or_prompts() -> None:
    run = Run(max_gap_ms=10.0)
    state = State.from_snapshot(run.engine.snapshot())
    run.add(16, 40)
    run.until(lambda: bool(run.tokens))
    run.add(1500)
    budgets = []
    while run.engine.has_work:
        run.step()
        for record in run.engine.log.drain():
            state.apply(record)
            if record[2] == "step":
                fields = as_dict(record)
                assert fields["tokens"] <= state.budget
                budgets.append((state.budget, bool(fields["prefills"])))
        assert state.snapshot() == run.engine.snapshot()
    limited = [budget for budget, prompts in budgets if prompts and budget < BUDGET]
    assert limited[0] == LEAST + 1 and len(set(limited)) > 1
    assert budgets[0] == (BUDGET, True) and budgets[-1] == (BUDGET, False)


def test_short_prompts_pass_a_long_one_which_keeps_half_of_each_step() -> None:
    alone = Run()
    long = alone.add(8_000)
    alone.until(lambda: long in alone.tokens)
    run = Run(max_gap_ms=LOOSE)
    long = run.add(8_000)
    run.step()
    shorts: list[int] = []
    while long not in run.tokens:
        shorts += [run.add(40) for _ in range(8)]  # more than half of the budget in each step
        run.step()
        assert run.engine.scheduler.step < 100
    assert alone.first(long) < run.first(long) < 2.2 * alone.first(long)
    answered = [run.tokens[short][0] for short in shorts if short in run.tokens]
    assert len(answered) > 150 and answered == sorted(answered), "short prompts keep the order in which they came"
    assert run.first(shorts[0]) < 2 * (STEP_S + BUDGET * TOKEN_S)


def test_without_a_target_short_prompts_wait_for_a_long_one() -> None:
    run = Run()
    long, short = run.add(8_000), run.add(40)
    run.until(lambda: len(run.tokens) == 2)
    assert run.tokens[long] == run.tokens[short]


def test_prompts_of_one_length_are_computed_in_order_with_the_whole_budget() -> None:
    run = Run(max_gap_ms=LOOSE)
    prompts = [run.add(2_500) for _ in range(4)]
    run.until(lambda: len(run.tokens) == 4)
    waits = [run.first(prompt) for prompt in prompts]
    assert waits == sorted(waits) and run.device.steps <= -(-10_000 // BUDGET) + 1


@pytest.mark.parametrize("target", [None, 20.0])
def test_in_a_storm_no_request_waits_more_than_twice_the_mean(target: float | None) -> None:
    run = Run(max_gap_ms=target)
    chats = [run.add(30, 4000) for _ in range(16)]
    run.until(lambda: len(run.tokens) == 16)
    for _ in range(10):
        run.step()
    storm = [run.add(30 + i % 7, 8) for i in range(500)]
    run.until(lambda: all(request in run.tokens for request in storm))
    waits = [run.first(request) for request in storm]
    assert max(waits) < 2 * sum(waits) / len(waits)
    assert waits == sorted(waits)
    if target is not None:
        gaps = sorted(run.gaps(chats, run.submitted[storm[0]]))
        assert gaps[len(gaps) * 95 // 100] < 1.1 * target / 1e3


def test_a_prompt_that_cannot_be_admitted_takes_nothing_from_a_long_one() -> None:
    run = Run(blocks=600, max_gap_ms=LOOSE)
    long = run.add(8_000)  # 500 blocks
    run.step()
    waiting = run.add(3_000)  # 188 blocks
    for _ in range(10):
        run.step()
    chunks = [as_dict(record)["prefills"] for record in run.engine.log.drain() if record[2] == "step"]
    assert [len(each) for each in chunks] == [1] * 11 and waiting not in run.tokens
    assert [each[0][2] for each in chunks] == [BUDGET] * 11 and chunks[0][0][0] == long
