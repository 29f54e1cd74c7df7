"""The decisions of the scheduler: the order of the queue, the length of a chunk, and which request is preempted.

Each is a function or an object of its own; engine/core/scheduler.py calls it. (Which text is evicted is decided in
engine/trace/eviction.py; which token is drawn, in engine/worker/sampler.py.)

The policies that sort the queue are "priority" and "longest-prefix" (the longest cached prefix first). SGLang (Zheng et
al. 2024) uses longest-prefix. This engine also limits how often a request may be overtaken. It helps when many requests
share long prefixes and the pool is small: with 400 questions about 24 texts and a pool for five texts, the mean time to
first token fell from 3.6 s to 0.5 s (engine/kernels/MEASURED.md).
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from engine.core.cache import KVCache
from engine.core.node import block_key
from engine.core.request import Request, RequestState
from engine.trace.records import RecordLog

CANDIDATES = 64  # number of requests at the head of the queue that are sorted in each step
HASHED_BLOCKS = 2048  # the most prompt blocks that are hashed in one step
OVERTAKES = 64  # how many younger requests may overtake an older one


class QueueOrder:
    """Sorts the queue before each admission: `order` is what a policy decides."""

    most: int | None = None  # requests at the head of the queue that are sorted; None: all

    def __init__(self, cache: KVCache, log: RecordLog) -> None:
        self._cache = cache
        self._log = log

    def sort(self, waiting: deque[Request]) -> None:
        """Sort the queue, and record a new order: the ids at its head."""
        head = list(islice(waiting, self.most))
        order = self.order(head)
        if order != head:
            for _ in order:
                waiting.popleft()
            waiting.extendleft(reversed(order))
            self._log.append("order", [request.id for request in order])

    def order(self, head: list[Request]) -> list[Request]:
        """Returns the requests in the order of their admission."""
        raise NotImplementedError

    def count_overtaken(self, waiting: deque[Request], admitted: list[Request]) -> None:
        """Note which requests this step has admitted, and which still wait."""


class LongestPrefix(QueueOrder):
    """Sorts the head of the queue by cached prefix, and counts how often each request there is overtaken.

    The cache's prefix tree keeps the hashes of its prefixes. The hashes of a prompt's prefixes are computed once, at
    most HASHED_BLOCKS in a step. A bisection finds the longest cached prefix. For 64 prompts of 10,000 cached tokens
    this takes 0.4 ms per step; walking the tree took 15 ms.
    """

    most = CANDIDATES

    def __init__(self, cache: KVCache, log: RecordLog) -> None:
        super().__init__(cache, log)
        self._hashes: dict[int, list[int]] = {}  # request id -> hashes of its prefixes that are known so far
        self._hashable = 0  # blocks that may still be hashed in this step

    def order(self, head: list[Request]) -> list[Request]:
        """Returns preempted requests, then requests at the limit, then the others by cached prefix. A request is at the
        limit once OVERTAKES younger requests have overtaken it. A step that admits several requests can exceed the
        limit."""
        self._hashes = {request.id: self._hashes.get(request.id, []) for request in head}
        self._hashable = HASHED_BLOCKS
        return sorted(head, key=self._sort_key)

    def _sort_key(self, request: Request) -> tuple[int, int, int]:
        if request.state is RequestState.PREEMPTED:
            return 0, 0, 0
        if request.overtaken >= OVERTAKES:
            return 1, 0, request.arrived
        return 2, -self._cached_blocks(request), request.arrived

    def _cached_blocks(self, request: Request) -> int:
        """Returns the number of blocks in the longest cached prefix, among the prefixes that are hashed so far."""
        if not self._cache.may_read(request):
            return 0
        hashes, prefixes, size = self._hashes[request.id], self._cache.tree.prefixes, self._cache.block_size
        limit = (len(request.ids) - 1) // size
        found = bisect_left(hashes, True, key=lambda prefix: prefix not in prefixes)
        while found == len(hashes) < limit and self._hashable:
            self._hashable -= 1
            block = block_key(request.ids, found, size, request.cache_salt)
            hashes.append(hash((hashes[-1] if hashes else 0, block)))
            found += hashes[-1] in prefixes
        return found

    def count_overtaken(self, waiting: deque[Request], admitted: list[Request]) -> None:
        """Add the number of younger requests in `admitted` to the `overtaken` of each request at the queue's head."""
        arrived = sorted(request.arrived for request in admitted)
        for request in islice(waiting, CANDIDATES):
            request.overtaken += len(arrived) - bisect(arrived, request.arrived)


class Priority(QueueOrder):
    """Sorts the queue by the requests' priority: the lowest number first, and then the order of arrival. A preempted
    request has no other place: a more urgent one that came later is before it."""

    def order(self, head: list[Request]) -> list[Request]:
        """Returns the requests by priority, which may make a request wait for any time."""
        return sorted(head, key=rank)


def rank(request: Request) -> tuple[int, int]:
    """Returns the place of a request under the policy "priority"."""
    return request.priority, request.arrived


# policy -> the class that sorts the queue; other policies do not sort it
ORDERS: dict[str, type[QueueOrder]] = {"longest-prefix": LongestPrefix, "priority": Priority}

Chunking = Callable[[Request, int, int], int]
"""(request, tokens left of its prompt, tokens left of the step's budget) -> tokens that the step computes."""

# chunked prefill on or off; off: a prompt is computed in one step, even above the budget
CHUNKS: dict[bool, Chunking] = {
    True: lambda request, left, budget: min(left, budget),
    False: lambda request, left, budget: left,
}


Victim = Callable[[Sequence[Request], Request], Request]
"""(running requests in the order of admission, the one that needs a block) -> the one that is preempted."""


def youngest(running: Sequence[Request], request: Request) -> Request:
    """Returns the request that was admitted last. The oldest always goes on, so one request after the other ends."""
    return running[-1]


def least_urgent(running: Sequence[Request], request: Request) -> Request:
    """Returns the last one under the policy "priority", as in vLLM. The first always goes on."""
    return max(running, key=rank)


VICTIMS: dict[str, Victim] = {"priority": least_urgent}  # policy -> who is preempted; other policies: the youngest
