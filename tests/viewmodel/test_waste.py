"""The waste that the engine counts, against what its simulated device computed and what its pool holds."""

from __future__ import annotations

import random

import pytest

from engine.core import cache
from engine.core.engine import Engine
from engine.params import SamplingParams
from engine.trace.state import State
from engine.trace.waste import WasteFigures, copies_of, waste_of
from minitui.tui.widgets.chat.occupancy import waste_words
from tests.engine.core.test_scheduler_simulation import Load, make_engine
from tests.support.simulation import SimulatedRunner, run


def computed(engine: Engine) -> int:
    assert isinstance(engine.runner, SimulatedRunner)
    return engine.runner.tokens_computed


def texts_in_the_pool(engine: Engine) -> dict[int, tuple[int, ...]]:
    """Each full block that a request holds or that is in the tree, with the whole text up to its end. No step may be in
    flight."""
    size, found = engine.cache.block_size, dict[int, tuple[int, ...]]()
    for request in engine.scheduler.running:
        for i in range(request.planned // size):
            found[request.table[i]] = tuple(request.ids[: (i + 1) * size])
    for node in engine.cache.tree.nodes.values():
        path = [each for each in list(node.path())[::-1] if each is not node]
        text = tuple(token for each in path for key in each.keys for token in key)
        for key, block in zip(node.keys, node.blocks, strict=True):
            text += tuple(key)
            assert found.setdefault(block, text) == text
    return found


@pytest.mark.parametrize("copies", [None, 0])
def test_the_shortest_words_fit_into_half_of_a_small_terminal(copies: int | None) -> None:
    words = waste_words(WasteFigures(9, 64, copies), 29)
    assert len(words) <= 29 and words.startswith("9 empty, ") and words.endswith(", 0 twice")


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_copies_and_unused_slots_are_those_of_the_pool(prefix_caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cache, only requests with different salts hold copies; without it, all requests with equal beginnings
    do."""
    monkeypatch.setattr(cache, "KEPT", 5)
    most = unused = 0
    for seed in range(12):
        load = Load(seed, 0, failures=True, prefix_caching=prefix_caching)
        engine = load.engine
        step = engine.step

        def checked(engine: Engine = engine, step: object = step) -> object:
            nonlocal most, unused
            emitted = step()  # type: ignore[operator]
            state, found = State.from_snapshot(engine.snapshot()), texts_in_the_pool(engine)
            texts, waste = list(found.values()), waste_of(state)
            assert waste.copies == len(texts) - len(set(texts))
            tables = sum(len(request.table) for request in engine.scheduler.running)
            if not prefix_caching:
                block = max(found, key=lambda block: texts.count(found[block]), default=0)
                same = {each for each, text in found.items() if text == found.get(block) and each != block}
                assert set(copies_of(state, block)) == same
            assert waste.slots == tables * engine.cache.block_size
            assert waste.unused_slots == waste.slots - sum(r.planned for r in engine.scheduler.running)
            most, unused = max(most, waste.copies or 0), max(unused, waste.unused_slots)
            return emitted

        engine.step = checked  # type: ignore[method-assign, assignment]
        load.run()  # it also compares the engine's snapshot with the state after each step
        assert len(engine.cache._copies._of) <= 5, "texts of requests that have ended are forgotten"
    assert most > 3 and unused > 10


@pytest.mark.parametrize("seed", range(4))
def test_tokens_computed_again_after_an_eviction_are_those_that_a_larger_pool_saves(seed: int) -> None:
    """One request at a time in a small pool and in one that never evicts."""
    work = []
    for blocks in (12, 4000):
        rng = random.Random(seed)
        engine = make_engine(blocks=blocks, budget=16)
        starts = [[rng.randrange(6) for _ in range(20)] for _ in range(4)]
        for _ in range(40):
            prompt = rng.choice(starts)[: rng.randrange(4, 20)] + [rng.randrange(6) for _ in range(rng.randrange(1, 8))]
            engine.add_request(prompt, SamplingParams(max_tokens=4, seed=1, ignore_eos=True))
            run(engine)
        work.append((computed(engine), engine.cache.waste))
    (small, waste), (large, none) = work
    assert waste.evicted == small - large > 50
    assert waste.preempted == none.evicted == none.preempted == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_tokens_computed_again_after_a_preemption_are_those_computed_beyond_one_each(prefix_caching: bool) -> None:
    engine = make_engine(blocks=20, rows=6, prefix_caching=prefix_caching)
    requests = [
        engine.add_request([40 + i, *range(6)], SamplingParams(max_tokens=30, seed=i, ignore_eos=True))
        for i in range(6)
    ]
    run(engine)
    once = sum(len(request.ids) - 1 for request in requests)  # the last token is not computed
    assert engine.cache.waste.preempted == computed(engine) - once > 20
    assert engine.cache.waste.evicted == engine.cache.waste.duplicate == 0


def test_duplicates_are_counted_when_their_block_is_freed() -> None:
    engine = make_engine(budget=64)
    for _ in range(2):
        engine.add_request([1, 2, 3, 4, 5, 6, 7, 8], SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    run(engine)
    # The second block of the prompt, because its last token is always computed, and two blocks of the reply.
    assert engine.cache.waste.duplicate == 3 * 4
    assert computed(engine) == 16 - 4 + 2 * 8, "the first block of the prompt was computed once"
