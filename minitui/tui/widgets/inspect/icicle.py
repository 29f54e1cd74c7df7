"""The radix tree as an icicle: a bar for each node, at its positions in the text, and a row for each branch.

A column is some tokens, the first one at the left. A node is as high as it has branches, so its area shows how much
memory its users save. Its fill says how many requests use it; the marks inside say where the text of the system prompt,
the user and the model begins. Behind the last node of a request are its own tokens, which are not in the tree yet. The
nodes that have just been evicted are hatched. In a model with several kinds of memory, signs in the bars say where a
recurrent state is kept, and up to where the pages of a window are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from minitui.text import count
from minitui.tui.glyphs import glyphs
from minitui.tui.theme import LIT, owner_style
from minitui.tui.widgets.base import selected
from minitui.tui.widgets.rows import Row, Run, Runs, cells, clean, cut, fit, fitting, whole_words
from minitui.viewmodel.state.side_groups import kept_ends
from minitui.viewmodel.state.tree import TreeRow
from minitui.viewmodel.view import View

NAMES = 14  # columns for the names of requests at the right of the longest branch
RANK = 9  # columns for the order of eviction
LEAST = 3  # columns: a narrower bar has no text
WORDS = 8  # columns: a shorter piece of a bar has no words
MOVE_S = 0.3  # the branches of a node that was split, and an evicted text, move for this time
MOVE = 4  # columns
AXIS = 12  # columns between two marks of the axis

Marks = Callable[[int, int], Sequence[tuple[int, str, str]]]


@dataclass(slots=True)
class Bar:
    """A node, or the own tokens of a request, or an evicted text. Positions are in tokens."""

    kind: str  # node | request | evicted
    id: int
    begin: int
    end: int
    style: str
    text: str
    first: int = 0  # the first row
    rows: int = 1
    name: str = ""  # behind the bar; of an evicted text: how it began
    ink: str = "ink"  # the style of the name: the colour of the chat
    rank: str = ""  # at the right edge
    kept: Sequence[tuple[int, str]] = ()  # what the side groups hold of the node (kept_ends)
    moved: int = 0  # columns to the right of its place


@dataclass(slots=True)
class Icicle:
    """The rows, and the bars in them."""

    rows: list[Runs] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    per_column: float = 1.0  # tokens
    spare: int = 0  # rows without a branch; negative: branches without a row
    apart: int = 1  # lines from a row of bars to the next
    moving: bool = False  # bars will be at other places in the next frame

    @property
    def nodes(self) -> int:
        """The number of nodes with a bar in the picture."""
        return sum(bar.kind == "node" and bar.first * self.apart + 1 < len(self.rows) for bar in self.bars)

    def at(self, column: int, row: int) -> Bar | None:
        """Returns the bar at a cell. Row 0 is the axis."""
        token, y = (column + 0.5) * self.per_column, (row - 1) // self.apart
        inside = (b for b in self.bars if b.first <= y < b.first + b.rows and b.begin <= token < b.end)
        return next(inside, None)


def icicle(
    view: View, nodes: Sequence[TreeRow], marks: Marks, width: int, height: int, split: int = 0, age: float = 1.0,
) -> Icicle:
    """Returns the picture of these nodes, which are in tree order: at most `height` rows, the first one the axis.
    `split`: the node that was split `age` seconds ago: its branches still move to their places.
    `marks`: of a node that begins at a token: (position in it, role, text) for each role that begins inside."""
    state = view.moment.shown.state
    found, placed = Icicle(), _Rows()
    bars = found.bars = placed.bars
    at_node: dict[int, list[int]] = {}  # node -> the requests whose last node it is
    for request in state.requests.values():
        at_node.setdefault(request.node, []).append(request.id)
    ends: dict[int, int] = {0: 0}
    moved = {split: round(MOVE * max(0.0, 1 - age / MOVE_S))} if split else {}
    found.moving = any(moved.values())

    def own_tokens(node: int) -> None:
        for id in at_node.get(node, ()):
            request = state.requests[id]
            tokens = state.computed(request)
            if node or tokens:
                begin, ink = ends[node], owner_style(view.texts.colour(request.group))
                bar = Bar("request", id, begin, max(begin, tokens), "active", "", name=view.texts.request(id), ink=ink)
                bar.moved = moved.get(node, 0)
                placed.add(bar, begin)

    for i, node in enumerate(nodes):
        begin = ends.get(state.nodes[node.node].parent, 0)
        ends[node.node] = end = begin + node.tokens
        bar = Bar("node", node.node, begin, end, _style(view, node), f"node {node.node}" if node.name else node.text)
        bar.moved = moved.get(state.nodes[node.node].parent, 0)
        moved.setdefault(node.node, bar.moved)
        if node.rank and (i + 1 == len(nodes) or nodes[i + 1].depth <= node.depth):
            bar.rank = f"evict {node.rank:,}"
        bar.kept = kept_ends(state, state.nodes[node.node]) if state.groups else ()
        placed.add(bar, begin)
        own_tokens(node.node)
    own_tokens(0)
    next_row = len(placed.reach)
    room = height - 1
    gone: dict[tuple[int, int], tuple[int, bytes]] = {}  # (node, parent) -> tokens, the first ids
    for last in (just_evicted := view.moment.just_evicted()):
        before, _ = gone.get((last.node, last.parent), (0, b""))
        gone[last.node, last.parent] = before + last.tokens, last.ids
    evicted = list(gone.items())[-max(1, room // 3) :]
    if evicted:
        keeps = min(next_row, room - len(evicted))
        bars[:] = [bar for bar in bars if bar.first < keeps]
        for bar in bars:
            bar.rows = min(bar.rows, keeps - bar.first)
        for row, ((last_of, parent), (tokens, ids)) in enumerate(evicted, keeps):
            begin = ends.get(last_of, ends.get(parent, 0))
            words = f"{glyphs().times} {count(tokens, 'token')} just evicted"
            away = 0.0 if view.moment.still or len(just_evicted) > 1 else view.moment.age(just_evicted[0].t) / MOVE_S
            found.moving |= 0 < away < 1
            moved_by = round(MOVE * min(1.0, away))
            bar = Bar("evicted", last_of, begin, begin + tokens, "bad", words, row, moved=moved_by)
            bar.name = view.texts.evicted(ids)
            bars.append(bar)
        next_row += len(evicted)
    found.spare = room - next_row
    most = max((bar.end for bar in bars if bar.first < room), default=1)
    round_to = max(16, 1 << most.bit_length() >> 4)  # the scale does not change with each token
    most = -(-most // round_to) * round_to
    columns = max(8, width - NAMES - (RANK if any(bar.rank for bar in bars) else 0))
    found.per_column = most / columns
    found.rows = [_axis(found.per_column, columns, width)]
    found.apart = 2 if 2 * next_row - 1 <= room else 1
    for y in range(min(next_row, room)):
        in_row = [bar for bar in bars if bar.first <= y < bar.first + bar.rows]
        found.rows.append(_row(in_row, y, found.per_column, marks, width, close=found.apart == 1))
        if found.apart == 2 and y + 1 < next_row:  # a gap, which does not divide the bars of both rows
            both = [bar for bar in in_row if y + 1 < bar.first + bar.rows]
            found.rows.append(_row(both, y + 1, found.per_column, marks, width))
    return found


class _Rows:
    """Places bars in tree order: a bar continues the last row if nothing is behind its parent there yet."""

    def __init__(self) -> None:
        self.bars: list[Bar] = []
        self.reach: list[int] = []  # of each row: where its last bar ends
        self._path: list[Bar] = []

    def add(self, bar: Bar, begin: int) -> None:
        """Place a bar that begins where its parent ends; the bars of its path are as high as their branches."""
        if not self.reach or self.reach[-1] > begin:
            self.reach.append(0)
        bar.first = len(self.reach) - 1
        self.reach[-1] = max(bar.end, begin + 1)
        self.bars.append(bar)
        while self._path and self._path[-1].end > begin:
            self._path.pop()
        for above in self._path:
            above.rows = bar.first - above.first + 1
        if bar.kind == "node":
            self._path.append(bar)


def _style(view: View, node: TreeRow) -> str:
    """Returns the style of a node's bar: its fill says who uses it; what has changed or is selected is brighter."""
    shown = view.moment.shown
    fill = "shared" if node.users > 1 else "active" if node.users else "cached"
    if any(block in view.lit for block in shown.state.nodes[node.node].blocks[:1]):
        return f"bold on-fill on {LIT}"
    if node.node == selected(view, "node"):
        return f"bold underline on-fill on {fill}-lit"
    if node.node in view.links.nodes:
        return f"underline on-fill on {fill}-lit"
    glow = view.moment.glow_of(shown.node_changed.get(node.node, -1e9))
    return f"on-fill on {fill}{('', '-warm', '-glow')[glow]}"


