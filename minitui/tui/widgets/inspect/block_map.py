"""Block map: how full is the pool, which requests hold the blocks, and which blocks have just changed?

The bar at the top shows the pool exactly, and the row below it the waste. The map has one cell per block, in the order
of the block numbers. If there are more blocks than cells, two half blocks share a cell; if there are still more, each
half shows the most frequent state of k blocks, and the title gives k; zoomed in, the map has pages. Changed cells are
highlighted. There are four colourings: by state, owner, age, or reference count; each has its own glyphs.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from textual.binding import Binding

from minitui.tui.glyphs import ASCII, glyphs
from minitui.tui.theme import LIT
from minitui.tui.widgets.base import LinePanel, Opened, Picture, Thing, selected
from minitui.tui.widgets.chat import occupancy
from minitui.tui.widgets.inspect.block_colours import COLOURINGS, SIGNED, Layer, lay_out, with_filling
from minitui.tui.widgets.rows import Line, Row, Run, Runs, runs_width
from minitui.viewmodel.board import KeyRead
from minitui.viewmodel.state.annotated_state import AnnotatedState
from minitui.viewmodel.view import View

CELL_SHAPES = ((6, 2), (2, 2), (2, 1), (1, 1), (1, 0))  # (width of a cell, gap after it), the widest first
WIDE = 6  # cells: used only with blank lines between the rows
MIN_WIDTH_SHARE = 0.75  # a shape is used if rows of 8, 16, 24 … cells take at least this share of the width
FEWEST_SHOWN = 64  # blocks


@dataclass(frozen=True, slots=True)
class Grid:
    """The layout of `blocks` blocks in cells: cell i shows the blocks from first + i*k to first + (i+1)*k - 1."""

    first: int
    blocks: int
    k: int  # blocks per cell
    cell: int  # width of a cell
    gap: int  # width of the gap between two cells
    per_row: int  # cells in a row
    height: int  # available lines
    digits: int = 0  # of the block's number in a cell; 0: cells have no numbers
    halves: int = 1  # rows of cells in a line: 2 if the cells are half blocks

    @property
    def cells(self) -> int:
        return -(-self.blocks // self.k)

    @property
    def rows(self) -> int:
        """The number of rows of cells."""
        return -(-self.cells // self.per_row)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Two grids of one shape have cells of one size."""
        return self.k, self.cell, self.gap * self.halves

    @property
    def spread(self) -> bool:
        """True if there is room for blank lines between the rows of cells."""
        return self.gap > 0 and 2 * self.rows - 1 <= self.height

    def cell_of(self, block: int) -> int | None:
        """Returns the cell that shows a block, or None."""
        cell = (block - self.first) // self.k
        return cell if 0 <= cell < self.cells else None

    def block_at(self, column: int, line: int) -> int | None:
        """Returns the first block of the cell at these coordinates of the map, or None."""
        x = column // (self.cell + self.gap)
        cell = line * self.halves // (2 if self.spread else 1) * self.per_row + x
        return self.first + cell * self.k if 0 <= x < self.per_row and 0 <= cell < self.cells else None


