"""Markdown as lines of styled text, for a terminal: no widgets, so that a streamed answer costs a few milliseconds.

`render(text, width)` gives lines; a line is a list of spans `(text, tone)`. Tones name what a span is (TONES); a theme
gives them colours. Nothing is lost: raw HTML and unknown markup come out as they were written.

A widget for every block costs a layout of all of them at every append (300 ms for a 30-block answer); lines of text
cost their own characters only. `Streamed` keeps the lines of the blocks that are complete.
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
LONG_BLOCK = 1_500  # characters: beyond this the block being written is shown as it is typed
_RUNS = re.compile(r"\s+|\S+").findall
_LINES = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$").findall  # the parser's: str.splitlines knows more ends


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").enable(["table", "strikethrough"])


def render(text: str, width: int) -> list[Line]:
    """The document's lines, wrapped to `width` cells."""
    text = visible(text)
    if not text.strip():
        return []
    lines, _ = _blocks(_parser().parse(text), 0, max(width, 8), text)
    while lines and not any(t.strip() for t, _ in lines[-1]):
        lines.pop()
    return lines


def plain(text: str, width: int, tone: str = "text") -> list[Line]:
    """The text as it stands, wrapped."""
    lines: list[Line] = []
    for row in visible(text).expandtabs(4).split("\n"):
        lines += wrap([(row, tone)], max(width, 8))
    return lines


class Streamed:
    """The lines of a text that grows at its end, at a cost that does not grow with it.

    The blocks that are complete keep their lines; only the last is rendered again. While that one is longer than
    LONG_BLOCK it is shown as plain text. `finish` renders the whole text once more, as one document, so that what is
    left on the screen never depends on how it arrived.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._text = ""
        self._done = 0  # characters of complete blocks
        self._lines: list[Line] = []  # theirs

    def update(self, text: str) -> list[Line]:
        """The lines of `text`, which begins with the text of the last call (else all is rendered anew)."""
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
        """The lines of the whole text."""
        return render(text, self.width)

    def _next_block(self) -> int | None:
        """Where the first top-level block after those done ends, if another one has begun behind it."""
        rest = self._text[self._done :]
        if "\n" not in rest or (len(rest) > LONG_BLOCK and "\n\n" not in rest):
            return None
        starts = [t.map[0] for t in _parser().parse(rest) if t.level == 0 and t.nesting >= 0 and t.map]
        if len(starts) < 2:
            return None
        lines = _LINES(rest)
        return self._done + sum(len(line) for line in lines[: starts[1]])


def wrap(spans: Sequence[Span], width: int) -> list[Line]:
    """Break spans into lines of at most `width` cells, at spaces where there are any."""
    lines: list[Line] = []
    line: Line = []
    used = 0
    space: Span | None = None  # before the next word: dropped at a line's end
    word: list[Span] = []  # may run across spans
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
        for text, tone in word:  # longer than a line: broken anywhere
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
            elif not lines:  # indentation of the first line stays
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
    """The lines of the blocks from token `i` to the end of their container, and the index behind it."""
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
        else:  # raw HTML: shown as written, never swallowed
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
    """Code keeps its lines; one too long is broken hard, for a terminal cannot scroll a part of itself."""
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
    """The spans of a paragraph; a hard break is a span "\\n"."""
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
    # "&#8238;" has become a character by now. A tab would move the cursor.
    return [(visible(text).replace("\t", " "), tone) for text, tone in spans]


def wrap_breaks(spans: list[Span], width: int) -> list[Line]:
    """`wrap`, beginning a new line at every span "\\n"."""
    lines: list[Line] = []
    row: list[Span] = []
    for span in [*spans, ("\n", "break")]:
        if span[1] == "break":
            lines += wrap(row, width)
            row = []
        else:
            row.append(span)
    return lines
