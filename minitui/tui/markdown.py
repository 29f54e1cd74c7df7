"""Markdown as lines of styled text for a terminal.

`render(text, width)` returns lines; a line is a list of spans `(text, tone)`. The tone is the kind of the span (TONES);
the transcript gives each tone a colour. Raw HTML and unknown markup are shown as written.

This module makes lines, not widgets: with a widget for each block, every append lays out all blocks (300 ms for 30
blocks). `Streamed` keeps the lines of complete blocks, so an append costs a few milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.cells import cell_len, chop_cells

from minitui.visible import visible

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

Span = tuple[str, str]
Line = list[Span]

TONES = ("text", "strong", "em", "code", "link", "heading", "bullet", "quote", "rule", "fence", "strike")
BULLETS = "•◦▪"
LONG_BLOCK = 1_500  # characters; an unfinished block beyond this is shown as plain text
LONG_TEXT = 50_000  # characters; the time of the parser may grow with their square
_RUNS = re.compile(r"\s+|\S+").findall
_LINES = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$").findall  # only the line ends that the parser knows


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").enable(["table", "strikethrough"])


def render(text: str, width: int) -> list[Line]:
    """Returns the lines of the Markdown document, wrapped to `width` cells; beyond LONG_TEXT, it is not interpreted."""
    if len(text) > LONG_TEXT:
        return plain(text.strip("\n"), width)
    text = visible(text)
    if not text.strip():
        return []
    lines, _ = _blocks(_parser().parse(text), 0, max(width, 8), text)
    while lines and not any(t.strip() for t, _ in lines[-1]):
        lines.pop()
    return lines


def plain(text: str, width: int) -> list[Line]:
    """Returns the lines of a text that is not Markdown, wrapped to `width` cells."""
    lines: list[Line] = []
    for row in visible(text).expandtabs(4).split("\n"):
        lines += wrap([(row, "text")], max(width, 8))
    return lines


def shortened(text: str, most: int) -> str:
    """Returns a text without its middle if it has more than `most` characters; a line says how many are left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n\n… {len(text) - most:,} characters are not shown …\n\n{text[len(text) - half :]}"


