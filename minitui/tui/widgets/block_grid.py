"""The layout of the block map: how many blocks a cell shows, and where each cell is."""

from __future__ import annotations

from dataclasses import dataclass

CELL_SHAPES = ((2, 2), (2, 1), (1, 1), (1, 0))  # (width of a cell, gap after it), the widest first
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
        return self.k, self.cell, self.gap

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
        cell = line // (2 if self.spread else 1) * self.per_row + x
        return self.first + cell * self.k if 0 <= x < self.per_row and 0 <= cell < self.cells else None


def grid(blocks: int, width: int, height: int, first: int = 1, one_each: bool = False, numbered: bool = False) -> Grid:
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
    return Grid(first, blocks, max(1, -(-blocks // (width * height))), 1, 0, width, height)


def blocks_to_show(total: int, last_used: int, room: int) -> int:
    """Returns how many blocks to show of a pool of `total` blocks in `room` cells.

    If the pool has more blocks than cells, this is the smallest of 64, 128, 256, … that is at least 1.1 times
    `last_used`, the number of the last used block: the other blocks are free. If this number is more than `room`, all
    blocks are shown.
    """
    if total <= room:
        return total
    shown = FEWEST_SHOWN
    while shown < last_used * 1.1:
        shown *= 2
    return shown if shown <= room else total


def _in_eights(cells: int) -> int:
    """Returns the largest multiple of 8 that is at most `cells`; `cells` itself if there are fewer than 8."""
    return cells - cells % 8 if cells > 8 else cells
