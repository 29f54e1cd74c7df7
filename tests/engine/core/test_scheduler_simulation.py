"""The real scheduler, allocator and tree under random load, over a simulated device that checks every slot it reads."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from engine.core.engine import Engine
from engine.core.node import Node
from engine.core.policy import QueueOrder
from engine.core.request import Request
from engine.core.scheduler import SchedulerConfig
from engine.core.step import StepPlan
from engine.errors import InvalidRequest
from engine.params import SamplingParams
from engine.trace.eviction import EVICTION_POLICIES
from engine.trace.side_pool import SideGroup
from engine.trace.state import State
from tests.support.simulation import AnyToken, SimulatedRunner, alone, run, simulated


def make_engine(
    blocks: int = 64, block_size: int = 4, budget: int = 32, rows: int = 8, overlap: bool = False, drafts: int = 0,
    groups: Sequence[SideGroup] = (), **options: object,
) -> Engine:
    """With `drafts`, the model repeats itself, and up to this number of tokens are drafted."""
    of_engine = {name: options.pop(name) for name in ("prefix_caching", "eviction_policy") if name in options}
    runner = SimulatedRunner(blocks + 1, block_size, rows, groups=tuple(groups), echo=drafts > 0)
    config = SchedulerConfig(budget, rows, max_model_len=4096, speculative_tokens=drafts, **options)  # type: ignore[arg-type]
    return simulated(Engine(runner, config, overlap=overlap, eos_ids=frozenset({49}), **of_engine))  # type: ignore[arg-type]


class Load:
    """Random arrivals, shared prefixes, aborts and failing steps, reproducible from a seed. `groups`: (random, block
    size) -> side groups; with them, the cache is cleared now and then."""

    def __init__(
        self, seed: int, delay: int, failures: bool = False, prefix_caching: bool = True, drafts: int = 0,
        groups: Callable[[random.Random, int], list[SideGroup]] = lambda r, size: [], **options: object,
    ) -> None:
        self.random = r = random.Random(seed)
        blocks, size = r.choice([6, 9, 16, 40, 120]), r.choice([1, 2, 4, 16])
        budget = r.choice([size, 2 * size, 16, 64, 512])
        self.engine = make_engine(
            blocks, size, budget, r.choice([1, 3, 8, 32]),
            policy=r.choice(["fcfs", "longest-prefix", "static", "priority"]), chunked_prefill=r.random() < 0.85,
            prefix_caching=prefix_caching, eviction_policy=list(EVICTION_POLICIES)[seed % len(EVICTION_POLICIES)],
            drafts=drafts, groups=groups(r, size), **options,
        )
        self.engine.delay = delay
        self.capacity = blocks * size
        self.prefixes = [[r.randrange(6) for _ in range(r.randrange(1, 40))] for _ in range(4)]
        self.requests: list[Request] = []
        self.failures = failures
        self.drafts = drafts

    def prompt(self) -> list[int]:
        r = self.random
        ids = list(r.choice(self.prefixes)) if r.random() < 0.8 else []
        if self.requests and r.random() < 0.3:  # a later turn of an earlier conversation
            ids = list(r.choice(self.requests).ids)
        return (ids + [r.randrange(6) for _ in range(r.randrange(0, 12))])[: self.capacity] or [1]

    def arrive(self) -> None:
        params = SamplingParams(max_tokens=self.random.choice([1, 2, 5, 20, 60]), seed=self.random.randrange(100))
        salt, priority = self.random.choice(["", "", "a", "b"]), self.random.randrange(3)
        self.requests.append(self.engine.add_request(self.prompt(), params, cache_salt=salt, priority=priority))

    def run(self, check_every: int = 1) -> None:
        """Run to the end. Each request draws what it draws alone, and the records tell the engine's state."""
        engine, r = self.engine, self.random
        state = State.from_snapshot(engine.snapshot())
        engine.log.drain()
        runner, pool = engine.runner, engine.cache.allocator
        assert isinstance(runner, SimulatedRunner)

        def maybe_fail(plan: object) -> None:
            if self.failures and r.random() < 0.03:
                raise RuntimeError("the simulated device failed")

        runner.on_launch = runner.on_wait = maybe_fail
        arrivals = r.randrange(5, 60)
        emitted: dict[int, list[int]] = {}
        for n in range(20_000):
            if arrivals and r.random() < 0.3:
                self.arrive()
                arrivals -= 1
            if r.random() < 0.02 and self.requests:
                engine.abort(r.choice(self.requests).id)
            if engine.cache.sides and r.random() < 0.01:
                engine.clear_cache(preempt=r.random() < 0.5)
            for item in engine.step():
                if item.token_id is not None:
                    emitted.setdefault(item.request.id, []).append(item.token_id)
            state.apply_all(engine.log.drain())
            if n % check_every == 0:
                engine.check()
                assert state.snapshot() == engine.snapshot()
                assert state.counts == [pool.num_free, pool.num_active, pool.num_shared, pool.num_cached]
            if n % 50 == 0:
                assert State.from_snapshot(state.snapshot()).snapshot() == state.copy().snapshot() == state.snapshot()
            if not arrivals and not engine.has_work:
                break
        else:
            raise AssertionError("somebody starved")
        assert pool.num_active == pool.num_shared == 0, "blocks leaked"
        assert all(side.pool.available == side.pool.total for side in engine.cache.sides), "pages leaked"
        for request in self.requests:
            got, prompt = request.output_ids, request.ids[: request.prompt_len]
            assert got == alone(prompt, request.seed, len(got), stop=request.stop_ids, echo=self.drafts > 0)
            assert got == emitted.get(request.id, []), "something else was emitted, or after the end"
            reason = request.finish_reason.split(":")[0]
            assert reason in ("stop", "length", "abort", *["error"] * self.failures)
            if reason == "length":
                assert len(request.ids) == request.max_total
            if reason == "stop":
                assert got[-1] in request.stop_ids


