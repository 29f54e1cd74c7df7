"""The compare screen: two runs on one clock, and their figures."""

from __future__ import annotations

from typing import ClassVar, Protocol, cast

from textual import events, getters
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container

from minitui.tui.screens.base import BaseScreen, Hint
from minitui.tui.widgets.bar import Bar
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.differences import Differences
from minitui.tui.widgets.side_by_side import SideBySide
from minitui.tui.widgets.status_bar import StatusBar
from minitui.tui.widgets.top_bar import TopBar
from minitui.viewmodel.view import View

WIDE = 170  # columns: the figures are beside the lanes
TALL = 50  # rows: the figures are below the lanes; a smaller terminal shows one of the two


class HasRuns(Protocol):
    """The part of the application (CompareApp) that this screen uses."""

    SAVES: bool  # False: there are no new runs to save
    notes: tuple[str, ...]  # sentences below the figures

    def save_runs(self) -> None:
        """Ask for a name, and save the two runs as recordings."""


class CompareScreen(BaseScreen[None]):
    """Arranges the two panels. Tab changes between them."""

    BINDINGS: ClassVar = [
        Binding("tab,shift+tab", "panel", "lanes or figures", show=False, id="compare.panel"),
        Binding("S", "save", "save", show=False, id="compare.save", tooltip="save the two runs as recordings"),
    ]
    DEFAULT_CSS = """
    CompareScreen {
        layout: vertical; background: $ground;
        & #both { height: 1fr; }
        & #runs, & #figures { height: 1fr; width: 1fr; }
        &.-beside #both { layout: horizontal; }
        &.-beside #figures { width: 80; }
        &.-below #figures { height: 24; }
    }
    """
    runs = getters.query_one("#runs", SideBySide)
    figures = getters.query_one("#figures", Differences)

    def __init__(self) -> None:
        super().__init__()
        self._current = "runs"

    def compose(self) -> ComposeResult:
        yield TopBar()
        with Container(id="both"):
            yield SideBySide(id="runs")
            yield Differences(id="figures")
        yield StatusBar()

    def on_mount(self) -> None:
        self.lay_out()
        self.runs.focus()

    def hints(self) -> list[Hint]:
        """Returns the keys of this screen."""
        moves = [("left right", "cursor"), ("[ ]", "zoom"), ("k", "time or steps"), ("up down", "request")]
        if self._current == "figures":
            moves = [("up down", "scroll")]
        keep = [h for h in super().hints() if h[1] in ("inspect", "help", "commands")]
        save = [("S", "save")] if cast(HasRuns, self.app).SAVES else []
        return [("tab", "figures" if self._current == "runs" else "lanes"), *moves, *save, *keep, ("q", "quit")]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Refuse to save where there are no new runs."""
        return action != "save" or cast(HasRuns, self.app).SAVES

    def on_resize(self, event: events.Resize) -> None:
        self.lay_out()

    def lay_out(self) -> None:
        """Show both panels if there is room, else the current one."""
        beside = self.size.width >= WIDE
        below = not beside and self.size.height >= TALL
        self.set_class(beside, "-beside")
        self.set_class(below, "-below")
        for name, panel in (("runs", self.runs), ("figures", self.figures)):
            panel.display = beside or below or name == self._current

    def paint(self, view: View) -> None:
        """Show the view; called once a frame while this screen is visible."""
        self.figures.notes = cast(HasRuns, self.app).notes
        for bar in self.query(Bar):
            bar.paint(view)
        for panel in self.query(LinePanel):
            if panel.display and not isinstance(panel, Bar):
                panel.paint(view)

    def action_panel(self) -> None:
        """Move the focus to the other panel; in a small terminal, show it in place of this one."""
        self._current = "figures" if self._current == "runs" else "runs"
        self.lay_out()
        self.query_one(f"#{self._current}").focus()

    def action_save(self) -> None:
        """Save the two runs as recordings."""
        cast(HasRuns, self.app).save_runs()
