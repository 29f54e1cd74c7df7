"""Rows of styled text. All panels are made of them: a row is a tuple of runs `(text, style in words)`.

Rows are plain data: they can be compared (only changed rows are drawn), joined to text (snapshots), and searched for
a style (tests). Widths are in terminal cells.
"""

from __future__ import annotations

import re
import textwrap

from rich.cells import cell_len, set_cell_size

from minitui.tui.glyphs import glyphs
from minitui.visible import visible, visible_line

Run = tuple[str, str]
Runs = tuple[Run, ...]

# Characters that may not be one cell wide: all but Latin, punctuation, arrows, mathematics, boxes and shapes.
_ODD = re.compile(
    "[^\\x20-\\x7e\\xa0-\\u02ff\\u2010-\\u2027\\u2030-\\u205e\\u2190-\\u21ff\\u2200-\\u22ff\\u2500-\\u25fc]"
)


class Line(tuple[Run, ...]):
    """A row with exactly the width of its panel: it is not measured again."""

    __slots__ = ()


def cells(text: str) -> int:
    """Returns the width of `text` in terminal cells."""
    return len(text) if text.isascii() or not _ODD.search(text) else cell_len(visible_line(text))


def cut(text: str, width: int) -> str:
    """Returns the first `width` cells of `text`, padded with spaces if it is shorter."""
    if text.isascii() or not _ODD.search(text):
        return text[:width].ljust(width)
    return set_cell_size(visible_line(text), width)


def clean(text: str) -> str:
    """Returns untrusted text on one line: control characters become visible, white space becomes one space."""
    if text.isprintable() and "  " not in text:
        return text
    return " ".join("".join(c if c.isprintable() else " " for c in visible(text)).split())


def fit(text: str, width: int, dots: str = "…") -> str:
    """Returns `text` in exactly `width` cells: padded, or cut with dots at the end."""
    if width <= 0:
        return ""
    length = cells(text)
    if length <= width:
        return text + " " * (width - length)
    if width <= len(dots):
        return cut(text, width)
    return cut(text, width - len(dots)) + dots


def clip(text: str, width: int) -> str:
    """Returns `text` in at most `width` cells, cut with dots at the end."""
    return text if cells(text) <= width else fit(text, width, glyphs().dots).rstrip()


class Row:
    """Builds one row from left to right; neighbours of the same style become one run."""

    __slots__ = ("runs", "width")

    def __init__(self, text: str = "", style: str = "ink") -> None:
        self.runs: list[Run] = []
        self.width = 0
        if text:
            self.add(text, style)

    def add(self, text: str, style: str = "ink") -> Row:
        if text:
            self.width += cells(text)
            if self.runs and self.runs[-1][1] == style:
                self.runs[-1] = (self.runs[-1][0] + text, style)
            else:
                self.runs.append((text, style))
        return self

    def to(self, column: int, fill: str = " ", style: str = "ink") -> Row:
        """Pad to a column."""
        if column > self.width:
            self.add(fill * (column - self.width), style)
        return self

    def right(self, text: str, column: int, style: str = "ink") -> Row:
        """Add text that ends before `column`."""
        self.to(column - cells(text))
        return self.add(text, style)

    def extend(self, runs: Runs | list[Run]) -> Row:
        for text, style in runs:
            self.add(text, style)
        return self

    def done(self, width: int) -> Runs:
        """Returns the row in exactly `width` cells: padded, or cut, with dots where words were cut."""
        if self.width == width:
            return Line(self.runs)
        if self.width < width:
            return Line((*self.runs, (" " * (width - self.width), "ink")))
        runs, room = [], width
        for text, style in self.runs:
            length = cells(text)
            if length >= room:
                words = any(character.isalpha() for character in text)
                runs.append((fit(text, room, glyphs().dots) if words and length > room else cut(text, room), style))
                break
            runs.append((text, style))
            room -= length
        return Line(runs)


def legend(*entries: tuple[str, str, str], gap: str = "  ") -> list[Run]:
    """Returns a legend of (sign, style, meaning) entries."""
    runs: list[Run] = []
    for sign, style, meaning in entries:
        runs += [(gap, "dim")] if runs else []
        runs += [(sign, style), (f" {meaning}", "dim")]
    return runs


def wrapped(text: str, style: str, width: int) -> list[Runs]:
    """Returns untrusted text as rows of `width` cells, broken between words."""
    return [Row(line, style).done(width) for line in textwrap.wrap(clean(text), width)]


def plain(row: Runs) -> str:
    """Returns the row's text."""
    return "".join(text for text, _ in row)


def runs_width(runs: Runs | list[Run]) -> int:
    return sum(cells(text) for text, _ in runs)
