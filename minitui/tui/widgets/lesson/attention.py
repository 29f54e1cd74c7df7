"""Attention: which keys does each query of a step see, and in which slot is the key that is read now?"""

from __future__ import annotations

from minitui.text import count
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row, Runs, fitting, legend, wrapped
from minitui.viewmodel.board import KeyRead
from minitui.viewmodel.view import View

LOOKED_BACK = 512  # steps
AXIS_CELLS = 16  # a narrower axis has only numbers


class Attention(LinePanel):
    """Shows the queries of a prompt chunk, one below the other, and the keys that they see. The chunk is the first of
    the newest step that has one."""

    TITLE = "Who sees whom"

    def picture(self, view: View, width: int, height: int) -> Picture:
        row = view.shown_step()
        last = row.step if row is not None else view.moment.horizon
        steps = (step for step in range(last, last - LOOKED_BACK, -1) if step in view.history.steps)
        step = next((step for step in steps if view.history.steps.chunks(step)), None)
        if step is None:
            return Picture(wrapped("no step with a prompt yet", "dim", width))
        request, start, queries, _ = view.history.steps.chunks(step)[0]
        label = max(len("query"), len(str(start + queries - 1))) + 1
        keys = start + queries
        rows, per_row, per_cell = triangle(start, queries, max(1, width - label), max(1, height - 2))
        body = [Row("query".ljust(label), "dim").extend(_axis(start, keys, per_cell, width - label)).done(width)]
        for i, marks in enumerate(rows):
            line = Row(str(start + i * per_row).rjust(label - 1), "dim").add(" ")
            body.append(line.extend(marks).done(width))
        g = glyphs()
        title = f"Who sees whom {g.middot} step {step} {g.middot} r{request}: {_queries(queries)}, {count(keys, 'key')}"
        scale = f"1 cell = {count(per_cell, 'key')} {g.times} {_queries(per_row)}"
        pairs = per_cell * per_row
        half = f", filled if {-(-pairs // 2)} of {pairs} are seen" if pairs > 1 else ""
        body.append(Row(fitting(width, scale + half, scale), "dim").done(width))
        key = legend(
            (g.cached, "hit", "cached key"), (g.active, "prefill", "key of this step"), (g.free, "faint", "not seen")
        )
        return Picture(body[:height], title, legend=key)


def _axis(start: int, keys: int, per_cell: int, room: int) -> Runs:
    """Returns the positions of the first key, of the first key of this step, and of the last key, each above its column
    or, without room, to the left of it."""
    columns = -(-keys // per_cell)
    row = Row("key 0" if columns > AXIS_CELLS else "0", "dim")
    last = str(keys - 1)
    end = min(columns - 1, room - len(last))
    if start and row.width < (at := start // per_cell) and at + len(str(start)) < end:
        row.to(at).add(str(start), "dim")
    if row.width < end:
        row.to(end).add(last, "dim")
    return tuple(row.runs)


def triangle(start: int, queries: int, width: int, height: int) -> tuple[list[list[tuple[str, str]]], int, int]:
    """Returns (rows of cells, queries in a row, keys in a cell) of a chunk of `queries` tokens from position `start`. A
    cell is marked if at least half of its pairs of query and key are seen."""
    keys = start + queries
    per_cell, per_row = -(-keys // width), -(-queries // height)
    g = glyphs()
    rows = []
    for first in range(0, queries, per_row):
        last = min(queries, first + per_row) - 1
        row: list[tuple[str, str]] = []
        for at in range(0, keys, per_cell):
            end = min(keys, at + per_cell)
            pairs = sum(min(end, max(at, start + query + 1)) - at for query in range(first, last + 1))
            seen = 2 * pairs >= (end - at) * (last - first + 1)
            mark = (g.free, "faint") if not seen else (g.cached, "hit") if end <= start else (g.active, "prefill")
            row.append(mark)
        rows.append(row)
    return rows, per_row, per_cell


def _queries(n: int) -> str:
    return f"{n:,} {'query' if n == 1 else 'queries'}"


class KeySlot(LinePanel, can_focus=False):
    """Shows how a query finds a key: position, entry of the block table, slot."""

    TITLE = "From position to slot"

    def picture(self, view: View, width: int, height: int) -> Picture:
        read = view.board
        if not isinstance(read, KeyRead):
            return Picture(wrapped("no key has been read yet: the experiment has not run", "dim", width))
        size, offset = read.block_size, read.key % read.block_size
        sums = Row(f"{read.key} // {size} = {read.logical}   ", "dim").add(
            f"table[{read.logical}] = {read.block}", "bold ink"
        )
        sums.add(f"   {read.key} % {size} = {offset}", "dim")
        slot = Row(f"slot = {read.block} * {size} + {offset} = ", "ink").add(str(read.slot), "bold accent")
        rows = [
            Row(f"query {read.query} reads the key of token {read.key}", "bold ink").done(width),
            sums.done(width), slot.done(width), _table(read, width),
        ]
        return Picture(rows[:height], f"From position to slot {glyphs().middot} r{read.request}")


def _table(read: KeyRead, width: int) -> Runs:
    """Returns the block table in one line; the entry that is read, and those before it, are bright."""
    line = Row("table ", "dim")
    for i, block in enumerate(read.table):
        style = (
            "on-fill on accent"
            if i == read.logical
            else "accent on select"
            if i < read.logical
            else "ink on active-chip"
        )
        line.add(f" {block} ", style).add(" ")
    return line.done(width)
