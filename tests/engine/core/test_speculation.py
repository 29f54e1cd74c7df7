"""Speculation by prompt lookup: what is drafted, and that no reply shows it, in any schedule."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from engine.core import speculation
from engine.core.engine import Engine
from engine.core.ngrams import CANDIDATES, ENOUGH, LONGEST_PAUSE, NGRAM, Lookup
from engine.core.scheduler import SchedulerConfig
from engine.params import SamplingParams
from engine.trace.kind import as_dict
from tests.engine.core import test_scheduler_simulation as simulation
from tests.engine.core.test_scheduler_simulation import Load
from tests.support.simulation import AnyToken, SimulatedRunner, alone, run


def make_engine(blocks: int = 64, block_size: int = 4, budget: int = 64, tokens: int = 4, **options: object) -> Engine:
    return simulation.make_engine(blocks, block_size, budget, drafts=tokens, **options)  # type: ignore[arg-type]


# ---- what is drafted


def longest_match(ids: list[int], most: int) -> list[int]:
    """`Lookup.follow` by trying every place."""
    best, longest = 0, 0
    for place in range(NGRAM, len(ids)):
        n = 0
        while n < min(place, ENOUGH) and ids[place - 1 - n] == ids[-1 - n]:
            n += 1
        if n >= max(longest, NGRAM):
            best, longest = place, n
    run = ids[best:]
    return (run * (most // len(run) + 1))[:most] if best else []


def follow(lookup: Lookup, ids: list[int], most: int) -> list[int]:
    lookup.index(ids, len(ids))
    return lookup.follow(ids, most)


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_is_what_followed_the_place_most_like_the_end(seed: int) -> None:
    r = random.Random(seed)
    lookup, ids = Lookup(), [r.randrange(5)]
    while len(ids) < CANDIDATES + NGRAM:  # so short that every place is looked at
        ids += [r.randrange(5) for _ in range(r.randrange(1, 4))]
        assert follow(lookup, ids, 5) == longest_match(ids, 5)


@pytest.mark.parametrize(
    ("ids", "most", "draft"),
    [
        ([1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 9, 1, 2, 3, 4], 2, [5, 9]),  # after the longer match, not the latest
        ([1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 9, 7, 2, 3, 4], 2, [6, 9]),  # of equals the latest
        ([1, 2, 3, 1, 2, 3, 1], 8, [2, 3, 1, 2, 3, 1, 2, 3]),  # a text that repeats itself goes on
        ([1], 4, []), ([1, 1, 1], 4, []), ([1, 2, 3, 4, 1, 2], 4, []),
    ],
)
def test_drafts(ids: list[int], most: int, draft: list[int]) -> None:
    assert follow(Lookup(), ids, most) == draft


def test_a_token_costs_the_same_however_long_the_text() -> None:
    """Counted, not timed: each token enters the index once, and a bounded number of places is looked at."""
    lookup, ids, looked = Lookup(), [0, 0, 0], []

    class Counting(list):  # type: ignore[type-arg]
        def __getitem__(self, at):  # type: ignore[no-untyped-def]
            looked.append(1 if isinstance(at, int) else len(range(*at.indices(len(self)))))
            return super().__getitem__(at)

    costs = []
    for length in range(4, 4000):
        ids.append(length % 2)
        looked.clear()
        follow(lookup, Counting(ids), 4)
        costs.append(sum(looked))
    assert max(costs) <= 2 * CANDIDATES * ENOUGH and max(costs[-100:]) <= max(costs[:200])


def test_drafts_that_fail_pause_longer_and_longer_and_one_that_succeeds_ends_that() -> None:
    lookup, ids, tried = Lookup(), [1, 2] * 4, []
    for _ in range(400):
        if follow(lookup, ids, 4):
            tried.append(len(ids))
            lookup.learn(0, len(ids) + 1)
        ids.append(ids[-2])
    gaps = [b - a for a, b in pairwise(tried)]
    assert gaps == [3, 5, 9, 17, 33, *[LONGEST_PAUSE + 1] * (len(gaps) - 5)] and len(gaps) > 7
    lookup.learn(1, len(ids) + 2)
    ids += [1, 2] * LONGEST_PAUSE
    lookup.learn(0, len(ids))
    assert not follow(lookup, ids, 4) and not follow(lookup, [*ids, 1], 4) and follow(lookup, [*ids, 1, 2], 4)


@pytest.mark.parametrize("pieces", [1, 2, 7, 1000])
def test_a_text_indexed_in_pieces_gives_the_same_drafts(pieces: int) -> None:
    r = random.Random(pieces)
    ids = [r.randrange(3) for _ in range(300)]
    whole, parts, taken = Lookup(), Lookup(), []
    whole.index(ids, len(ids))
    while not taken or taken[-1]:
        taken.append(parts.index(ids, pieces))
    assert sum(taken) == len(ids) - NGRAM and max(taken) <= pieces
    assert parts.follow(ids, 5) == whole.follow(ids, 5) != []


def test_a_step_indexes_so_many_tokens_and_no_more_however_many_prompts_are_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two prompts of 1,600 tokens decode from the same step on; that their ends were there before is found in time."""
    monkeypatch.setattr(speculation, "INDEXED_TOKENS", 100)
    counted, index = [0], Lookup.index

    def counting(self: Lookup, ids: list[int], most: int) -> int:
        taken = index(self, ids, most)
        counted[-1] += taken
        return taken

    monkeypatch.setattr(Lookup, "index", counting)
    engine = make_engine(blocks=1000, budget=4000)
    text = [i % 40 for i in range(800)]
    requests = [engine.add_request(text * 2, SamplingParams(max_tokens=100, ignore_eos=True)) for _ in range(2)]
    while engine.has_work:
        engine.step()
        counted.append(0)
    assert max(counted) == 100 and sum(counted) >= 2 * 1600
    assert all(request.drafted_tokens for request in requests)


