"""What a typed text names: "400" a step, "r12" a request, "b17" a block, "n5" a node of the tree, else a chat."""

from __future__ import annotations

import re

from engine.errors import InvalidRequest
from minitui.viewmodel.selection import Selection
from minitui.viewmodel.view import View

NUMBERED = re.compile(r"(?:(s|step|r|request|b|block|n|node) *)?(\d[\d,]{0,14})", re.IGNORECASE)
KINDS = {"s": "step", "r": "request", "b": "block", "n": "node"}
EXAMPLES = "400 or step 400, r12, block 17, node 5, or the name of a chat"
NAMES_LISTED = 4  # chats in the error about an ambiguous name


def find(view: View, text: str, steps: tuple[int, int]) -> Selection:
    """Returns what the text names. `steps`: the first and the last step that can be shown. Raises InvalidRequest, with
    what there is, if the text names nothing."""
    words = text.strip()
    numbered = NUMBERED.fullmatch(words)
    if numbered is None:
        return _of_chat(view, words)
    kind, number = KINDS[(numbered[1] or "s")[0].lower()], int(numbered[2].replace(",", ""))
    missing = _missing(view, kind, number, steps)
    if missing:
        raise InvalidRequest(f"there is no {kind} {number:,}: {missing}")
    return Selection(kind, number)


def _missing(view: View, kind: str, number: int, steps: tuple[int, int]) -> str:
    """Returns which numbers there are instead; empty if the thing exists in the picture."""
    state = view.moment.shown.state
    if kind == "step":
        first, last = steps
        if first <= number <= last:
            return ""
        return f"steps {first:,} to {last:,} can be shown" if last >= first else "no step has been computed yet"
    if kind == "request":
        lanes = view.history.lanes.lanes
        if number in lanes and view.moment.begun(lanes[number]):
            return ""
        begun = [lane.id for lane in lanes.values() if view.moment.begun(lane)]
        return f"r{min(begun)} to r{max(begun)} are kept" if begun else "no request is known at this moment"
    if kind == "block":
        return "" if 0 < number < state.num_blocks else f"the pool has blocks 1 to {state.num_blocks - 1:,}"
    if number in state.nodes:
        return ""
    newest = max(state.nodes, default=0)
    return f"the tree of this moment has {len(state.nodes):,} nodes, the newest is node {newest:,}"


def _of_chat(view: View, name: str) -> Selection:
    """Returns the newest request of the chat with this name, or the only one whose name contains it."""
    newest: dict[str, int] = {}
    for lane in view.history.lanes.lanes.values():
        if view.moment.begun(lane):
            newest[lane.request.group] = max(lane.id, newest.get(lane.request.group, lane.id))
    named = {group: view.texts.group_name(group) for group in newest}
    wanted = name.lower()
    fits = [group for group, known in named.items() if known.lower() == wanted] or [
        group for group, known in named.items() if wanted and wanted in known.lower()
    ]
    if len(fits) == 1:
        return Selection("request", newest[fits[0]])
    if not fits:
        raise InvalidRequest(f"there is no {name[:40]!r}: type {EXAMPLES}")
    listed = ", ".join(f"{named[group]} (r{newest[group]})" for group in fits[:NAMES_LISTED])
    more = f" and {len(fits) - NAMES_LISTED} more" if len(fits) > NAMES_LISTED else ""
    raise InvalidRequest(f"{name[:40]!r} names {len(fits)} chats: {listed}{more}; type the number of the request")
