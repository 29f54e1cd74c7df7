"""The prefix cache of a server, computed from its KV events (kv_messages.py).

The events name texts by hashes. They do not name the blocks in memory, nor the requests that use them. So the numbers
of the blocks here are places in minitui's own table, and users, hits of a node and the order of eviction are unknown.
Several blocks may have the same content; the tree has the content once, until the last of the blocks is removed.

vLLM names the blocks of all groups by the same hash, that of the text before their end, and tells the kind of a group
when it stores blocks. The tree has the texts of full attention; the blocks of other groups are kept for its blocks. A
block whose text is not in the tree is remembered until it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from engine.trace.records import CLEARED
from engine.trace.side_pool import SideGroup, new_pool
from engine.trace.views import NodeView
from minitui.trace.foreign import REMOVED
from minitui.vllm.blocks import Blocks, Inconsistent
from minitui.vllm.kv_messages import FULL, Event, Hash

WORDS = {"mamba": "state", "chunked_local_attention": "chunks", "sliding_window": "window"}  # vLLM's -> ours
UNKNOWN_GROUP = "blocks of KV cache groups that are unknown"
NOBODY = -1


@dataclass(slots=True)
class Group:
    """One group. `blocks`: how many blocks end with a text; `pages`: their numbers in minitui's own table."""

    index: int
    blocks: Counter[Hash] = field(default_factory=Counter)
    pages: dict[Hash, int] = field(default_factory=dict)


class CachedGroups:
    """The groups of one tree. `main`: vLLM's number of the group with full attention, None as long as it is unknown."""

    def __init__(self, tree: CachedTree) -> None:
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


UNKNOWN_BEGINNING = "texts whose beginning is unknown"
NO_ROOM = "texts for which minitui has no room"


