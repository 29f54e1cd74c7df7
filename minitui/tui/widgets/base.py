"""The base class of all panels: a panel is a list of rows, and only changed rows are drawn.

A panel implements `picture(view, width, height)`. `paint(view)` adds the frame, compares the rows with the rows
on the screen, and refreshes the rows that differ; Textual then calls `render_line` for these rows only. The frame is
drawn here, not by CSS, so that line y of the widget is row y of `drawn_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from rich.text import Text
from textual import events
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.filter import ANSIToTruecolor
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import Reactive
from textual.strip import Strip
from textual.widget import Widget

from minitui.tui.glyphs import ASCII, Glyphs, glyphs, to_ascii
from minitui.tui.terminal.line_filters import VisibleLines
from minitui.tui.terminal.textual_insides import CellWidget
from minitui.tui.theme import Palette, palette
from minitui.tui.widgets.rows import Line, Row, Run, Runs, cells, clip, named, named_rows, plain, runs_width, wrapped
from minitui.viewmodel.view import View
from minitui.viewmodel.words.story import tell

Thing = tuple[str, Any]  # kind and id, as in View.select
Id = TypeVar("Id")
EDGE = 6  # cells of the lower edge that a legend cannot have
LEGEND_GAP = 2  # cells between two entries of a legend below the picture
LABEL = 13  # cells of a label of the details of a thing
CARD, CARD_ROWS = 60, 7  # cells and rows of the details where the pointer rests


def in_frame(
    body: list[Runs], title: str, note: list[Run], legend: list[Run], width: int, height: int, focused: bool
) -> list[Runs]:
    """Returns the rows of `body` in a frame: exactly `height` rows of exactly `width` cells."""
    inner_width, inner_height = width - 4, max(0, height - 2)
    line = "accent" if focused else "frame"
    body = body[:inner_height] + [()] * (inner_height - len(body))
    if runs_width(legend) > width - EDGE:
        body = _with_legend(body, legend, inner_width)
    heading = (title, "bold accent" if focused else "bold ink")
    rows = [_edge("╭╮", heading, note, width, line)]
    rows += [(("│ ", line), *exact(row, inner_width), (" │", line)) for row in body]
    if height > 1:
        rows.append(_edge("╰╯", None, legend, width, line))
    return rows


def has_room(title: str, note: list[Run], width: int) -> bool:
    """Returns True if title and note fit into the upper edge."""
    return 2 + cells(title) + 2 + runs_width(note) + 4 <= width


def _edge(corners: str, heading: Run | None, side: list[Run], width: int, line: str) -> Runs:
    """Returns a horizontal edge, with `side` at its right end if there is room."""
    rule = glyphs().rule
    row = Row(corners[0] + rule, line)
    if heading is not None:
        row.add(clip(f" {heading[0]} ", width - 4), heading[1])
    room = width - row.width - 4
    if side and runs_width(side) <= room:
        row.to(width - 4 - runs_width(side), rule, line)
        row.add(" ", line).extend(side).add(" ", line)
    row.to(width - 1, rule, line).add(corners[1], line)
    return row.done(width)


def exact(row: Runs, width: int) -> Runs:
    """Returns a row of exactly `width` cells."""
    if type(row) is Line or runs_width(row) == width:
        return row
    return Row().extend(row).done(width)


def _with_legend(body: list[Runs], legend: list[Run], width: int) -> list[Runs]:
    """Returns the rows with the legend in the last ones, if these are empty. Used if the frame has no room for it."""
    lines = [Row()]
    for entry in _entries(legend):
        if lines[-1].width and lines[-1].width + LEGEND_GAP + runs_width(entry) > width:
            lines.append(Row())
        lines[-1].to(lines[-1].width + LEGEND_GAP if lines[-1].width else 0).extend(entry)
    kept = len(body) - len(lines)
    if kept < 1 or any(plain(row).strip() for row in body[kept:]):
        return body
    return [*body[:kept], *(line.done(width) for line in lines)]


def _entries(legend: list[Run]) -> list[list[Run]]:
    """Returns the entries of a legend, without the spaces between them."""
    entries: list[list[Run]] = [[]]
    for run in legend:
        if run[0].strip():
            entries[-1].append(run)
        else:
            entries.append([])
    return [entry for entry in entries if entry]


NEAR = 12  # cells; a jump of the cursor takes as many bytes
NARROWEST = 8  # cells; narrower panels are blank


def selected(view: View, kind: str) -> Any:
    """Returns the id of the selection if it is of this kind ("block", "node", …), else None."""
    return view.selection.id if view.selection is not None and view.selection.kind == kind else None


def neighbour(ids: Sequence[Id], chosen: Any, by: int, otherwise: int = 0) -> Id:
    """Returns the id that is `by` places after the chosen one, or the last in this direction. `otherwise`: the index of
    the one to return if none is chosen."""
    return ids[max(0, min(len(ids) - 1, ids.index(chosen) + by))] if chosen in ids else ids[otherwise]


@dataclass(slots=True)
class Picture:
    """The content of a panel: the rows of its body and the texts in its frame."""

    rows: list[Runs]
    title: str = ""
    note: list[Run] = field(default_factory=list)  # at the top right
    legend: list[Run] = field(default_factory=list)  # at the bottom right
    brief: str = ""  # the title if there is no room for the whole one and the note


@dataclass
class Opened(Message):
    """Asks the screen to show the details of a block, request, node or step. kind, id: as in View.select."""

    kind: str
    id: Any


def story_lines(view: View, kind: str, subject: Any, width: int) -> list[Runs]:
    """Returns the details of a thing as rows."""
    rows: list[Runs] = []
    for label, text in tell(view, kind, subject).lines:
        pieces = named_rows(view, text, "ink", max(20, width - LABEL)) or [()]
        for i, piece in enumerate(pieces):
            label_runs = named(view, view.texts.labelled(label), "dim") if i == 0 else []
            rows.append(Row().extend(label_runs).to(LABEL).extend(piece).done(width))
    return rows


class Column(Vertical):
    """Panels one below the other."""

    BLANK = True  # Textual does not draw the container itself: the panels cover it


class Columns(Horizontal):
    """Columns side by side."""

    BLANK = True


class LinePanel(CellWidget, can_focus=True):
    """A panel drawn row by row. `FRAME`: "box" for a border, "none" for no border."""

    FRAME: ClassVar[str] = "box"
    TITLE: ClassVar[str] = ""
    SHOWS_ITSELF: ClassVar[bool] = False  # True: `paint` is called also while it is hidden, and may show it
    moving = False  # True: something in it moves, so it is painted in every frame
    wanted = 0  # rows with the frame that the content of the last picture needs; 0: unknown
    NEEDS_STATE: ClassVar[bool] = False  # True: before the engine's state is known, the panel only says why it is not
    DEFAULT_CSS = "LinePanel { background: $ground; color: $ink; }"
    view: View  # the view of the last paint; the attribute does not exist before the first paint
    # Textual lays the screen out again when this size has changed, because a widget may then need scrollbars. A panel
    # has none. The second layout delayed the effect of a key that shows another panel.
    virtual_size: Reactive[Size] = Reactive(Size(0, 0))

    def __init__(self, *, id: str | None = None, frame: str | None = None) -> None:
        super().__init__(id=id)
        self.frame = frame or self.FRAME
        self.drawn_rows: list[Runs] = []
        self._strips: list[Strip | None] = []
        self._width = 0
        self._drawn_with: tuple[Palette, Glyphs] | None = None
        self._under: Thing | None = None  # the thing under the pointer

    # ---- for subclasses

    def picture(self, view: View, width: int, height: int) -> Picture:
        """Returns the picture for a body of `width` × `height` cells, from the view and the panel's own settings."""
        raise NotImplementedError

    def own_key(self, keys: str, first: bool = False) -> list[Run]:
        """Returns a note with the panel's own keys; empty without the focus: the keys then have no effect. `first`: no
        other note precedes."""
        return [(keys if first else f" · {keys}", "dim")] if self.has_focus else []

    def pointed(self, view: View, column: int, row: int) -> Thing | None:
        """Returns the block, node or request at the cell (column, row) of the body; None if there is none."""
        return None

    def clicked(self, view: View, column: int, row: int) -> None:
        """Handle a click on the cell (column, row) of the body: it selects what is there."""
        if (here := self.pointed(view, column, row)) is not None:
            view.select(*here)

    # ---- painting

    @property
    def painted(self) -> bool:
        """True after the first paint."""
        return hasattr(self, "view")

    def paint(self, view: View) -> int:
        """Draw the present state of the view. Returns the number of changed rows."""
        self.view = view
        width, height = self.size
        if width < 1 or height < 1:
            return 0
        self._width = width
        palette_and_glyphs = (palette(self.app), glyphs())
        rows = self.drawn(view, width, height)
        if self._drawn_with != palette_and_glyphs or len(rows) != len(self.drawn_rows):
            self._drawn_with = palette_and_glyphs
            self.drawn_rows, self._strips = rows, [None] * len(rows)
            self.refresh()
            return len(rows)
        regions = []
        for y, row in enumerate(rows):
            if row != self.drawn_rows[y]:
                regions += [Region(at, y, end - at, 1) for at, end in changes(self.drawn_rows[y], row, width)]
                self._strips[y] = None
        self.drawn_rows = rows
        if regions:
            self.refresh_cells(regions)
        return len({region.y for region in regions})

    def drawn(self, view: View, width: int, height: int) -> list[Runs]:
        """Returns the rows of `framed` as they are drawn: blank in a very narrow panel, in ASCII with `--ascii`."""
        if width < NARROWEST:
            return [exact((), width)] * height
        rows = self.framed(view, width, height)
        if glyphs() is ASCII:
            return [Line((to_ascii(text), style) for text, style in row) for row in rows]
        return rows

    def framed(self, view: View, width: int, height: int) -> list[Runs]:
        """Returns the picture with its frame: exactly `height` rows of exactly `width` cells."""
        if self.frame == "none":
            body = self._picture(view, width, height).rows[:height]
            return [exact(row, width) for row in body] + [exact((), width)] * (height - len(body))
        picture = self._picture(view, width - 4, max(0, height - 2))
        title = picture.title or self.TITLE
        if picture.note and picture.brief and not has_room(title, picture.note, width):
            title = picture.brief
        return in_frame(picture.rows, title, picture.note, picture.legend, width, height, self.has_focus)

    def _picture(self, view: View, width: int, height: int) -> Picture:
        if self.NEEDS_STATE and not view.history.loaded:
            return self.nothing_yet(view, width)
        return self.picture(view, width, height)

    def nothing_yet(self, view: View, width: int) -> Picture:
        """Returns the picture of a panel that needs the engine's state, before the state is known."""
        return Picture(wrapped(view.history.missing, "dim", width))

    # ---- Textual

    def render_line(self, y: int) -> Strip:
        if y >= len(self.drawn_rows):
            return Strip.blank(self.size.width, palette(self.app).style("ink"))
        strip = self._strips[y]
        if strip is None:
            strip = self._strips[y] = self._make_strip(self.drawn_rows[y])
        return strip

    def _make_strip(self, row: Runs) -> Strip:
        colours = palette(self.app)
        strip = Strip([colours.segment(run) for run in row], self._width)
        for line_filter in self.app.get_line_filters():  # for example the filter of NO_COLOR
            if not isinstance(line_filter, (ANSIToTruecolor, VisibleLines)):  # the palette already does their work
                strip = strip.apply_filter(line_filter, self.background_colors[1])
        return strip

    def render_lines(self, crop: Region) -> list[Strip]:
        # Textual's own rendering would style, pad and filter these finished lines again, so it is not used.
        self.forget_dirty()
        if self.styles.gutter:
            return super().render_lines(crop)
        strips = [self.render_line(y) for y in range(crop.y, crop.bottom)]
        if crop.x or crop.width != self._width:
            return [strip.crop(crop.x, crop.right) for strip in strips]
        return strips

    def repaint(self) -> None:
        """Paint the same view again: after a key, a resize or a change of focus."""
        if self.painted and self.is_mounted:
            self.paint(self.view)

    def action_open(self) -> None:
        """Open the details of the selection."""
        if self.view.selection is not None:
            self.post_message(Opened(self.view.selection.kind, self.view.selection.id))

    def back_to_now(self) -> None:
        """Leave the past, for panels with another use of the key of this command."""
        if self.view.moment.travel_text or self.view.moment.playback is not None:
            self.call_later(self.app.run_action, "do('now')")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Returns False before the first paint: actions need the view."""
        return self.painted

    def on_resize(self) -> None:
        self.repaint()

    def on_focus(self) -> None:
        self.repaint()

    def on_blur(self) -> None:
        if self.display:  # not if a key shows another panel in its place
            self.repaint()

    def on_click(self, event: events.Click) -> None:
        column, row = self._cell(event)
        self._under = self.tooltip = None
        if self.painted and row >= 0 and column >= 0:
            self.clicked(self.view, column, row)
            self.repaint()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        column, row = self._cell(event)
        inside = self.painted and row >= 0 and column >= 0 and not event.button
        self._under = self.pointed(self.view, column, row) if inside else None

    @Widget.tooltip.getter  # type: ignore[attr-defined]
    def tooltip(self) -> Text | None:
        """The first details of the thing under the pointer; Textual shows them when the pointer rests."""
        if self._under is None:
            return None
        width = min(CARD, self.screen.size.width - 4)
        head = Row(tell(self.view, *self._under).title, "bold ink").done(width)
        rows = [head, *story_lines(self.view, *self._under, width)[:CARD_ROWS], Row("click selects", "dim").done(width)]
        style = palette(self.app).style
        return Text("\n").join(Text.assemble(*((text, style(words)) for text, words in row)) for row in rows)

    def _cell(self, event: events.MouseEvent) -> tuple[int, int]:
        """Returns the column and row of the body at the pointer."""
        return (event.x, event.y) if self.frame == "none" else (event.x - 2, event.y - 1)

    @property
    def text(self) -> str:
        """The panel's rows as text."""
        return "\n".join(plain(row).rstrip() for row in self.drawn_rows)