# ---- any schedule


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4, 10))
def test_drafts_change_no_token_in_any_schedule(seed: int, delay: int) -> None:
    Load(seed, delay, drafts=1 + seed % 6).run()


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("seed", range(8, 11))
def test_drafts_and_failing_steps(seed: int, delay: int) -> None:
    Load(seed, delay, failures=True, drafts=4).run()


def test_the_random_loads_draft_accept_reject_and_preempt() -> None:
    """What the tests above rely on: their loads do contain these."""
    drafted = accepted = preemptions = 0
    for seed in range(5, 8):
        load = Load(seed, 0, drafts=4)
        load.run(check_every=1000)
        drafted += sum(r.drafted_tokens for r in load.requests)
        accepted += sum(r.accepted_tokens for r in load.requests)
        preemptions += sum(r.preemptions for r in load.requests if r.drafted_tokens)
    assert drafted > 500 and drafted // 5 < accepted < drafted * 4 // 5 and preemptions > 10


# ---- a reply's end, and what is counted


def echoing(prompt: list[int], n: int, seed: int = 0, stop: frozenset[int] = frozenset()) -> list[int]:
    return alone(prompt, seed, n, stop=stop, echo=True)


REPEATING = [1, 2, 3, 4, 5] * 5


def drafting_seed(prompt: list[int], n: int) -> int:
    """A seed whose reply goes on as the prompt does for `n` tokens."""
    expected = (prompt * (n // 5 + 1))[:n]
    return next(seed for seed in range(10_000) if echoing(prompt, n, seed) == expected)


def test_accepted_drafts_save_steps_and_are_counted() -> None:
    engine = make_engine(tokens=4)
    seed = drafting_seed(REPEATING, 10)
    request = engine.add_request(REPEATING, SamplingParams(max_tokens=11, seed=seed, ignore_eos=True))
    emitted, steps = [], []
    while engine.has_work:
        items = engine.step()
        emitted += [item.token_id for item in items]
        steps.append(len(items))
        engine.check()
    assert steps[:3] == [1, 5, 5], "the first token; then drafts of four, all right, and one more"
    assert emitted == request.output_ids == echoing(REPEATING, 11, seed)
    told = [as_dict(record) for record in engine.log.drain() if record[2] in ("draft", "accept")]
    assert [t["drafts"] for t in told if t["kind"] == "draft"] == [[(1, 4)], [(1, 4)]]
    assert [t["drafts"] for t in told if t["kind"] == "accept"] == [[(1, 4, 4)], [(1, 4, 4)]]
    assert (request.drafted_tokens, request.accepted_tokens) == (8, 8)


@pytest.mark.parametrize("end", range(1, 6))
def test_a_stop_token_inside_accepted_drafts_ends_the_reply_there(end: int) -> None:
    seed = drafting_seed(REPEATING, 8)
    engine = make_engine(tokens=6)
    stop = echoing(REPEATING, end, seed)[-1]
    params = SamplingParams(max_tokens=20, seed=seed, stop_token_ids=(stop,))
    request = engine.add_request(REPEATING, params)
    run(engine)
    assert request.output_ids == echoing(REPEATING, 20, seed, stop=frozenset({stop}))
    assert request.finish_reason == "stop"
    kept = sum(len(node.blocks) for node in engine.cache.tree.nodes.values())
    assert kept == (len(request.ids) - 1) // 4, "blocks beyond the end of the reply were published"
    engine.check()


@pytest.mark.parametrize("most", range(1, 14))
def test_no_reply_outgrows_max_tokens_by_its_drafts(most: int) -> None:
    engine = make_engine(tokens=6)
    seed = drafting_seed(REPEATING, 10)
    request = engine.add_request(REPEATING, SamplingParams(max_tokens=most, seed=seed, ignore_eos=True))
    run(engine)
    assert request.output_ids == echoing(REPEATING, most, seed) and request.finish_reason == "length"


def test_rejected_drafts_are_not_published() -> None:
    """Whoever goes on with a reply reads all of it that the tree keeps, and the simulation looks at each slot. The last
    token's would hold a rejected draft where the reply ended with the draw in its place."""
    engine = make_engine(blocks=800, tokens=6, block_size=2)
    stop = frozenset({0})
    params = [SamplingParams(max_tokens=40, seed=seed, stop_token_ids=tuple(stop)) for seed in range(24)]
    first = [engine.add_request(REPEATING, each) for each in params]
    run(engine)
    assert sum(r.drafted_tokens - r.accepted_tokens for r in first) > 100
    assert sum(r.finish_reason == "stop" for r in first) > 10
    for request in first:
        again = engine.add_request([*request.ids, 1], SamplingParams(max_tokens=1, seed=1))
        run(engine)
        assert again.cached_tokens == (len(request.ids) - 1) // 2 * 2


def test_drafts_take_what_is_left_of_the_budget_and_prompts_come_first() -> None:
    engine = make_engine(tokens=8, budget=20)
    seed = drafting_seed(REPEATING, 10)
    engine.add_request(REPEATING, SamplingParams(max_tokens=40, seed=seed, ignore_eos=True))
    engine.step(), engine.step()
    engine.add_request([7, 8, 9] * 12, SamplingParams(max_tokens=1))
    engine.log.drain()
    for _ in range(3):
        engine.step()
    records = engine.log.drain()
    tokens = [record[7] for record in records if record[2] == "step"]
    chunks = [record[4] for record in records if record[2] == "step"]
    assert [chunk[0][2] for chunk in chunks[:2]] == [19, 17]
    assert tokens[0] == 20 and max(tokens) <= 20
    assert {record[3] for record in records if record[2] == "draft"} <= {3, 4}, "drafted where the budget was spent"


def test_nobody_is_preempted_for_drafts() -> None:
    engine = make_engine(blocks=9, block_size=4, tokens=8, watermark=0.0)
    seed = drafting_seed(REPEATING[:15], 8)
    params = SamplingParams(max_tokens=2, seed=seed, ignore_eos=True)
    requests = [engine.add_request(REPEATING[:15], params) for _ in range(2)]
    run(engine)
    assert all(request.preemptions == 0 for request in requests)
    assert [r.output_ids for r in requests] == [echoing(REPEATING[:15], 2, seed)] * 2


@pytest.mark.parametrize(
    "params", [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"grammar": True}]
)
def test_rows_whose_draws_depend_on_earlier_drafts_get_none(params: dict[str, object]) -> None:
    engine = make_engine()
    constrained = params.pop("grammar", False)
    request = engine.add_request(REPEATING, SamplingParams(max_tokens=12, seed=1, ignore_eos=True, **params))  # type: ignore[arg-type]
    request.grammar = AnyToken() if constrained else None
    other = engine.add_request([9, *REPEATING], SamplingParams(max_tokens=12, seed=1, ignore_eos=True))
    run(engine)
    assert request.drafted_tokens == 0 < other.drafted_tokens
    assert request.output_ids == echoing(REPEATING, 12, 1)


def test_a_row_whose_logits_are_not_finite_ends_after_what_it_drew_before() -> None:
    engine = make_engine(tokens=4)
    seed = drafting_seed(REPEATING, 10)
    params = SamplingParams(max_tokens=30, seed=seed, ignore_eos=True)
    request, other = engine.add_request(REPEATING, params), engine.add_request([9, 9, 8], params)
    engine.step()
    engine.runner.bad_request = request.id  # type: ignore[attr-defined]
    run(engine)
    assert request.finish_reason.startswith("error: the model's logits")
    assert request.output_ids == echoing(REPEATING, 5, seed), "the four drafts were right; the draw after them is none"
    assert other.finish_reason == "length"
    engine.check()


def test_with_speculation_steps_are_not_overlapped() -> None:
    runner = SimulatedRunner(65, 4, 8)
    assert Engine(runner, SchedulerConfig(64, 8), overlap=True).delay == 1
    assert Engine(runner, SchedulerConfig(64, 8, speculative_tokens=4), overlap=True).delay == 0
