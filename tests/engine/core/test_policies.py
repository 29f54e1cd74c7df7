"""Who is admitted next: what sorting the queue by cached prefix gains when the pool is short, and may not cost."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from engine.core import policy as longest_prefix
from engine.core.engine import Engine
from engine.core.policy import LongestPrefix
from engine.core.request import Request, RequestState
from engine.core.scheduler import SchedulerConfig
from engine.params import SamplingParams
from engine.trace.records import RecordLog
from minitui.dev.bench import NoDevice
from tests.engine.core import test_scheduler_simulation as simulation
from tests.support.simulation import run

STEP_S, TOKEN_S = 4e-3, 5e-5  # a step takes as long as this, and as this for each token of it


@dataclass
class Outcome:
    """Of a run: tokens taken from the tree, mean and worst seconds to the first token, admissions in order."""

    hits: int
    mean_ttft: float
    worst_ttft: float
    admitted: list[int]


def make_engine(policy: str, blocks: int = 200) -> tuple[Engine, list[float]]:
    """An engine on make-believe time: the list holds the present."""
    now = [0.0]
    config = SchedulerConfig(512, 8, max_model_len=2048, policy=policy)
    return Engine(NoDevice(blocks + 1), config, log=RecordLog(clock=lambda: now[0])), now


def documents(policy: str, requests: int, every: float = 0.03) -> Outcome:
    """People ask about 24 documents of 512 tokens, at random; the pool holds the KV of about five of them."""
    engine, now = make_engine(policy)
    rng = random.Random(3)
    texts = [[rng.randrange(1000) for _ in range(512)] for _ in range(24)]
    arrivals = []
    at = 0.0
    for _ in range(requests):
        at += rng.expovariate(1 / every)
        arrivals.append((at, [*rng.choice(texts), *(rng.randrange(1000) for _ in range(32))]))
    came: list[Request] = []
    first: dict[int, float] = {}
    while len(came) < requests or engine.has_work:
        while len(came) < requests and (arrivals[len(came)][0] <= now[0] or not engine.has_work):
            now[0] = max(now[0], arrivals[len(came)][0])
            came.append(engine.add_request(arrivals[len(came)][1], SamplingParams(max_tokens=32, ignore_eos=True)))
        scheduled = engine.scheduler.plan()
        assert scheduled is not None
        now[0] += STEP_S + TOKEN_S * scheduled.plan.num_tokens
        for emitted in engine.committer.commit(scheduled, engine.runner.launch(scheduled.plan, {}).wait()):
            first.setdefault(emitted.request.id, now[0])
    engine.check()
    waits = [first[request.id] - arrivals[i][0] for i, request in enumerate(came)]
    admitted = [record[3] for record in engine.log.drain() if record[2] == "admit" and record[5] == "new"]
    return Outcome(sum(r.cached_tokens for r in came), sum(waits) / len(waits), max(waits), admitted)


def overtakings(admitted: list[int]) -> int:
    """How often the most unlucky request saw a younger one admitted before it."""
    return max(sum(other > id for other in admitted[:i]) for i, id in enumerate(admitted))


def test_sorting_by_prefix_takes_more_from_the_tree_and_answers_sooner_when_the_pool_is_short() -> None:
    in_order, sorted_ = documents("fcfs", 240), documents("longest-prefix", 240)
    assert in_order.admitted == sorted(in_order.admitted)
    assert sorted_.hits > 2 * in_order.hits
    assert sorted_.mean_ttft < 0.4 * in_order.mean_ttft and sorted_.worst_ttft < in_order.worst_ttft
    assert 0 < overtakings(sorted_.admitted) <= longest_prefix.OVERTAKES + 8


def test_nobody_is_overtaken_for_ever() -> None:
    """One asks about something else, while questions about a cached text never end."""
    engine, _ = make_engine("longest-prefix")
    rng = random.Random(1)
    text = [rng.randrange(1000) for _ in range(256)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)

    def ask() -> None:
        while len(engine.scheduler.waiting) < 30:
            engine.add_request([*text, *(rng.randrange(1000) for _ in range(20))], params)

    ask()
    for _ in range(10):
        engine.step()
    stranger = engine.add_request([rng.randrange(1000) for _ in range(300)], params)
    admitted: list[int] = []
    while stranger.state is RequestState.WAITING and len(admitted) < 1000:
        ask()
        engine.step()
        admitted += [record[3] for record in engine.log.drain() if record[2] == "admit"]
    before = sum(id > stranger.id for id in admitted[: admitted.index(stranger.id)])
    assert 10 < before <= longest_prefix.OVERTAKES + engine.scheduler.config.max_num_seqs


def test_a_step_compares_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue of thousands must not be matched against the tree in every step."""
    engine, _ = make_engine("longest-prefix")
    rng = random.Random(2)
    for _ in range(500):
        engine.add_request([rng.randrange(1000) for _ in range(40)], SamplingParams(max_tokens=200, ignore_eos=True))
    looked = []
    cached = LongestPrefix._cached_blocks
    monkeypatch.setattr(LongestPrefix, "_cached_blocks", lambda self, r: looked.append(r.id) or cached(self, r))
    engine.step()
    assert len(set(looked)) == longest_prefix.CANDIDATES


