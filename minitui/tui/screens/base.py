"""The base class of all screens: it has the terminal's size, and hints for the status bar."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from textual import getters
from textual.geometry import Size
from textual.screen import Screen

from minitui.tui.app_base import AppBase

Result = TypeVar("Result")
Hint = tuple[str, str]  # a key, and what it does


class BaseScreen(Screen[Result]):
    """A screen whose layout has the size of the application.

    Textual 8 lays a screen out in the size of a Resize message, and each change of size posts another Resize message.
    Two such messages with different sizes can follow each other for ever: then a core is busy and no key is read.
    """

    app = getters.app(AppBase)
    FIGURES: ClassVar[bool] = False  # always show steps per frame and dropped records, not only when there is a backlog

    def hints(self) -> list[Hint]:
        """The hints for the status bar, the most important first."""
        return [(self.app.key_of(action.id), action.footer) for action in self.app.actions if action.footer]

    def _screen_resized(self, size: Size) -> None:
        super()._screen_resized(self.app.size)
