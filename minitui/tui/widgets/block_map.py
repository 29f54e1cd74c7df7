"""Block map: how full is the pool, which requests hold the blocks, and which blocks have just changed?

The bar at the top shows the pool exactly, and the row below it the waste. The map has one cell per block, in the order
of the block numbers. If there are more blocks than cells, each cell shows the most frequent state of k blocks; the
title gives k. Changed cells are highlighted. There are four colourings: by state, owner, age, or reference count; each
has its own glyphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import numpy as np
from textual.binding import Binding

from engine.trace.views import ACTIVE, CACHED, FREE, SHARED
from minitui.tui.glyphs import glyphs
from minitui.tui.theme import OWNER_COLOURS
from minitui.tui.widgets import occupancy
from minitui.tui.widgets.base import LinePanel, Opened, Picture, paragraphs, selected
from minitui.tui.widgets.rows import Line, Row, Run, Runs, runs_width
from minitui.viewmodel.annotated_state import STATE_NAMES
from minitui.viewmodel.board import KeyRead
from minitui.viewmodel.model import View

FILLING = 4  # code of an active block with free places for tokens; the other codes are in engine.trace.views
MODES = {"state": "state", "owner": "owner", "age": "age", "refs": "refcount"}  # key -> name of each colouring
CELL_SHAPES = ((2, 2), (2, 1), (1, 1), (1, 0))  # (width of a cell, gap after it), the widest first
MIN_WIDTH_SHARE = 0.75  # a shape is used if rows of 8, 16, 24 … cells take at least this share of the width
GLOW_SHARE = 0.25  # a cell is highlighted if at least this share of its blocks has changed
AGES = (1.0, 5.0, 15.0, 60.0, 300.0)  # limits in seconds; a block's digit is the number of limits below its age
DIGITS = "0123456789"


@dataclass(frozen=True, slots=True)
class Grid:
    """The layout of `blocks` blocks in cells: cell i shows the blocks from first + i*k to first + (i+1)*k - 1."""

    first: int
    blocks: int
    k: int  # blocks per cell
    cell: int  # width of a cell
    gap: int  # width of the gap between two cells
    per_row: int  # cells in a row
    rows: int  # available rows
    digits: int = 0  # of the block's number in a cell; 0: cells have no numbers

    @property
    def cells(self) -> int:
        return -(-self.blocks // self.k)


def grid(
    blocks: int, width: int, height: int, first: int = 1, one_each: bool = False, numbered: bool = False
) -> Grid:
    """Returns the grid with the widest cells that fit, for `blocks` blocks numbered from `first`.

    `one_each`: k is 1, and the grid has as many of the blocks as fit. `numbered`: each cell has the number of its
    block, if these cells fit.
    """
    width, height = max(1, width), max(1, height)
    if numbered:
        digits = len(str(first + blocks - 1))
        per_row = _in_eights((width + 1) // (digits + 2))
        if per_row and -(-blocks // per_row) <= height:
            return Grid(first, blocks, 1, 1 + digits, 1, per_row, height, digits)
    if one_each:
        blocks = min(blocks, width * height)
    for min_share in (MIN_WIDTH_SHARE, 0.0):
        for cell, gap in CELL_SHAPES:
            per_row = _in_eights((width + gap) // (cell + gap))
            fits = per_row > 0 and -(-blocks // per_row) <= height
            if fits and per_row * (cell + gap) >= min_share * width:
                return Grid(first, blocks, 1, cell, gap, per_row, height)
    if blocks <= width * height:
        return Grid(first, blocks, 1, 1, 0, width, height)
    return Grid(first, blocks, -(-blocks // (width * height)), 1, 0, width, height)


def _in_eights(cells: int) -> int:
    """Returns the largest multiple of 8 that is at most `cells`; `cells` itself if there are fewer than 8."""
    return cells - cells % 8 if cells > 8 else cells


@dataclass(slots=True)
class _Layer:
    """A colouring: a code for each block, and the glyph and style of each code."""

    codes: np.ndarray
    looks: list[tuple[str, str]]  # (glyph, style) of each code
    legend: list[list[Run]]  # entries of the legend
    glows: bool = False  # changed blocks are highlighted


class BlockMap(LinePanel):
    """Arrows move over the cells, Enter zooms to one block per cell and then opens a block, c changes the colouring."""

    TITLE = "KV blocks"
    NUMBERS = False  # each cell has the number of its block, if there is room
    help_text = paragraphs("""\
