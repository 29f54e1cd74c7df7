"""Pieces: into which pieces is a text cut? Tokens of a prompt and of a reply have different colours."""

from __future__ import annotations

from minitui.text import count
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture, paragraphs
from minitui.tui.widgets.rows import Row, Runs, cells, clip, legend, wrapped
from minitui.viewmodel.board import Pieces
from minitui.viewmodel.view import View
from minitui.visible import visible_line

PLAIN = ("ink on empty-chip", "ink on cached-chip")  # neighbouring pieces look different
REPLY = ("ink on active-chip", "ink on shared-chip")
NEW = "bold on-fill on accent"


class TextPieces(LinePanel):
    """Shows the pieces of a text, separated by bars, with their token ids under them if they are known."""

    TITLE = "Tokens"
    help_text = paragraphs("""\
A text in pieces. During the merges, the new pieces are bright. At the end each piece is a token; the number under it is
the token's id. A space at the beginning of a piece belongs to the piece.""")

    def picture(self, view: View, width: int, height: int) -> Picture:
        board = view.board
        if not isinstance(board, Pieces):
            return Picture(wrapped("no text yet: the experiment has not run", "dim", width))
        below = wrapped(board.line, "bold ink", width)
        rows = piece_lines(board, width)
        hidden = len(rows) - (height - len(below))
        if hidden > 0:  # the end of the text is where it changes
            rows = rows[hidden:]
        key = legend(("  ", PLAIN[1], "prompt"), ("  ", REPLY[0], "reply"), ("  ", NEW, "new"))
        note = [(f"{glyphs().dots}{count(hidden, 'line')} above", "dim")] if hidden > 0 else []
        return Picture([*rows, *below], board.title, note, key if board.prompt is not None else [])


def piece_lines(board: Pieces, width: int) -> list[Runs]:
    """Returns the pieces in lines of `width` cells, each with a line of ids under it if the ids are known."""
    lines: list[Runs] = []
    text, numbers = Row(), Row()

    def end() -> None:
        nonlocal text, numbers
        lines.append(text.done(width))
        if board.ids:
            lines.append(numbers.done(width))
        text, numbers = Row(), Row()

    for i, piece in enumerate(board.pieces):
        shown = clip(visible_line(piece), width - 1)
        number = str(board.ids[i]) if board.ids else ""
        room = max(cells(shown), len(number)) + 1
        if text.width + room > width:
            end()
        looks = PLAIN if board.prompt is None or i < board.prompt else REPLY
        text.add(shown, NEW if i in board.lit else looks[i % 2])
        numbers.add(number, "dim").to(numbers.width + room - len(number))
        text.to(numbers.width - 1).add("│", "faint")
    if text.width:
        end()
    return lines
