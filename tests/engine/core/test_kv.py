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


def publish(cache: KVCache, request: Request, step: int = -1) -> Request:
    """Compute a whole prompt after its cached prefix, in `step` or, if it is -1, in a step that is committed."""
    match = cache.look_up(request)
    assert match is not None
    cache.take(request, match)
    assert cache.grow(request, len(request.ids))
    request.planned = len(request.ids)
    if step >= 0:
        cache.publish_planned(request, step)
    else:
        cache.publish_committed(request, len(request.ids))
    return request


def finish(cache: KVCache, request: Request) -> None:
    cache.release(request, cache.log.append("finish", request.id, "stop", 0))


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
TestTreeAgainstASet.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def nodes(cache: KVCache) -> list[tuple[int, int]]:
    """The first token and the number of blocks of each node."""
    return sorted((node.keys[0][0], len(node.blocks)) for node in cache.tree.nodes.values() if node.parent)


def test_eviction_takes_the_least_recently_used_leaf_first_and_by_its_tail() -> None:
    cache = make_cache(9)
    for n, token in enumerate([10, 20, 30]):
        finish(cache, publish(cache, make_request(n, [token] * 6)))
    again = make_request(7, [10] * 7)
    match = cache.look_up(again)
    assert match is not None and cache.take(again, match) == 6  # the first is used again: the second is now the oldest
    finish(cache, again)
    assert cache.tree.evict(2, "test") == 2
    assert nodes(cache) == [(10, 3), (20, 1), (30, 3)]
    assert cache.tree.evict(2, "test") == 2
    assert nodes(cache) == [(10, 3), (30, 2)]


def test_what_was_in_use_last_is_evicted_last_whenever_its_use_began() -> None:
    cache = make_cache(9)
    requests = [publish(cache, make_request(n, [token] * 6)) for n, token in enumerate([10, 20])]
    for request in reversed(requests):  # the first to begin is the last to end
        finish(cache, request)
    cache.tree.evict(3, "test")
    assert nodes(cache) == [(10, 3)]


def test_a_failed_step_takes_what_was_built_on_it_along() -> None:
    cache = make_cache(12)
    leader = publish(cache, make_request(1, [1, 1, 2, 2, 3, 3, 4]), step=5)
    follower = publish(cache, make_request(2, [1, 1, 2, 2, 9, 9, 9]), step=6)
    written = publish(cache, make_request(3, [1, 1, 2, 2, 8, 8, 8]))
    assert follower.table[:2] == written.table[:2] == leader.table[:2]
    cache.check([leader, follower, written])
    blocks = cache.tree.invalidated_by(5)
    assert blocks == set(leader.table[:3]) | set(follower.table[:3]) | set(written.table[:3])
    for request in (written, follower, leader):
        finish(cache, request)
    cache.tree.withdraw(5, blocks)
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
    found = []
    for number, salt in enumerate(["", "a", "b", "a", "", "c"]):
        if salt == "c":
            cache.tree.evict(9, "test")
        request = make_request(number, [1, 2, 3, 4, 5, 6, 7])
        request.cache_salt = salt
        match = cache.look_up(request)
        assert match is not None
        found.append((len(match.blocks), match.stop, match.at))
        publish(cache, request)
        cache.check([request])
        finish(cache, request)
    # Another salt's evictions are not mentioned.
    assert found == [(0, "empty", 0)] * 3 + [(3, "whole", 6)] * 2 + [(0, "empty", 0)]