class Streamed:
    """The lines of a text that grows at its end; the cost of an update does not grow with the text. Complete blocks
    keep their lines; only the last block is rendered again, as plain text if it is longer than LONG_BLOCK. `finish`
    renders the whole text as one document, so the final lines do not depend on how the text was split into updates."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._text = ""
        self._done = 0  # characters of complete blocks
        self._lines: list[Line] = []  # lines of complete blocks

    def update(self, text: str) -> list[Line]:
        """Returns the lines of `text`. If it does not begin with the previous text, everything is rendered again."""
        if not text.startswith(self._text):
            self._done, self._lines = 0, []
        self._text = text
        while (cut := self._next_block()) is not None:
            block = render(text[self._done : cut], self.width)
            if block:
                self._lines += [[], *block] if self._lines else block
            self._done = cut
        rest = text[self._done :]
        tail = plain(rest.strip("\n"), self.width) if len(rest) > LONG_BLOCK else render(rest, self.width)
        return self._lines + ([[], *tail] if self._lines and tail else tail)

    def finish(self, text: str) -> list[Line]:
        """Returns the lines of the whole text."""
        return render(text, self.width)

    def _next_block(self) -> int | None:
        """Returns where the first block after `_done` ends, if another block follows it; else None."""
        rest = self._text[self._done :]
        if "\n" not in rest or (len(rest) > LONG_BLOCK and "\n\n" not in rest):
            return None
        starts = [t.map[0] for t in _parser().parse(rest) if t.level == 0 and t.nesting >= 0 and t.map]
        if len(starts) < 2:
            return None
        lines = _LINES(rest)
        return self._done + sum(len(line) for line in lines[: starts[1]])


def wrap(spans: Sequence[Span], width: int) -> list[Line]:
    """Breaks spans into lines of at most `width` cells, at spaces if possible."""
    lines: list[Line] = []
    line: Line = []
    used = 0
    space: Span | None = None  # the space before the next word; dropped at the end of a line
    word: list[Span] = []  # one word can have several spans
    size = 0

    def place() -> None:
        nonlocal line, used, space
        gap = len(space[0]) if space else 0
        if used and used + gap + size > width:
            lines.append(line)
            line, used, space = [], 0, None
        if space:
            line.append(space)
            used += gap
            space = None
        if size <= width:
            line.extend(word)
            used += size
            return
        for text, tone in word:  # the word is longer than a line: break it anywhere
            for piece in chop_cells(text, width):
                cells = cell_len(piece)
                if used and used + cells > width:
                    lines.append(line)
                    line, used = [], 0
                line.append((piece, tone))
                used += cells

    for text, tone in spans:
        for piece in _RUNS(text):
            if not piece[0].isspace():
                word.append((piece, tone))
                size += len(piece) if piece.isascii() else cell_len(piece)
                continue
            if word:
                place()
                word, size = [], 0
            if used:
                space = (piece, tone)
            elif not lines:  # keep the indentation of the first line
                line.append((piece, tone))
                used += len(piece)
    if word:
        place()
    lines.append(line)
    return [_merge(row) for row in lines]


def _merge(line: Line) -> Line:
    merged: Line = []
    for text, tone in line:
        if merged and merged[-1][1] == tone:
            merged[-1] = (merged[-1][0] + text, tone)
        else:
            merged.append((text, tone))
    return merged


# --- blocks ------------------------------------------------------------------------------------------------------


def _blocks(tokens: list[Token], i: int, width: int, source: str, depth: int = 0) -> tuple[list[Line], int]:
    """Returns (lines of the blocks from token `i` to the end of their container, index after the container)."""
    lines: list[Line] = []

    def add(block: list[Line], tight: bool = False) -> None:
        if lines and block and not tight:
            lines.append([])
        lines.extend(block)

    while i < len(tokens):
        token = tokens[i]
        kind = token.type
        if token.nesting < 0:
            return lines, i + 1
        if kind == "paragraph_open":
            add(wrap_breaks(_inline(tokens[i + 1]), width), tight=token.hidden)
            i += 3
        elif kind == "heading_open":
            spans = [(t, "heading" if tone in ("text", "strong") else tone) for t, tone in _inline(tokens[i + 1])]
            add(wrap_breaks(spans, width))
            i += 3
        elif kind in ("fence", "code_block"):
            add(_fence(token.content, width))
            i += 1
        elif kind == "hr":
            add([[("─" * min(width, 40), "rule")]])
            i += 1
        elif kind == "blockquote_open":
            inner, i = _blocks(tokens, i + 1, width - 2, source, depth)
            add([[("▎ ", "rule"), *[(t, "quote" if tone == "text" else tone) for t, tone in row]] for row in inner])
        elif kind in ("bullet_list_open", "ordered_list_open"):
            block, i = _list(tokens, i, width, source, depth)
            add(block, tight=depth > 0)
        elif kind == "table_open":
            block, i = _table(tokens, i, width)
            add(block)
        else:  # raw HTML is shown as written
            add(plain(token.content.rstrip("\n"), width))
            i += 1
    return lines, i


def _list(tokens: list[Token], i: int, width: int, source: str, depth: int) -> tuple[list[Line], int]:
    ordered = tokens[i].type == "ordered_list_open"
    number = int(tokens[i].attrGet("start") or 1)
    lines: list[Line] = []
    i += 1
    while tokens[i].type == "list_item_open":
        mark = f"{number}. " if ordered else BULLETS[depth % len(BULLETS)] + " "
        inner, i = _blocks(tokens, i + 1, width - len(mark), source, depth + 1)
        for row, line in enumerate(inner or [[]]):
            lines.append([(mark, "bullet") if row == 0 else (" " * len(mark), "text"), *line])
        number += 1
    return lines, i + 1


def _fence(code: str, width: int) -> list[Line]:
    """Returns the lines of a code block. A long line is broken anywhere: a block cannot be scrolled sideways."""
    lines: list[Line] = []
    for row in code.rstrip("\n").expandtabs(4).split("\n"):
        lines += [[("  " + piece, "fence")] for piece in (chop_cells(row, max(width - 4, 4)) or [""])]
    return [[(line[0][0] + " " * max(0, width - cell_len(line[0][0])), "fence")] for line in lines]


def _table(tokens: list[Token], i: int, width: int) -> tuple[list[Line], int]:
    rows: list[list[list[Span]]] = []
    while tokens[i].type != "table_close":
        if tokens[i].type == "tr_open":
            rows.append([])
        elif tokens[i].type == "inline":
            rows[-1].append(_inline(tokens[i]))
        i += 1
    columns = max(len(row) for row in rows)
    sizes = [max(sum(cell_len(t) for t, _ in r[c]) if c < len(r) else 0 for r in rows) for c in range(columns)]
    room = max(width - 2 * (columns - 1), columns * 3)
    while sum(sizes) > room:
        sizes[sizes.index(max(sizes))] -= 1
    lines: list[Line] = []
    for index, row in enumerate(rows):
        cells = [wrap(row[c] if c < len(row) else [], max(sizes[c], 1)) for c in range(columns)]
        for k in range(max(len(cell) for cell in cells)):
            line: Line = []
            for c, cell in enumerate(cells):
                spans = cell[k] if k < len(cell) else []
                line += [(t, "strong" if index == 0 and tone == "text" else tone) for t, tone in spans]
                line.append((" " * (sizes[c] - sum(cell_len(t) for t, _ in spans) + 2), "text"))
            lines.append(line)
        if index == 0:
            lines.append([("─" * min(sum(sizes) + 2 * (columns - 1), width), "rule")])
    return lines, i + 1


def _inline(token: Token) -> list[Span]:
    """Returns the spans of a paragraph; a hard break is a span "\\n"."""
    spans: list[Span] = []
    tones = ["text"]
    link = ""
    for child in token.children or []:
        kind = child.type
        if kind == "text":
            spans.append((child.content, tones[-1]))
        elif kind == "code_inline":
            spans.append((child.content, "code"))
        elif kind == "softbreak":
            spans.append((" ", tones[-1]))
        elif kind == "hardbreak":
            spans.append(("\n", "break"))
        elif kind in ("strong_open", "em_open", "s_open", "link_open"):
            tones.append({"strong_open": "strong", "em_open": "em", "s_open": "strike", "link_open": "link"}[kind])
            link = str(child.attrGet("href") or "") if kind == "link_open" else link
        elif kind in ("strong_close", "em_close", "s_close", "link_close"):
            tones.pop()
            if kind == "link_close" and link and not (spans and spans[-1][0] == link):
                spans.append((f" ({link})", "rule"))
        elif kind == "image":
            spans.append((f"[{child.content}]", "link"))
        else:
            spans.append((child.content, tones[-1]))
    # The parser has replaced entities such as "&#8238;" by characters. A tab would move the cursor.
    return [(visible(text).replace("\t", " "), tone) for text, tone in spans]


def wrap_breaks(spans: list[Span], width: int) -> list[Line]:
    """Wraps spans as `wrap` does, and begins a new line at every span "\\n"."""
    lines: list[Line] = []
    row: list[Span] = []
    for span in [*spans, ("\n", "break")]:
        if span[1] == "break":
            lines += wrap(row, width)
            row = []
        else:
            row.append(span)
    return lines
