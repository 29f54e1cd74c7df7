"""The parts of the prefix tree (engine/core/radix.py): nodes, their keys, and the matches of sequences with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Key = tuple[int, ...]  # the token ids of one block


class SaltedKey(tuple[int, ...]):
    """The key of the first block of a request with a cache salt. It equals only keys with the same salt."""

    salt: str

    def __new__(cls, ids: Iterable[int], salt: str) -> SaltedKey:
        key = super().__new__(cls, ids)
        key.salt = salt
        return key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SaltedKey) and self.salt == other.salt and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.salt, tuple(self)))


def block_key(ids: list[int], index: int, size: int, salt: str) -> Key:
    """Returns the key of block `index` of a sequence. Only the first block has the salt: the others are below it."""
    key = tuple(ids[index * size : (index + 1) * size])
    return SaltedKey(key, salt) if salt and not index else key


def common_tokens(a: Key, b: Key) -> int:
    """Returns the number of equal tokens at the beginning of two keys of the same length; 0 if their salts differ."""
    n = 0
    if getattr(a, "salt", "") != getattr(b, "salt", ""):
        return n
    for x, y in zip(a, b, strict=True):
        if x != y:
            break
        n += 1
    return n


class Node:
    """A run of blocks. `keys[i]` are the tokens of `blocks[i]`; `hashes[i]` is the hash of the whole prefix up to and
    including these tokens. `last_used` is the sequence number of the last record that used the node."""

    __slots__ = ("blocks", "children", "hashes", "id", "keys", "last_used", "parent", "users")

    def __init__(self, id: int, parent: Node | None, keys: list[Key], blocks: list[int], users: int, clock: int):
        self.id = id
        self.parent = parent
        self.keys = keys
        self.blocks = blocks
        self.children: dict[Key, Node] = {}
        self.users = users
        self.last_used = clock
        self.hashes: list[int] = []

    @property
    def end_hash(self) -> int:
        """The hash of the whole prefix up to the end of this node."""
        return self.hashes[-1] if self.hashes else 0

    @property
    def evictable(self) -> bool:
        return self.users == 0 and not self.children and self.parent is not None

    @property
    def same_child(self) -> Node | None:
        """The only child, if this node can be merged with it: the same requests hold both. Each request that holds a
        child holds its parent too, so equal counts mean the same requests. If no request holds the two, they must have
        the same age: then the order of evictions does not change."""
        if len(self.children) != 1 or self.parent is None:
            return None
        (child,) = self.children.values()
        same = self.users == child.users and (self.users or self.last_used == child.last_used)
        return child if same else None

    def path(self) -> Iterator[Node]:
        """Yield this node and its ancestors, without the root."""
        node: Node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(slots=True)
class Match:
    """The blocks of a sequence that were found in the tree. The last node may match in part."""

    node: Node  # the last node that matched as a whole
    part: Node | None  # the child of `node` that matched only in its first `part_blocks` blocks; None: no such child
    part_blocks: int
    blocks: list[int]  # all blocks that matched, in order
    # Why the match ended: whole | differs | ends | short | empty | evicted | window | state (engine/trace/kinds.py).
    stop: str
    at: int  # index of the first token that did not match; for "evicted", the step of the eviction; for a side
    # group, the number of tokens that full attention has
    cut_by: str = ""  # the name of the side group that ended it
