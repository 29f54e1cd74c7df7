"""The compare screen: two runs on one clock, and their figures with what changes between them."""

from __future__ import annotations

from typing import ClassVar

from textual import events, getters
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container

from minitui.tui.glyphs import glyphs
from minitui.tui.screens.base import BaseScreen, Hint
from minitui.tui.widgets.bars import StatusBar, TopBar
from minitui.tui.widgets.base import Picture, ScrollPanel
from minitui.tui.widgets.rows import Row, Run, Runs, clean, fit, wrapped
from minitui.tui.widgets.side_by_side import SideBySide
from minitui.viewmodel.compare.comparison import Comparison, Difference
from minitui.viewmodel.view import View

TITLE, CHANGE, WORD = 21, 8, 7  # cells of the name of a figure, of a change, and of "better" or "worse"
LEAST, MOST = 12, 20  # cells of a value
STYLES = {True: "good", False: "bad", None: "ink"}
WORDS = {True: "better", False: "worse", None: ""}
SAMPLES = 100  # with fewer samples, a percentile says little: their number is shown


class Differences(ScrollPanel):
    """Up and down scroll."""

    TITLE = "What differs"
    comparison: Comparison | None = None

    def picture(self, view: View, width: int, height: int) -> Picture:
        if self.comparison is None or not self.comparison.shows(view):
            self.comparison = Comparison.of(view)
        comparison = self.comparison
        comparison.refresh()
        if len(comparison.runs) < 2:
            return Picture([Row("the second run has not begun", "dim").done(width)])
        worded = width >= TITLE + 2 * LEAST + CHANGE + WORD
        others = CHANGE + (WORD if worded else 0)
        value = max(LEAST, min(MOST, (width - TITLE - others) // 2))
        title = max(1, width - 2 * value - others)
        head = Row("", "dim").to(title)
        for run in comparison.runs:
            head.right(fit(clean(run.name) or "this run", value - 1, glyphs().dots).rstrip(), head.width + value, "dim")
        rows = [self._row(one, comparison, title, value, width) for one in comparison.differences]
        for text in (comparison.unlike, comparison.disturbed, *view.notes):
            rows += [Row().done(width), *wrapped(text, "ink", width)] if text else []
        shown, below = self.window(rows, height - 1)
        note: list[Run] = [(f"{below} more below", "dim")] if below else []
        return Picture([head.right("change", head.width + CHANGE, "dim").done(width), *shown], note=note)

    def _row(self, one: Difference, comparison: Comparison, title: int, value: int, width: int) -> Runs:
        quantity, better = one.quantity, one.better
        row = Row(fit(quantity.title + self._samples(one, comparison), title, glyphs().dots), "ink")
        for amount in (one.first, one.second):
            row.right(quantity.text(amount), row.width + value, "bold ink" if better is not None else "ink")
        row.right(one.change, row.width + CHANGE, STYLES[better])
        if width >= row.width + WORD:
            row.add(" " + WORDS[better], STYLES[better])
        return row.done(width)

    @staticmethod
    def _samples(one: Difference, comparison: Comparison) -> str:
        """Returns the number of samples of a percentile, if it is small."""
        if not one.quantity.samples:
            return ""
        fewest = min(getattr(run.figures, one.quantity.samples) for run in comparison.runs)
        return f" (n={fewest:,})" if fewest < SAMPLES else ""


WIDE = 170  # columns: the figures are beside the lanes
TALL = 50  # rows: the figures are below the lanes; a smaller terminal shows one of the two


class CompareScreen(BaseScreen[None]):
    """Arranges the two panels. Tab changes between them."""

    BINDINGS: ClassVar = [Binding("tab,shift+tab", "panel", "lanes or figures", show=False, id="compare.panel")]
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
        moves = [("left right", "cursor"), ("[ ]", "zoom"), ("k", "time or steps"), ("up down", "request")]
        if self._current == "figures":
            moves = [("up down", "scroll")]
        keep = [h for h in super().hints() if h[1] in ("inspect", "help", "commands")]
        return [("tab", "figures" if self._current == "runs" else "lanes"), *moves, *keep, ("q", "quit")]

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

    def action_panel(self) -> None:
        """Move the focus to the other panel; in a small terminal, show it in place of this one."""
        self._current = "figures" if self._current == "runs" else "runs"
        self.lay_out()
        self.query_one(f"#{self._current}").focus()


class NewRunsScreen(CompareScreen):
    """The compare screen for runs that can be saved as recordings."""

    BINDINGS: ClassVar = [
        Binding("S", "app.save_runs", "save", show=False, id="compare.save", tooltip="save the two runs as recordings"),
    ]

    def hints(self) -> list[Hint]:
        return [*super().hints()[:-1], ("S", "save"), ("q", "quit")]
