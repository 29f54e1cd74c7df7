"""How full is the pool? One exact bar, and the counts that sum to the allocator's."""

from __future__ import annotations

from engine.trace.state import ACTIVE, CACHED, FREE, SHARED
from minitui.tui.theme import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Run
from minitui.viewmodel.annotated_state import Board
from minitui.viewmodel.model import View

ORDER = (ACTIVE, SHARED, CACHED, FREE)
STYLES = {ACTIVE: "active", SHARED: "shared", CACHED: "cached", FREE: "free"}
WORDS = {ACTIVE: "active", SHARED: "shared", CACHED: "cached", FREE: "free"}


def glyph(code: int) -> str:
    """The glyph of a block's state."""
    g = glyphs()
    return {ACTIVE: g.active, SHARED: g.shared, CACHED: g.cached, FREE: g.free}[code]


def shares(counts: tuple[int, int, int, int], width: int) -> dict[int, int]:
    """Cells for each state: they sum to `width`, in proportion, and what exists gets at least one."""
    total = sum(counts)
    if total == 0 or width < 4:
        return {FREE: width, ACTIVE: 0, SHARED: 0, CACHED: 0}
    exact = {code: counts[code] * width / total for code in ORDER}
    out = {code: max(int(exact[code]), 1 if counts[code] else 0) for code in ORDER}
    by_rest = sorted(ORDER, key=lambda code: exact[code] - out[code], reverse=True)
    i = 0
    while sum(out.values()) < width:
        out[by_rest[i % 4]] += 1
        i += 1
    while sum(out.values()) > width:
        out[max(out, key=lambda code: out[code])] -= 1
    return out


def bar(board: Board, width: int) -> list[Run]:
    """The stacked bar: active, shared, cached, free."""
    cells = shares(board.counts, width)
    return [(glyph(code) * cells[code], STYLES[code]) for code in ORDER if cells[code]]


def entries(board: Board) -> list[list[Run]]:
    """Glyph, word and count of each state."""
    return [
        [(glyph(code), STYLES[code]), (f" {WORDS[code]} ", "dim"), (f"{board.counts[code]:,}", "ink")] for code in ORDER
    ]


def legend(board: Board) -> list[Run]:
    """All of them in one line."""
    return [run for entry in entries(board) for run in (*entry, ("  ", "ink"))]


def lead(board: Board) -> Row:
    """What stands before the bar: how much of the pool is not free."""
    share = 1 - board.counts[FREE] / max(1, board.total)
    percent = f"{100 * share:.0f}" if not 0 < share < 0.01 else "<1"
    return Row("KV pool ", "dim").add(f"{percent} % ", "bold ink")


LEAST_BAR = 8  # cells


class Occupancy(LinePanel, can_focus=False):
    """The whole in one line, for small screens."""

    FRAME = "none"
    DEFAULT_CSS = "Occupancy { height: 1; }"

    def picture(self, view: View, width: int, height: int) -> Picture:
        board = view.board
        if not view.loaded:
            return Picture([Row("KV pool: the engine is being started", "dim").done(width)])
        words = Row(" ").extend(legend(board)).add(f"of {board.total:,}", "dim")
        head = lead(board)
        room = width - head.width - words.width
        if room < LEAST_BAR:  # how many there are in all can be counted; what the signs mean cannot
            words = Row(" ").extend(legend(board))
            room = width - head.width - words.width
        if room < LEAST_BAR:
            words = Row(" ")
            for code in ORDER:
                words.add(glyph(code), STYLES[code]).add(f" {board.counts[code]:,} ")
            room = max(4, width - head.width - words.width)
        return Picture([head.extend(bar(board, room)).extend(words.runs).done(width)])
