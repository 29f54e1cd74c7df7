"""Filters for every line that Textual draws: one makes control characters visible, the other makes signs ASCII."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from minitui.tui.glyphs import to_ascii
from minitui.visible import visible_line


class VisibleLines(LineFilter):
    """Replaces characters that control a terminal by visible signs (minitui/visible.py); the line keeps its width."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Returns the line with signs. If the signs need more width, the end of the line is cut off."""
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


class AsciiLines(LineFilter):
    """Replaces signs and frames by ASCII; letters of all languages stay."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Returns the line with ASCII signs, in the same width."""
        return [Segment(to_ascii(text), style, control) for text, style, control in segments]
