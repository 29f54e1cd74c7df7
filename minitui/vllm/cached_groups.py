"""What the KV cache groups beside full attention have of the cached texts, computed from a server's KV events.

vLLM names the blocks of all groups by the same hash, that of the text before their end, and tells the kind of a group
when it stores blocks. The tree has the texts of full attention; the blocks of other groups are kept for its blocks. A
block whose text is not in the tree is remembered until it is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.trace.shared_pool import new_pool
from engine.trace.side_pool import SideGroup
from engine.trace.state import State
from minitui.trace.foreign import REMOVED
from minitui.vllm.kv_messages import FULL, Event, Hash

WORDS = {"mamba": "state", "chunked_local_attention": "chunks", "sliding_window": "window"}  # vLLM's -> ours
UNKNOWN_GROUP = "blocks of KV cache groups that are unknown"
NOBODY = -1


class Tree(Protocol):
    """The tree of cached texts (cached_tree.py)."""

    state: State
    left_out: Counter[str]

    def write(self, kind: str, *fields: Any) -> None: ...
    def block_of(self, hash: Hash) -> int | None: ...
    def get_pages(self, n: int) -> list[int]: ...
    def give_back(self, pages: list[int]) -> None: ...


@dataclass(slots=True)
class Group:
    """One group. `blocks`: how many blocks end with a text; `pages`: their numbers in minitui's own table."""

    index: int
    blocks: Counter[Hash] = field(default_factory=Counter)
    pages: dict[Hash, int] = field(default_factory=dict)


class CachedGroups:
    """The groups of one tree. `main`: vLLM's number of the group with full attention, None as long as it is unknown."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.main: int | None = None
        self.others: dict[int, Group] = {}

    def is_main(self, event: Event) -> bool:
        """Returns whether an event is about full attention: the first such group, or group 0 if no kinds are told."""
        full = event.kind == "BlockStored" and event.spec in FULL and bool(event.spec or not event.group)
        if self.main is None and full:
            self.main = event.group
        return event.group == self.main

    def take(self, event: Event) -> None:
        """Apply an event of another group."""
        group = self.others.get(event.group)
        if group is None and event.kind == "BlockStored" and event.spec:
            group = self._learn(event)
        if group is None:
            self._tree.left_out[UNKNOWN_GROUP] += 1
            return
        for hash in event.hashes:
            if event.kind == "BlockStored":
                group.blocks[hash] += 1
                self._keep(group, hash)
            elif group.blocks[hash] > 1:
                group.blocks[hash] -= 1
            elif group.blocks.pop(hash, 0):
                page = group.pages.pop(hash, None)
                if page is not None:
                    self._tree.write("lose", group.index, [page], REMOVED)
                    self._tree.give_back([page])

    def _learn(self, event: Event) -> Group:
        """Add a group to the state; the gap in the record numbers asks readers to take a snapshot."""
        state = self._tree.state
        kind = "state" if event.spec == "mamba" else "window"
        name = f"{WORDS.get(event.spec, event.spec.replace('_', ' '))}{f' {event.window}' if event.window else ''}"
        same = sum(pool.group.name.partition(" #")[0] == name for pool in state.groups)
        facts = SideGroup(
            f"{name} #{same + 1}" if same else name, kind, state.num_blocks, event.window, True, event.size
        )
        state.groups.append(new_pool(facts, state))
        for request in state.requests.values():
            request.side.append({})
        state.seq += 1
        group = self.others[event.group] = Group(len(state.groups) - 1)
        return group

    def appeared(self, hashes: list[Hash]) -> None:
        """Texts are in the tree from now on."""
        for group in self.others.values():
            for hash in hashes:
                if hash in group.blocks:
                    self._keep(group, hash)

    def _keep(self, group: Group, hash: Hash) -> None:
        block = self._tree.block_of(hash)
        if block is not None and hash not in group.pages and (pages := self._tree.get_pages(1)):
            group.pages[hash] = pages[0]
            self._tree.write("keep", group.index, NOBODY, [(block, pages[0])])

    def vanished(self, hash: Hash) -> None:
        """A text has left the tree, with what was kept for it."""
        for group in self.others.values():
            if (page := group.pages.pop(hash, None)) is not None:
                self._tree.give_back([page])

    def clear(self) -> None:
        """Nothing is cached any more; what is kept in the tree leaves it with its texts."""
        for group in self.others.values():
            group.blocks.clear()
