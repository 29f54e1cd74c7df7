"""The kinds of records that only other servers write: vLLM's recorder (minitui/vllm/) and its KV events. In vLLM a
block can be cached although the tree has its text already: it is a copy of the tree's block."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from engine.trace import kind
from engine.trace.state import State
from engine.trace.views import CACHED, FREE, NodeView

REMOVED = "the server removed it"  # reason of an eviction that a server's KV events report: they name no reason


class Copy(kind.Kind):
    """Like hold, but the request keeps its own blocks: its next private `blocks` have the content of the tree's blocks
    on the path to `node`, and are cached as their copies."""

    request: kind.Running
    node: kind.Node
    blocks: kind.Blocks

    @staticmethod
    def apply(state: State, request: int, node: int, blocks: list[int]) -> None:
        holder = state.requests[request]
        originals: list[int] = []
        for view in state.path(node):
            if view.id == holder.node:
                break
            view.users += 1
            view.last_used = state.seq
            originals[:0] = view.blocks
        for original, block in zip(originals, blocks, strict=True):
            state.copies.setdefault(original, []).append(block)
            state.node_of[block] = state.node_of[original]
        holder.node = node
        holder.shared_blocks += len(blocks)

    @staticmethod
    def faults(state: State, request: int, node: int, blocks: list[int]) -> Iterator[str]:
        holder = state.requests[request]
        if state.blocks_below(holder.node, node) != len(blocks):
            yield f"node {node} is not {len(blocks):,} blocks below node {holder.node}, which r{request} holds"
        start = holder.shared_blocks
        if holder.table[start : start + len(blocks)] != blocks:
            yield f"its blocks are not the next private blocks of r{request}"


class Uncopy(kind.Kind):
    """A block that is a copy or has copies is evicted. The oldest copy takes the place of the tree's own block."""

    block: kind.Positive

    @staticmethod
    def apply(state: State, block: int) -> None:
        original = state.original_of(block)
        copies = state.copies[original]
        if original == block:
            view = state.nodes[state.node_of[block]]
            view.blocks[view.blocks.index(block)] = copies[0]
            del state.copies[block]
            for pool in state.groups:
                pool.rename(block, copies[0])
            original, copies = copies[0], copies[1:]
        else:
            copies.remove(block)
        if copies:
            state.copies[original] = copies
        else:
            state.copies.pop(original, None)
        state.leave_tree([block])

    @staticmethod
    def faults(state: State, block: int) -> Iterator[str]:
        if block >= state.num_blocks or not state.node_of[block] or not state.copies.get(state.original_of(block)):
            yield f"block {block:,} is no copy and has no copies"
        if state.holders[block]:
            yield f"block {block:,} is in use"


class Swap(kind.Kind):
    """A copy takes the place of the tree's own block, which becomes the oldest copy: it turned out to be the block that
    a new request gets."""

    block: kind.Positive

    @staticmethod
    def apply(state: State, block: int) -> None:
        original = state.original_of(block)
        view, copies = state.nodes[state.node_of[block]], state.copies.pop(original)
        view.blocks[view.blocks.index(original)] = block
        copies.remove(block)
        state.copies[block] = [original, *copies]
        for pool in state.groups:
            pool.rename(original, block)

    @staticmethod
    def faults(state: State, block: int) -> Iterator[str]:
        if block >= state.num_blocks or not state.node_of[block] or state.original_of(block) == block:
            yield f"block {block:,} is no copy"


class Store(kind.Kind):
    """A server reports cached content, but not which request computed it (minitui/vllm/cached_tree.py): a new leaf, or
    the end of a leaf that exists."""

    node: kind.Count
    parent: kind.Count
    ids: kind.Counts
    blocks: kind.Blocks

    @staticmethod
    def apply(state: State, node: int, parent: int, ids: list[int], blocks: list[int]) -> None:
        view = state.nodes.get(node)
        if view is None:
            view = state.nodes[node] = NodeView(node, parent, array("i"), [], 0, state.seq)
            state.nodes[parent].children.append(node)
        view.ids.fromlist(ids)
        view.blocks += blocks
        view.last_used = state.seq
        for block in blocks:
            state.node_of[block] = node
        state.counts[FREE] -= len(blocks)
        state.counts[CACHED] += len(blocks)

    @staticmethod
    def faults(state: State, node: int, parent: int, ids: list[int], blocks: list[int]) -> Iterator[str]:
        view = state.nodes.get(node)
        if not node or (view.parent if view else parent) != parent or parent not in state.nodes or parent == node:
            yield f"node {node} cannot be below node {parent}"
        if view is not None and view.children:
            yield f"node {node} is not a leaf"
        if not blocks or len(ids) != len(blocks) * state.block_size or len(set(blocks)) != len(blocks):
            yield f"{len(ids):,} ids do not fill {len(set(blocks)):,} blocks"
        if any(block >= state.num_blocks or state.holders[block] or state.node_of[block] for block in blocks):
            yield "its blocks are not free"
