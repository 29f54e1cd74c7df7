"""The blocks that planned steps have yet to write.

A block of the prefix tree is *pending* from the planning to the commit of the step that writes it. Later steps may read
it, because the device runs steps in order.
"""

from __future__ import annotations


class PendingBlocks:
    """The pending blocks and their steps."""

    def __init__(self) -> None:
        self._step_of: dict[int, int] = {}  # block -> the step that writes it
        self._blocks_of: dict[int, list[int]] = {}  # step -> the blocks that it writes

    def add(self, blocks: list[int], step: int) -> None:
        self._step_of.update(dict.fromkeys(blocks, step))
        self._blocks_of.setdefault(step, []).extend(blocks)

    def discard(self, blocks: list[int]) -> None:
        """Forget blocks that leave the tree. They need not be pending."""
        if self._step_of:
            for block in blocks:
                self._step_of.pop(block, None)

    def settle(self, step: int) -> bool:
        """Forget the blocks that a step has written. Returns False if there are none."""
        blocks = self._blocks_of.pop(step, None)
        if blocks is None:
            return False
        for block in blocks:
            if self._step_of.get(block) == step:
                del self._step_of[block]
        return True

    def forget(self, step: int) -> None:
        """Forget a failed step. Its blocks are pending until `discard`."""
        self._blocks_of.pop(step, None)

    def step_of(self, block: int) -> int:
        """Return the step that writes a block; -1 if the block is written."""
        return self._step_of.get(block, -1)

    def by_block(self) -> dict[int, int]:
        """Return the pending blocks, each with the step that writes it."""
        return dict(self._step_of)
