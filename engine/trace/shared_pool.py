"""A side group whose pages are blocks of group 0's pool: vLLM has one pool for all KV cache groups.

A block belongs to one group at a time. State counts the blocks of all groups, so what is available is the same for each
of them. A page that is kept for a block of the tree leaves the tree with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from engine.trace.side_pool import MainPool, SideGroup, SidePool
from engine.trace.views import CACHED, FREE


class SharedPool(SidePool):
    """The pages of one group in `state`'s pool. Their order in the pool is unknown, so `free` is always empty."""

    def __init__(self, group: SideGroup, state: MainPool) -> None:
        super().__init__(group)
        self.free = []
        self._state = state
        self._num_held = 0  # pages with a holder

    @property
    def total(self) -> int:
        """The pages that this group has or can get: other groups hold the rest of the pool."""
        return self._num_held + self.available

    @property
    def available(self) -> int:
        return self._state.counts[FREE] + self._state.counts[CACHED]

    def take_pages(self, pages: list[int]) -> None:
        self.hold(pages)

    def hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._state.hold_blocks((page,))
            self.holders[page] += 1
            if self.holders[page] == 1:
                self._num_held += 1
                self.idle.pop(page, None)
            elif self.holders[page] == 2:
                self.num_shared += 1

    def release(self, pages: Iterable[int], soon: bool = False) -> None:
        for page in pages:
            super().release((page,), soon)
            self._num_held -= not self.holders[page]
            self._state.release_blocks((page,))
        self.free.clear()

    def keep(self, pairs: Iterable[tuple[int, int]]) -> None:
        state = self._state
        for block, page in pairs:
            super().keep(((block, page),))
            state.node_of[page] = state.node_of[block]
            if not self.holders[page]:  # its text was not in the tree for a while
                self.idle[page] = None
                state.counts[FREE] -= 1
                state.counts[CACHED] += 1

    def forget(self, blocks: Iterable[int]) -> None:
        pages = [self.kept[block] for block in blocks if block in self.kept]
        super().forget([self.block_of[page] for page in pages])
        self.free.clear()
        if pages:
            self._state.leave_tree(pages)

    def move(self, block: int, node: int) -> None:
        if page := self.kept.get(block):
            self._state.node_of[page] = node

    def take_faults(self, pages: list[int]) -> Iterator[str]:
        if any(page >= self.group.num_blocks for page in pages):
            yield "its pages are not in the pool"

    def copy(self, state: MainPool) -> SharedPool:
        other = SharedPool(self.group, state)
        self.copy_to(other)
        other._num_held = self._num_held
        return other

    def fill(self, data: dict[str, Any], held: Iterable[int]) -> None:
        """Fill a new pool from a snapshot. `state` has the rest of the snapshot, and does not count these pages yet."""
        self.keep((block, page) for block, page in data["kept"])
        self.idle = OrderedDict.fromkeys((*data["idle"], *self.idle))
        self.hold(held)


def new_pool(group: SideGroup, state: MainPool) -> SidePool:
    """Returns an empty pool of a side group."""
    return SharedPool(group, state) if group.shared else SidePool(group)
