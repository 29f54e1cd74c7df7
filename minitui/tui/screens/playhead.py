"""The keys that move the playhead of a recording."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from minitui.tui.screens.base import BaseScreen


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
    ]
