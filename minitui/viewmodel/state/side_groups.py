"""The groups of a model with several kinds of memory (engine/trace/side_pool.py), as the panels show them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine.trace.side_pool import OWN, SideGroup, SidePool
from engine.trace.state import State
from engine.trace.views import NodeView, RequestView
from minitui.text import count, listed, ranges

FULL = "full"  # the name of group 0
NAMED = 4  # ends of checkpoints that a text names


class Strip(NamedTuple):
    """The pool of a group. `counts`: its pages that are (free, active, shared, cached)."""

    name: str
    unit: str
    counts: tuple[int, int, int, int]

    @property
    def total(self) -> int:
        return sum(self.counts)


def unit(group: SideGroup) -> str:
    """Returns what the pool consists of: "page" or "slot"."""
    return "slot" if group.kind == "state" else "page"


def strips(state: State) -> list[Strip]:
    """Returns the pools of all groups, that of full attention first; empty for a model with one kind of memory."""
    if not state.groups:
        return []
    free, active, shared, cached = state.counts
    sides = [Strip(pool.group.name, unit(pool.group), pool.counts) for pool in state.groups]
    return [Strip(FULL, "block", (free, active, shared, cached)), *sides]


def tokens_before(state: State, node: NodeView) -> int:
    """Returns the number of tokens of a node's ancestors."""
    return sum(len(view.ids) for view in state.path(node.parent))


def kept_places(pool: SidePool, node: NodeView) -> list[int]:
    """Returns the places in the node, from 0, of the blocks for which the tree keeps a page or checkpoint."""
    return [place for place, block in enumerate(node.blocks) if block in pool.kept]


def kept_ends(state: State, node: NodeView) -> list[tuple[int, str]]:
    """Returns what the side groups hold of a node: (tokens of the node up to there, "window" or "state") for each
    checkpoint, and for the last of successive pages. Ascending."""
    ends = []
    for pool in state.groups:
        places = set(kept_places(pool, node))
        every = pool.group.kind == "state"
        ends += [((i + 1) * state.block_size, pool.group.kind) for i in places if every or i + 1 not in places]
    return sorted(ends)


def kept_words(state: State, pool: SidePool, node: NodeView) -> str:
    """Returns what the tree keeps for a node: "pages for 3 of 8 blocks (tokens 64 to 111)", "2 checkpoints, after 64
    and 128 tokens", "nothing"."""
    places, size, before = kept_places(pool, node), state.block_size, tokens_before(state, node)
    if not places:
        return "nothing: a prompt that ends its hit here goes back to an earlier node"
    if pool.group.kind == "state":
        ends = [f"{before + (place + 1) * size:,}" for place in places]
        shown = ends if len(ends) <= NAMED else [*ends[: NAMED - 1], f"{len(ends) - NAMED + 1} more"]
        return f"{count(len(places), 'checkpoint')}, after {listed(shown)} tokens"
    spans = f"tokens {before + places[0] * size:,} to {before + (places[-1] + 1) * size - 1:,}"
    gaps = "between " if places[-1] - places[0] + 1 > len(places) else ""
    return f"pages for {len(places):,} of {count(len(node.blocks), 'block')} ({gaps}{spans})"


def place_words(group: SideGroup, place: int, size: int) -> str:
    """Returns what a request has at a place: "tokens 32 to 47" of a page, "the state after token 48" of a slot.
    `size`: tokens of a block."""
    if group.kind == "window":
        return f"tokens {place * size:,} to {(place + 1) * size - 1:,}"
    if place == OWN:
        return "its newest state"
    return f"the state after {(place + 1) * size:,} tokens" if place >= 0 else f"the state after draft {OWN - place}"


def held_words(pool: SidePool, pages: dict[int, int], size: int) -> str:
    """Returns the pages or slots of a request: "pages 4–6 (tokens 32 to 79)", "slot 3: its newest state"."""
    group = pool.group
    if not pages:
        return f"no {unit(group)}"
    if group.kind == "state":
        return "; ".join(f"slot {page:,}: {place_words(group, place, size)}" for place, page in sorted(pages.items()))
    places = sorted(pages)
    numbers = ranges([pages[place] for place in places])
    span = f"tokens {places[0] * size:,} to {(places[-1] + 1) * size - 1:,}"
    return f"{'page' if len(pages) == 1 else 'pages'} {numbers} ({span})"


def of_block(state: State, block: int) -> Iterator[tuple[SidePool, int, list[tuple[RequestView, int]]]]:
    """Yields (pool, page, its holders) for each group that keeps a page or checkpoint for a block of the tree. A holder
    is a request and the place at which it has the page."""
    for index, pool in enumerate(state.groups):
        page = pool.kept.get(block)
        if page is not None:
            held = [
                (request, place) for request in state.requests.values()
                for place, own in request.side[index].items() if own == page
            ]
            yield pool, page, held


def evicted_next(state: State, pool: SidePool, most: int) -> list[tuple[int, int, int]]:
    """Returns (page, node, tokens up to the end of its block) of the pages that are evicted next, in order."""
    found = []
    for page in pool.next_idle(most):
        block = pool.block_of[page]
        node = state.nodes[state.node_of[block]]
        end = tokens_before(state, node) + (node.blocks.index(state.original_of(block)) + 1) * state.block_size
        found.append((page, node.id, end))
    return found


def eviction_words(state: State, pool: SidePool) -> str:
    """Returns the order of eviction of a group: "next: slot 4 (node 3, after 64 tokens), …; 5 slots are free"."""
    name, free = unit(pool.group), len(pool.free)
    after = f"after {count(free, f'free {name}')}: " if free else ""
    evicted = evicted_next(state, pool, NAMED)
    order = [f"{name} {page:,} (node {node}, up to token {end:,})" for page, node, end in evicted]
    more = f" and {len(pool.idle) - len(order):,} more" if len(pool.idle) > len(order) else ""
    return after + (", ".join(order) + more if order else f"no {name} can be evicted")
