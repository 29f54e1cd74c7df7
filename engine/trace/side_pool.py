"""The pools of a model with several kinds of memory, beside the pool of full attention.

Layers whose memory has the same form share a group. Group 0 has the layers with full attention: its blocks are those of
the radix tree and of the requests' block tables. A side group has a pool of its own:

    window   layers that see only the last tokens: pages of one block each; those behind the window are dropped
    state    layers that keep a recurrent state: slots, each with the state after some token; a slot that the tree keeps
             is a checkpoint, with the state after the last token of a block

For a block of the tree, a side pool may keep a page or a checkpoint. A block of group 0 in the tree is one prefix, so
it names what is kept for that prefix. The engine (engine/core/side_groups.py) and the state of the panels
(engine/trace/state.py) use the same pool; each change is a record.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Protocol

from engine.trace.kind import Bound, Count, Flag, Positive, Text, bounds_of, one_of
from engine.trace.runs import blocks_of, runs_of
from engine.trace.views import CACHED, FREE

NULL = 0  # page 0 takes the writes of padding; slot 0 has the state before the first token
OWN = -1  # the place of a request's own slot, which has its newest state; drafts have slots at -2, -3 …


@dataclass(frozen=True, slots=True)
class SideGroup:
    """One side group. `num_blocks`: pages or slots, the null block included; `window`: tokens, 0 for states. `shared`:
    the pages are blocks of group 0's pool, as in vLLM (SharedPool). `page_tokens`: tokens of a page, 0: those of a
    block of group 0."""

    name: Text
    kind: Annotated[str, one_of("window", "state")]
    num_blocks: Positive
    window: Count = 0
    shared: Flag = False
    page_tokens: Count = 0

    def first_page(self, tokens: int, block_size: int) -> int:
        """Returns the first block of a sequence whose page the token after `tokens` tokens needs."""
        return max(0, tokens - self.window + 1) // block_size


def window_pages(window: int, block_size: int) -> int:
    """Returns how many pages of a window a request has at most between two steps, and one to go on."""
    return -(-window // block_size) + 2


GROUP: dict[str, Bound] = bounds_of(SideGroup)


class MainPool(Protocol):
    """The pool of group 0: a State (engine/trace/state.py)."""

    counts: list[int]
    node_of: array

    def hold_blocks(self, blocks: Iterable[int]) -> None: ...
    def release_blocks(self, blocks: Iterable[int]) -> None: ...
    def leave_tree(self, blocks: Sequence[int]) -> None: ...


class SidePool:
    """The pages or slots of one side group: who holds them, and for which blocks of the tree they are kept. A page
    without a holder is idle if the tree keeps it, else free. Idle pages leave the tree in the order of `idle`."""

    def __init__(self, group: SideGroup) -> None:
        self.group = group
        self.free = list(range(group.num_blocks - 1, 0, -1))  # an allocation takes the last
        self.holders = array("i", [0]) * group.num_blocks
        self.kept: dict[int, int] = {}  # block of group 0 in the tree -> page or slot
        self.block_of: dict[int, int] = {}  # the reverse
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.num_shared = 0  # pages with two holders or more

    @property
    def total(self) -> int:
        return self.group.num_blocks - 1

    @property
    def available(self) -> int:
        """The number of pages that are free or can be evicted."""
        return len(self.free) + len(self.idle)

    @property
    def num_active(self) -> int:
        return self.total - self.available - self.num_shared

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The numbers of (free, active, shared, cached) pages, like State.counts of the blocks."""
        return len(self.free), self.num_active, self.num_shared, len(self.idle)

    def take(self, n: int) -> list[int]:
        """Returns `n` free pages, now with one holder. There must be as many."""
        pages = self.free[len(self.free) - n :][::-1]
        del self.free[len(self.free) - n :]
        for page in pages:
            self.holders[page] = 1
        return pages

    def take_pages(self, pages: list[int]) -> None:
        """Apply a record that says that these pages were taken."""
        self.take(len(pages))

    def take_faults(self, pages: list[int]) -> Iterator[str]:
        """Yields why these pages cannot be taken now."""
        if self.free[len(self.free) - len(pages) :] != pages[::-1]:
            yield "its pages are not the free pages that are next"

    def hold(self, pages: Iterable[int]) -> None:
        """Count one more holder of each page, which the tree keeps."""
        for page in pages:
            self.holders[page] += 1
            if self.holders[page] == 1:
                del self.idle[page]
            elif self.holders[page] == 2:
                self.num_shared += 1

    def release(self, pages: Iterable[int], soon: bool = False) -> None:
        """Count one holder less of each page. `soon`: as idle pages, they are the next to be evicted."""
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 1:
                self.num_shared -= 1
            elif self.holders[page] == 0 and page in self.block_of:
                self.idle[page] = None
                self.idle.move_to_end(page, last=not soon)
            elif self.holders[page] == 0:
                self.free.append(page)

    def keep(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Keep pages for blocks of the tree: (block of group 0, page). Each page has a holder."""
        for block, page in pairs:
            self.kept[block] = page
            self.block_of[page] = block

    def forget(self, blocks: Iterable[int]) -> None:
        """Stop keeping pages for these blocks, which leave the tree. Pages without a holder become free."""
        for block in blocks:
            page = self.kept.pop(block, None)
            if page is not None:
                del self.block_of[page]
                if page in self.idle:
                    del self.idle[page]
                    self.free.append(page)

    def next_idle(self, n: int) -> list[int]:
        """Returns the `n` idle pages that are evicted next, or all."""
        return [page for page, _ in zip(self.idle, range(n), strict=False)]

    def evict(self, pages: Iterable[int]) -> None:
        """Evict idle pages: they become free, their blocks stay in the tree."""
        self.forget([self.block_of[page] for page in pages])

    def rename(self, block: int, other: int) -> None:
        """A copy of a block takes its place in the tree (minitui/trace/foreign.py)."""
        page = self.kept.pop(block, None)
        if page is not None:
            self.kept[other] = page
            self.block_of[page] = other

    def move(self, block: int, node: int) -> None:
        """A block of the tree now belongs to another node: nothing changes here."""

    # ---- snapshots

    def copy(self, state: MainPool) -> SidePool:
        """Returns an independent copy, for a copy of the state."""
        other = SidePool(self.group)
        self.copy_to(other)
        return other

    def copy_to(self, other: SidePool) -> None:
        """Copy all fields to a pool of the same group."""
        other.free, other.holders, other.kept = list(self.free), self.holders[:], dict(self.kept)
        other.block_of, other.idle, other.num_shared = dict(self.block_of), self.idle.copy(), self.num_shared

    def snapshot(self) -> dict[str, Any]:
        """Returns plain data. The holders are not in it: the requests of the snapshot name their pages."""
        return {
            **asdict(self.group), "free": runs_of(self.free), "idle": list(self.idle),
            "kept": [list(pair) for pair in self.kept.items()],
        }

    def fill(self, data: dict[str, Any], held: Iterable[int]) -> None:
        """Fill a new pool from a snapshot. `held`: the pages of all requests, a shared page more than once."""
        self.free = blocks_of(data["free"])
        self.keep((block, page) for block, page in data["kept"])
        self.idle = OrderedDict.fromkeys(data["idle"])
        for page in held:
            self.holders[page] += 1
        self.num_shared = sum(count > 1 for count in self.holders)

    def check(self, held: Iterable[int]) -> Iterator[str]:
        """Yields what is wrong. `held`: as for `fill`."""
        name, holders = self.group.name, array("i", [0]) * self.group.num_blocks
        for page in held:
            holders[page] += 1
        if holders != self.holders or holders[NULL]:
            yield f"{name}: the holders differ from the requests' pages"
        if {page: block for block, page in self.kept.items()} != self.block_of:
            yield f"{name}: kept pages and their blocks differ"
        unheld = {page for page in range(1, self.group.num_blocks) if not holders[page]}
        if unheld != {*self.free, *self.idle} or len(unheld) != self.available:
            yield f"{name}: {self.available} pages are free or idle, {len(unheld)} have no holder"
        if self.idle.keys() != unheld & self.block_of.keys():
            yield f"{name}: the idle pages are not those that the tree keeps without a holder"
        if self.num_shared != sum(count > 1 for count in holders):
            yield f"{name}: {self.num_shared} shared pages were counted"


class SharedPool(SidePool):
    """The pages of a group in `state`'s pool: vLLM has one pool for all KV cache groups.

    A block belongs to one group at a time. State counts the blocks of all groups, so what is available is the same for
    each of them. A page that is kept for a block of the tree leaves the tree with it. `free` is always empty, because
    the order of the pages is unknown.
    """

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
