"""Drives SGLang's own prefix cache and publishes its KV events, as SGLang's scheduler does, without a model.

    python -m tests.support.sglang_driver SEEDS [FILE]

compares minitui's tree with SGLang's after each message, and writes some runs to FILE (tests/vllm/sglang_events.xz).

Import this only where SGLang is installed.
"""

from __future__ import annotations

import base64
import json
import lzma
import random
import sys
from array import array
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec
import torch
from sglang.srt.disaggregation.kv_events import KVEventBatch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from minitui.vllm.cached_tree import CachedTree
from minitui.vllm.kv_messages import read
from tests.support.tree_texts import digest, leaves

Space = tuple[str | None, str | None]  # extra key and salt of a request: texts of other spaces are not shared
CORES = ("rust", "python", "radix")  # the two forms of SGLang's present cache, and the cache before it
PAGES = 60  # of the pool
MOST = 6  # requests at once


@dataclass
class Running:
    """A request. `slots`: its places in the pool, for the tokens that it holds."""

    space: Space
    ids: list[int]
    most: int
    slots: torch.Tensor
    protected: int
    lock: Any


class Driver:
    """Requests come, share prefixes, grow, end; the cache evicts. `cached`: the texts that it should have."""

    def __init__(self, core: str, page: int, seed: int = 0, eagle: bool = False, spaces: bool = True) -> None:
        """`eagle`: with EAGLE's drafts. `spaces`: some requests have an extra key or a salt."""
        kind = TokenToKVPoolAllocator if page == 1 else PagedTokenToKVPoolAllocator
        sizes = (PAGES,) if page == 1 else (PAGES * page, page)
        self.pool = kind(*sizes, torch.float32, "cpu", None, False)
        params = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.pool, page_size=page,
            is_eagle=eagle, enable_kv_cache_events=True,
        )
        if core != "radix":  # what SGLang takes for a model with full attention
            params.tree_components, params.tree_core_backend = (ComponentType.FULL,), core
        self.cache: Any = (RadixCache if core == "radix" else UnifiedRadixCache)(params)
        self.older = core == "radix"
        self.page, self.eagle, self.random = page, eagle, random.Random(seed)
        self.running: list[Running] = []
        self.spaces: list[Space] = [(None, None)]
        if spaces:
            self.spaces += [(None, None)] * 3 + [("adapter", None), (None, "salt"), ("adapter", "salt")]
        self._prefixes = [self._draw(self.random.randrange(1, 12) * page) for _ in range(4)]

    def _draw(self, n: int) -> list[int]:
        return [self.random.randrange(40) for _ in range(n)]

    def key(self, space: Space, ids: list[int]) -> RadixKey:
        return RadixKey(array("q", ids), space[0], is_bigram=self.eagle, cache_salt=space[1]).page_aligned(self.page)

    def matched(self, space: Space, ids: list[int]) -> tuple[int, Any]:
        """Returns the cached tokens of a text, and the node in which they end."""
        result = self.cache.match_prefix(MatchPrefixParams(key=self.key(space, ids)))
        return result.device_prefix_len, result.last_device_node

    def _take(self, n: int) -> torch.Tensor | None:
        """Returns places for `n` tokens in whole pages, after an eviction if necessary."""
        n = -(-n // self.page) * self.page
        short = n - self.pool.available_size()
        if short > 0:
            self.cache.evict(EvictParams(num_tokens=short))
        return self.pool.alloc(n)

    def admit(self) -> None:
        """Let a request begin: its prompt may share a prefix with others. Its prompt is cached at once."""
        rnd = self.random
        ids = list(rnd.choice(self._prefixes)) + self._draw(rnd.choice([1, 3, self.page, 3 * self.page + 1]))
        if self.running and rnd.random() < 0.3:
            other = rnd.choice(self.running).ids
            ids = other[: rnd.randrange(1, len(other) + 1)] + self._draw(2)
        space = rnd.choice(self.spaces)
        hit, node = self.matched(space, ids[:-1])
        lock = self.cache.lock(node)
        new = self._take(len(ids) - hit)
        if new is None:
            self.cache.unlock(lock)
            return
        slots = torch.cat([self.cache.path_device_indices(node)[:hit], new])
        most = len(ids) + rnd.choice([1, 2 * self.page, 9 * self.page])
        request = Running(space, ids, most, slots, hit, lock)
        self.running.append(request)
        self.keep(request)

    def keep(self, request: Running) -> None:
        """Cache the full pages of a request, and give back the places of texts that were cached meanwhile."""
        key = self.key(request.space, request.ids)
        n = len(key)
        own = InsertParams(key=key, value=request.slots[:n].clone(), prev_prefix_len=request.protected)
        result = self.cache.insert(own)
        if self.older and result.prefix_len > request.protected:  # the present cache does this itself
            self.pool.free(request.slots[request.protected : result.prefix_len])
        self.cache.unlock(request.lock)
        _, node = self.matched(request.space, request.ids)
        request.lock = self.cache.lock(node)
        have = self.cache.path_device_indices(node)
        request.slots = torch.cat([have[:n], request.slots[n:]])
        request.protected = n

    def end(self, request: Running) -> None:
        """Cache what a request has computed, and let it leave."""
        self.keep(request)
        self.cache.unlock(request.lock)
        self.pool.free(request.slots[request.protected :])
        self.running.remove(request)

    def step(self) -> list[Any]:
        """Run one step; returns its KV events."""
        rnd = self.random
        if len(self.running) < MOST and rnd.random() < 0.5:
            self.admit()
        for request in list(self.running):
            request.ids.append(rnd.randrange(40))
            if len(request.ids) > len(request.slots):
                more = self._take(1)
                if more is None:
                    request.ids.pop()
                    self.end(request)
                    continue
                request.slots = torch.cat([request.slots, more])
            if len(request.ids) >= request.most:
                self.end(request)
            elif rnd.random() < 0.05:
                self.keep(request)
        if rnd.random() < 0.01:
            for request in list(self.running):
                self.end(request)
            self.cache.reset()
            self.pool.clear()
        return list(self.cache.take_events())

    def differences(self, tree: CachedTree) -> list[str]:
        """Returns where a tree differs from SGLang's: all of its texts are cached, and there are not any others."""
        size = self.cache.total_size()
        size = size[0] if isinstance(size, tuple) else size
        wrong = []
        if size != (len(tree) + tree.copies) * self.page:
            wrong.append(f"{len(tree)} pages and {tree.copies} copies are shown, SGLang has {size} tokens")
        for path in leaves(tree):
            found = max(self.matched(space, list(path))[0] for space in set(self.spaces))
            if found != len(path) - (self.page if self.eagle else 0):  # the last token's successor is not known
                wrong.append(f"a text of {len(path)} tokens is shown, SGLang has {found}")
        return wrong


def compare(core: str, page: int, seed: int, eagle: bool, steps: int) -> tuple[list[Any], list[str]]:
    """Returns the messages of a run, each with the tree's pages and texts after it, and what differs from SGLang's."""
    driver, tree = Driver(core, page, seed, eagle), CachedTree(1 << 12, page)
    kept: list[Any] = []
    wrong: list[str] = []
    for _ in range(steps):
        if not (events := driver.step()):
            continue
        payload = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=events, attn_dp_rank=0))
        tree.take(0.0, list(read(payload)[1]))
        wrong += [f"{core}, pages of {page}, seed {seed}: {text}" for text in driver.differences(tree)]
        kept.append([base64.b64encode(payload).decode(), len(tree), digest(tree)])
    return kept, wrong + [f"left out: {word}" for word in tree.left_out]


def main() -> None:
    """Compare, and print what differs."""
    seeds = int(sys.argv[1])
    messages, pages, wrong = 0, 0, 0
    for core, page, eagle, seed in product(CORES, (1, 16, 64), (False, True), range(seeds)):
        kept, different = compare(core, page, seed, eagle, 300)
        messages, pages, wrong = messages + len(kept), pages + sum(row[1] for row in kept), wrong + len(different)
        print(*different[:3], sep="\n", end="\n" if different else "")
    print(f"{messages:,} messages, {pages / messages:.0f} pages on average, {wrong:,} differences")
    if len(sys.argv) > 2:
        kinds = [(1, False), (16, False), (16, True)]
        runs = [(page, compare("rust", page, 3, eagle, 200)[0]) for page, eagle in kinds]
        with lzma.open(sys.argv[2], "wt") as file:
            json.dump([{"page": page, "messages": rows} for page, rows in runs], file)


if __name__ == "__main__":
    main()