# Steps in flight when step() returns: 0 without overlap, 1 with it; 2 is what a pipeline would have.
@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("seed", range(18))
def test_any_schedule_gives_the_tokens_of_each_request_alone(seed: int, delay: int) -> None:
    Load(seed, delay).run()


class AnyOrder(QueueOrder):
    def __init__(self, engine: Engine, chance: random.Random) -> None:
        super().__init__(engine.cache, engine.log)
        self.chance = chance

    def order(self, head: list[Request]) -> list[Request]:
        return self.chance.sample(head, len(head))


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_whatever_is_decided_each_request_has_the_tokens_that_it_has_alone(delay: int) -> None:
    """Decisions drawn at random; but the request that came first is not preempted, so that all come to an end."""
    decided: Counter[str] = Counter()
    for seed in (3, 4, 6, 8):  # those with preemptions
        load = Load(seed, delay)
        decide_at_random(load.engine, random.Random(seed), decided)
        load.run(check_every=3)
    assert min(decided[name] for name in ("chunk", "leaf", "not the youngest")) > 5, decided


def decide_at_random(engine: Engine, chance: random.Random, decided: Counter[str]) -> None:
    tree = engine.cache.tree

    def chunk(request: Request, left: int, budget: int) -> int:
        decided["chunk"] += 1
        return chance.randint(1, min(left, budget))

    def victim(running: Sequence[Request], request: Request) -> Request:
        first = min(running, key=lambda request: request.id)
        found = chance.choice([request for request in running if request is not first] or [first])
        decided["not the youngest"] += found is not running[-1]
        return found

    def next_leaf() -> Node | None:
        decided["leaf"] += 1
        return chance.choice([node for node in tree.nodes.values() if node.evictable] or [None])

    engine.scheduler.order = AnyOrder(engine, chance)
    engine.scheduler.chunk, engine.scheduler.victim = chunk, victim
    tree.next_leaf = next_leaf


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("seed", range(9))
def test_a_failing_step_fails_its_requests_and_nothing_else(seed: int, delay: int) -> None:
    Load(seed, delay, failures=True).run()


