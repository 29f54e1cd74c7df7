"""A panel with an axis of time, which keys and the mouse move and scale."""

from __future__ import annotations

from textual import events

from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.tracks import SCALES, Scale
from minitui.viewmodel.history.spans import Timeline

MOST_STEPS = 200  # the most steps in sight


class AxisPanel(LinePanel):
    """Owns the part of the axis that is in sight, and the cursor. `[` and `]` change the scale, page up and page down
    move the picture; the mouse drags it, and its wheel changes the scale."""

    def __init__(self, *, id: str | None = None, frame: str | None = None) -> None:
        super().__init__(id=id, frame=frame)
        self.right: float | None = None  # the right edge on the axis; None: follows the newest step
        self.cursor: float | None = None  # a place on the axis
        self.chosen_ms: float | None = None  # the scale chosen by the user, in ms per column
        self.scale = Scale(0.0, 1.0, 1)
        self.steps_in_sight = (0, -1)  # the first and the last
        self.label = 0  # cells for the names of the tracks
        self._drag: tuple[int, float] | None = None  # where the mouse button was pressed, and the right edge then
        self._dragged = False

    @property
    def cursor_column(self) -> int | None:
        """The column of the cursor, which may be out of sight; None without a cursor."""
        return None if self.cursor is None else self.scale.column(self.cursor)

    def ends_drag(self) -> bool:
        """Returns True if a click is the end of a drag; asking a second time returns False."""
        dragged, self._dragged = self._dragged, False
        return dragged

    def on_mouse_down(self, event: events.MouseDown) -> None:
        if self.painted:
            self._drag, self._dragged = (event.x, self.scale.right), False
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._drag is not None and event.x != self._drag[0]:
            self._dragged = True
            self._move_to(self._drag[1] - (event.x - self._drag[0]) * self.scale.ms)

    def on_mouse_up(self, event: events.MouseUp) -> None:
        self._drag = None
        self.release_mouse()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._wheel(event, -1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._wheel(event, 1)

    def _wheel(self, event: events.MouseEvent, by: int) -> None:
        event.stop()
        if not self.painted:
            return
        if event.shift:
            self._move_to(self.scale.right + by * self.scale.columns * self.scale.ms / 8)
        else:
            self._zoom(by, self.scale.left + (event.x - 2 - self.label + 0.5) * self.scale.ms)

    def _move_to(self, right: float) -> None:
        """Show the time before `right`; stop following the newest step."""
        line = Timeline(self.view.history.steps, self.view.moment.horizon)
        half = self.scale.columns * self.scale.ms / 2
        self.right = max(line.begin + half, min(right, line.end + half))
        self.repaint()

    def _zoom(self, by: int, around: float | None) -> None:
        """Change the scale; the place `around` keeps its column. None: the right edge stays."""
        at = min(range(len(SCALES)), key=lambda i: abs(SCALES[i] - self.scale.ms))
        if by > 0 and self.steps_in_sight[1] - self.steps_in_sight[0] + 1 >= MOST_STEPS:
            return
        self.chosen_ms = SCALES[max(0, min(len(SCALES) - 1, at + by))]
        if around is not None and self.right is not None:
            self.right = around + (self.scale.right - around) * self.chosen_ms / self.scale.ms
        self.repaint()

    def action_pan(self, by: int) -> None:
        self._move_to(self.scale.right + by * self.scale.columns * self.scale.ms / 2)

    def action_zoom(self, by: int) -> None:
        visible = self.cursor is not None and self.scale.left <= self.cursor < self.scale.right
        self._zoom(by, self.cursor if visible else None)
