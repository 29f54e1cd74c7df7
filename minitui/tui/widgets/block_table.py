"""Block table: where are this request's tokens? Logical blocks 0 … n, and the physical block of each.

This shows paging: the request sees consecutive positions; the pool provides any free blocks.
"""

from __future__ import annotations

import textwrap
from typing import ClassVar

from textual.binding import Binding

from minitui.text import count
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.base import LinePanel, Opened, Picture, paragraphs
from minitui.tui.widgets.rows import Row, Run, Runs, cells, clip
from minitui.viewmodel.model import View

CHIP = 6  # cells per chip: five for the block number, one space; more for longer numbers
TWO_ROWS_FROM = 6  # panel height from which the heading may take two rows
NAME = 12  # least cells for a chat's name


class BlockTable(LinePanel):
    """The table of the selected request, or of the newest running one. Left and right move over its blocks."""

    TITLE = "Block table"
    help_text = paragraphs("""\
Paging. A request numbers its tokens 0, 1, 2, …; tokens 0 to 15 are its logical block 0, and so on. The table shows,
under each logical block, the physical block that stores it. Any free block will do, so memory is never fragmented. ×4:
four requests have this block in their tables and read it. Only the last block is written to.""")
    BINDINGS: ClassVar = [
        Binding("left", "move(-1)", "block before", show=False, id="table.left"),
        Binding("right", "move(1)", "block after", show=False, id="table.right"),
        Binding("up", "turn(1)", "newer request", show=False, id="table.up"),
        Binding("down", "turn(-1)", "older request", show=False, id="table.down"),
        Binding("enter", "open", "details", show=False, id="table.open"),
    ]

    def picture(self, view: View, width: int, height: int) -> Picture:
        id = view.subject()
        request = view.shown.state.requests.get(id) if id is not None else None
        if request is None:
            return self._nothing(view, id, width, height)
        size = view.shown.state.block_size
        computed = view.shown.state.computed(request)
        lane = view.lanes.lanes.get(request.id)
        shared = sum(view.shown.state.holders[block] > 1 for block in request.table)
        line = Row(f"r{request.id}", "bold accent" if view.selection is not None else "bold ink")
        about = Row(f"  {count(len(request.table), 'block')} for {count(computed, 'token')}", "dim")
        if shared:
            about.add(f", {shared} shared", "dim")
            about.add(" with others" if about.width + 12 <= width else "", "dim")
        if request.state != "running":
            about.add(f"  {request.state}: holds no blocks", "waiting")
        name = view.group_name(request.group) if request.group else ""
        head = _head(line, name, about, width, height)
        title = "Block table · logical " + glyphs().arrow + " physical"
        note: list[Run] = []
        if view.selection is None:
            note = [("newest running request", "dim")] if view.home is None else []
        elif view.selection.kind == "request" and lane is not None:
            note = [("selected", "accent")]
        rows = [*head, *self._chips(view, request.table, computed, size, width, height - len(head))]
        g = glyphs()
        legend: list[Run] = [
            ("number", "ink on shared-chip"), (f" held by {g.times}n  ", "dim"), ("number", "ink on active-chip"),
            (" private  ", "dim"), ("9/16", "ink"), (" tokens in the last block", "dim"),
        ]  # fmt: skip
        return Picture(rows, title=title, note=note, legend=legend)

    def _nothing(self, view: View, id: int | None, width: int, height: int) -> Picture:
        lane = view.lanes.lanes.get(id) if id is not None else None
        last = view.shown.last_tables.get(lane.group) if lane is not None else None
        if lane is None or last is None or last.request != lane.id or not last.table:
            anyone = view.selection is None and view.home is None
            text = "no request has run yet" if anyone else "no request of this chat has run yet"
            if lane is not None:
                text = f"r{lane.id} is waiting: it holds no blocks yet"
                if lane.finish_reason:
                    text = f"r{lane.id} finished ({lane.finish_reason}) and released its blocks"
            return Picture([Row(line, "dim").done(width) for line in textwrap.wrap(text, width)], title="Block table")
        fates = [view.shown.fate(block, last.seq) for block in last.table]
        kept = sum(fate in ("cached", "held") for fate in fates)
        line, name = Row(f"r{lane.id}", "bold ink"), view.group_name(lane.group)
        text = f"  finished: {kept} of {len(fates)} blocks stay in the tree"
        if line.width + cells(name) + 1 + len(text) > width:
            text = f"  {kept} of {len(fates)} blocks cached"
        head = _head(line, name, Row(text, "dim"), width, height)
        size = view.shown.state.block_size
        rows = [*head, *self._chips(view, last.table, last.computed, size, width, height - len(head), fates)]
        legend: list[Run] = [
            ("number", "ink on cached-chip"), (" cached  ", "dim"), ("number", "ink on shared-chip"),
            (" in use  ", "dim"), ("number", "dim"), (" freed", "dim"),
        ]  # fmt: skip
        return Picture(rows, title="Block table · at finish", legend=legend)

    def _chips(
        self, view: View, table: list[int], computed: int, size: int, width: int, height: int,
        fates: list[str] | None = None,
    ) -> list[Runs]:  # fmt: skip
        """Returns lines of chips: in threes (logical number, physical block, holders), in twos (the first logical
        number before the chips), or chips alone, whichever fits. `fates`: the uses of a finished request's blocks."""
        if height < 1:
            return []
        chip = max(CHIP, len(str(view.shown.state.num_blocks - 1)) + 2)
        lead = len(str(len(table) - 1)) + 2  # "12→ "
        across, short = max(1, width // chip), max(1, (width - lead) // chip)
        tall = min(height, 3)
        if -(-len(table) // across) * 3 > height and -(-len(table) // short) * 2 <= height:
            tall = 2
        left = 0 if tall == 3 else lead
        if left:
            across = short
        rows: list[Runs] = []
        selected = view.selection.id if view.selection is not None and view.selection.kind == "block" else 0
        at = table.index(selected) if selected in table else None
        items = _with_ends(len(table), max(1, height // tall) * across, across, at)
        for start in range(0, len(items), across):
            logical, chips, holders = Row(), Row(), Row()
            if left and items[start] >= 0:
                chips.add(f"{items[start]}{glyphs().arrow}".rjust(left - 1), "dim")
            for column, index in enumerate(items[start : start + across]):
                at = left + column * chip
                if index < 0:  # -index blocks are left out here
                    logical.to(at).add(glyphs().dots.rjust(chip - 2), "dim")
                    chips.to(at).add(f"+{-index} ".rjust(chip - 1), "dim")
                    continue
                block = table[index]
                held = view.shown.state.holders[block]
                style = f"ink on {'shared' if held > 1 else 'active'}-chip"
                if fates is not None:
                    held = held if fates[index] == "held" else 0
                    style = {"cached": "ink on cached-chip", "held": "ink on shared-chip"}.get(fates[index], "dim")
                elif view.glow_of(float(view.shown.changed[block])) == 2:
                    style = "bold " + style
                chosen = view.selection is not None and view.selection.kind == "block" and view.selection.id == block
                logical.to(at).add(str(index).rjust(chip - 2), "accent" if chosen else "dim")
                chips.to(at).add(f"{block} ".rjust(chip - 1), "on-fill on accent" if chosen else style)
                filled = min(size, max(0, computed - index * size))
                if filled < size:
                    holders.to(at).add(f"{filled}/{size}".rjust(chip - 2), "ink")
                elif held > (fates is None):
                    holders.to(at).add(f"{glyphs().times}{held}".rjust(chip - 2), "pool")
            if tall == 3:
                rows.append(logical.done(width))
            rows.append(chips.done(width))
            if tall == 3 or (tall == 2 and holders.width):
                rows.append(holders.done(width))
        return rows[:height]

    # ---- moving about

    def action_move(self, by: int) -> None:
        view = self.view
        id = view.subject() if view is not None else None
        request = view.shown.state.requests.get(id) if view is not None and id is not None else None
        if view is None or request is None or not request.table:
            return
        table = request.table
        selection = view.selection
        index = len(table) - 1
        if selection is not None and selection.kind == "block" and selection.id in table:
            index = max(0, min(len(table) - 1, table.index(selection.id) + by))
        view.select("block", table[index])
        self.repaint()

    def action_turn(self, by: int) -> None:
        """Select the next newer or older request."""
        view = self.view
        if view is None:
            return
        ids = sorted(view.shown.state.requests)
        if not ids:
            return
        now = view.subject()
        at = ids.index(now) + by if now in ids else -1
        view.select("request", ids[max(0, min(len(ids) - 1, at))])
        self.repaint()

    def action_open(self) -> None:
        if self.view is None:
            return
        selection = self.view.selection
        if selection is not None and selection.kind == "block":
            self.post_message(Opened("block", selection.id))
        elif (id := self.view.subject()) is not None:
            self.post_message(Opened("request", id))


def _head(line: Row, name: str, about: Row, width: int, height: int) -> list[Runs]:
    """Returns the heading: in one row, or in two if it is too long and the panel has room."""
    whole = cells(name) + 1 if name else 0
    fits = line.width + whole + about.width <= width
    if not fits and height >= TWO_ROWS_FROM:
        return [line.add(f" {clip(name, width - line.width - 1)}").done(width), about.done(width)]
    if name:
        line.add(" " + clip(name, max(NAME, width - line.width - about.width - 1)))
    return [line.extend(about.runs).done(width)]


def _with_ends(n: int, room: int, across: int, at: int | None = None) -> list[int]:
    """Returns which of `n` logical blocks to show in `room` places: all, or the first ones (often shared) and the last
    ones (the next token), and always block `at`. A negative number counts the blocks left out at its place."""
    shown = _both_ends(n, room, across)
    if at is None or at in shown:
        return shown
    ends = [index for index in shown if index > 0 or index == shown[0] == 0]
    head = [index for index in ends if index < at]
    kept = next(
        (blocks for blocks in ([*head, at, n - 1], [at, n - 1], [at]) if len(_with_gaps(blocks, n)) <= room), [at]
    )
    for distance in range(1, n):
        for near in (at + distance, at - distance):
            if 0 <= near < n and near not in kept:
                wider = sorted([*kept, near])
                if len(_with_gaps(wider, n)) > room:
                    return _with_gaps(kept, n) if room >= 3 else [at]
                kept = wider
    return _with_gaps(kept, n)


def _with_gaps(blocks: list[int], n: int) -> list[int]:
    """Returns the blocks with a negative number for each gap: how many blocks it leaves out."""
    items: list[int] = []
    before = -1
    for block in [*blocks, n]:
        if block - before > 1:
            items.append(before + 1 - block)
        items.append(block)
        before = block
    return items[:-1]


def _both_ends(n: int, room: int, across: int) -> list[int]:
    if n <= room:
        return list(range(n))
    head = min(max(1, across // 3), room - 2) if room >= 3 else 0
    tail = max(1, room - head - 1)
    left_out = n - head - tail
    return [*range(head), *([-left_out] if room > 1 else []), *range(n - tail, n)]