def nodes_of(engine: Engine) -> list[Node]:
    return [node for node in engine.cache.tree.nodes.values() if node.parent is not None]


@pytest.mark.parametrize("together", [1, 3])
def test_the_same_prompt_again_leaves_one_node(together: int) -> None:
    """One request after the other, or several at once: prefilled in chunks, decoded token by token."""
    engine = make_engine(blocks=200, budget=8, overlap=True)
    prompt = list(range(1, 24))
    for _ in range(3):
        for _ in range(together):
            engine.add_request(prompt, SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
        while engine.has_work:
            engine.step()
            engine.check()  # also: no node is left that could be merged with its only child
            assert len(nodes_of(engine)) <= 1 + 2 * together  # the shared part, and a rest for each request
        (node,) = nodes_of(engine)
        assert len(node.blocks) == (23 + 40 - 1) // 4
    engine.add_request(prompt[:9], SamplingParams(max_tokens=1))
    run(engine)
    first, rest = sorted(nodes_of(engine), key=lambda node: -node.last_used)
    assert rest.parent is first and len(first.blocks) == 2, "the age of a part that was used later stays its own"


@pytest.mark.parametrize("seed", [2, 6, 13, 20, 23])
def test_merging_nodes_changes_no_decision(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which texts are cached and evicted, which requests run: all as in a tree that keeps its chains of nodes."""
    kinds = ("admit", "match", "wait", "alloc", "preempt", "finish", "step")
    decided, merges = [], []
    for _ in range(2):
        load = Load(seed, seed % 2)
        kept: list[tuple[object, ...]] = []
        load.engine.log.watch = lambda record, k=kept: k.append(record[2:])  # type: ignore[misc]
        load.run(check_every=50)
        decided.append([record[: 2 if record[0] == "alloc" else None] for record in kept if record[0] in kinds])
        merges.append(sum(record[0] == "merge" for record in kept))
        monkeypatch.setattr(Node, "same_child", None)
    assert merges[0] > 0 == merges[1]
    assert decided[0] == decided[1]


@pytest.mark.parametrize("seed", [3, 4])
def test_a_replay_is_identical(seed: int) -> None:
    logs = []
    for _ in range(2):
        load = Load(seed, delay=1, failures=True)
        kept = []
        append = load.engine.log.append
        load.engine.log.append = lambda kind, *f, a=append, k=kept: (k.append((kind, *f)), a(kind, *f))[1]  # type: ignore
        load.run(check_every=50)
        logs.append([record for record in kept if record[0] not in ("time", "first", "parts")])
    assert logs[0] == logs[1] and len(logs[0]) > 100


def test_eight_requests_that_share_a_prefix_prefill_it_once() -> None:
    engine = make_engine(blocks=256, block_size=16, budget=512)
    prefix = [i % 40 for i in range(160)]
    for i in range(8):
        engine.add_request([*prefix, i, i + 1, i + 2], SamplingParams(max_tokens=3))
    run(engine)
    assert engine.runner.prefill_tokens == 160 + 8 * 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps_before", range(8))
def test_an_aborted_leader_strands_no_follower(steps_before: int, overlap: bool) -> None:
    engine = make_engine(blocks=256, block_size=16, budget=48, overlap=overlap)
    prefix = [i % 40 for i in range(160)]
    requests = [engine.add_request([*prefix, i, i + 1], SamplingParams(max_tokens=4, seed=i)) for i in range(8)]
    for _ in range(steps_before):
        engine.step()
    engine.abort(requests[0].id)
    run(engine)
    engine.check()
    for i, request in enumerate(requests[1:], 1):
        assert request.output_ids == alone([*prefix, i, i + 1], i, 4, stop=frozenset({49}))
    assert engine.runner.prefill_tokens <= 160 + 8 * 2 + 16  # type: ignore[attr-defined]


def test_a_fully_cached_prompt_recomputes_at_most_a_block_and_frees_the_copy() -> None:
    engine = make_engine(blocks=64, block_size=16)
    prompt = [i % 30 for i in range(48)]  # ends at a block boundary
    engine.add_request(prompt, SamplingParams(max_tokens=1))
    run(engine)
    before = engine.runner.prefill_tokens  # type: ignore[attr-defined]
    second = engine.add_request(prompt, SamplingParams(max_tokens=8, seed=1))
    engine.step()
    assert engine.runner.prefill_tokens - before == 16  # type: ignore[attr-defined]
    assert second.shared_blocks == 3, "its own copy of the last block was not exchanged for the tree's"
    engine.check()
    run(engine)
    assert second.cached_tokens == 32


def test_a_request_that_outgrows_the_pool_finishes_with_length() -> None:
    engine = make_engine(blocks=4, block_size=4, budget=8)
    request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=None, ignore_eos=True))
    run(engine)
    assert request.finish_reason == "length" and len(request.ids) == 17 and request.preemptions == 0


def test_a_full_pool_preempts_the_youngest_and_resumes_it() -> None:
    engine = make_engine(blocks=10, block_size=4, budget=64, watermark=0.0)
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
    requests = [engine.add_request([i, 1, 2, 3, 4, 5, 6], params) for i in range(3)]
    run(engine)
    assert sum(r.preemptions for r in requests) > 0 and requests[0].preemptions == 0
    for i, request in enumerate(requests):
        assert request.output_ids == alone([i, 1, 2, 3, 4, 5, 6], 1, 20)


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers_and_blocks_nobody() -> None:
    engine = make_engine(blocks=4, block_size=4)
    with pytest.raises(InvalidRequest, match=r"17 tokens; this pool holds 16 \(4 blocks of 4\)"):
        engine.add_request([1] * 17, SamplingParams())
    with pytest.raises(InvalidRequest, match="empty"):
        engine.add_request([], SamplingParams())
    engine.add_request([1] * 16, SamplingParams(max_tokens=5))
    run(engine)
    engine.check()


def test_a_prompt_longer_than_the_budget_is_chunked_and_decodes_go_on() -> None:
    engine = make_engine(blocks=64, block_size=4, budget=16)
    first = engine.add_request([1, 2], SamplingParams(max_tokens=40, ignore_eos=True))
    engine.step()
    engine.add_request([3] * 60, SamplingParams(max_tokens=2))
    before = len(first.ids)
    engine.log.drain()
    for _ in range(4):
        engine.step()
    assert len(first.ids) == before + 4
    assert [r[7] for r in engine.log.drain() if r[2] == "step"] == [16, 16, 16, 16], "not the whole budget, or more"


def test_requests_that_reserve_max_tokens_they_do_not_use_do_not_fill_the_pool() -> None:
    engine = make_engine(blocks=32, block_size=4, budget=64)
    for i in range(4):
        engine.add_request([i, 1, 2], SamplingParams(max_tokens=100, ignore_eos=True))
    engine.step()
    assert len(engine.scheduler.running) == 4


def test_the_last_sampled_token_is_not_published() -> None:
    engine = make_engine(blocks=16, block_size=4)
    request = engine.add_request([1, 2, 3, 4, 5], SamplingParams(max_tokens=3, ignore_eos=True))
    run(engine)
    assert len(request.ids) == 8  # two blocks of ids, but the KV of the last was never written
    assert sum(len(n.blocks) for n in engine.cache.tree.nodes.values()) == 1


def test_a_request_with_nan_logits_ends_alone_and_its_blocks_are_not_shared() -> None:
    engine = make_engine(blocks=64, block_size=4)
    requests = [engine.add_request([i] * 9, SamplingParams(max_tokens=9, seed=i)) for i in range(3)]
    engine.runner.bad_request = requests[1].id  # type: ignore[attr-defined]
    run(engine)
    assert requests[1].finish_reason.startswith("error") and requests[1].output_ids == []
    assert requests[0].output_ids and requests[2].output_ids
    assert all(1 not in key for n in engine.cache.tree.nodes.values() for key in n.keys)
    engine.check()


def test_a_miss_says_where_and_why() -> None:
    engine = make_engine(blocks=8, block_size=4, budget=64)

    def match_of(prompt: list[int]) -> tuple[object, ...]:
        engine.log.drain()
        engine.add_request(prompt, SamplingParams(max_tokens=1))
        run(engine)
        return next(r[4:7] for r in engine.log.drain() if r[2] == "match")

    assert match_of([1, 2, 3, 4, 5, 6, 7, 8, 9]) == (0, "empty", 0)
    assert match_of([1, 2, 3, 4, 5, 6, 0, 0, 0]) == (4, "differs", 6)
    assert match_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]) == (8, "ends", 8)
    assert match_of([1, 2, 3]) == (0, "short", 0)
    assert match_of([1, 2, 3, 4, 5, 6, 7, 8, 9]) == (8, "whole", 8)
    match_of([7] * 31)  # fills the pool
    assert match_of([1, 2, 3, 4, 5, 6, 7, 8, 9])[1] == "evicted"
    engine.clear_cache()
    assert match_of([1, 2, 3, 4, 5, 6, 7, 8, 9]) == (0, "empty", 0), "after a clear nothing has been there before"


def test_a_follower_that_arrives_while_the_leader_is_in_its_prompt_shares_what_is_computed_so_far() -> None:
    engine = make_engine(blocks=256, block_size=4, budget=16)
    prompt = [i % 40 for i in range(64)]
    leader = engine.add_request(prompt, SamplingParams(max_tokens=2))
    engine.step()
    engine.step()
    assert leader.planned == 32
    follower = engine.add_request([*prompt, 1, 2], SamplingParams(max_tokens=2))
    run(engine)
    assert follower.cached_tokens == 64
    assert engine.runner.prefill_tokens == 64 + 2  # type: ignore[attr-defined]


def test_rows_have_an_order_that_does_not_depend_on_hashes() -> None:
    engine = make_engine(rows=8)
    for i in range(8):
        engine.add_request([i, 1], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    scheduled = engine.scheduler.plan()
    assert scheduled is not None and scheduled.plan.rows.tolist() == list(range(8))


def test_a_prompt_that_does_not_fit_beside_the_running_ones_waits_instead_of_thrashing() -> None:
    engine = make_engine(blocks=20, block_size=4, budget=8)
    first = engine.add_request([1] * 60, SamplingParams(max_tokens=2))
    second = engine.add_request([2] * 60, SamplingParams(max_tokens=2))
    run(engine)
    assert first.preemptions == second.preemptions == 0
    assert any(record[2] == "wait" and record[4].startswith("blocks") for record in engine.log.drain())


def test_a_queue_that_is_full_refuses_with_the_number() -> None:
    engine = make_engine(max_waiting=2)
    for _ in range(2):
        engine.add_request([1], SamplingParams())
    with pytest.raises(InvalidRequest, match="2 requests are waiting"):
        engine.add_request([1], SamplingParams(), group="a chat")
    *_, record = engine.log.drain()
    assert record[2:4] == ("refuse", "a chat") and "2 requests are waiting" in record[4]


@pytest.mark.parametrize("with_a_stranger", [False, True])
def test_who_shares_blocks_of_a_step_that_fails_later_is_requeued_and_answers_as_if_nothing_had_happened(
    with_a_stranger: bool,
) -> None:
    """Step 0 fails when it is committed; step 1, which built on it, is in flight by then: its work is void."""
    engine = make_engine(blocks=64, block_size=4, overlap=True)
    runner = engine.runner
    assert isinstance(runner, SimulatedRunner)

    def fail_step_0(plan: object) -> None:
        if plan.step == 0:  # type: ignore[attr-defined]
            runner.slots[:] = -9  # and what it wrote is garbage
            raise RuntimeError("the simulated device failed")

    runner.on_wait = fail_step_0
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    leader = engine.add_request(prompt, SamplingParams(max_tokens=5, seed=1))
    engine.step()
    follower = engine.add_request([*prompt, 3], SamplingParams(max_tokens=6, seed=2, ignore_eos=True))
    stranger = engine.add_request([9, 9], SamplingParams(max_tokens=1, seed=3)) if with_a_stranger else None
    engine.step()
    assert leader.finish_reason.startswith("error: RuntimeError")
    assert follower.in_flight == 0 and any(record[2] == "requeue" for record in engine.log.drain())
    engine.check()
    run(engine)
    assert follower.output_ids == alone([*prompt, 3], 2, 6) and follower.finish_reason == "length"
    if stranger is not None:
        assert stranger.output_ids == alone([9, 9], 3, 1)


@pytest.mark.parametrize("aborted", [False, True])
def test_a_block_begun_by_a_step_that_fails_and_filled_by_the_next_is_not_kept(aborted: bool) -> None:
    """Chunks of 6 and blocks of 8: step 0 writes most of the first block, step 1 publishes it and is in flight."""
    engine = make_engine(block_size=8, budget=6, overlap=True)
    runner = engine.runner
    assert isinstance(runner, SimulatedRunner)
    prompt = list(range(1, 13))
    leader = engine.add_request(prompt, SamplingParams(max_tokens=5, seed=1))

    def fail_step_0(plan: StepPlan) -> None:
        if plan.step == 0:
            runner.slots[8:14] = -9  # of block 1: what it wrote is garbage
            raise RuntimeError("the simulated device failed")

    def abort_before_it_fails(plan: StepPlan) -> None:
        if plan.step == 1 and aborted:
            engine.abort(leader.id)

    runner.on_wait, runner.on_launch = fail_step_0, abort_before_it_fails
    engine.step()
    engine.step()
    assert leader.finish_reason == ("abort" if aborted else "error: RuntimeError: the simulated device failed")
    engine.check()
    heir = engine.add_request([*prompt, 3], SamplingParams(max_tokens=6, seed=2, ignore_eos=True))
    run(engine)
    assert heir.output_ids == alone([*prompt, 3], 2, 6)


def test_a_row_that_sits_a_step_out_leaves_the_decoding_set_and_returns() -> None:
    """Under a grammar a token must be seen before the next is drawn: with overlap, every other step."""
    engine = make_engine(overlap=True)
    state = State.from_snapshot(engine.snapshot())
    constrained = engine.add_request([1, 2, 3], SamplingParams(max_tokens=6, seed=1, ignore_eos=True))
    constrained.grammar = AnyToken()
    free = engine.add_request([4, 5, 6], SamplingParams(max_tokens=12, seed=2, ignore_eos=True))
    for _ in range(40):
        engine.step()
        state.apply_all(engine.log.drain())
        assert state.snapshot() == engine.snapshot()
    assert constrained.output_ids == alone([1, 2, 3], 1, 6) and free.output_ids == alone([4, 5, 6], 2, 12)
    assert engine.runner.steps < 20  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_reply_whose_grammar_cannot_be_followed_ends_with_that_error_and_the_others_go_on(overlap: bool) -> None:
    engine = make_engine(overlap=overlap)
    broken = engine.add_request([1, 2, 3], SamplingParams(max_tokens=6, seed=1, ignore_eos=True))
    broken.grammar = AnyToken(most=3)
    free = engine.add_request([4, 5, 6], SamplingParams(max_tokens=12, seed=2, ignore_eos=True))
    run(engine)
    assert broken.output_ids == alone([1, 2, 3], 1, 6)[:3]
    assert broken.finish_reason == "error: the grammar is too costly"
    assert free.output_ids == alone([4, 5, 6], 2, 12)
    engine.check()