class SearchPanel(LinePanel):
    """A panel that can be searched: / begins a search, and the keys after it are its text; Escape ends it."""

    search = ""
    typing = False  # True: the user is typing a search

    def searched(self) -> None:
        """Called when the search has changed."""

    def action_search(self) -> None:
        self._search_for(True, "")

    def _search_for(self, typing: bool, text: str) -> None:
        self.typing, self.search = typing, text
        self.searched()
        self.repaint()

    def search_note(self) -> list[Run]:
        """Returns the search as a note; empty without a search."""
        return [("/" + self.search + "▏" * self.typing, "accent")] if self.typing or self.search else []

    def on_key(self, event: events.Key) -> None:
        """While the user types a search, add the keys to it."""
        key, character = event.key, event.character
        if key == "escape" and (self.typing or self.search):
            self._search_for(False, "")
        elif self.typing and key == "enter":
            self._search_for(False, self.search)
        elif self.typing and key == "backspace":
            self._search_for(True, self.search[:-1])
        elif self.typing and character and event.is_printable:
            self._search_for(True, self.search + character)
        else:
            return
        event.prevent_default().stop()

    def check_consume_key(self, key: str, character: str | None) -> bool:
        """Returns True for a printable key while the user types a search, so that no binding acts on the key."""
        return self.typing and character is not None and character.isprintable()


