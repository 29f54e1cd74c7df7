"""Wire: what does a client send to the server, and what comes back?"""

from __future__ import annotations

import textwrap

from minitui.text import count
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture, paragraphs
from minitui.tui.widgets.rows import Row, Runs, clip, wrapped
from minitui.viewmodel.board import Wire
from minitui.viewmodel.model import View
from minitui.visible import visible_line

STYLES = {"sent": "bold accent", "got": "ink"}
SIGNS = {"sent": "$ ", "got": "  "}


class WireLines(LinePanel):
    """Shows the end of the exchange: the lines that were sent and received last."""

    TITLE = "HTTP"
    help_text = paragraphs("""\
A request to the server, as a command that you can type, and the lines of the answer. Lines that begin with “data:” are
server-sent events: each is a piece of the answer, sent as soon as it is known. Fields that say nothing about the
answer, such as its id, are left out.""")

    def picture(self, view: View, width: int, height: int) -> Picture:
        board = view.board
        if not isinstance(board, Wire):
            return Picture(wrapped("no request yet: the experiment has not run", "dim", width))
        rows: list[Runs] = []
        for kind, text in board.lines:
            pieces = textwrap.wrap(visible_line(text), max(8, width - 2), break_on_hyphens=False)
            for i, piece in enumerate(pieces):
                sign = SIGNS[kind] if i == 0 else "  "
                rows.append(Row(sign + clip(piece, width - 2), STYLES[kind]).done(width))
        hidden = max(0, len(rows) - height)
        note = [(f"{glyphs().dots}{count(hidden, 'line')} above", "dim")] if hidden else []
        return Picture(rows[hidden:], board.title, note)
