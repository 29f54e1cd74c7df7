"""The screens for a recording: Inspect and Lecture, with keys that move the playhead and a bar that shows it."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from minitui.tui.screens.base import BaseScreen
from minitui.tui.screens.inspect import InspectScreen
from minitui.tui.screens.lecture import LectureScreen
from minitui.tui.widgets.replay_bar import ReplayBar


class PlayheadScreen(BaseScreen[None]):
    """A screen with keys that move the playhead; the application does what they say.

    A subclass lists this class as its last base class, because the CSS of the first base class has priority.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("less_than_sign", "app.speed(-1)", "slower", show=False, id="replay.slower"),
        Binding("greater_than_sign", "app.speed(1)", "faster", show=False, id="replay.faster"),
        Binding("left_parenthesis", "app.jump(-1)", "back", show=False, id="replay.back"),
        Binding("right_parenthesis", "app.jump(1)", "forward", show=False, id="replay.forward"),
        Binding("left_curly_bracket", "app.mark(-1)", "previous bookmark", show=False, id="replay.previous"),
        Binding("right_curly_bracket", "app.mark(1)", "next bookmark", show=False, id="replay.next"),
        Binding("B,home", "app.begin", "begin of the recording", show=False, id="replay.begin"),
        Binding("E", "app.end", "end of the recording", show=False, id="replay.end"),
        Binding("m", "app.bookmark", "bookmark this step", show=False, id="replay.bookmark"),
    ]


class ReplayScreen(InspectScreen, PlayheadScreen):
    """The inspect screen for a recording, with a bar for the playhead."""

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield ReplayBar()


class ReplayLecture(LectureScreen, PlayheadScreen):
    """The lecture screen for a recording, with a bar for the playhead."""

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield ReplayBar()
