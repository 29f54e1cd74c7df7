"""The state of every block of the KV pool.

Two facts decide a block's state: how many requests hold it, and whether the radix tree refers to it::

    free     no request, not in the tree      active   one request
    shared   two requests or more             cached   no request, in the tree: evictable

Only the allocator stores these facts. Block 0 is the null block: padding refers to it, no request holds it, and the
totals do not count it.
"""

from __future__ import annotations

from collections.abc import Iterable

NULL_BLOCK = 0


class BlockAllocator:
    """Counts the requests that hold each block, for the blocks 1 … num_blocks - 1. `num_blocks` includes the null
    block, as the pool's tensors do. Every change takes O(1) time per block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks, the null block and one other; it has {num_blocks}")
        self.num_blocks = num_blocks
        self.total = num_blocks - 1
        self._holders = [0] * num_blocks
        self._in_tree = bytearray(num_blocks)
        # A stack: the block freed last is taken first. A new pool hands out the blocks in the order 1, 2, 3 …
        self._free = list(range(num_blocks - 1, 0, -1))
        self.num_active = self.num_shared = self.num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_blocks(self) -> list[int]:
        """The free blocks. The next allocation takes the last of them."""
        return list(self._free)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def in_tree(self, block: int) -> bool:
        return bool(self._in_tree[block])

    def allocate(self, n: int) -> list[int] | None:
        """Take `n` free blocks for one request. Returns None, and takes nothing, if fewer are free."""
        if n > len(self._free):
            return None
        if n == 0:
            return []
        blocks = self._free[-n:][::-1]
        del self._free[-n:]
        for block in blocks:
            self._holders[block] = 1
        self.num_active += n
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of these blocks. Each block must be in the tree or held by a request."""
        for block in blocks:
            holders = self._holders[block] = self._holders[block] + 1
            if holders == 1:
                self.num_cached -= 1
                self.num_active += 1
            elif holders == 2:
                self.num_active -= 1
                self.num_shared += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one holder from each block. A block outside the tree is freed when its last holder releases it."""
        counts, in_tree, free = self._holders, self._in_tree, self._free
        active = shared = cached = 0
        for block in blocks:
            holders = counts[block] = counts[block] - 1
            if holders == 0:
                active -= 1
                if in_tree[block]:
                    cached += 1
                else:
                    free.append(block)
            elif holders == 1:
                shared -= 1
                active += 1
            elif holders < 0:
                raise AssertionError(f"block {block} was released more often than it was held")
        self.num_active += active
        self.num_shared += shared
        self.num_cached += cached

    def tree_add(self, blocks: Iterable[int]) -> None:
        """Record that the tree refers to these blocks. A request must hold each of them."""
        for block in blocks:
            self._in_tree[block] = 1

    def tree_drop(self, blocks: Iterable[int]) -> None:
        """Record that the tree no longer refers to these blocks. Blocks without a holder are freed."""
        holders, in_tree, free = self._holders, self._in_tree, self._free
        before = len(free)
        for block in blocks:
            in_tree[block] = 0
            if holders[block] == 0:
                free.append(block)
        self.num_cached -= len(free) - before

    def check(self) -> None:
        """Raise AssertionError unless counts, states and the free list agree."""
        states = [0, 0, 0]
        for block in range(1, self.num_blocks):
            holders = self._holders[block]
            if holders == 1:
                states[0] += 1
            elif holders > 1:
                states[1] += 1
            elif self._in_tree[block]:
                states[2] += 1
        assert self._holders[NULL_BLOCK] == 0 and not self._in_tree[NULL_BLOCK], "the null block is owned"
        assert states == [self.num_active, self.num_shared, self.num_cached], (
            f"counted {states} blocks, but the counters are {[self.num_active, self.num_shared, self.num_cached]}"
        )
        assert len(set(self._free)) == len(self._free), "a block is in the free list twice"
        assert all(self._holders[b] == 0 and not self._in_tree[b] for b in self._free), "a free block is owned"
        assert self.num_free + sum(states) == self.total, f"{self.num_free} free + {states} is not {self.total}"
