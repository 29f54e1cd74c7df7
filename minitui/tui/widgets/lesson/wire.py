"""Wire: what does a client send to the server, and what comes back?"""

from __future__ import annotations

import textwrap
from typing import ClassVar

from textual.binding import Binding, BindingType

from minitui.text import count
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Runs, clip, wrapped
from minitui.viewmodel.board import Wire
from minitui.viewmodel.view import View
from minitui.visible import visible_line

STYLES = {"sent": "bold accent", "got": "ink"}
SIGNS = {"sent": "$ ", "got": "  "}


class WireLines(LinePanel):
    """Shows the end of the exchange: the lines that were sent and received last. Scrolls to the lines before."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "scroll(1)", "a line up", show=False, id="wire.up"),
        Binding("down", "scroll(-1)", "a line down", show=False, id="wire.down"),
        Binding("pageup", "scroll(5)", "lines up", show=False, id="wire.up.page"),
        Binding("pagedown", "scroll(-5)", "lines down", show=False, id="wire.down.page"),
    ]
    TITLE = "HTTP"
    back = 0  # lines below the picture

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
        end = max(0, len(rows) - height)
        self.back = max(0, min(self.back, end))
        top = end - self.back
        note = [(f"{glyphs().dots}{count(top, 'line')} above, {self.back} below", "dim")] if end else []
        keys = self.own_key("up, down: scroll", first=True) or [("tab: scroll", "accent")] if end else []
        return Picture(rows[top : top + height], board.title, note, keys)

    def action_scroll(self, lines: int) -> None:
        """Scroll by lines; up is positive."""
        self.back += lines