def grid(
    blocks: int, width: int, height: int, first: int = 1, one_each: bool = False, numbered: bool = False,
    halves: int = 1,
) -> Grid:
    """Returns the grid with the widest cells that fit, for `blocks` blocks numbered from `first`. `one_each`: k is 1,
    and the grid has as many of the blocks as fit. `numbered`: each cell has the number of its block, if these cells
    fit. `halves` 2: if a cell for each block does not fit, two cells share a line."""
    width, height = max(1, width), max(1, height)
    if numbered:
        digits = len(str(first + blocks - 1))
        per_row = _in_eights((width + 1) // (digits + 2))
        if per_row and -(-blocks // per_row) <= height:
            return Grid(first, blocks, 1, 1 + digits, 1, per_row, height, digits)
    if one_each:
        blocks = min(blocks, width * height * halves)
    for min_share in (MIN_WIDTH_SHARE, 0.0):
        for cell, gap in CELL_SHAPES:
            per_row = _in_eights((width + gap) // (cell + gap))
            fits = per_row > 0 and -(-blocks // per_row) * (1 + (cell >= WIDE)) <= height + (cell >= WIDE)
            if fits and per_row * (cell + gap) >= min_share * width:
                return Grid(first, blocks, 1, cell, gap, per_row, height)
    k = max(1, -(-blocks // (width * height * halves)))
    return Grid(first, blocks, k, 1, 0, width, height, halves=halves)


def blocks_to_show(total: int, last_used: int, room: int) -> int:
    """Returns how many blocks to show of a pool of `total` blocks in `room` cells. If the pool has more blocks than
    cells, this is the smallest of 64, 128, 256, … that is at least 1.1 times `last_used`, the number of the last used
    block: the other blocks are free. If this number is more than `room`, each cell shows the fewest blocks with which
    these fit."""
    room = max(1, room)
    if total <= room:
        return total
    shown = FEWEST_SHOWN
    while shown < last_used * 1.1:
        shown *= 2
    return shown if shown <= room else min(total, room * math.ceil(last_used * 1.1 / room))


def _in_eights(cells: int) -> int:
    """Returns the largest multiple of 8 that is at most `cells`; `cells` itself if there are fewer than 8."""
    return cells - cells % 8 if cells > 8 else cells


def plain_fills() -> bool:
    """Returns True if colours alone may tell the states of blocks."""
    return glyphs() is not ASCII and "NO_COLOR" not in os.environ


PAIR = 1 << 20  # more than the greatest value of a cell
GLOW_SHARE = 0.25  # a cell is highlighted if at least this share of its blocks has changed


class BlockMap(LinePanel):
    """Arrows move over the cells, Enter zooms to one block per cell and then opens a block, c changes the colouring."""

    TITLE = "KV blocks"
    NEEDS_STATE = True
    NUMBERS = False  # each cell has the number of its block, if there is room
    BINDINGS: ClassVar = [
        Binding("left", "move(-1, 0)", "block before", show=False, id="map.left"),
        Binding("right", "move(1, 0)", "block after", show=False, id="map.right"),
        Binding("up", "move(0, -1)", "row above", show=False, id="map.up"),
        Binding("down", "move(0, 1)", "row below", show=False, id="map.down"),
        Binding("pageup", "page(-1)", "blocks before", show=False, id="map.pageup"),
        Binding("pagedown", "page(1)", "blocks after", show=False, id="map.pagedown"),
        Binding("enter", "open", "zoom in, then details", show=False, id="map.open"),
        Binding("backspace", "unzoom", "zoom out", show=False, id="map.unzoom"),
        Binding("c", "colour", "colours", show=False, id="map.colour", tooltip="by state, owner, age or holders"),
    ]

    mode = "state"
    zoomed_at: int | None = None  # the first block shown when zoomed in; None: not zoomed
    grid: Grid
    _drawn_for: tuple[Grid, int, list[tuple[str, str]]] | None = None  # grid, width, looks of these:
    _cells: np.ndarray
    _cell_rows: list[Runs]
    _pairs: dict[int, Run]  # the half cells

    # ---- the picture

    def picture(self, view: View, width: int, height: int) -> Picture:
        shown = view.moment.shown
        pool = occupancy.lead(shown)
        head = [pool.extend(occupancy.bar(shown, max(0, width - pool.width))).done(width)]
        if rows := occupancy.strip_rows(shown.state, width):
            head = rows if len(rows) <= height // 3 else [*head, occupancy.side_strips(shown.state, width)]
        layer = COLOURINGS[self.mode](view)
        above, legend = lay_out(layer.legend, width, 0 if self.frame == "none" else width - 4)
        if above:
            head.append(Row().extend(above).done(width))
        numbered = self._grid(view, width, height - len(head)).digits
        if height > len(head) + 1 and self._grid(view, width, height - len(head) - 1).digits == numbered:
            ruled = self.NUMBERS and not numbered
            head.append((_ruler(view.moment.shown.total, width) if ruled else occupancy.waste(view, width)).done(width))
        map_height = height - len(head)
        if map_height < 1:
            return Picture(head[:height], legend=[])
        self.grid = self._grid(view, width, map_height)
        spaced = self._grid(view, width, map_height - 1)
        if map_height > 2 and spaced.shape == self.grid.shape:
            head.append(Row().done(width))  # a blank line, only if the cells keep their size
            self.grid = spaced
        if shows_filling := self.mode == "state" and self.grid.k == 1:
            layer.codes = with_filling(view)
        rows = self._map_rows(view, layer, width)
        if shows_filling:
            filling: list[Run] = [("  ", "ink")] * bool(legend) + [(glyphs().filling, "active"), (" filling", "dim")]
            if runs_width([*legend, *filling]) <= width - 4 or len(head) + len(rows) < height - 1:
                legend = [*legend, *filling]
        reused: list[Run] = [(" ", f"on-fill on {LIT}"), (" just reused", "dim"), ("  ", "ink")]
        if view.lit and legend and runs_width([*reused, *legend]) <= width - 4:
            legend = [*reused, *legend]
        note: list[Run] = [("colour by ", "dim"), (self.mode, "ink"), (" · c", "dim")]
        if self.zoomed_at is None and not self._shows_all(view):
            note = [*self.own_key("PgDn: each block · ", first=True), *note]
        if self.NUMBERS:
            note = []  # in a lesson, c is a prediction
        half = "half " * (self.grid.halves > 1)
        brief = f"KV blocks · {self.grid.k} a {half}cell" if self.grid.k > 1 else ""
        return Picture([*head, *rows], title=self._title(shown, width), brief=brief, note=note, legend=legend)

    def _title(self, shown: AnnotatedState, width: int) -> str:
        g = self.grid
        if g.k > 1:
            of = f" of the first {g.blocks:,}" if g.blocks < shown.total else ""
            return f"KV blocks · 1 {'half ' if g.halves > 1 else ''}cell = {g.k}{of} blocks"
        if self.zoomed_at is not None:
            last = g.first + g.blocks - 1
            keys = " · PgUp" * (g.first > 1) + " · PgDn" * (last < shown.total)
            return f"KV blocks · {g.first:,}–{last:,} of {shown.total:,}{keys}"
        if g.blocks < shown.total:
            others = ", the others are free" if width >= 66 else ""
            return f"KV blocks · first {g.blocks:,} of {shown.total:,}{others}"
        return f"KV blocks · {shown.total:,} blocks of {shown.state.block_size}"

    def _grid(self, view: View, width: int, height: int) -> Grid:
        # Half blocks have no signs inside, only fills.
        halves = 2 if plain_fills() else 1
        total, room = view.moment.shown.total, width * height * halves
        if self.zoomed_at is None:
            in_use = np.flatnonzero(view.moment.shown.codes)
            last_used = int(in_use[-1]) if len(in_use) else 0
            return grid(blocks_to_show(total, last_used, room), width, height, numbered=self.NUMBERS, halves=halves)
        first = max(1, min(self.zoomed_at, total - room + 1))
        return grid(total - first + 1, width, height, first=first, one_each=True, halves=halves)

    def _map_rows(self, view: View, layer: Layer, width: int) -> list[Runs]:
        """Returns the lines of the map; computes only those that have changed."""
        g = self.grid
        lines = -(-g.rows // g.halves)
        cells = np.full((lines, g.halves * g.per_row), -1, np.int64)
        cells.reshape(-1)[: g.cells] = self._values(view, layer)
        drawn_for = (g, width, layer.looks)
        if self._drawn_for == drawn_for:
            stale = (cells != self._cells).any(1)
        else:
            self._pairs = {}
            stale = np.ones(lines, bool)
            self._cell_rows = [()] * lines
        for y in np.flatnonzero(stale):
            if g.halves > 1:
                self._cell_rows[y] = _half_runs(cells[y].reshape(2, g.per_row), layer.looks, width, self._pairs)
                continue
            self._cell_rows[y] = _runs(cells[y], layer.looks, g, width, g.first + int(y) * g.per_row)
        self._cells, self._drawn_for = cells, drawn_for
        if not g.spread:
            return list(self._cell_rows)
        blank: Runs = ((" " * width, "ink"),)
        return [row for cell_row in self._cell_rows for row in (cell_row, blank)][:-1]

    def _values(self, view: View, layer: Layer) -> np.ndarray:
        """Returns the value of each cell, as `_runs` takes it."""
        g = self.grid
        n = len(layer.looks)
        span = slice(g.first, g.first + g.blocks)
        codes = layer.codes[span].astype(np.int64)
        glow = view.moment.glow()[span].astype(np.int64) if layer.glows else np.zeros(g.blocks, np.int64)
        marked_blocks = np.zeros(view.moment.shown.state.num_blocks, bool)
        if view.links.blocks:
            marked_blocks[list(view.links.blocks)] = True
        if isinstance(read := view.board, KeyRead):
            marked_blocks[list(read.table[: read.logical + 1])] = True
        marked = marked_blocks[span]
        if g.k > 1:
            at = np.arange(g.blocks) // g.k
            codes = np.bincount(at * n + codes, minlength=g.cells * n).reshape(g.cells, n).argmax(1)
            in_cell = np.bincount(at)
            warm, bright = (np.bincount(at, glow >= least) / in_cell >= GLOW_SHARE for least in (1, 2))
            glow = warm.astype(np.int64) + bright
            marked = np.bincount(at, marked) > 0
        lit = np.zeros(view.moment.shown.state.num_blocks, bool)
        lit[list(view.lit)] = True
        lit = lit[span]
        if g.k > 1:
            lit = np.bincount(at, lit) > 0
        values = codes * 16 + lit * 8 + glow * 2 + marked
        cursor = self.cursor_cell(view)
        if cursor is not None and self.has_focus:
            values[cursor] = codes[cursor] * 16 + 6
        if isinstance(read, KeyRead) and (cell := g.cell_of(read.block)) is not None:
            values[cell] = codes[cell] * 16 + 6
        return values

    # ---- selection and zoom

    def cursor_cell(self, view: View) -> int | None:
        """Returns the cell of the selected block, or None."""
        block = selected(view, "block")
        return None if block is None else self.grid.cell_of(block)

    def pointed(self, view: View, column: int, row: int) -> Thing | None:
        body = self.size.height - (0 if self.frame == "none" else 2)
        block = self.grid.block_at(column, row - (body - self.grid.height))
        return None if block is None else ("block", block)

    def action_move(self, dx: int, dy: int) -> None:
        view, g = self.view, self.grid
        if self.cursor_cell(view) is None:
            cell = 0
            if view.links.blocks:  # start at the blocks of the selection
                cell = max(0, min(g.cells - 1, (min(view.links.blocks) - g.first) // g.k))
            block = g.first + cell * g.k
        else:
            block = selected(view, "block") + (dx + dy * g.per_row) * g.k
        block = max(1, min(view.moment.shown.total, block))
        if self.zoomed_at is not None and not g.first <= block < g.first + g.blocks:
            self.zoomed_at = max(1, self.zoomed_at + (dx or dy * g.per_row))
        view.select("block", block)

    def action_open(self) -> None:
        block = selected(self.view, "block")
        if self.grid.k > 1:
            start = block or self.grid.first
            room = self.grid.per_row * self.grid.height * self.grid.halves
            self.zoomed_at = max(1, start - room // 2)
            self.view.select("block", start)
        elif block is not None:
            self.post_message(Opened("block", block))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Allow to zoom out only when zoomed in, and to page where not all blocks are in sight. In a lecture, the page
        keys are those of a presenter's remote."""
        if not super().check_action(action, parameters):
            return False
        if action == "page":
            return not self._shows_all(self.view) and self.app.current_mode != "lecture"
        return action != "unzoom" or self.zoomed_at is not None

    def _shows_all(self, view: View) -> bool:
        """Returns True if each block has a cell in the picture."""
        return self.grid.k == 1 and self.grid.blocks == view.moment.shown.total

    def action_page(self, by: int) -> None:
        self.zoomed_at = 1 if self.zoomed_at is None else max(1, self.grid.first + by * self.grid.blocks)

    def action_unzoom(self) -> None:
        self.zoomed_at = None
        self.repaint()

    def action_colour(self) -> None:
        modes = list(COLOURINGS)
        self.mode = modes[(modes.index(self.mode) + 1) % len(modes)]
        self.repaint()


def _runs(cells: np.ndarray, looks: list[tuple[str, str]], g: Grid, width: int, first: int) -> Runs:
    """Returns one line of cells, of the blocks from `first` on; equal neighbours become one run. The value of a cell is
    code*16 + lit*8 + glow*2 + marked. A glow of 3 marks the cursor, or the block that is read. Lit blocks have just
    been reused. A negative value ends the line."""
    runs: list[Run] = []
    ends = [*(np.flatnonzero(cells[1:] != cells[:-1]) + 1).tolist(), len(cells)]
    start = used = 0
    for end in ends:
        value = int(cells[start])
        if value < 0:
            break
        glyph, style = looks[value >> 4]
        glow = (value >> 1) & 3
        solid = style == "active"  # the glyph fills the cell
        if glow != 3 and style.startswith("on-fill on owner-") and plain_fills():
            glyph = " "  # the letter of most owners is only under the cursor
        if glow == 3:
            glyph = glyphs().finished if solid else glyph
            style, solid = f"{style.split()[-1]} on ink", False
        elif value & 8:
            style = LIT if solid else f"bold on-fill on {LIT}"
        elif value & 1:
            style = f"underline {style}-lit"
        elif glow:
            style += "-glow" if glow == 2 else "-warm"
        if g.gap:
            cell = glyph * g.cell if solid else glyph.ljust(g.cell)
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


def _half_runs(cells: np.ndarray, looks: list[tuple[str, str]], width: int, pairs: dict[int, Run]) -> Runs:
    """Returns one line of two rows of cells [2, cells in a row], with values as for `_runs`. `pairs`: keeps the glyph
    and style of each pair of values, for these looks."""
    runs: list[Run] = []
    both = (cells[0] + 1) * PAIR + cells[1] + 1
    at = np.flatnonzero(both[1:] != both[:-1]) + 1
    ends = [*at.tolist(), len(both)]
    start = 0
    for end, pair in zip(ends, both[[0, *ends[:-1]]].tolist(), strict=True):
        run = pairs.get(pair)
        if run is None:
            run = pairs[pair] = _half_cell(pair // PAIR - 1, pair % PAIR - 1, looks)
        runs.append((run[0] * (end - start), run[1]))
        start = end
    if start < width:
        runs.append((" " * (width - start), "ink"))
    return Line(runs)


def _half_cell(above: int, below: int, looks: list[tuple[str, str]]) -> Run:
    """Returns the glyph and the style of a cell with two values."""
    upper, lower = _fill(above, looks), _fill(below, looks)
    if not upper and not lower:
        return " " if above < 0 else glyphs().free, "free"
    if upper == lower:
        return glyphs().busy, upper
    if not upper:
        return glyphs().filling, lower
    return glyphs().kernels, f"{upper} on {lower}" if lower else upper


def _fill(value: int, looks: list[tuple[str, str]]) -> str:
    """Returns the colour of a half block; empty: the ground, for a free block and where no block is."""
    if value < 0:
        return ""
    style, glow = looks[value >> 4][1], (value >> 1) & 3
    fill = "owner-none" if style.startswith(f"{SIGNED} on owner-") else style.split()[-1]  # half cells have no letters
    if glow == 3:
        return "ink"
    if value & 8:
        return LIT
    if value & 1:
        return f"{fill}-lit"
    if fill == "free":
        return "free-glow" if glow == 2 else ""
    return fill + ("", "-warm", "-glow")[glow]


def _ruler(blocks: int, width: int) -> Row:
    """Returns the numbers of the first block, and of each eighth after it, above cells that are one cell wide."""
    row = Row()
    for number in range(1, blocks + 1, 8):
        if row.width < number and number - 1 + len(str(number)) <= width:
            row.to(number - 1).add(str(number), "dim")
    return row
