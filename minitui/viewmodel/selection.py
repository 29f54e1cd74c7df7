"""The selection, and the requests, nodes, blocks and step linked to it, which the panels highlight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minitui.viewmodel.history.steps import Steps
from minitui.viewmodel.state.annotated_state import AnnotatedState

KINDS = ("request", "group", "block", "node", "step")


@dataclass(frozen=True, slots=True)
class Selection:
    """The selection: a request, block, node or step, with its number as `id`, or a group, with its name as `id`."""

    kind: str
    id: Any


@dataclass(slots=True)
class Links:
    """The requests, nodes, blocks and step that belong to the selection."""

    requests: set[int] = field(default_factory=set)
    nodes: set[int] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    step: int | None = None


def resolve(
    selection: Selection | None, shown: AnnotatedState, steps: Steps, in_group: Callable[[str], list[int]]
) -> Links:
    """Returns the links of the selection in the state `shown`. `in_group` returns the requests of a group."""
    links = Links()
    if selection is None:
        return links
    state = shown.state
    if selection.kind == "request":
        links.requests.add(selection.id)
    elif selection.kind == "group":
        links.requests.update(in_group(selection.id))
    elif selection.kind == "step":
        links.step = selection.id
        links.requests.update(chunk[0] for chunk in (steps.chunks(selection.id) if selection.id in steps else []))
        return links
    elif selection.kind == "node" and selection.id in state.nodes:
        links.nodes.update(n.id for n in state.path(selection.id))
        links.blocks.update(state.nodes[selection.id].blocks)
        links.requests.update(request.id for request in shown.users_of(selection.id))
        return links
    elif selection.kind == "block" and 0 < selection.id < state.num_blocks:
        links.blocks.add(selection.id)
        links.requests.update(request.id for request in shown.holders_of(selection.id))
        node = state.node_of[selection.id]
        if node:
            links.nodes.update(n.id for n in state.path(node))
        return links
    for id in links.requests:
        request = state.requests.get(id)
        if request is not None:
            links.blocks.update(request.table)
            links.nodes.update(n.id for n in state.path(request.node))
    return links
