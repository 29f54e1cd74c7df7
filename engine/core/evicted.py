"""The memory of evictions: a later miss can name the step of the eviction, and tokens computed again are counted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MOST = 32_768  # blocks; older evictions are forgotten


class EvictedPrefixes:
    """The prefixes of evicted blocks, each with the step of its eviction. A prefix is the hash of all tokens up to and
    including its last block."""

    def __init__(self) -> None:
        self._step_of: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._step_of)

    def add(self, prefixes: Iterable[int], step: int) -> None:
        """Remember the evictions of `step`."""
        steps = self._step_of
        for prefix in prefixes:
            steps[prefix] = step
        while len(steps) > MOST:
            steps.popitem(last=False)

    def step_of(self, prefix: int) -> int | None:
        """Return the step of the eviction; None if the prefix was not evicted, or too long ago."""
        return self._step_of.get(prefix)

    def pop(self, prefixes: list[int]) -> list[int]:
        """Forget prefixes, because they are in the tree again. Return the indices of those that were evicted."""
        steps = self._step_of
        return [i for i, prefix in enumerate(prefixes) if steps.pop(prefix, None) is not None]

    def clear(self) -> None:
        """Forget all evictions."""
        self._step_of.clear()
