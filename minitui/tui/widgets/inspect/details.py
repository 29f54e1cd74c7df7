"""The popover with the details of a block, request, node or step. The details are updated while the popover is open."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.binding import Binding
from textual.widget import Widget

from minitui.tui.widgets.base import LinePanel, Picture, ScrollPanel, selected, story_lines
from minitui.tui.widgets.inspect.timeline import TimelineOpened
from minitui.tui.widgets.rows import Row, Run
from minitui.viewmodel.view import View
from minitui.viewmodel.words.story import tell


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
