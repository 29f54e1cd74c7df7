"""The radix tree for display: its rows, the texts of the nodes and the eviction order.

The rows of nodes that saved the most prompt tokens come first.

Rows that change places are hard to read, so the rows are ordered at most once in REORDER_SECONDS. The figures of the
visible rows and the eviction order are always current.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.trace.state import State
from engine.trace.views import CACHED, NodeView
from minitui.text import ranges
from minitui.viewmodel.state.annotated_state import AnnotatedState
from minitui.viewmodel.state.eviction import EvictionOrder

REORDER_SECONDS = 2.0
NAMED_BLOCKS = 3  # ranges of block numbers in the name of a node without a text
NEXT = 4  # the number of nodes evicted next that are always shown
CONTEXT_TOKENS = 16  # the number of the parent's last tokens that are decoded together with a node
DOTS = "…"
ROLE_TOKENS = 24  # the marker of a role, its name and the beginning of its text
HEAD_TOKENS = 96  # the number of a node's first tokens that are decoded for its row
SIBLINGS_COMPARED = 256
TEXTS_KEPT = 4096

# How chat templates mark roles: ChatML, Llama 3, Gemma, [INST].
ROLES = re.compile(
    r"<\|im_start\|>\s*(\w+)|<\|start_header_id\|>\s*(\w+)<\|end_header_id\|>|<start_of_turn>\s*(\w+)|\[(INST)\]"
)
_BEGIN = re.compile(r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]")  # one token
_MARKUP = re.compile(r"<\|im_start\|>\s*\w*|<\|im_end\|>|<\|[a-z_]+\|>|</?s>|\[/?INST\]")
_SHORT = {"system": "sys", "user": "usr", "assistant": "ast", "model": "ast", "INST": "usr", "tool": "tool"}
_PART = re.compile(r"<\|?[a-z_|]*$")  # an incomplete marker at the end

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class TreeRow:
    """One row of the tree panel."""

    node: int
    depth: int
    role: str  # sys | usr | ast | tool | ""
    text: str  # begins where the node diverges from its siblings; of a node without a text, its name and the reason
    name: str  # of a node without a text: "node 14 · blocks 33–48"; else empty
    tokens: int
    users: int
    saved: int
    rank: int  # 1: evicted first; 0: held by a request
    pending: bool
    has_children: bool
    folded: bool


@dataclass(slots=True)
class TreePicture:
    """The rows to show, and figures of the whole tree."""

    nodes: int = 0
    tokens: int = 0
    evictable_tokens: int = 0
    hidden_nodes: int = 0
    rows: list[TreeRow] = field(default_factory=list)


class Tree:
    """The display order, eviction ranks and texts of the nodes, kept between frames."""

    def __init__(self) -> None:
        self.folded: set[int] = set()
        self._order: dict[int, tuple[int, int, int]] = {}  # node -> (saved, users, tokens) at the last ordering
        self._children_of: dict[int, list[int]] = {}  # node -> its children, in display order
        self._eviction: EvictionOrder | None = None
        self._eviction_at: tuple[AnnotatedState, int] | None = None  # the state and record number of `_eviction`
        self._ordered_at = -1e9
        self._ordered_for: AnnotatedState | None = None
        self._texts: dict[tuple[int, int, int, int], tuple[str, str]] = {}
        self._without_text: dict[tuple[int, int], bool] = {}
        self._end_roles: dict[tuple[int, int], str] = {}
        self._token_roles: dict[int, bool] = {}  # token id -> whether its text begins a role
        self._roles: dict[tuple[int, int], tuple[int, list[tuple[int, str, str]]]] = {}  # (tokens searched, roles)

    def eviction(self, shown: AnnotatedState) -> EvictionOrder:
        """Returns the order of eviction in the state `shown`."""
        moment = (shown, shown.state.seq)
        if self._eviction is None or moment != self._eviction_at:
            self._eviction, self._eviction_at = EvictionOrder(shown.state), moment
        return self._eviction

    def refresh(self, shown: AnnotatedState, now: float, force: bool = False) -> bool:
        """Order the nodes again if REORDER_SECONDS have passed; returns True then. Call once per frame before
        `picture`."""
        if not force and shown is self._ordered_for and now - self._ordered_at < REORDER_SECONDS:
            return False
        self._ordered_at, self._ordered_for = now, shown
        nodes = shown.state.nodes
        ids, at = np.unique(shown.node_of, return_inverse=True)
        saved = dict(zip(ids.tolist(), np.bincount(at, shown.saved).astype(np.int64).tolist(), strict=True))
        self._order = {n.id: (saved.get(n.id, 0), n.users, len(n.ids)) for n in nodes.values() if n.id}
        self._children_of = {n.id: sorted(n.children, key=self._key) for n in nodes.values() if n.children}
        return True

    def picture(
        self, shown: AnnotatedState, decode: Decode, limit: int, pinned: set[int] | None = None, search: str = "",
        everything: bool = False,
    ) -> TreePicture:
        """Returns at most `limit` rows in tree order: the `pinned` nodes and the nodes that saved most, with their
        ancestors. With `search`: all nodes whose text contains `search`, with their ancestors. With `everything`: all
        nodes."""
        state = shown.state
        size = state.block_size
        in_tree = int(np.count_nonzero(shown.node_of))
        picture = TreePicture(len(state.nodes) - 1, in_tree * size, state.counts[CACHED] * size)
        chosen = self._choose(shown, decode, limit, pinned or set(), search, everything)
        picture.hidden_nodes = picture.nodes - len(chosen)
        stack = [(id, 0) for id in reversed(self._children(state, 0, chosen))]
        while stack:
            id, depth = stack.pop()
            picture.rows.append(self._row(shown, state.nodes[id], depth, decode))
            if id not in self.folded:
                stack += [(child, depth + 1) for child in reversed(self._children(state, id, chosen))]
        return picture

    def evicted_next(self, shown: AnnotatedState, decode: Decode) -> list[TreeRow]:
        """Returns rows, all of depth 0, for the NEXT nodes that are evicted first. Their last blocks, which are evicted
        first, are named first."""
        return [self._row(shown, node, 0, decode, node.blocks[::-1]) for node in self.eviction(shown).nodes[:NEXT]]

    def _row(
        self, shown: AnnotatedState, node: NodeView, depth: int, decode: Decode, blocks: list[int] | None = None
    ) -> TreeRow:
        state = shown.state
        role, text = self.text(state, node, decode)
        name = ""
        if self._hidden(node, decode):
            numbers = ranges(blocks or node.blocks, NAMED_BLOCKS)
            name = f"node {node.id} · block{'s' * (len(node.blocks) > 1)} {numbers}"
        return TreeRow(
            node=node.id, depth=depth, role=role, text=f"{name} · {text}" if name else text, name=name,
            tokens=len(node.ids), users=node.users, saved=shown.saved_by(node), rank=self.eviction(shown).rank(node),
            pending=bool(state.pending) and any(block in state.pending for block in node.blocks[-64:]),
            has_children=bool(node.children), folded=node.id in self.folded,
        )

    def _key(self, id: int) -> tuple[int, int, int, int]:
        saved, users, tokens = self._order.get(id, (0, 0, 0))
        return -saved, -users, -tokens, id

    def _children(self, state: State, parent: int, chosen: set[int]) -> list[int]:
        return sorted((child for child in state.nodes[parent].children if child in chosen), key=self._key)

    def _choose(
        self, shown: AnnotatedState, decode: Decode, limit: int, pinned: set[int], search: str, everything: bool
    ) -> set[int]:
        state = shown.state
        chosen: set[int] = set()
        if search:
            wanted = search.lower()
            for node in state.nodes.values():
                if node.id and wanted in self.text(state, node, decode)[1].lower():
                    chosen.update(n.id for n in state.path(node.id))
            return chosen
        if everything:
            return {id for id in state.nodes if id}
        for id in sorted(pinned):
            if id in state.nodes and len(chosen) < limit:
                chosen.update(n.id for n in state.path(id))
        # Best nodes first. The children of each node are sorted, so the heap needs only the next child of each node.
        heap: list[tuple[tuple[int, int, int, int], int, Iterator[int]]] = []

        def offer(siblings: Iterator[int]) -> None:
            for id in siblings:
                heapq.heappush(heap, (self._key(id), id, siblings))
                break

        offer(self._ordered(state, 0))
        while heap and len(chosen) < limit:
            _, id, siblings = heapq.heappop(heap)
            offer(siblings)
            chosen.add(id)
            if id not in self.folded and state.nodes[id].children:
                offer(self._ordered(state, id))
        return chosen

    def _ordered(self, state: State, parent: int) -> Iterator[int]:
        """Yields the children of a node in the order of the last ordering; children added later come last."""
        known, nodes = self._children_of.get(parent, []), state.nodes
        yield from (id for id in known if id in nodes and nodes[id].parent == parent)
        seen = set(known)
        yield from (id for id in nodes[parent].children if id not in seen)

    # ---- texts

    def _hidden(self, node: NodeView, decode: Decode) -> bool:
        """True if the node's text is not known."""
        key = (node.id, min(len(node.ids), HEAD_TOKENS))
        if key not in self._without_text:
            if len(self._without_text) > TEXTS_KEPT:
                self._without_text.clear()
            self._without_text[key] = is_hidden(node.ids[:HEAD_TOKENS], decode)
        return self._without_text[key]

    def text(self, state: State, node: NodeView, decode: Decode) -> tuple[str, str]:
        """Returns (role, text) of a node. The text begins at the first token that differs from all siblings."""
        siblings = state.nodes[node.parent].children
        key = (node.id, min(len(node.ids), HEAD_TOKENS), node.parent, len(siblings))
        found = self._texts.get(key)
        if found is None:
            if len(self._texts) > TEXTS_KEPT:
                self._texts.clear()
                self._end_roles.clear()
            found = self._texts[key] = self._make_text(state, node, siblings, decode)
        return found

    def _make_text(self, state: State, node: NodeView, siblings: list[int], decode: Decode) -> tuple[str, str]:
        common, first = 0, node.ids[:1]  # `first`: one token more than is known to be common to a sibling
        for id in siblings[:SIBLINGS_COMPARED]:
            ids = state.nodes[id].ids
            if id != node.id and ids[: common + 1] == first:
                common = _common(node.ids, ids, state.block_size)
                first = node.ids[: common + 1]
        # A role marker may begin in the parent's last tokens.
        context = list(state.nodes[node.parent].ids[-CONTEXT_TOKENS:]) if node.parent > 0 else []
        head = decode(context + list(node.ids[:HEAD_TOKENS]))
        before = decode(context + list(node.ids[:common]))
        if not head.startswith(before):
            before = decode(context)  # the texts diverge inside a character: show the text from the beginning
        if before == head:
            before = ""  # the server hides texts, so all token ids are the mask id: show the mask
        partial = _PART.search(before)  # if the siblings diverge inside a marker, show all of the marker
        start = len(before) - len(partial.group()) if partial else len(before)
        role = self._end_role(state, node.parent, decode)
        begin = start
        for marker in ROLES.finditer(head):
            if marker.start() > start and without_markup(head[start : marker.start()]):
                break
            role = _role(marker)
            begin = max(start, marker.end())
        text = without_markup(head[begin:])
        return role, (DOTS + text if begin == start and start > 0 and text else text)

    def roles(self, node: NodeView, begin: int, decode: Decode) -> Sequence[tuple[int, str, str]]:
        """Returns (position in the node, role, beginning of its text) for each role that begins in a node. `begin`: the
        position of the node's first token. Templates in which no single token begins a role have no roles here."""
        key = (node.id, begin)
        searched, found = self._roles.get(key, (0, []))
        if searched > len(node.ids):
            searched, found = 0, []
        if searched < len(node.ids):
            if len(self._roles) > TEXTS_KEPT:
                self._roles.clear()
            starts = self._token_roles
            while found and found[-1][0] + ROLE_TOKENS > searched:  # its text was not complete
                searched = found.pop()[0]
            for at in range(searched, len(node.ids)):
                id = node.ids[at]
                if id not in starts:
                    starts[id] = _BEGIN.fullmatch(decode((id,)).strip()) is not None
                text = decode(node.ids[at : at + ROLE_TOKENS]) if starts[id] else ""
                if marker := ROLES.match(text):
                    found.append((at, _role(marker), without_markup(ROLES.split(text[marker.end() :])[0])))
            self._roles[key] = len(node.ids), found
        return found

    def _end_role(self, state: State, id: int, decode: Decode) -> str:
        """Returns the role at the end of this node: the role in the last marker of the node or of its ancestors."""
        unmarked: list[tuple[int, int]] = []  # not recursive: the tree may be deeper than Python's recursion limit
        role = ""
        for node in state.path(id):
            key = (node.id, len(node.ids))
            known = self._end_roles.get(key)
            if known is not None:
                role = known
                break
            unmarked.append(key)
            markers = list(ROLES.finditer(decode(node.ids)))
            if markers:
                role = _role(markers[-1])
                break
        self._end_roles.update(dict.fromkeys(unmarked, role))
        return role


def without_markup(text: str) -> str:
    """Returns the text on one line, without the markers of a chat template."""
    return " ".join(_MARKUP.sub(" ", text).split())


def is_hidden(ids: Sequence[int], decode: Decode) -> bool:
    """True if several tokens have the text of one token: a recording or a server does not show its texts."""
    return len(ids) > 1 and (len(set(ids)) == 1 or decode(ids[:1]) == decode(ids))


def quoted(text: str, most: int) -> str:
    """Returns `text` in at most `most` characters; a text that was cut ends with "…"."""
    return text if len(text) <= most else text[: most - 1].rstrip() + DOTS


def _role(marker: re.Match[str]) -> str:
    name = next(group for group in marker.groups() if group)
    return next((short for full, short in _SHORT.items() if full.startswith(name)), name[:4])


def _common(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    pairs = zip(a[:limit], b[:limit], strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b), limit))
