"""The base class of all screens: it gives a screen the size of the application, and hints for the status bar."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

from textual import getters
from textual.geometry import Size
from textual.screen import Screen

from minitui.tui.app_base import AppBase
from minitui.tui.row_update import RowUpdates

if TYPE_CHECKING:
    from rich.console import RenderableType

Result = TypeVar("Result")
Hint = tuple[str, str]  # (key, its action in a word or two)


class BaseScreen(Screen[Result]):
    """A screen whose layout has the size of the application.

    Textual 8 lays a screen out with the size in a Resize message, and each change of size posts a new Resize message.
    Two messages with different sizes can cause each other for ever: then a CPU core is busy and no key is read.
    """

    app = getters.app(AppBase)
    ABOUT: ClassVar[str] = ""  # the name of its text in the help; empty: that of its mode
    FIGURES: ClassVar[bool] = False  # False: the status bar shows figures only if records wait or were lost

    def __init__(self, name: str | None = None, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(name, id, classes)
        self._row_updates = RowUpdates()

    def hints(self) -> list[Hint]:
        """Returns the hints for the status bar, the most important first."""
        return [(self.app.key_of(action.id), action.footer) for action in self.app.actions if action.footer]

    def _screen_resized(self, size: Size) -> None:
        super()._screen_resized(self.app.size)

    def _compositor_refresh(self) -> None:
        """Write what has changed; if this is in panels only, write just the changed cells."""
        app = self.app
        update = self._row_updates.update(self._compositor) if self is app.screen and not app.is_inline else None
        if update is None:
            super()._compositor_refresh()
        else:
            app._display(self, cast("RenderableType", update))  # Textual calls `render_segments`
            self._dirty_widgets.clear()
            app._update_mouse_over(self)
        app.feed.note_drawn()
