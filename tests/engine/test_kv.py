"""Allocator and prefix tree against simple models of what they should be."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.core.allocator import BlockAllocator
from engine.core.cache import KVCache
from engine.core.request import Request
from engine.params import SamplingParams
from engine.trace.records import RecordLog

SIZE = 2


def make_cache(blocks: int) -> KVCache:
    return KVCache(blocks + 1, SIZE, RecordLog())


def make_request(id: int, ids: list[int]) -> Request:
    return Request(id, list(ids), SamplingParams(), 0, 10_000, prompt_len=len(ids), row=id % 1000)


class TreeAgainstASet(RuleBasedStateMachine):
    """The tree is, in effect, a set of prefixes: every published prefix of whole blocks, minus what was evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(24)
        self.live: list[Request] = []
        self.next_id = 1
        self.known: set[tuple[int, ...]] = set()  # every prefix, of whole blocks, that the tree should hold

    @rule(ids=st.lists(st.integers(0, 2), min_size=1, max_size=14), step=st.booleans())
    def run_a_prompt(self, ids: list[int], step: bool) -> None:
        request = make_request(self.next_id, ids)
        self.next_id += 1
        match = self.cache.look_up(request)
        assert match is not None
        # No more than the model knows, no less, and never the last token.
        limit = (len(ids) - 1) // SIZE
        expected = next((n for n in range(limit, 0, -1) if tuple(ids[: n * SIZE]) in self.known), 0)
        assert len(match.blocks) == expected
        if match.stop == "differs":
            assert all(list(p[: match.at + 1]) != ids[: match.at + 1] for p in self.known if len(p) > match.at)
            assert match.at == 0 or any(list(p[: match.at]) == ids[: match.at] for p in self.known)
        if match.stop == "ends":
            assert match.at == expected * SIZE > 0
            assert not any(len(p) > match.at and list(p[: match.at]) == ids[: match.at] for p in self.known)
        self.cache.take(request, match)
        before = self._evictable()
        if not self.cache.grow(request, len(ids)):
            self.cache.release(request, self.cache.log.append("finish", request.id, "no room", 0))
            return
        self._forget_evicted(before)
        request.planned = len(ids)
        if step:
            self.cache.publish_planned(request, self.next_id)
            self.cache.tree.settle(self.next_id)
        self.cache.publish_committed(request, len(ids))
        self.known |= {tuple(ids[: n * SIZE]) for n in range(1, len(ids) // SIZE + 1)}
        self.live.append(request)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.live:
            request = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
            self.cache.release(request, self.cache.log.append("finish", request.id, "stop", 0))

    @rule(n=st.integers(1, 6))
    def evict(self, n: int) -> None:
        before, cached = self._evictable(), self.cache.allocator.num_cached
        assert self.cache.tree.evict(n, "test") == min(n, cached)
        self._forget_evicted(before)

    def _prefixes(self) -> dict[tuple[int, ...], int]:
        found: dict[tuple[int, ...], int] = {}
        for node in self.cache.tree.nodes.values():
            prefix = [t for n in list(node.path())[1:][::-1] for key in n.keys for t in key] if node.parent else []
            for key, block in zip(node.keys, node.blocks, strict=True):
                prefix += key
                found[tuple(prefix)] = block
        return found

    def _evictable(self) -> set[tuple[int, ...]]:
        return {p for p, block in self._prefixes().items() if not self.cache.allocator.holders(block)}

    def _forget_evicted(self, evictable: set[tuple[int, ...]]) -> None:
        gone = self.known - self._prefixes().keys()
        assert gone <= evictable, "a block that a request holds was evicted"
        self.known -= gone

    @invariant()
    def tree_and_set_agree(self) -> None:
        self.cache.check(self.live)
        prefixes = self._prefixes()
        assert prefixes.keys() == self.known
        assert all(p[: len(p) - SIZE] in prefixes or len(p) == SIZE for p in prefixes), "a child outlived its parent"


TestTreeAgainstASet = TreeAgainstASet.TestCase
TestTreeAgainstASet.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_eviction_takes_the_least_recently_used_leaf_first_and_by_its_tail() -> None:
    cache = make_cache(9)
    for n, token in enumerate([10, 20, 30]):
        request = make_request(n, [token] * 6)
        assert cache.grow(request, 6)
        request.planned = 6
        cache.publish_committed(request, 6)
        cache.release(request, cache.log.append("finish", n, "stop", 0))
    again = make_request(7, [10] * 7)
    match = cache.look_up(again)
    assert match is not None and cache.take(again, match) == 6  # the first is used again: the second is now the oldest
    cache.release(again, cache.log.append("finish", 7, "stop", 0))
    assert cache.tree.evict(2, "test") == 2
    assert sorted((n.keys[0][0], len(n.blocks)) for n in cache.tree.nodes.values() if n.parent) == [
        (10, 3), (20, 1), (30, 3),
    ]
    assert cache.tree.evict(2, "test") == 2
    assert sorted((n.keys[0][0], len(n.blocks)) for n in cache.tree.nodes.values() if n.parent) == [(10, 3), (30, 2)]


def test_what_was_in_use_last_is_evicted_last_whenever_its_use_began() -> None:
    cache = make_cache(9)
    requests = []
    for n, token in enumerate([10, 20]):
        request = make_request(n, [token] * 6)
        assert cache.grow(request, 6)
        request.planned = 6
        cache.publish_committed(request, 6)
        requests.append(request)
    for request in reversed(requests):  # the first to begin is the last to end
        cache.release(request, cache.log.append("finish", request.id, "stop", 0))
    cache.tree.evict(3, "test")
    assert [n.keys[0][0] for n in cache.tree.nodes.values() if n.parent] == [10]


def test_a_failed_step_takes_what_was_built_on_it_along() -> None:
    cache = make_cache(12)
    leader = make_request(1, [1, 1, 2, 2, 3, 3, 4])
    cache.grow(leader, 7)
    leader.planned = 7
    cache.publish_planned(leader, 5)
    follower = make_request(2, [1, 1, 2, 2, 9, 9, 9])
    match = cache.look_up(follower)
    assert match is not None and cache.take(follower, match) == 4
    cache.grow(follower, 7)
    follower.planned = 7
    cache.publish_planned(follower, 6)
    written = make_request(3, [1, 1, 2, 2, 8, 8, 8])
    match = cache.look_up(written)
    assert match is not None and cache.take(written, match) == 4
    cache.grow(written, 7)
    written.planned = 7
    cache.publish_committed(written, 7)
    cache.check([leader, follower, written])
    invalid, blocks = cache.tree.invalidated_by(5)
    assert blocks == set(leader.table[:3]) | set(follower.table[:3]) | set(written.table[:3])
    for request in (written, follower, leader):
        cache.release(request, cache.log.append("finish", request.id, "error", 0))
    cache.tree.withdraw(5, invalid)
    cache.check([])
    assert len(cache.tree.nodes) == 1 and cache.allocator.num_free == 12


def test_allocation_is_all_or_nothing() -> None:
    allocator = BlockAllocator(5)
    assert allocator.allocate(5) is None and allocator.num_free == 4
    assert allocator.allocate(3) == [1, 2, 3]
    assert allocator.allocate(2) is None and allocator.num_free == 1
    allocator.release([2, 1])
    assert allocator.allocate(2) == [1, 2]
    allocator.check()


def test_a_block_released_too_often_is_caught() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(1)
    assert blocks
    allocator.release(blocks)
    with pytest.raises(AssertionError, match="more often"):
        allocator.release(blocks)


def test_only_requests_with_the_same_salt_share_blocks() -> None:
    cache = make_cache(40)
    salts = ["", "a", "b", "a", ""]
    found = []
    for number, salt in enumerate(salts):
        request = make_request(number, [1, 2, 3, 4, 5, 6, 7])
        request.cache_salt = salt
        match = cache.look_up(request)
        assert match is not None
        found.append((len(match.blocks), match.stop, match.at))
        cache.take(request, match)
        assert cache.grow(request, 7)
        cache.publish_committed(request, 7)
        cache.check([request])
        cache.release(request, cache.log.append("finish", number, "stop", 0))
    assert found == [(0, "empty", 0)] * 3 + [(3, "whole", 6)] * 2
    cache.tree.evict(9, "test")
    again = make_request(9, [1, 2, 3, 4, 5, 6, 7])
    again.cache_salt = "c"
    match = cache.look_up(again)
    assert match is not None and match.stop == "empty", "another salt's evictions are not mentioned"
