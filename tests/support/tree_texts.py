"""The texts of a tree of cached tokens, to compare trees."""

from __future__ import annotations

import hashlib

from minitui.vllm.cached_tree import CachedTree


def leaves(tree: CachedTree) -> list[tuple[int, ...]]:
    """Returns the tokens of each leaf with those before it, sorted."""
    ends = [node.id for node in tree.state.nodes.values() if node.id and not node.children]
    paths = [reversed(list(tree.state.path(end))) for end in ends]
    return sorted(tuple(token for view in path for token in view.ids) for path in paths)


def digest(tree: CachedTree) -> str:
    """Returns a short name of all leaves."""
    return hashlib.sha256(repr(leaves(tree)).encode()).hexdigest()[:16]