The pool of KV memory, one cell per block. A block holds the keys and values of 16 tokens, for all layers. A free block
is unused. An active block belongs to one request. A shared block is read by several requests whose texts begin with
the same tokens. A cached block is held by no request; the tree keeps it for prompts that begin with the same text,
and evicts it when blocks are needed. A large map (z) describes the selected block:
tokens, holders, age, history. ▄ marks the block in which a request's next token is stored. Bright cells have
just changed.

Waste is memory or work that serves nothing. Unused slots are the places in the requests' blocks that hold no token yet;
most are in the last block of each request, so smaller blocks waste fewer. A copy is a block that holds the same tokens
after the same prefix as another block: without the prefix cache, or with different cache salts, requests do not share.
Tokens computed again: prompt tokens whose cached blocks had been evicted, tokens that a preempted request had computed
before, and duplicates: tokens that two requests computed at the same time, and the last token of a cached prompt with
its block. A larger pool avoids the first two. A dash stands for figures that the recording does not have.""")
    BINDINGS: ClassVar = [
        Binding("left", "move(-1, 0)", "block before", show=False, id="map.left"),
        Binding("right", "move(1, 0)", "block after", show=False, id="map.right"),
        Binding("up", "move(0, -1)", "row above", show=False, id="map.up"),
        Binding("down", "move(0, 1)", "row below", show=False, id="map.down"),
        Binding("enter", "open", "zoom in, then details", show=False, id="map.open"),
        Binding("backspace", "unzoom", "zoom out", show=False, id="map.unzoom"),
        Binding("c", "colour", "colours", show=False, id="map.colour", tooltip="by state, owner, age or holders"),
    ]

    def __init__(self, *, id: str | None = None, frame: str | None = None) -> None:
        super().__init__(id=id, frame=frame)
        self.mode = "state"
        self.zoomed_at: int | None = None  # the first block shown when zoomed in; None: not zoomed
        self.grid = grid(1, 1, 1)
        self._cells = np.empty((0, 0), np.int64)
        self._cell_rows: list[Runs] = []
        self._looks: list[tuple[str, str]] = []

    # ---- the picture

    def picture(self, view: View, width: int, height: int) -> Picture:
        if not view.loaded:
            return Picture([Row().add("the engine is starting", "dim").done(width)], title="KV blocks")
        shown = view.shown
        pool = occupancy.lead(shown)
        head = [pool.extend(occupancy.bar(shown, max(0, width - pool.width))).done(width)]
        layer = None
        if self.mode != "state":
            layer = {"owner": self._by_owner, "age": self._by_age, "refs": self._by_refs}[self.mode](view)
        entries = layer.legend if layer is not None else occupancy.entries(shown)
        above, legend = _lay_out(entries, width, 0 if self.frame == "none" else width - 4)
        if above:
            head.append(Row().extend(above).done(width))
        numbered = self._grid(view, width, height - len(head)).digits
        if height > len(head) + 1 and self._grid(view, width, height - len(head) - 1).digits == numbered:
            ruled = self.NUMBERS and not numbered
            head.append((_ruler(view.shown.total, width) if ruled else occupancy.waste(view, width)).done(width))
        map_height = height - len(head)
        if map_height < 1:
            return Picture(head[:height], legend=[])
        self.grid = self._grid(view, width, map_height)
        spaced = self._grid(view, width, map_height - 1)
        if map_height > 2 and (spaced.k, spaced.cell, spaced.gap) == (self.grid.k, self.grid.cell, self.grid.gap):
            head.append(Row().done(width))  # a blank line, only if the cells keep their size
            self.grid = spaced
        rows = self._map_rows(view, layer or self._by_state(view), width)
        note: list[Run] = [("colour by ", "dim"), (MODES[self.mode], "ink"), (" · c", "dim")]
        if self.NUMBERS:
            note = []  # in a lesson, c is a prediction
        title = "KV blocks"
        if self.grid.k > 1:
            title += f" · 1 cell = {self.grid.k} blocks"
        elif self.zoomed_at is None and self.grid.blocks < shown.total:
            title += f" · first {self.grid.blocks:,} of {shown.total:,}"
            title += ", the others are free" if width >= 66 else ""
        elif self.zoomed_at is not None:
            title += f" · {self.grid.first:,} to {self.grid.first + self.grid.blocks - 1:,} of {shown.total:,}"
        else:
            title += f" · {shown.total:,} blocks of {shown.state.block_size}"
        filling: list[Run] = [("  ", "ink")] * bool(legend) + [(glyphs().filling, "active"), (" filling", "dim")]
        fits = runs_width([*legend, *filling]) <= width - 4 or len(head) + len(rows) < height - 1
        if layer is None and self.grid.k == 1 and fits:
            legend = [*legend, *filling]
        return Picture([*head, *rows], title=title, note=note, legend=legend)

    def _grid(self, view: View, width: int, height: int) -> Grid:
        total = view.shown.total
        room = width * height
        if self.zoomed_at is None:
            used = self._used_part(view, room) if total > room else total
            return grid(used, width, height, numbered=self.NUMBERS)
        first = max(1, min(self.zoomed_at, total - room + 1))
        return grid(total - first + 1, width, height, first=first, one_each=True)

    def _used_part(self, view: View, room: int) -> int:
        """Returns how many blocks to show of a pool with more blocks than cells.

        This is the smallest of 64, 128, 256, … that is at least 1.1 times the number of the last used block. The title
        then says that the other blocks are free. If this number is more than `room`, all blocks are shown.
        """
        in_use = np.flatnonzero(view.shown.codes)
        last = int(in_use[-1]) if len(in_use) else 0
        shown = 64
        while shown < last * 1.1:
            shown *= 2
        return shown if shown <= room else view.shown.total

    def _map_rows(self, view: View, layer: _Layer, width: int) -> list[Runs]:
        g = self.grid
        n = len(layer.looks)
        span = slice(g.first, g.first + g.blocks)
        codes = layer.codes[span].astype(np.int64)
        glow = view.glow()[span] if layer.glows else None
        marked = np.zeros(view.shown.state.num_blocks, bool)
        if view.links.blocks:
            marked[list(view.links.blocks)] = True
        if isinstance(read := view.board, KeyRead):
            marked[list(read.table[: read.logical + 1])] = True
        marked_cells = marked[span]
        if g.k > 1:
            at = np.arange(g.blocks) // g.k
            codes = np.bincount(at * n + codes, minlength=g.cells * n).reshape(g.cells, n).argmax(1)
            if glow is not None:
                in_cell = np.bincount(at)
                bright = np.bincount(at, glow == 2) / in_cell >= GLOW_SHARE
                warm = np.bincount(at, glow >= 1) / in_cell >= GLOW_SHARE
                glow = bright.astype(np.int64) + warm
            marked_cells = np.bincount(at, marked_cells) > 0
        combined = codes * 8
        if glow is not None:
            combined += glow.astype(np.int64) * 2
        combined += marked_cells
        cursor = self.cursor_cell(view)
        if cursor is not None and self.has_focus:
            combined[cursor] = codes[cursor] * 8 + 6
        if isinstance(read, KeyRead) and 0 <= (cell := (read.block - g.first) // g.k) < g.cells:
            combined[cell] = codes[cell] * 8 + 6
        rows = -(-g.cells // g.per_row)
        cells = np.full((rows, g.per_row), -1, np.int64)
        cells.reshape(-1)[: g.cells] = combined
        same = self._cells.shape == cells.shape and self._looks == layer.looks
        if not same:
            self._cell_rows = [()] * rows
        stale = np.ones(rows, bool) if not same else (cells != self._cells).any(1)
        for y in np.flatnonzero(stale):
            self._cell_rows[y] = _runs(cells[y], layer.looks, g, width, g.first + int(y) * g.per_row)
        self._cells, self._looks = cells, layer.looks
        out = list(self._cell_rows)
        if self._spread():
            blank: Runs = ((" " * width, "ink"),)
            out = [row for pair in ((row, blank) for row in out) for row in pair][:-1]
        return out

    # ---- colourings

    def _by_state(self, view: View) -> _Layer:
        codes = view.shown.codes
        if self.grid.k == 1:
            codes = codes.copy()
            if filling := view.shown.filling():
                codes[[block for block in filling if codes[block] == ACTIVE]] = FILLING
        looks = [(occupancy.glyph(code), STATE_NAMES[code]) for code in (FREE, ACTIVE, SHARED, CACHED)]
        looks.append((glyphs().filling, "active"))
        return _Layer(codes, looks, [], glows=True)  # its legend is occupancy.entries

    def _by_owner(self, view: View) -> _Layer:
        shown = view.shown
        groups: dict[str, int] = {}
        requests = [request for _, request in sorted(shown.state.requests.items()) if request.table]
        group_of = [groups.setdefault(request.group, len(groups)) for request in requests]
        sizes = np.array([len(request.table) for request in requests], np.int64)
        of = np.repeat(np.array(group_of, np.int64), sizes)
        blocks = np.fromiter(chain.from_iterable(request.table for request in requests), np.int64, len(of))
        owner = np.full(shown.state.num_blocks, -1, np.int64)
        owner[blocks] = of
        owner[blocks[owner[blocks] != of]] = -2  # held by several groups
        g = glyphs()
        looks = [(g.free, "free"), (g.cached, "cached"), (g.shared, "shared")]
        letters = [_letter(view.group_name(group), i) for group, i in groups.items()]
        looks += [(letter, f"owner-{i % OWNER_COLOURS}") for i, letter in enumerate(letters)]
        codes = np.where(owner >= 0, owner + 3, np.where(owner == -2, 2, np.where(shown.node_of > 0, 1, 0)))
        legend = [_entry(g.shared, "shared", "several"), _entry(g.cached, "cached", "cached"), _free()]
        for group, i in groups.items():
            name = view.group_name(group)
            named = name.removeprefix(letters[i] + " ")[:16].rstrip()  # the letter already shows the number in the name
            legend.append(_entry(letters[i], f"owner-{i % OWNER_COLOURS}", named or "no name"))
        return _Layer(codes, looks, legend)

    def _by_age(self, view: View) -> _Layer:
        shown = view.shown
        older = np.searchsorted(np.array(AGES), view.picture_now - shown.changed)
        codes = np.where(shown.codes == FREE, 0, older + 1)
        shades = ("active-glow", "active-warm", "active", "shared", "cached", "dim")
        looks = [(glyphs().free, "free")] + [(DIGITS[i], shades[i]) for i in range(len(AGES) + 1)]
        words = ("changed <1 s ago", "<5 s", "<15 s", "<1 min", "<5 min", "longer ago")
        return _Layer(codes, looks, [*(_entry(DIGITS[i], shades[i], word) for i, word in enumerate(words)), _free()])

    def _by_refs(self, view: View) -> _Layer:
        shown = view.shown
        holders = shown.holders
        g = glyphs()
        codes = np.where(holders > 0, np.minimum(holders, 10) + 1, np.where(shown.node_of > 0, 1, 0))
        looks = [(g.free, "free"), (g.cached, "cached"), ("1", "active")]
        looks += [(DIGITS[i], "shared-glow") for i in range(2, 10)] + [("+", "shared-glow")]
        legend = [
            _entry("1", "active", "held by one request"), _entry("2-9", "shared-glow", "by 2 to 9"),
            _entry("+", "shared-glow", "by ten or more"), _entry(g.cached, "cached", "by none: cached"), _free(),
        ]  # fmt: skip
        return _Layer(codes, looks, legend)

    # ---- selection and zoom

    def cursor_cell(self, view: View) -> int | None:
        """Returns the cell of the selected block, or None."""
        block = selected(view, "block")
        if block is None:
            return None
        cell = (block - self.grid.first) // self.grid.k
        return cell if 0 <= cell < self.grid.cells else None

    def block_at(self, column: int, row: int) -> int | None:
        """Returns the first block of the cell at these coordinates of the map, or None."""
        g = self.grid
        if self._spread():
            row //= 2
        x = column // (g.cell + g.gap)
        cell = row * g.per_row + x
        return g.first + cell * g.k if 0 <= x < g.per_row and 0 <= cell < g.cells else None

    def _spread(self) -> bool:
        """Returns True if there is room for blank lines between the rows of cells."""
        g = self.grid
        return g.gap > 0 and 2 * -(-g.cells // g.per_row) - 1 <= g.rows

    def clicked(self, view: View, column: int, row: int) -> None:
        block = self.block_at(column, row - self._head_rows())
        if block is not None:
            view.select("block", block)

    def _head_rows(self) -> int:
        body = self.size.height - (0 if self.frame == "none" else 2)
        return body - self.grid.rows

    def action_move(self, dx: int, dy: int) -> None:
        view, g = self.view, self.grid
        if self.cursor_cell(view) is None:
            cell = 0
            if view.links.blocks:  # start at the blocks of the selection
                cell = max(0, min(g.cells - 1, (min(view.links.blocks) - g.first) // g.k))
            block = g.first + cell * g.k
        else:
            block = selected(view, "block") + (dx + dy * g.per_row) * g.k
        block = max(1, min(view.shown.total, block))
        if self.zoomed_at is not None and not g.first <= block < g.first + g.blocks:
            self.zoomed_at = max(1, self.zoomed_at + (dx or dy * g.per_row))
        view.select("block", block)
        self.repaint()

    def action_open(self) -> None:
        block = selected(self.view, "block")
        if self.grid.k > 1:
            start = block or self.grid.first
            room = self.grid.per_row * self.grid.rows
            self.zoomed_at = max(1, start - room // 2)
            self.view.select("block", start)
            self.repaint()
        elif block is not None:
            self.post_message(Opened("block", block))

    def action_unzoom(self) -> None:
        self.zoomed_at = None
        self.repaint()

    def action_colour(self) -> None:
        modes = list(MODES)
        self.mode = modes[(modes.index(self.mode) + 1) % len(modes)]
        self.repaint()


def _runs(cells: np.ndarray, looks: list[tuple[str, str]], g: Grid, width: int, first: int) -> Runs:
    """Returns one line of cells, of the blocks from `first` on; equal neighbours become one run.

    The value of a cell is code*8 + glow*2 + marked. A glow of 3 marks the cursor, or the block that is read.
    A negative value ends the line.
    """
    runs: list[Run] = []
    ends = [*(np.flatnonzero(cells[1:] != cells[:-1]) + 1).tolist(), len(cells)]
    start = used = 0
    for end in ends:
        value = int(cells[start])
        if value < 0:
            break
        glyph, style = looks[value >> 3]
        glow = (value >> 1) & 3
        if glow == 3:
            style = "on-fill on accent"
        elif value & 1:
            style = "accent on select"
        elif glow:
            style += "-glow" if glow == 2 else "-warm"
        if g.gap:
            # A digit stands once in a wide cell: "33" would read as thirty-three.
            cell = glyph.ljust(g.cell) if glyph.isdigit() else glyph * g.cell
            for at in range(start, end):
                if g.digits:
                    cell = f"{glyph}{first + at}".ljust(g.cell)
                runs += [(cell, style), (" " * g.gap, "ink")]
        else:
            runs.append((glyph * (end - start), style))
        used += (end - start) * (g.cell + g.gap)
        start = end
    if used > width:  # the gap after the last cell does not fit
        runs.pop()
        used -= g.gap
    if used < width:
        runs.append((" " * (width - used), "ink"))
    return Line(runs)


def _ruler(blocks: int, width: int) -> Row:
    """Returns the numbers of the first block, and of each eighth after it, above cells that are one cell wide."""
    row = Row()
    for number in range(1, blocks + 1, 8):
        if row.width < number and number - 1 + len(str(number)) <= width:
            row.to(number - 1).add(str(number), "dim")
    return row


def _letter(name: str, index: int) -> str:
    """Returns one character for an owner: for the number at the start of its name, else for its index."""
    lead = name.split(" ")[0]
    number = int(lead) if lead.isdigit() else index + 10
    return "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"[number % 62]


def _entry(glyph: str, style: str, word: str) -> list[Run]:
    """Returns one entry of a legend."""
    return [(glyph, style), (f" {word}", "dim")]


def _free() -> list[Run]:
    return _entry(glyphs().free, "free", "free")


def _lay_out(entries: list[list[Run]], width: int, frame: int) -> tuple[list[Run], list[Run]]:
    """Returns a legend in two parts: (for a row above the map, for the frame). The frame has room for `frame` cells.

    If all entries fit into the frame, the row is empty. Otherwise the row takes as many entries as fit, and the frame
    takes the others. "+n more" counts the entries left out.
    """

    def taken(some: list[list[Run]], room: int) -> tuple[list[Run], list[list[Run]]]:
        runs: list[Run] = []
        for i, entry in enumerate(some):
            longer = [*runs, *([("  ", "ink")] if runs else []), *entry]
            if runs_width(longer) > room:
                return runs, some[i:]
            runs = longer
        return runs, []

    in_frame, rest = taken(entries, frame)
    if not rest:
        return [], in_frame
    above, rest = taken(entries, width)
    below, left = taken(rest, frame)
    if left:
        if frame:
            below, left = taken(rest, frame - 10)
            below = [*below, (f"{'  ' if below else ''}+{len(left)} more", "dim")]
        else:
            above, left = taken(entries, width - 10)
            above = [*above, (f"  +{len(left)} more", "dim")]
    return above, below