class ScrollPanel(LinePanel):
    """A panel with more rows than fit; `top` is the first row shown."""

    BINDINGS: ClassVar = [
        Binding("up", "scroll(-1)", "a line up", show=False, id="scroll.up"),
        Binding("down", "scroll(1)", "a line down", show=False, id="scroll.down"),
    ]
    top = 0

    def window(self, rows: list[Runs], height: int) -> tuple[list[Runs], int]:
        """Returns (the rows from `top` on that fit, how many rows are below them)."""
        self.top = max(0, min(self.top, len(rows) - height))
        return rows[self.top : self.top + height], max(0, len(rows) - height - self.top)

    def action_scroll(self, lines: int) -> None:
        """Scroll by lines; down is positive."""
        self.top += lines
        self.repaint()

    def on_mouse_scroll_down(self) -> None:
        self.action_scroll(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_scroll(-3)


def changes(before: Runs, after: Runs, width: int) -> list[tuple[int, int]]:
    """Returns (begin, end) in cells of each part of a row that differs. Parts less than NEAR cells apart are one."""
    if any(cells(text) != len(text) for row in (before, after) for text, _ in row):
        return [(0, width)]
    parts: list[tuple[int, int]] = []
    at = 0
    old, new = iter(before), iter(after)
    (was, old_style), (now, new_style) = next(old, ("", "")), next(new, ("", ""))
    while was and now:
        n = min(len(was), len(now))
        if old_style != new_style or was[:n] != now[:n]:
            begin = parts.pop()[0] if parts and at - parts[-1][1] < NEAR else at
            parts.append((begin, at + n))
        at += n
        was, old_style = (was[n:], old_style) if n < len(was) else next(old, ("", ""))
        now, new_style = (now[n:], new_style) if n < len(now) else next(new, ("", ""))
    return [*parts, (at, width)] if was or now else parts  # the row before had another width
