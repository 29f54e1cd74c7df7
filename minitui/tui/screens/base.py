"""The base class of all screens: it gives a screen the size of the application, and hints for the status bar."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from textual import getters
from textual.geometry import Size
from textual.screen import Screen

from minitui.tui.app_base import AppBase

Result = TypeVar("Result")
Hint = tuple[str, str]  # (key, its action in a word or two)


class BaseScreen(Screen[Result]):
    """A screen whose layout has the size of the application.

    Textual 8 lays a screen out with the size in a Resize message, and each change of size posts a new Resize message.
    Two messages with different sizes can cause each other for ever: then a CPU core is busy and no key is read.
    """

    app = getters.app(AppBase)
    FIGURES: ClassVar[bool] = False  # False: the status bar shows figures only if records wait or were lost

    def hints(self) -> list[Hint]:
        """Returns the hints for the status bar, the most important first."""
        return [(self.app.key_of(action.id), action.footer) for action in self.app.actions if action.footer]

    def _screen_resized(self, size: Size) -> None:
        super()._screen_resized(self.app.size)
