"""Measures how long KV blocks stay in the cache, from the engine's records: their lifetimes, idle times and reuse."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from itertools import groupby

from engine.metrics.prometheus import Histogram
from engine.trace.kind import Reader, Record
from engine.trace.records import CLEARED
from engine.trace.state import State


class BlockTimes(Reader):
    """The times of each block's allocation, of its last use and of its last release; NaN if unknown.

    `lifetime` and `idle` get a value for each block that is evicted for lack of room, `reuse_gap` for each block that a
    request takes from the cache. vLLM measures a sample of the blocks; here, all are measured. vLLM counts a block as
    idle from its last use on; here, a block is idle only while no request holds it.
    """

    def __init__(self, lifetime: Histogram, idle: Histogram, reuse_gap: Histogram) -> None:
        self._lifetime, self._idle, self._reuse_gap = lifetime, idle, reuse_gap
        self.forget()

    def forget(self) -> None:
        """Forget all times: records were lost, or a new engine began."""
        self._allocated, self._used, self._released = array("d"), array("d"), array("d")

    def observe(self, record: Record, state: State) -> None:
        """Note the times of a record; `state` is the state before the record."""
        self._state = state
        if not self._allocated:
            for times in (self._allocated, self._used, self._released):
                times.extend([math.nan] * state.num_blocks)
        self.read(record)

    def on_alloc(self, t: float, blocks: list[int]) -> None:
        for block in blocks:
            self._allocated[block] = self._used[block] = t

    def on_hold(self, t: float, request: int, node: int) -> None:
        held = self._state.requests[request].node
        for view in self._state.path(node):
            if view.id == held:
                break  # the request holds this node and its ancestors already
            _count(self._reuse_gap, self._used, view.blocks, t)
            for block in view.blocks:
                self._used[block] = t

    def on_finish(self, t: float, request: int) -> None:
        for block in self._state.requests[request].table:
            self._released[block] = t

    on_preempt = on_requeue = on_finish

    def on_evict(self, t: float, node: int, blocks: int, reason: str) -> None:
        if reason != CLEARED:
            evicted = self._state.nodes[node].blocks[-blocks:]
            _count(self._lifetime, self._allocated, evicted, t)
            _count(self._idle, self._released, evicted, t)


def _count(histogram: Histogram, times: array[float], blocks: Iterable[int], t: float) -> None:
    """Count the time from each block's known `times` until `t`. Neighbours often have the same time: one addition."""
    for began, same in groupby(times[block] for block in blocks):
        if not math.isnan(began):
            histogram.observe(t - began, sum(1 for _ in same))