@pytest.mark.parametrize("hashed", [3, 100_000])
def test_the_blocks_counted_are_those_that_the_tree_has(hashed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every sort of a random load that evicts and preempts, against a walk of the tree."""
    monkeypatch.setattr(longest_prefix, "HASHED_BLOCKS", hashed)
    checked, cached = [0, 0], LongestPrefix._cached_blocks

    def compared(self: LongestPrefix, request: Request) -> int:
        found, match = cached(self, request), self._cache.look_up(request)
        blocks = len(match.blocks) if match is not None else 0
        assert found == blocks or (found < blocks and self._hashable == 0)
        checked[found > 0] += 1
        return found

    monkeypatch.setattr(LongestPrefix, "_cached_blocks", compared)
    engine, _ = make_engine("longest-prefix", blocks=60)
    rng = random.Random(4)
    texts = [[rng.randrange(1000) for _ in range(200)] for _ in range(4)]
    for _ in range(60):
        ids = [*rng.choice(texts)[: rng.randrange(200)], *(rng.randrange(1000) for _ in range(rng.randrange(1, 40)))]
        params = SamplingParams(max_tokens=60, prompt_logprobs=rng.choice([None, None, None, 0]), ignore_eos=True)
        engine.add_request(ids, params)
        for _ in range(rng.randrange(6)):
            engine.step()
    run(engine, check=True)
    assert min(checked) > 100
    assert {"evict", "preempt"} <= {record[2] for record in engine.log.drain()}


def test_prompts_hashed_over_several_steps_are_sorted_right_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longest_prefix, "HASHED_BLOCKS", 40)
    engine, _ = make_engine("longest-prefix", blocks=92)
    text, params = list(range(800)), SamplingParams(max_tokens=400, ignore_eos=True)
    engine.add_request(text, params)
    for _ in range(10):
        engine.step()
    queue = [engine.add_request([*text[: 160 * i], *([2000 + i] * (1460 - 160 * i))], params) for i in (1, 4, 2, 5, 3)]
    for _ in range(6):
        engine.step()
    assert [request.id for request in engine.scheduler.waiting] == [queue[i].id for i in (3, 1, 4, 2, 0)]


def test_the_lowest_number_is_admitted_first_and_equal_ones_in_order_of_arrival() -> None:
    engine, _ = make_engine("priority")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    numbers = [5, 0, 5, -3, 0, 9, 5, -3, 1, 2, 0, 7]  # the engine runs 8 of the 12 requests at the same time
    for n, number in enumerate(numbers):
        engine.add_request([n + 1] * 8, params, priority=number)
    admitted: list[int] = []
    while engine.has_work:
        scheduled = engine.scheduler.plan()
        assert scheduled is not None
        admitted += [request.id for request in engine.scheduler.running if request.id not in admitted]
        engine.committer.commit(scheduled, engine.runner.launch(scheduled.plan, {}).wait())
    expected = sorted(range(1, 13), key=lambda i: (numbers[i - 1], i))
    assert admitted == expected and admitted != sorted(admitted)


def test_of_requests_with_priorities_the_least_urgent_is_preempted_and_resumed_last() -> None:
    engine = simulation.make_engine(blocks=12, budget=64, policy="priority", watermark=0.0)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    numbers = [5, 0, 0]
    requests = []
    for n, number in enumerate(numbers):  # the urgent ones come when the first runs already
        requests.append(engine.add_request([n] * 10, params, priority=number))
        engine.step()
    finished: list[int] = []
    while engine.has_work:
        finished += [item.request.id for item in engine.step() if item.finish_reason]
        engine.check()
    assert finished == [2, 3, 1]
    assert requests[0].preemptions and not requests[1].preemptions
