"""Rows of styled text, the currency of every panel: a row is a tuple of runs `(text, style in words)`.

Rows are plain data: they can be compared (only rows that changed are drawn), joined to text (snapshots), and searched
for a style (tests). Widths are terminal cells.
"""

from __future__ import annotations

import re

from rich.cells import cell_len, set_cell_size

from minitui.tui.theme import glyphs
from minitui.visible import visible, visible_line

Run = tuple[str, str]
Runs = tuple[Run, ...]

# Whatever is not surely one cell wide: beyond Latin, punctuation, arrows, mathematical signs, boxes and shapes.
_ODD = re.compile(
    "[^\\x20-\\x7e\\xa0-\\u02ff\\u2010-\\u2027\\u2030-\\u205e\\u2190-\\u21ff\\u2200-\\u22ff\\u2500-\\u25fc]"
)


class Line(tuple[Run, ...]):
    """A row that is known to have exactly the width of its panel: nobody need measure it again."""

    __slots__ = ()


def cells(text: str) -> int:
    """Width of `text` in terminal cells."""
    return len(text) if text.isascii() or not _ODD.search(text) else cell_len(visible_line(text))


def cut(text: str, width: int) -> str:
    """The first `width` cells of `text`, or all of it and spaces."""
    if text.isascii() or not _ODD.search(text):
        return text[:width].ljust(width)
    return set_cell_size(visible_line(text), width)


def clean(text: str) -> str:
    """Text of unknown origin on one line: control characters become signs, runs of white space one space."""
    if text.isprintable() and "  " not in text:
        return text
    return " ".join("".join(c if c.isprintable() else " " for c in visible(text)).split())


def fit(text: str, width: int, dots: str = "…") -> str:
    """`text` in exactly `width` cells: padded, or cut with dots at the end."""
    if width <= 0:
        return ""
    length = cells(text)
    if length <= width:
        return text + " " * (width - length)
    if width <= len(dots):
        return cut(text, width)
    return cut(text, width - len(dots)) + dots


def clip(text: str, width: int) -> str:
    """`text` in at most `width` cells, cut with dots at the end."""
    return text if cells(text) <= width else fit(text, width, glyphs().dots).rstrip()


class Row:
    """Builds one row from left to right; equal neighbours in style are joined into one run."""

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
        """Pad up to a column."""
        if column > self.width:
            self.add(fill * (column - self.width), style)
        return self

    def right(self, text: str, column: int, style: str = "ink") -> Row:
        """Add text that ends just before `column`."""
        self.to(column - cells(text))
        return self.add(text, style)

    def extend(self, runs: Runs | list[Run]) -> Row:
        for text, style in runs:
            self.add(text, style)
        return self

    def done(self, width: int) -> Runs:
        """The row in exactly `width` cells: padded, or cut, words with dots so that nobody takes the rest for all."""
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


def plain(row: Runs) -> str:
    """The row's text."""
    return "".join(text for text, _ in row)


def runs_width(runs: Runs | list[Run]) -> int:
    return sum(cells(text) for text, _ in runs)


def number(value: float, digits: int = 0) -> str:
    """A number for people: thousands separated, `digits` decimals."""
    return f"{value:,.{digits}f}"


def short(value: float) -> str:
    """A number in at most five cells: 812, 9,999, 18.4k, 2.1M."""
    if abs(value) < 10_000:
        return f"{value:,.0f}"
    if abs(value) < 999_950:
        return f"{value / 1000:.1f}k"
    return f"{value / 1e6:.1f}M"


def ms(value: float) -> str:
    """Milliseconds with three significant digits."""
    if value < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def ordinal(n: int) -> str:
    """1st, 2nd, 3rd, 4th …"""
    suffix = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"
