"""The base class of all screens: hints for the status bar, and what Textual's screens need (textual_insides.py)."""

from __future__ import annotations

from typing import ClassVar

from textual import getters
from textual.binding import Binding, BindingType

from minitui.tui.apps.app_base import AppBase
from minitui.tui.terminal.textual_insides import Result, SizedScreen
from minitui.tui.widgets.base import LinePanel, Opened
from minitui.tui.widgets.inspect.details import Details
from minitui.viewmodel.view import View

PHONE = 60  # columns; a narrower screen leaves out what is not read there
Hint = tuple[str, str]  # (key, its action in a word or two)


class BaseScreen(SizedScreen[Result]):
    """A screen of the application."""

    app = getters.app(AppBase)
    ABOUT: ClassVar[str] = ""  # the name of its text in the help; empty: that of its mode
    HORIZONTAL_BREAKPOINTS = [(0, "-phone"), (PHONE, "-desk")]  # noqa: RUF012 (as in Textual)
    FIGURES: ClassVar[bool] = False  # False: the status bar shows figures only if records wait or were lost

    def hints(self) -> list[Hint]:
        """Returns the hints for the status bar, the most important first."""
        return [(self.app.key_of(action.id), action.footer) for action in self.app.actions if action.footer]

    def on_opened(self, message: Opened) -> None:
        """Show the details that a panel has requested, on screens that have a popover."""
        for details in self.query(Details):
            message.stop()
            details.show(self.app.view, message.kind, message.id, self.focused)

    def paint(self, view: View) -> None:
        """Show the view; called once a frame while this screen is visible."""
        for panel in self.query(LinePanel):
            if panel.display or panel.SHOWS_ITSELF:
                panel.paint(view)


class PlayheadScreen(BaseScreen[None]):
    """A screen with keys that move the playhead; the application does what they say. A subclass lists this class as its
    last base class, because the CSS of the first base class has priority."""

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
