"""The popover with the details of a block, request, node or step. The details are updated while the popover is open."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from textual.binding import Binding
from textual.geometry import Offset
from textual.timer import Timer
from textual.widget import Widget

from minitui.tui.widgets.base import LinePanel, Picture, ScrollPanel, Thing, selected
from minitui.tui.widgets.inspect.timeline import TimelineOpened
from minitui.tui.widgets.rows import Row, Run, Runs, named, named_rows
from minitui.viewmodel.view import View
from minitui.viewmodel.words.story import tell

LABEL = 13  # cells
HOVERED = 7  # lines of a hover card
REST_S = 0.3  # a pointer that moves across the panels shows no cards


def story_lines(view: View, kind: str, subject: Any, width: int) -> list[Runs]:
    """Returns the details of a thing as rows."""
    rows: list[Runs] = []
    for label, text in tell(view, kind, subject).lines:
        pieces = named_rows(view, text, "ink", max(20, width - LABEL)) or [()]
        for i, piece in enumerate(pieces):
            label_runs = named(view, view.texts.labelled(label), "dim") if i == 0 else []
            rows.append(Row().extend(label_runs).to(LABEL).extend(piece).done(width))
    return rows


class SelectedBlock(LinePanel, can_focus=False):
    """The tokens, holders, age and history of the selected block, below a maximised map."""

    TITLE = "Block"

    def picture(self, view: View, width: int, height: int) -> Picture:
        block = selected(view, "block")
        if block is None:
            return Picture([Row("no block is selected", "dim").done(width)])
        rows = story_lines(view, "block", block, width)
        more = len(rows) - height
        key: list[Run] = [(f"{more} more lines: enter", "dim")] if more > 0 else []
        return Picture(rows[:height], title=tell(view, "block", block).title, legend=key)


class HoverCard(LinePanel, can_focus=False):
    """The first details of the thing under the pointer, beside it. A click selects the thing."""

    DEFAULT_CSS = "HoverCard { layer: above; position: absolute; display: none; }"
    thing: Thing | None = None
    _timer: Timer | None = None

    def point(self, view: View, thing: Thing | None, place: Offset) -> None:
        """Hide, and show this thing when the pointer has rested at `place` of the screen."""
        self.display = False
        if self._timer is not None:
            self._timer.stop()
        self._timer = None if thing is None else self.set_timer(REST_S, partial(self._show, view, thing, place))

    def _show(self, view: View, thing: Thing, place: Offset) -> None:
        self.thing, self.display = thing, True
        whole = self.screen.size
        width = min(64, whole.width - 4)
        height = min(len(story_lines(view, *thing, width - 4)), HOVERED) + 2
        below = place.y + 1 + height <= whole.height - 1
        self.styles.width, self.styles.height = width, height
        self.styles.offset = (
            max(0, min(place.x + 2, whole.width - width)), place.y + 1 if below else max(0, place.y - height),
        )
        self.paint(view)

    def picture(self, view: View, width: int, height: int) -> Picture:
        if self.thing is None:
            return Picture([])
        rows = story_lines(view, *self.thing, width)
        return Picture(rows[:height], title=tell(view, *self.thing).title, legend=[("click selects", "dim")])


class Details(ScrollPanel):
    """The popover. `show` opens it above the panels; Escape and Enter close it. Enter opens a request's timeline."""

    DEFAULT_CSS = "Details { layer: above; position: absolute; display: none; }"
    BINDINGS: ClassVar = [
        Binding("escape", "close", "close", show=False, id="details.close"),
        Binding("enter", "enter", "close, or the timeline of the request", show=False, id="details.enter"),
    ]

    kind = ""
    subject: Any = None
    _back: Widget | None = None

    def show(self, view: View, kind: str, subject: Any, back: Widget | None) -> None:
        """Open with the details of a thing. `kind` and `subject` are the arguments `kind` and `id` of View.select.
        `back` gets the focus when the popover closes."""
        self.kind, self.subject, self._back, self.top = kind, subject, back, 0
        width = min(92, self.screen.size.width - 4)
        lines = story_lines(view, self.kind, self.subject, width - 4)
        height = min(max(5, len(lines) + 2), self.screen.size.height - 4)
        self.styles.width, self.styles.height = width, height
        self.styles.offset = ((self.screen.size.width - width) // 2, (self.screen.size.height - height) // 2)
        self.display = True
        self.focus()
        self.paint(view)

    def picture(self, view: View, width: int, height: int) -> Picture:
        rows = story_lines(view, self.kind, self.subject, width)
        shown, below = self.window(rows, height)
        legend = [("enter: each token · esc closes" if self._has_timeline else "esc closes", "dim")]
        if below:
            legend.insert(0, (f"{below} more lines below  ", "accent"))
        return Picture(shown, title=tell(view, self.kind, self.subject).title, legend=legend)

    @property
    def _has_timeline(self) -> bool:
        return self.kind == "request" and self.app.current_mode == "inspect"

    def action_enter(self) -> None:
        """Close, and open the timeline of the request."""
        if not self._has_timeline:
            self.action_close()
            return
        self.display = False
        self.view.select("request", self.subject)
        self.post_message(TimelineOpened())

    def action_close(self) -> None:
        self.display = False
        if self._back is not None:
            self._back.focus()