def _axis(per_column: float, columns: int, width: int) -> Runs:
    """Returns the positions of the columns, in tokens, at round numbers."""
    least = per_column * AXIS
    step = next(n * 10**e for e in range(9) for n in (1, 2, 5) if n * 10**e >= least)
    row, token = Row(), 0
    while (at := round(token / per_column)) < columns - len(f"{token:,}"):
        row.to(at).add(f"{token:,}" + (" tokens" if not token and columns > 40 else ""), "dim")
        token += step
    return row.done(width)


def _row(bars: Sequence[Bar], y: int, per_column: float, marks: Marks, width: int, close: bool = False) -> Runs:
    """Returns row `y` of the bars. `close`: there is no gap between rows, so a line ends each bar."""
    g = glyphs()
    row = Row()
    name = rank = ink = ""
    for bar in sorted(bars, key=lambda bar: bar.begin):
        at = max(row.width, round(bar.begin / per_column) + bar.moved)
        room = max(bar.end > bar.begin, round(bar.end / per_column) + bar.moved - at)
        row.to(at)
        rank = bar.rank if bar.first == y else rank
        style = bar.style
        if close and y == bar.first + bar.rows - 1 and not style.startswith("bold"):
            style = f"underline {style.removeprefix('underline ')}"  # a line to the bar below
        if bar.kind == "evicted":
            left = width - at - 1
            text = fitting(left - 1, bar.text, bar.text.removesuffix(" just evicted"), glyphs().times)
            room = max(1, min(room, left - len(text)))
            quote = f" {whole_words(clean(bar.name), room - 4)} " if bar.name and room >= WORDS else ""
            row.add(g.unused * min(2, room), "bad").add(quote, "bold bad")
            row.add(g.unused * (at + room - row.width), "bad").add(f" {text}", "bold bad")
            continue
        if bar.kind == "request":
            row.add(g.filling * room, "active")
            name, ink = bar.name, bar.ink
            continue
        if bar.first != y or room < LEAST:
            row.add(" " * room, style)
            continue
        own, signs = Row("▏" if bar.begin else " ", style), _signs(bar, per_column)
        _text(own, bar, style, room - 1, per_column, marks(bar.id, bar.begin), sorted(signs))
        row.extend(_marked(own.runs, bar, signs) if signs else own.runs)
    if name:
        row.add(" " + name, f"bold {ink}")
    if rank:
        row.to(width - RANK + 1).add(cut(rank, RANK - 1), "hit")
    return row.done(width)


