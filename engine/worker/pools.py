"""Chooses the sizes of a model's pools: blocks for full attention, pages for windows, slots for recurrent states.

A block of full attention is needed for each block of text. A running request needs few pages of a window, however long
its text is, and few slots of states; what is left of these pools are pages and checkpoints that later requests may use.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.groups import CacheGroup
from engine.trace.side_pool import SideGroup, window_pages

TEXT = 1024  # tokens of a running request, as assumed for the number of states that a pool of blocks can use
SLOTS = 3  # of a running request: its own, the checkpoint that it makes, and the one that it read or made before


class PoolSizes:
    """The pools for the groups of one model."""

    def __init__(
        self, groups: Sequence[CacheGroup], config: EngineConfig, max_rows: int, budget: int, block_bytes: Sequence[int]
    ) -> None:
        """`max_rows`: requests that run at the same time. `budget`: tokens of a step. `block_bytes`: of a block, page
        or slot of each group."""
        self._groups, self._config, self._block_bytes = groups, config, block_bytes
        self._size, self._rows, self._budget = config.block_size, max_rows, budget
        self._drafts = config.speculative_tokens if config.speculation != "off" else 0

    def sides(self, blocks: int) -> tuple[SideGroup, ...]:
        """Returns the side groups for a pool of `blocks` blocks of full attention, with their null blocks.

        Raises EngineError if the configured sizes are too small for one request.
        """
        return tuple(
            SideGroup(group.name, group.kind, 1 + self._count(group, blocks), group.window)
            for group in self._groups[1:]
        )  # fmt: skip

    def _count(self, group: CacheGroup, blocks: int) -> int:
        size, config = self._size, self._config
        if group.kind == "window":
            pages = min(blocks, window_pages(group.window, size))
            least, given, what = pages + -(-self._drafts // size), config.window_blocks, "window_blocks"
            chosen = max(least, min(blocks, self._rows * pages + -(-self._budget // size)))
        else:
            least, given, what = 2 + self._drafts, config.state_slots, "state_slots"
            running = max(1, min(self._rows, blocks * size // TEXT))
            chosen = running * (SLOTS + self._drafts) + blocks * size // config.checkpoint_interval
        if given is not None and given < least:
            raise EngineError(
                f"{what} is {given:,}, but one request needs {least:,} in the group {group.name!r}"
                + (f" with {self._drafts} drafts" if self._drafts else "")
                + f": raise --{what.replace('_', '-')}, or leave it out"
            )
        return chosen if given is None else given

    def bytes_for(self, blocks: int) -> int:
        """Returns the bytes of all pools, for a number of blocks of full attention."""
        numbers = blocks + 1, *(side.num_blocks for side in self.sides(blocks))
        return sum(number * size for number, size in zip(numbers, self._block_bytes, strict=True))

    def blocks_in(self, room: int) -> int:
        """Returns the largest number of blocks of full attention whose pools fit in `room` bytes; 0: none."""
        low, high = 0, room // max(1, self._block_bytes[0]) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes_for(middle) <= room else (low, middle)
        return low
