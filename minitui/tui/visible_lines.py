"""The border of the application: each line that Textual draws, of whatever widget, holds only visible characters."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from minitui.visible import visible_line


class VisibleLines(LineFilter):
    """Characters that control a terminal become signs (minitui/visible.py); the line keeps its width."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """The same line; signs take the place of the cells behind them."""
        if all(text.isprintable() for text, _, _ in segments):
            return segments
        width = sum(cell_len(text) for text, _, _ in segments)
        line, used = [], 0
        for text, style, control in segments:
            shown = visible_line(text)
            room = width - used
            if cell_len(shown) > room:
                shown = set_cell_size(shown, room)
            used += cell_len(shown)
            if shown:
                line.append(Segment(shown, style, control))
        return line
