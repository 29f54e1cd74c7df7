"""Tree blocks: which blocks does each node of the prefix tree have? Which match a prompt, which were evicted?"""

from __future__ import annotations

from minitui.text import count
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Run, Runs, fit, legend, whole_words, wrapped
from minitui.viewmodel.board import TreeBlocks, TreeLine
from minitui.viewmodel.view import View
from minitui.visible import visible_line

NAME = 20  # cells
CELL = 5  # cells of a block, with the space after it
STYLES = {
    "kept": "on-fill on cached", "looked": "bold on-fill on accent", "match": "bold on-fill on good",
    "new": "on-fill on active", "evicted": "faint",
}
WORDS = {"kept": "cached", "looked": "compared", "match": "equal", "new": "new", "evicted": "evicted"}


class NodeBlocks(LinePanel):
    """A row for each node: the beginning of its text, and its blocks."""

    TITLE = "Tree, block by block"
    NEEDS_STATE = True

    def picture(self, view: View, width: int, height: int) -> Picture:
        board = view.board
        if not isinstance(board, TreeBlocks):
            return Picture(wrapped("no tree yet: the experiment has not run", "dim", width))
        below = wrapped(board.line, "bold ink", width)
        rows: list[Runs] = []
        for node in board.nodes:
            rows += _node(node, width)
        room = max(0, height - len(below))
        hidden = max(0, len(rows) - room)
        if hidden:
            rows = [*rows[: max(0, room - 1)], Row(f"+ {count(hidden + 1, 'row')}", "dim").done(width)]
        key: list[Run] = legend(*((sign(state), STYLES[state], word) for state, word in WORDS.items()))
        return Picture([*rows, *below], board.title, legend=key)


def sign(state: str) -> str:
    """Returns the sign before the number of a block."""
    return {"kept": " ", "looked": "?", "match": "=", "new": "+", "evicted": glyphs().preempted}[state]


def _node(node: TreeLine, width: int) -> list[Runs]:
    """Returns the rows of a node: more than one if its blocks do not fit."""
    indent = 2 * node.depth
    lines: list[Runs] = []
    room = max(8, NAME - indent)
    row = Row(" " * indent + fit(whole_words(visible_line(node.name), room), room) + " ", "hit")
    left = row.width
    for number, state in node.blocks:
        if row.width + CELL > width and row.width > left:
            lines.append(row.done(width))
            row = Row().to(left)
        row.add(f"{sign(state)}{number}".rjust(CELL - 1), STYLES[state]).add(" ")
    return [*lines, row.done(width)]