class CachedTree(Blocks):
    """The tree of cached texts. `left_out`: what it does not show, in words -> events."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.left_out: Counter[str] = Counter()
        super().__init__({
            "num_blocks": num_blocks, "block_size": block_size, "max_num_batched_tokens": 0, "max_num_seqs": 0,
            "prefix_caching": True,
        })

    def _forget(self) -> None:
        super()._forget()
        self.left_out.clear()
        self.stored = self.removed = 0  # blocks, since the tree began
        self._block_of: dict[Hash, int] = {}
        self._copies: Counter[Hash] = Counter()  # blocks with the content of another block
        self._unused = list(range(self._sizes[0] - 1, 0, -1))
        self.groups = CachedGroups(self)

    def __len__(self) -> int:
        """Returns the number of cached blocks with different contents."""
        return len(self._block_of)

    @property
    def copies(self) -> int:
        """The number of blocks with the content of another block."""
        return self._copies.total()

    def take(self, t: float, events: list[Event]) -> None:
        """Apply the events of one message. `t`: seconds since the server's first event."""
        self.t = max(self.t, t)
        for event in events:
            if event.where:
                self.left_out[event.where] += 1
        known = (event for event in events if not event.where and self._is_of_tree(event))
        for kind, group in groupby(known, key=lambda event: event.kind):
            if kind == "BlockRemoved":  # vLLM sends one event for each block
                self._take_removed(hash for event in group for hash in event.hashes)
                continue
            for event in _joined(group):
                self._take(event)

    def _is_of_tree(self, event: Event) -> bool:
        """Returns whether the tree shows an event; the other groups take theirs."""
        if event.kind == "AllBlocksCleared":
            self.groups.clear()
            return True
        alone = not event.group and not self.groups.others and event.spec in FULL
        if self.groups.is_main(event) or alone:
            return True
        self.groups.take(event)
        return False

    def block_of(self, hash: Hash) -> int | None:
        """Returns the block of the tree that ends with a text."""
        return self._block_of.get(hash)

    def get_pages(self, n: int) -> list[int]:
        """Returns unused numbers of blocks, as many as there are."""
        pages = self._unused[len(self._unused) - n :]
        del self._unused[len(self._unused) - n :]
        return pages

    def give_back(self, pages: list[int]) -> None:
        """These numbers are unused again."""
        self._unused += pages

    def _take(self, event: Event) -> None:
        if event.kind == "BlockStored":
            self._take_stored(event)
        else:
            self.clear(CLEARED)
            self._copies.clear()

    def _take_stored(self, event: Event) -> None:
        if event.size != self.size:
            raise Inconsistent(f"a block has {event.size} tokens, the blocks before have {self.size}")
        self.stored += len(event.hashes)
        parent, new = event.parent, 0
        if parent is not None and parent not in self._block_of:
            self.left_out[UNKNOWN_BEGINNING] += 1
            return
        for hash in event.hashes:
            if hash not in self._block_of:
                break
            self._copies[hash] += 1
            parent, new = hash, new + 1
        hashes = event.hashes[new:]
        if any(hash in self._block_of for hash in hashes) or len(set(hashes)) != len(hashes):
            raise Inconsistent("a text is stored in two places")
        if len(hashes) > len(self._unused):
            self.left_out[NO_ROOM] += 1
        elif hashes:
            self._store(parent, hashes, event.ids[new * self.size :])

    def _store(self, parent: Hash | None, hashes: list[Hash], ids: list[int]) -> None:
        """Append new blocks below the block with the hash `parent`."""
        blocks = [self._unused.pop() for _ in hashes]
        node = 0
        if parent is not None:
            block = self._block_of[parent]
            view = self.state.nodes[self.state.node_of[block]]
            node = self._node_at_block(view.id, _place(view, block, 0) + 1)
        view = self.state.nodes[node]
        self._block_of.update(zip(hashes, blocks, strict=True))
        if node and not view.children:
            self.write("store", node, view.parent, ids, blocks)
            self._hashes[node] += hashes  # type: ignore[arg-type]
        else:
            leaf, self._next_node = self._next_node, self._next_node + 1
            self.write("store", leaf, node, ids, blocks)
            self._hashes[leaf] = list(hashes)  # type: ignore[arg-type]
            self._first[hashes[0]] = leaf  # type: ignore[index]
        self.groups.appeared(hashes)

    def _node_at_block(self, node: int, n: int) -> int:
        """Returns the node that ends with block `n` of `node`; splits the node if necessary."""
        view = self.state.nodes[node]
        return node if n == len(view.blocks) else self._split(view, n)

    def _take_removed(self, hashes: Iterable[Hash]) -> None:
        run: tuple[int, int] = (0, 0)  # a leaf and the number of blocks at its end to evict
        for hash in hashes:
            self.removed += 1
            if self._copies[hash] > 0:
                self._copies[hash] -= 1
                continue
            block = self._block_of.get(hash)
            if block is None:  # stored before minitui was there, or below a text that was removed
                continue
            node = self.state.node_of[block]
            view = self.state.nodes[node]
            keep = _place(view, block, run[1] if node == run[0] else 0)
            if node == run[0] and keep == len(view.blocks) - run[1] - 1:
                run = (node, run[1] + 1)
                continue
            if node == run[0] and keep >= len(view.blocks) - run[1]:
                continue  # it is a part of the run
            self._evict(*run, REMOVED)
            if node == run[0]:
                if not self.state.node_of[block]:
                    continue
                keep = view.blocks.index(block)
            run = (0, 0)
            if view.children or keep != len(view.blocks) - 1:
                self._evict_below(view, keep, REMOVED)  # the texts below have lost their beginning
            else:
                run = (node, 1)
        self._evict(*run, REMOVED)

    def _evict(self, node: int, n: int, reason: str) -> None:
        if not n:
            return
        view = self.state.nodes[node]
        gone = self._hashes[node][len(view.blocks) - n :]
        for hash in gone:
            self._unused.append(self._block_of.pop(hash))
            del self._copies[hash]
        super()._evict(node, n, reason)
        for hash in gone:
            self.groups.vanished(hash)


def _place(view: NodeView, block: int, n: int) -> int:
    """Returns the index of a block of a node. Most often, `n` blocks follow it; a search takes long in long nodes."""
    last = len(view.blocks) - 1 - n
    return last if last >= 0 and view.blocks[last] == block else view.blocks.index(block)


def _joined(events: Iterable[Event]) -> Iterator[Event]:
    """Yields events; those that continue the text of the event before are a part of it: SGLang sends each block."""
    last: Event | None = None
    for event in events:
        if last is not None and last.hashes and event.parent == last.hashes[-1] and event.size == last.size:
            last.hashes += event.hashes
            last.ids += event.ids
            continue
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last
