"""Waste: memory of the pool that holds nothing or the same twice, and tokens that were computed more than once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.trace.state import State
from engine.trace.views import NodeView, Waste


@dataclass(frozen=True, slots=True)
class WasteFigures:
    """The waste in one state."""

    unused_slots: int = 0  # slots of the requests' blocks without a token: most are in the last block of each request
    slots: int = 0  # all slots of the requests' blocks; a shared block counts for each request
    copies: int | None = 0  # blocks with the same tokens after the same prefix as another block; None: unknown
    again: Waste | None = None  # tokens computed more than once since the engine began; None: not recorded


def waste_of(state: State) -> WasteFigures:
    """Returns the waste in this state."""
    requests = state.requests.values()
    slots = sum(len(request.table) for request in requests) * state.block_size
    used = sum(state.computed(request) for request in requests)
    again = None if state.waste is None else replace(state.waste)
    return WasteFigures(slots - used, slots, _copies(state), again)


def _copies(state: State) -> int | None:
    """Returns the number of blocks whose text another block holds too; None if this is unknown. Without a prefix cache,
    the engine numbers the texts of full blocks. With it, the tree has each text once, except for requests with
    different cache salts, whose nodes are children of the root. vLLM reports its copies."""
    reported = sum(len(copies) for copies in state.copies.values())
    if state.waste is None:
        return reported or None
    contents = [number for request in state.requests.values() for number in request.contents]
    copies = len(contents) - len(set(contents))
    size, starts = state.block_size, dict[bytes, list[NodeView]]()
    for id in state.nodes[0].children:
        node = state.nodes[id]
        starts.setdefault(node.ids[:size].tobytes(), []).append(node)
    equal = [nodes for nodes in starts.values() if len(nodes) > 1]
    if equal and _texts_are_hidden(state):
        return None
    for nodes in equal:
        texts = [text for node in nodes for text in _texts(state, node)]
        copies += len(texts) - len(set(texts))
    return copies


def copies_of(state: State, block: int) -> list[int]:
    """Returns the other blocks that are known to hold the same text: without a prefix cache, and those of vLLM."""
    if state.node_of[block]:
        original = state.original_of(block)
        return [each for each in (original, *state.copies.get(original, ())) if each != block]
    numbers = {
        held: number
        for request in state.requests.values()
        for held, number in zip(request.table, request.contents, strict=False)
    }
    return [held for held, number in numbers.items() if held != block and number == numbers.get(block)]


def _texts_are_hidden(state: State) -> bool:
    """Returns True if all token ids are equal: a server that hides texts replaces every id by the same one."""
    first = next(iter(state.nodes[state.nodes[0].children[0]].ids))
    return all(token == first for node in state.nodes.values() for token in node.ids)


def _texts(state: State, top: NodeView) -> Iterator[int]:
    """Yields the hash of the whole text up to each block at or below `top`, a child of the root."""
    size = state.block_size
    stack = [(top, 0)]
    while stack:
        node, text = stack.pop()
        for start in range(0, len(node.ids), size):
            text = hash((text, node.ids[start : start + size].tobytes()))
            yield text
        stack += [(state.nodes[child], text) for child in node.children]
