"""`--ascii`, for what is not drawn with the glyphs of minitui.tui.theme: words of the help, widgets of Textual's
own."""

from __future__ import annotations

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

_INSTEAD = {
    "·": "|", "…": "~", "×": "x", "÷": "/", "–": "-", "—": "-", "−": "-", "“": '"', "”": '"', "‘": "'", "’": "'",
    "→": ">", "←": "<", "↑": "^", "↓": "v", "✓": "*", "✗": "x", "●": "*", "○": "o", "▲": "^", "▼": "v", "▶": ">",
    "▸": ">", "▾": "v", "•": "*", "─": "-", "━": "-", "│": "|", "┃": "|", "╭": "+", "╮": "+", "╰": "+", "╯": "+",
    "┌": "+", "┐": "+", "└": "`", "┘": "+", "├": "|", "┤": "|", "▁": "_", "▔": "-", "▌": "|", "▐": "|", "▊": "|",
    "▎": "|", "█": "#", "▄": "_", "▀": "-", "░": ".", "▒": "o", "▓": "S",
}  # fmt: skip
_TABLE = str.maketrans(_INSTEAD)  # a place for a place: lines keep their width


class AsciiLines(LineFilter):
    """Signs and frames become ASCII, letters of whatever language stay."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """The same line, drawn with what every terminal has."""
        return [
            one if one.text.isascii() else Segment(one.text.translate(_TABLE), one.style, one.control)
            for one in segments
        ]