def _text(
    row: Row, bar: Bar, style: str, room: int, per_column: float, marks: Sequence[tuple[int, str, str]],
    signs: Sequence[int],
) -> None:
    """Add the text of a node in `room` cells, with the roles where they begin. Words end before the next of `signs`,
    the columns that signs replace."""
    begin = row.width
    pieces = [(round(at / per_column), role, text) for at, role, text in marks]
    if not pieces or pieces[0][0] > 0:
        pieces.insert(0, (0, "", bar.text))
    for i, (_, role, text) in enumerate(pieces):
        end = min(room, pieces[i + 1][0] if i + 1 < len(pieces) else room)
        piece = end - (row.width - begin)
        free = min([piece, *(column - row.width for column in signs if column >= row.width)])
        label = f"{'▏' if i else ''}{role} " if role else ""
        if free < len(label):
            label = ""
        row.add(label, _strong(style))
        piece, free = piece - len(label), free - len(label)
        if piece > 0:
            words = whole_words(clean(bar.text if i == 0 else text), free) if free >= WORDS else ""
            if not words and bar.id and bar.text == f"node {bar.id}":
                words = fitting(piece, bar.text, str(bar.id), "")
            row.add(fit(words, piece, glyphs().dots), style)
    if row.width < begin + room:
        row.add(" " * (begin + room - row.width), style)


def _signs(bar: Bar, per_column: float) -> dict[int, str]:
    """Returns a sign for each checkpoint and window of a bar, by the column of its last token."""
    g, signs = glyphs(), dict[int, str]()
    for end, kind in bar.kept:
        column = max(0, round((bar.begin + end) / per_column) - round(bar.begin / per_column) - 1)
        signs[column] = g.checkpoint if kind == "state" else signs.get(column, g.window)
    return signs


def _marked(runs: Sequence[Run], bar: Bar, signs: Mapping[int, str]) -> list[Run]:
    """Returns the cells of a bar with the signs in place of what they cover."""
    found, column = Row(), 0
    for text, style in runs:
        for cell in text if text.isascii() or cells(text) == len(text) else [text]:
            sign = signs.get(column) if cells(cell) == 1 else None
            found.add(sign or cell, _strong(bar.style) if sign else style)
            column += cells(cell)
    return found.runs


def _strong(style: str) -> str:
    return style if style.startswith("bold") else f"bold {style}"
