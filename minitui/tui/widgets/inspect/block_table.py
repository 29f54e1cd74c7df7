"""Block table: where are this request's tokens? The panel shows the logical blocks and the physical block of each.

This is paging: the positions of a request are consecutive, but its blocks can be anywhere in the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import ClassVar

from textual.binding import Binding

from engine.trace.side_pool import OWN
from minitui.text import count
from minitui.tui.glyphs import glyphs
from minitui.tui.theme import LIT, owner_style
from minitui.tui.widgets.base import LinePanel, Opened, Picture, Thing, neighbour, selected
from minitui.tui.widgets.rows import Row, Run, Runs, cells, clip, fitting, legend, wrapped
from minitui.viewmodel.state.side_groups import FULL
from minitui.viewmodel.view import View

CHIP = 6  # the fewest cells of a chip; long block numbers need more
TWO_ROWS_FROM = 6  # in a panel of at least this many rows, the heading may take two rows
MIN_NAME = 12  # the fewest cells of a chat's name


class BlockTable(LinePanel):
    """The block table of the selected request, or of the newest running request. Left, right and a click select one."""

    TITLE = "Block table"
    NEEDS_STATE = True
    BINDINGS: ClassVar = [
        Binding("left", "move(-1)", "block before", show=False, id="table.left"),
        Binding("right", "move(1)", "block after", show=False, id="table.right"),
        Binding("up", "turn(1)", "newer request", show=False, id="table.up"),
        Binding("down", "turn(-1)", "older request", show=False, id="table.down"),
        Binding("enter", "open", "details", show=False, id="table.open"),
    ]

    _places: list[tuple[range, range, int]]  # (rows below the heading, columns, block) of each chip
    _heading = 0  # rows

    def picture(self, view: View, width: int, height: int) -> Picture:
        self._places = []
        id = view.subject()
        request = view.moment.shown.state.requests.get(id) if id is not None else None
        if request is None:
            return self._without_table(view, id, width, height)
        size = view.moment.shown.state.block_size
        computed = view.moment.shown.state.computed(request)
        lane = view.history.lanes.lanes.get(request.id)
        shared = sum(view.moment.shown.state.holders[block] > 1 for block in request.table)
        line = self._label(view, request.id, request.group)
        name = view.texts.title(request.group) if request.group else ""
        blocks, tokens = count(len(request.table), "block"), count(computed, "token")
        others = f", {shared} shared" if shared else ""
        texts = [f"  {blocks} for {tokens}{others}", f"  {blocks}, {tokens}{others}", f"  {blocks}{others}"]
        texts += [f"  {blocks}"]
        texts = [texts[0] + " with others", *texts] if shared else texts
        state = "" if request.state == "running" else f"  {request.state}"
        head = _head(line, name, texts, state, width, height)
        title = "Block table · logical " + glyphs().arrow + " physical"
        note: list[Run] = []
        if view.selection is None:
            note = [("newest running request", "dim")] if view.home is None else []
        elif view.selection.kind == "request" and lane is not None:
            note = [("selected", "accent")]
        self._heading = len(head)
        rows = [*head, *self._chips(view, request.table, computed, size, width, height - len(head), side=request.side)]
        key = legend(
            ("number", "on-fill on shared", f"held by {glyphs().times}n"),
            ("number", "on-fill on active", "private"),
            ("number", "on-fill on cached", "only in the tree") if request.side else
            (f"n/{size}", "ink", "tokens in the last block"),
        )
        return Picture(rows, title=title, note=note, legend=key)

    def _label(self, view: View, id: int, group: str) -> Row:
        under = "underline " if view.selection is not None else ""
        return Row(view.texts.request(id), f"bold {under}{owner_style(view.texts.colour(group))}")

    def _without_table(self, view: View, id: int | None, width: int, height: int) -> Picture:
        lane = view.history.lanes.lanes.get(id) if id is not None else None
        last = view.moment.shown.last_tables.get(lane.request.group) if lane is not None else None
        if lane is None or last is None or last.request != lane.id or not last.table:
            any_request = view.selection is None and view.home is None
            text = "no request has run yet" if any_request else "no request of this chat has run yet"
            if lane is not None:
                text = f"r{lane.id} is waiting: it holds no blocks yet"
                if lane.finish_reason:
                    text = f"r{lane.id} finished ({lane.finish_reason}) and released its blocks"
            return Picture(wrapped(text, "dim", width), title="Block table")
        fates = [view.moment.shown.fate(block, last.seq) for block in last.table]
        in_tree = sum(fate in ("cached", "held") for fate in fates)
        line, name = self._label(view, lane.id, lane.request.group), view.texts.title(lane.request.group)
        of = f"{in_tree} of {len(fates)} blocks"
        texts = [f"  finished: {of} stay in the tree", f"  {of} cached", f"  {in_tree} of {len(fates)} cached"]
        head = _head(line, name, texts, "", width, height)
        size = view.moment.shown.state.block_size
        self._heading = len(head)
        rows = [*head, *self._chips(view, last.table, last.computed, size, width, height - len(head), fates)]
        key = legend(
            ("number", "on-fill on cached", "cached"), ("number", "on-fill on shared", "in use"),
            ("number", "dim", "freed"),
        )
        return Picture(rows, title="Block table · at finish", legend=key)

    def _chips(
        self, view: View, table: list[int], computed: int, size: int, width: int, height: int,
        fates: list[str] | None = None, side: Sequence[Mapping[int, int]] = (),
    ) -> list[Runs]:
        """Returns lines of chips. `fates`: AnnotatedState.fate of each block, for a finished request. `side`: of a
        request, its pages in the side groups.

        A chip takes as many lines as fit: three (logical number, physical block, holders), two (physical block,
        holders) or one (physical block). With two lines or one, the first chip's logical number is before the chips.
        With side groups, a chip has a line more for each of them, their names are before the chips, and the line of
        holders is left out first.
        """
        if height < 1:
            return []
        pools = view.moment.shown.state.groups
        names = [FULL, *(pool.group.name for pool in pools)] if pools else []
        chip = max(CHIP, len(str(view.moment.shown.state.num_blocks - 1)) + 2)
        lead = max(map(len, names)) + 1 if names else len(str(len(table) - 1)) + 2  # "12→ "
        whole = 3 + len(pools)
        across, short = max(1, width // chip), max(1, (width - lead) // chip)
        across = short if names else across
        chip_lines = min(height, whole)
        if -(-len(table) // across) * whole > height and -(-len(table) // short) * (whole - 1) <= height:
            chip_lines = whole - 1
        left = lead if names or chip_lines < whole else 0
        if left:
            across = short

        def page_of(i: int, place: int) -> int | None:
            """The page of side group `i` at a block: the request's own, else what the tree keeps for it."""
            page = side[i].get(place) if side else None
            if page is None and side and place == len(table) - 1:
                page = side[i].get(OWN)
            in_tree = fates is None or fates[place] in ("cached", "held")
            return pools[i].kept.get(table[place]) if page is None and in_tree else page

        with_logical = chip_lines >= (whole - 1 if names else whole)
        with_holders = chip_lines == whole or (not names and chip_lines == 2)
        rows: list[Runs] = []
        wanted = 3 - (-len(table) // across) * whole  # rows, with the heading and the frame
        self.wanted = wanted if view.moment.still else max(wanted, self.wanted)  # the panels do not move to and fro
        chosen = selected(view, "block")
        at = table.index(chosen) if chosen in table else None
        items = _with_ends(len(table), max(1, height // chip_lines) * across, across, at)
        for start in range(0, len(items), across):
            logical, chips, holders = Row(), Row(), Row()
            below = [Row(name, "dim") for name in names[1:]]
            lines = range(len(rows), len(rows) + chip_lines)
            if names:
                chips.add(names[0], "dim")
            elif left and items[start] >= 0:
                chips.add(f"{items[start]}{glyphs().arrow}".rjust(left - 1), "dim")
            for column, index in enumerate(items[start : start + across]):
                at = left + column * chip
                if index < 0:  # -index blocks are not shown here
                    logical.to(at).add(glyphs().dots.rjust(chip - 2), "dim")
                    chips.to(at).add(f"+{-index} ".rjust(chip - 1), "dim")
                    first = items[start + column - 1] + 1 if start + column else 0
                    for i, row in enumerate(below):
                        n = sum(page_of(i, place) is not None for place in range(first, first - index))
                        row.to(at).add(f"+{n} ".rjust(chip - 1) if n else "", "dim")
                    continue
                block = table[index]
                held = view.moment.shown.state.holders[block]
                style = f"on-fill on {'shared' if held > 1 else 'active'}"
                if fates is not None:
                    held = held if fates[index] == "held" else 0
                    style = {"cached": "on-fill on cached", "held": "on-fill on shared"}.get(fates[index], "dim")
                elif block in view.lit:
                    style = f"bold on-fill on {LIT}"
                elif view.moment.glow_of(float(view.moment.shown.changed[block])) == 2:
                    style = f"bold {style}-glow"
                self._places.append((lines, range(at, at + chip), block))
                here = block == chosen
                logical.to(at).add(str(index).rjust(chip - 2), "accent" if here else "dim")
                chips.to(at).add(f"{block} ".rjust(chip - 1), f"bold underline {style}" if here else style)
                filled = min(size, max(0, computed - index * size))
                if filled < size:
                    holders.to(at).add(f"{filled}/{size}".rjust(chip - 2), "ink")
                elif held > (fates is None):
                    holders.to(at).add(f"{glyphs().times}{held}".rjust(chip - 2), "pool")
                for i, row in enumerate(below):
                    if (page := page_of(i, index)) is not None:
                        look = ("cached", "active", "shared")[min(2, pools[i].holders[page])]
                        row.to(at).add(f"{page} ".rjust(chip - 1), f"on-fill on {look}")
            rows += [logical.done(width)] if with_logical else []
            rows += [row.done(width) for row in [chips, *below][: chip_lines - with_logical - with_holders]]
            if with_holders and (chip_lines == whole or holders.width):
                rows.append(holders.done(width))
        return rows[:height]

    # ---- selection

    def pointed(self, view: View, column: int, row: int) -> Thing | None:
        here = (block for rows, columns, block in self._places if row - self._heading in rows and column in columns)
        return next((("block", block) for block in here), None)

    def action_move(self, by: int) -> None:
        id = self.view.subject()
        request = self.view.moment.shown.state.requests.get(id) if id is not None else None
        if request is not None and request.table:
            self.view.select("block", neighbour(request.table, selected(self.view, "block"), by, -1))

    def action_turn(self, by: int) -> None:
        if ids := sorted(self.view.moment.shown.state.requests):
            self.view.select("request", neighbour(ids, self.view.subject(), by, -1))

    def action_open(self) -> None:
        if (block := selected(self.view, "block")) is not None:
            self.post_message(Opened("block", block))
        elif (id := self.view.subject()) is not None:
            self.post_message(Opened("request", id))


def _head(line: Row, name: str, texts: list[str], state: str, width: int, height: int) -> list[Runs]:
    """Returns the heading: the request in `line`, its name, the first of `texts` that fits, and its state. In one row,
    or in two if the whole is too long and the panel has room for both."""
    name_cells = cells(name) + 1 if name else 0
    fits = line.width + name_cells + len(texts[0]) + len(state) <= width
    if not fits and height >= TWO_ROWS_FROM:
        about = fitting(width - len(state), *texts)
        named = line.add(f" {clip(name, width - line.width - 1)}").done(width)
        return [named, Row(about, "dim").add(state, "waiting").done(width)]
    room = width - line.width - len(state)
    about = fitting(room - min(name_cells, MIN_NAME + 1), *texts)
    if name:
        line.add(" " + clip(name, max(MIN_NAME, room - len(about) - 1)))
    return [line.add(about, "dim").add(state, "waiting").done(width)]


def _with_ends(n: int, room: int, across: int, at: int | None = None) -> list[int]:
    """Returns which of the logical blocks 0 to n - 1 to show in `room` places, `across` places per line. If not all
    blocks fit, shows the first blocks (often shared) and the last (where the next token is stored), or those around
    block `at`, which is always included. A negative number -k stands for k blocks that are not shown."""
    if n <= room:
        return list(range(n))
    if room < 3:
        return [-(n - 1), n - 1] if room == 2 and at is None else [n - 1 if at is None else at]
    around = n - 1 if at is None else at
    near = (block for distance in range(n) for block in (around + distance, around - distance) if 0 <= block < n)
    head = range(min(max(1, across // 3), room - 2))
    shown: list[int] = []
    for block in chain([around, n - 1], head, near):
        wider = sorted({*shown, block})
        if len(_with_gaps(wider, n)) > room:
            break
        shown = wider
    return _with_gaps(shown, n)


def _with_gaps(blocks: list[int], n: int) -> list[int]:
    """Returns the blocks, with -k for each gap between them, where k is the number of blocks in the gap."""
    items: list[int] = []
    before = -1
    for block in [*blocks, n]:
        if block - before > 1:
            items.append(before + 1 - block)
        items.append(block)
        before = block
    return items[:-1]
