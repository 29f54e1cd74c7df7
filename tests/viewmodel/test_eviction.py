"""The predicted order of eviction and the predicted blocks, against what the engine evicts and allocates next."""

from __future__ import annotations

import json
import random

import pytest

from engine.trace.records import Record
from engine.trace.runs import blocks_of, number_of, runs_of
from engine.trace.state import State
from engine.trace.views import FREE
from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.viewmodel.state.eviction import EvictionOrder, free_words, is_under_pressure, next_blocks, pressure_words
from tests.engine.core.test_scheduler_simulation import Load


def recorded(seed: int, failures: bool) -> tuple[State, list[Record]]:
    """The state at the beginning and all records of a random load: few blocks, shared prefixes, aborts, chunks."""
    load = Load(seed, seed % 3, failures=failures)
    records: list[Record] = []
    state = State.from_snapshot(load.engine.snapshot())
    load.engine.log.watch = records.append
    load.run(check_every=1000)
    return state, records


@pytest.mark.parametrize("failures", [False, True])
def test_each_eviction_and_allocation_is_the_predicted_one(failures: bool) -> None:
    """Before each record: the engine evicts the last blocks of node 1 of the order, and takes the predicted blocks."""
    evictions = allocations = 0
    for seed in range(8):
        state, records = recorded(seed, failures)
        for i, record in enumerate(records):
            kind, *fields = record[2:]
            if kind == "evict" and fields[2] != "its request failed":
                first = EvictionOrder(state).nodes[0]
                assert first.id == fields[0], f"seed {seed}, record {record[0]}"
                evictions += 1
            elif kind == "alloc":
                order = EvictionOrder(state)
                assert next_blocks(state, order, len(fields[1]))[0] == fields[1]
                allocations += 1
            if kind in ("evict", "merge") and records[i - 1][2] not in ("evict", "merge"):
                # All evictions until the next allocation are for that allocation.
                taken = next((r[4] for r in records[i:] if r[2] == "alloc"), None)
                reason = fields[2] if kind == "evict" else ""
                if taken is not None and reason.endswith(f" {len(taken)}"):
                    free, evicted = next_blocks(state, EvictionOrder(state), len(taken))
                    assert {*free, *(block for _, block in evicted)} == set(taken)
            state.apply(record)
    assert evictions > 300 and allocations > 300


def test_the_whole_order_is_that_in_which_the_engine_evicts() -> None:
    checked = 0
    for seed in range(8):
        load = Load(seed, 0)
        for _ in range(40):
            if len(load.engine.scheduler.waiting) < 4:
                load.arrive()
            load.engine.step()
        tree, pool = load.engine.cache.tree, load.engine.cache.allocator
        state = State.from_snapshot(load.engine.snapshot())
        order = EvictionOrder(state)
        assert [order.rank(node) for node in order.nodes] == list(range(1, len(order.nodes) + 1))
        assert {node.id for node in order.nodes} == {n.id for n in state.nodes.values() if n.id and not n.users}
        went = []
        while tree.evict(1, "test"):
            went.append(pool.free_blocks[-1])
        assert went == [block for _, block in order.blocks()]
        checked += len(order.nodes)
    assert checked > 20


def test_a_pool_under_pressure_is_put_into_words() -> None:
    state, records = recorded(6, False)
    said = set()
    for record in records:
        state.apply(record)
        if is_under_pressure(state):
            words = pressure_words(state, EvictionOrder(state), 4)
            free, _, _, cached = state.counts
            said.add((free > 0, cached > 0))
            assert ("(free)" in words) == (free > 0)
            assert ("evict " in words) == (cached > 0 and free < 4)
            assert words.endswith("a request is preempted")
            assert (f"…; after {free + cached - 4} more" in words) == (free + cached > 4)
            brief = pressure_words(state, EvictionOrder(state), 4, brief=True)
            assert ("preempt" in brief) == (free + cached <= 4)
        assert free_words(state) == {0: "no block is free", 1: "after 1 free block is used"}.get(
            state.counts[FREE], f"after {state.counts[FREE]:,} free blocks are used"
        )
    assert len(said) == 4
    empty = State(num_blocks=9, block_size=16, budget=1, max_num_seqs=1)
    empty.free = None  # as after a snapshot of an older version
    assert pressure_words(empty, EvictionOrder(empty), 4).startswith("unknown")


def test_in_a_full_pool_of_vllm_the_next_blocks_are_known() -> None:
    """vLLM does not record the order of its free blocks. Without free blocks, allocations take the evicted ones."""
    reader = TraceReader(find_trace("vllm-8b"))
    state, predicted, checked = State.from_snapshot(reader.part(0).snapshot), None, 0
    for record in reader.records():
        kind = record[2]
        if kind in ("evict", "uncopy") and predicted is None and not state.counts[FREE]:
            order = EvictionOrder(state)
            predicted = [block for _, block in next_blocks(state, order, 60)[1]]
            assert pressure_words(state, order, 4).startswith(f"evict {', '.join(map(str, predicted[:4]))}")
        elif kind == "alloc" and predicted is not None:
            assert record[4] == predicted[: len(record[4])]
            predicted, checked = None, checked + 1
        elif kind not in ("evict", "uncopy"):
            predicted = None
        state.apply(record)
        if checked == 150:
            return
    pytest.fail("too few evictions")


def test_a_snapshot_has_the_free_blocks_in_order_as_runs() -> None:
    large = State(num_blocks=44_001, block_size=16, budget=1, max_num_seqs=1).snapshot()
    assert large["free"] == [[44_000, 1]]
    pairs = 0
    for seed in range(200):
        rng = random.Random(seed)
        blocks = list(range(1, rng.randint(2, 20)))
        for _ in range(rng.randint(0, 4)):  # parts of the list are turned around, as by a request that frees its blocks
            begin, end = sorted(rng.choices(range(len(blocks) + 1), k=2))
            blocks[begin:end] = blocks[begin:end][::-1]
        runs = json.loads(json.dumps(runs_of(blocks)))
        assert blocks_of(runs) == blocks and number_of(runs) == len(blocks)
        pairs += sum(isinstance(run, list) for run in runs)
    assert pairs > 200
    assert blocks_of([5, 4, 3, 1]) == [5, 4, 3, 1], "older recordings list each block"
