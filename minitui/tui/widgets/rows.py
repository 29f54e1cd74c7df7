"""Rows of styled text: all panels consist of rows. A row is a tuple of runs `(text, style in words)`.

Rows are plain data: painting compares them (only changed rows are drawn), snapshots join them to text, and tests
search them for a style. Widths are in terminal cells.
"""

from __future__ import annotations

import re
import textwrap

from rich.cells import cell_len, set_cell_size

from minitui.tui.glyphs import glyphs
from minitui.tui.theme import owner_style
from minitui.viewmodel.view import View
from minitui.viewmodel.words.texts import REQUEST
from minitui.visible import visible, visible_line

Run = tuple[str, str]
Runs = tuple[Run, ...]

# Characters whose width may differ from one cell: all but Latin, punctuation, arrows, mathematics, boxes and shapes.
_UNSURE_WIDTH = re.compile(
    "[^\\x20-\\x7e\\xa0-\\u02ff\\u2010-\\u2027\\u2030-\\u205e\\u2190-\\u21ff\\u2200-\\u22ff\\u2500-\\u25fc]"
)


class Line(tuple[Run, ...]):
    """A row that has exactly the width of its panel, so its width is not computed again."""

    __slots__ = ()


def cells(text: str) -> int:
    """Returns the width of `text` in terminal cells."""
    return len(text) if text.isascii() or not _UNSURE_WIDTH.search(text) else cell_len(visible_line(text))


def cut(text: str, width: int) -> str:
    """Returns the first `width` cells of `text`, padded with spaces if it is shorter."""
    if text.isascii() or not _UNSURE_WIDTH.search(text):
        return text[:width].ljust(width)
    return set_cell_size(visible_line(text), width)


def clean(text: str) -> str:
    """Returns untrusted text on one line: control characters become visible, adjacent white space becomes one space."""
    if text.isprintable() and "  " not in text:
        return text
    return " ".join("".join(c if c.isprintable() else " " for c in visible(text)).split())


def fit(text: str, width: int, dots: str = "…") -> str:
    """Returns `text` with exactly `width` cells: padded with spaces, or cut with dots at the end."""
    if width <= 0:
        return ""
    length = cells(text)
    if length <= width:
        return text + " " * (width - length)
    if width <= len(dots):
        return cut(text, width)
    return cut(text, width - len(dots)) + dots


def clip(text: str, width: int) -> str:
    """Returns `text` with at most `width` cells: a longer text is cut, with dots at the end."""
    return text if cells(text) <= width else fit(text, width, glyphs().dots).rstrip()


def whole_words(text: str, width: int) -> str:
    """Returns `text` with at most `width` cells: a longer text ends after a whole word, with dots."""
    if cells(text) <= width:
        return text
    dots = glyphs().dots
    kept = clip(text, width).removesuffix(dots)
    if not text[len(kept) :].startswith(" "):
        kept = kept.rpartition(" ")[0] or kept
    return kept.rstrip() + dots


def fitting(width: int, *texts: str) -> str:
    """Returns the first of these texts that has at most `width` cells; if none has, the last one."""
    return next((text for text in texts if cells(text) <= width), texts[-1])


class Row:
    """Builds one row from left to right; consecutive texts with the same style become one run."""

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
        """Add `fill` up to `column`."""
        if column > self.width:
            self.add(fill * (column - self.width), style)
        return self

    def right(self, text: str, column: int, style: str = "ink") -> Row:
        """Add spaces and `text`, so that the text ends just before `column`."""
        self.to(column - cells(text))
        return self.add(text, style)

    def extend(self, runs: Runs | list[Run]) -> Row:
        for text, style in runs:
            self.add(text, style)
        return self

    def done(self, width: int, ground: str = "") -> Runs:
        """Returns the row with exactly `width` cells: padded with spaces, or cut. A cut word ends with dots. `ground`:
        the background of all cells that have none."""
        if ground:
            self.to(width)
            self.runs = [(text, style if " on " in style else f"{style} on {ground}") for text, style in self.runs]
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
    """Returns untrusted text as rows of `width` cells, with line breaks between words."""
    return [Row(line, style).done(width) for line in textwrap.wrap(clean(text), width)]


def named(view: View, text: str, style: str = "ink") -> list[Run]:
    """Returns a text in which requests have their labels (Texts.labelled), with the labels in their chats' colours."""
    runs: list[Run] = []
    words, on, ground = style.partition(" on ")
    bold, at = "bold " * ("bold" in words), 0
    for found in REQUEST.finditer(text):
        lane = view.history.lanes.lanes.get(int(found[2])) if found[2] else None
        if lane is not None and (colour := view.texts.colour(lane.request.group)) is not None:
            runs += [(text[at : found.start()], style), (found[0], bold + owner_style(colour) + on + ground)]
            at = found.end()
    return [*runs, (text[at:], style)]


def named_rows(view: View, text: str, style: str, width: int) -> list[Runs]:
    """Returns untrusted text as rows of `width` cells, as `wrapped`, with the labels of its requests."""
    lines = textwrap.wrap(clean(view.texts.labelled(text)), max(10, width))
    return [Row().extend(named(view, line, style)).done(width) for line in lines]


def first_rows(text: str, style: str, width: int, most: int, more: str) -> list[Runs]:
    """Returns the first `most` rows of `wrapped`. If this is not all of the text, the last row ends with `more`, which
    names the key that shows the rest."""
    rows = wrapped(text, style, width)
    if len(rows) <= most:
        return rows
    if most <= 0:
        return []
    last, end = plain(rows[most - 1]).rstrip(), f"{glyphs().dots} {more}"
    while last and cells(last) + cells(end) > width:
        last = last.rpartition(" ")[0]
    return [*rows[: most - 1], Row(last + end, style).done(width)]


def plain(row: Runs) -> str:
    """Returns the row's text."""
    return "".join(text for text, _ in row)


def runs_width(runs: Runs | list[Run]) -> int:
    """Returns the width of all runs in terminal cells."""
    return sum(cells(text) for text, _ in runs)
