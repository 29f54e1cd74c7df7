"""Follows the blocks of vLLM's other KV cache groups: sliding windows, chunked local attention, recurrent states.

vLLM has one block pool for all groups, and identifies what a block of a group holds by a hash of the text before its
end. A block stays cached although the full-attention block of the same text is gone, and is of use again when that is
back. minitui's state keeps a page for a block of the tree, so it has such a page again from then on. Here all of them
are known; so are several pages with one content, of which vLLM takes the oldest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.trace.side_pool import SideGroup, new_pool

if TYPE_CHECKING:
    from engine.trace.state import State
    from minitui.vllm.tokens import Tokens

Write = Callable[..., None]
REUSED = "its block is needed"


@dataclass(slots=True)
class Side:
    """One group. `size`: tokens of a page; `window`, `chunk`: tokens that its layers see, 0: it is not such a group."""

    index: int
    group: SideGroup
    size: int
    chunk: int
    pages: dict[bytes, dict[int, None]] = field(default_factory=dict)  # hash of a text -> pages that end with it
    texts: dict[int, list[bytes]] = field(default_factory=dict)  # cached page -> its hashes
    lengths: dict[int, int] = field(default_factory=dict)  # request -> entries of its table, empty ones included

    def serves(self, end: int, tokens: Tokens) -> list[bool]:
        """Returns for each number of pages up to `end` whether a prompt can go on after as many."""
        cached = [tokens.at((i + 1) * self.size) in self.pages for i in range(end)]
        if self.group.kind == "state":
            return [True, *cached]
        needed = -(-(self.group.window - 1) // self.size)
        run, found = 0, [True]
        for i, there in enumerate(cached):
            first = (i + 1) * self.size // self.chunk * self.chunk // self.size if self.chunk else i + 1 - needed
            run = run + 1 if there else 0
            found.append(run >= i + 1 - max(0, first))
        return found


class SideGroups:
    """Owns what is known about the groups, and writes their records. `groups`: see `describe` in facts.py."""

    def __init__(self, state: State, groups: list[dict[str, Any]], write: Write) -> None:
        self._state, self._write = state, write
        self._size = state.block_size
        self._blocks: dict[bytes, int] = {}  # hash of a text -> the block of the tree that ends with it
        self.all = [
            Side(i, SideGroup(facts["name"], facts["kind"], state.num_blocks, facts["window"], True, facts["size"]),
                 facts["size"], facts["chunk"])
            for i, facts in enumerate(groups)
        ]
        state.groups = [new_pool(side.group, state) for side in self.all]

    # ---- the blocks of the tree

    def appeared(self, request: int, hashes: list[bytes], blocks: list[int]) -> None:
        """Blocks are in the tree from now on; pages with these texts may have been cached before."""
        for hash, block in zip(hashes, blocks, strict=True):
            self._blocks[hash] = block
            for side in self.all:
                if hash in side.pages:
                    self._keep(side, request, hash)

    def vanished(self, hashes: Iterable[bytes]) -> None:
        """Blocks have left the tree, with the pages that it kept for them."""
        for hash in hashes:
            del self._blocks[hash]

    def renamed(self, hash: bytes, block: int) -> None:
        """Another block has taken the place of the one with this text."""
        self._blocks[hash] = block

    def depth(self, tokens: Tokens, most: int) -> int:
        """Returns how many of the prompt's first tokens the tree has, at most `most`."""
        n = 0
        while n + self._size <= most and tokens.at(n + self._size) in self._blocks:
            n += self._size
        return n

    # ---- the tables of requests

    def take_table(self, request: int, tokens: Tokens, computed: int, tables: list[list[int]]) -> None:
        """Give an admitted request its tables. Empty entries are 0; pages before `computed` tokens are cached."""
        for side, table in zip(self.all, tables, strict=True):
            side.lengths[request] = 0
            whole = computed // side.size
            view, kept = self._state.requests[request], self._state.groups[side.index].kept
            most = min(whole, view.shared_blocks) if side.size == self._size else 0
            hits = [(i, page) for i, page in enumerate(table[:most]) if page and kept.get(view.table[i]) == page]
            if hits:
                self._write("borrow", side.index, request, hits)
            self._append(side, request, table, {i for i, _ in hits})

    def take_new(self, request: int, tables: list[list[int]]) -> None:
        """Append entries to a request's tables."""
        for side, table in zip(self.all, tables, strict=True):
            self._append(side, request, table, set())

    def _append(self, side: Side, request: int, table: list[int], done: set[int]) -> None:
        start = side.lengths[request]
        side.lengths[request] = start + len(table)
        new = [(start + i, page) for i, page in enumerate(table) if page and i not in done]
        if not new:
            return
        held = self._state.requests[request].side[side.index]
        if moved := [place for place, page in held.items() if any(page == other for _, other in new)]:
            self._write("drop", side.index, request, moved, False)  # vLLM moves the slots of drafts to the end
        self._write("take", side.index, request, new)

    def restore(
        self, request: int, tokens: Tokens, tables: list[list[int]], cached: list[list[tuple[int, int]]]
    ) -> None:
        """Give a request its tables in a new state. `cached`: (page, tokens of the text that it ends) of each group."""
        self.take_table(request, tokens, 0, tables)
        for side, pages in zip(self.all, cached, strict=True):
            for page, end in pages:
                self.cache(side.index, request, tokens.at(end), page, alone=False)

    def drop(self, request: int, pages: list[int]) -> None:
        """A request gave back pages behind its window, or states that newer ones have replaced."""
        for side in self.all:
            held = self._state.requests[request].side[side.index]
            if places := [place for place, page in held.items() if page in pages]:
                self._write("drop", side.index, request, places, False)

    def new_pages(self, request: int, tables: list[list[int]]) -> list[list[int]]:
        """Returns the entries of tables that the request does not have yet."""
        return [table[side.lengths[request] :] for side, table in zip(self.all, tables, strict=True)]

    def left(self, request: int) -> None:
        """A request has no tables any more."""
        for side in self.all:
            side.lengths.pop(request, None)

    def tables(self, request: int) -> list[list[int]]:
        """Returns a request's tables as vLLM has them."""
        held = self._state.requests[request].side
        return [[held[side.index].get(i, 0) for i in range(side.lengths.get(request, 0))] for side in self.all]

    # ---- what is cached

    def cache(self, index: int, request: int, hash: bytes, page: int, alone: bool) -> None:
        """A page is cached for a text. `alone`: for no other text any more."""
        side = self.all[index]
        if alone and side.texts.get(page, [hash]) != [hash]:
            self.uncache(page)
        texts = side.texts.setdefault(page, [])
        if hash in texts:
            return
        texts.append(hash)
        side.pages.setdefault(hash, {})[page] = None
        self._keep(side, request, hash)

    def _keep(self, side: Side, request: int, hash: bytes) -> None:
        """Keep the oldest page of a text for the block of the tree, unless one is kept already."""
        block, pool = self._blocks.get(hash), self._state.groups[side.index]
        page = next(iter(side.pages[hash]))
        if block is not None and block not in pool.kept and page not in pool.block_of:
            self._write("keep", side.index, request, [(block, page)])

    def uncache(self, page: int) -> bool:
        """The content of a page is not cached any more, as far as it was. Returns whether it was."""
        for side in self.all:
            texts = side.texts.pop(page, None)
            if texts is None:
                continue
            if page in self._state.groups[side.index].block_of:
                self._write("lose", side.index, [page], REUSED)
            for hash in texts:
                del side.pages[hash][page]
                if not side.pages[hash]:
                    del side.pages[hash]
            return True
        return False

    def move(self, page: int, other: int) -> None:
        """What was cached in a page is in another one from now on."""
        for side in self.all:
            if texts := list(side.texts.get(page, ())):
                request = next(
                    id for id, view in self._state.requests.items() if page in view.side[side.index].values()
                )
                self.uncache(page)
                for hash in texts:
                    self.cache(side.index, request, hash, other, alone=False)
                return

    def clear(self) -> None:
        """Nothing is cached any more."""
        for page in [page for side in self.all for page in side.texts]:
            self.uncache(page)

    # ---- hits

    def explain(self, tokens: Tokens, most: int, unit: int) -> tuple[int, int, Side | None]:
        """Returns what the tree has of a prompt, what all groups can serve, and the group that cuts the hit, if any.
        `most`: the largest hit. A hit is a multiple of `unit` tokens."""
        depth = self.depth(tokens, most) // unit * unit
        able = [side.serves(depth // side.size, tokens) for side in self.all]
        sizes = [side.size for side in self.all]
        ends = range(depth, -1, -unit)
        longest = [next(end for end in ends if can[end // size]) for can, size in zip(able, sizes, strict=True)]
        common = next(end for end in ends if all(can[end // size] for can, size in zip(able, sizes, strict=True)))
        shortest = min(longest, default=depth)
        cut = self.all[longest.index(shortest)] if shortest < depth or common < depth else None
        return depth, common, cut

