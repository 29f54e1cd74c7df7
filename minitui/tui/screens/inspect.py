"""The inspect screen: all panels at once, or one at a time on a small terminal. All panels share one selection."""

from __future__ import annotations

from typing import Any, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding

from minitui.tui.screens.base import BaseScreen, Hint
from minitui.tui.screens.jumps import Jumps, Place
from minitui.tui.screens.panel_painter import PanelPainter
from minitui.tui.widgets.bar import Bar
from minitui.tui.widgets.base import Column, Columns, LinePanel, Opened, selected
from minitui.tui.widgets.block_map import BlockMap
from minitui.tui.widgets.block_table import BlockTable
from minitui.tui.widgets.details import Details, SelectedBlock
from minitui.tui.widgets.events import Events
from minitui.tui.widgets.experts import ExpertMap
from minitui.tui.widgets.lanes import BatchLanes
from minitui.tui.widgets.requests import RequestTable
from minitui.tui.widgets.status_bar import StatusBar
from minitui.tui.widgets.step_bar import StepBar
from minitui.tui.widgets.timeline import JumpRequested, RequestTimeline, TimelineClosed, TimelineOpened
from minitui.tui.widgets.timings import StepTimings
from minitui.tui.widgets.top_bar import TopBar
from minitui.tui.widgets.tree import RadixTree
from minitui.tui.widgets.trends import TrendCharts
from minitui.tui.widgets.vitals import Vitals
from minitui.tui.widgets.waterfall import Waterfall
from minitui.viewmodel.view import View

WIDE, TALL = 100, 32  # a smaller terminal shows one panel at a time
TIMINGS_HEIGHT = 10  # rows; a terminal with at least as many rows as a number of ROOMY has one more
ROOMY = (36, 44)
REQUESTS = ("requests", "timeline")
BOTH = 44  # a terminal with fewer rows shows either the requests or the timeline of one


class InspectScreen(BaseScreen[None]):
    """Arranges the panels and handles their messages; the panels draw the view."""

    BINDINGS: ClassVar = [
        Binding("tab", "panel(1)", "next panel", show=False, id="inspect.next"),
        Binding("shift+tab", "panel(-1)", "previous panel", show=False, id="inspect.previous"),
        Binding("z", "maximise", "maximise", show=False, id="inspect.maximise", tooltip="one panel, or all panels"),
        Binding("slash", "search", "search", show=False, id="inspect.search", tooltip="search the events"),
        Binding("c", "colour", "colours", show=False, id="inspect.colour", tooltip="colour by another property"),
        Binding("escape", "back", "back", show=False, id="inspect.back", tooltip="undo the zoom or the selection"),
    ]
    DEFAULT_CSS = """
    InspectScreen {
        layout: vertical; background: $ground; layers: base above;
        & #columns { height: 1fr; }
        & #left, & #right { width: 1fr; }
        & #lanes, & #tree, & #events, & #waterfall, & #requests, & #timeline, & #trends { height: 1fr; }
        & #experts { display: none; }
    }
    """
    FIGURES = True
    LEFT: ClassVar = ("map", "table", "lanes", "experts")
    PANELS: ClassVar = (*LEFT, "tree", "timings", "waterfall", "events", *REQUESTS, "trends")
    ALONE: ClassVar = frozenset({"waterfall", "trends", *REQUESTS})  # panels that are never beside others

    def __init__(self) -> None:
        super().__init__()
        self._panels: dict[str, LinePanel] = {}  # by name; empty until the screen is mounted
        self.absent = {"experts"}  # panels without data from this engine
        self.current = "map"
        self.maximised = False
        self._before_alone = Place("map", False)  # before a panel of ALONE was shown
        self._before_timeline = Place("requests", True)
        self._jumps = Jumps(self.app)
        self._about = False  # the selected block is described below the map
        self._above = 1  # rows of the top bar, which is higher when it shows the story of a demo

    def compose(self) -> ComposeResult:
        yield TopBar()
        yield Vitals(id="vitals")
        yield StepBar(id="step")
        with Columns(id="columns"):
            with Column(id="left"):
                yield BlockMap(id="map")
                yield SelectedBlock(id="about")
                yield BlockTable(id="table")
                yield BatchLanes(id="lanes")
                yield ExpertMap(id="experts")
            with Column(id="right"):
                yield RadixTree(id="tree")
                yield StepTimings(id="timings")
                yield Waterfall(id="waterfall")
                yield Events(id="events")
                yield RequestTable(id="requests")
                yield RequestTimeline(id="timeline")
                yield TrendCharts(id="trends")
        yield Details(id="details")
        yield StatusBar()

    def on_mount(self) -> None:
        self._panels = {panel.id: panel for panel in self.query(LinePanel) if panel.id}
        self._bars = list(self.query(Bar))
        self._left, self._right = self.query_one("#left"), self.query_one("#right")
        self._details = self.query_one(Details)
        self.painter = PanelPainter(self.app, self._panels, self._bars, self.call_later)
        self.lay_out()
        self._panels[self.current].focus()

    def hints(self) -> list[Hint]:
        """Returns the keys of this screen, then the actions on the engine."""
        hints = super().hints()
        first = [("tab", "panel"), *(hint for hint in hints if hint[1] == "help")]
        panels = [("esc", "back")] if self.current in self.ALONE or self._jumps.shown else []
        panels += [(self.app.key_of("requests"), "requests")] if self.current not in REQUESTS else []
        panels += [hint for hint in hints if hint[1] == "go to"]
        panels += [(self.app.key_of("waterfall"), "waterfall")] if self.current != "waterfall" else []
        panels += [hint for hint in hints if hint[1] in ("pause", "step")]
        other_screen = ("1", "chat") if self.app.has_chats else ("3", "lecture")
        left_out = ("write", "chats", "inspect", "fork", "new")
        rest = (hint for hint in hints if hint not in [*first, *panels] and hint[1] not in left_out)
        return [*first, *panels, other_screen, ("z", "maximise"), *rest]

    # ---- arrangement

    @property
    def small(self) -> bool:
        """True if the terminal has room for one panel only."""
        return self.size.width < WIDE or self.size.height < TALL

    @property
    def single(self) -> bool:
        """True if only one panel is shown, because the terminal is small or the panel is maximised."""
        return self.maximised or self.small

    @property
    def _describes_block(self) -> bool:
        """True if the selected block is to be described below the map."""
        return self.single and self.current == "map" and selected(self.app.view, "block") is not None

    def on_resize(self, event: events.Resize) -> None:
        self.lay_out()

    def lay_out(self) -> None:
        """Show the panels that fit, and set their heights."""
        if not self._panels:
            return
        single = self.single
        if not single and self.current in self.ALONE:
            self.current = self._before_alone.panel
            self._panels[self.current].focus()
        for name in self.PANELS:
            self._panels[name].display = name == self.current if single else name not in self.absent | self.ALONE
        if self.current in REQUESTS and self.size.height >= BOTH:
            for name in REQUESTS:
                self._panels[name].display = True
        about = self._panels["about"]
        about.display = self._about = self._describes_block
        about.styles.height = max(10, self.size.height // 3)
        self._left.display = not single or self.current in self.LEFT
        self._right.display = not single or self.current not in self.LEFT
        step = self._panels["step"]
        step.frame = "none" if single else "box"
        step.styles.height = 2 if single else 4
        if single:
            for name in self.PANELS:
                self._panels[name].styles.height = "1fr"
            return
        rows = self.size.height - 7 - self._above
        min_rows, share = (9, 0.38) if self._above < 4 else (7, 0.3)  # a long story shrinks the map, not the lanes
        self._panels["map"].styles.height = max(min_rows, round(rows * share))
        self._panels["table"].styles.height = 6 if rows >= 32 else 5
        self._panels["timings"].styles.height = TIMINGS_HEIGHT + sum(self.size.height >= rows for rows in ROOMY)
        self._panels["experts"].styles.height = max(5, round(rows * 0.2))

    # ---- painting

    def paint(self, view: View) -> None:
        """Show the view; called once a frame while this screen is visible."""
        if not self._panels:
            return
        if view.history.experts.known == ("experts" in self.absent):
            self.absent = set() if view.history.experts.known else {"experts"}
            if self.current in self.absent:
                self.action_panel(1)
            self.lay_out()
        if (above := max(1, self._bars[0].size.height)) != self._above:
            self._above = above
            self.lay_out()
        if self._about != self._describes_block:
            self.lay_out()
        if self._details.display:
            self._details.paint(view)
        self.painter.paint(view)

    # ---- messages and actions

    def on_opened(self, message: Opened) -> None:
        """Show the details that a panel has requested."""
        message.stop()
        self._details.show(self.app.view, message.kind, message.id, self._panels[self.current])

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Make the panel with the focus the current panel."""
        if event.widget.id in self.PANELS:
            self.current = event.widget.id
            if self.single:
                self.lay_out()

    def action_panel(self, by: int) -> None:
        """Go to the next or previous panel."""
        self._close_details()
        absent = self.absent if self.single else self.absent | self.ALONE
        present = [name for name in self.PANELS if name not in absent or name == self.current]
        self._show(present[(present.index(self.current) + by) % len(present)])

    def _show(self, name: str) -> None:
        """Make a panel the current panel. Before the screen is mounted, only the name is kept."""
        self.current = name
        if self._panels:
            self.lay_out()
            panel = self._panels[name]
            panel.view = self.app.view  # Textual reports its size after the layout, and then it is painted at once
            panel.focus()

    def _go_to(self, place: Place) -> None:
        self.maximised = place.maximised
        self._show(place.panel)

    def show_all(self) -> None:
        """Show all panels. A small terminal shows the one that was shown before a panel of ALONE."""
        self._close_details()
        self._go_to(Place(self._before_alone.panel if self.current in self.ALONE else self.current, False))

    def _close_details(self) -> None:
        if self._panels and self._details.display:
            self._details.action_close()

    def toggle(self, name: str) -> None:
        """Show a panel of ALONE; if it is shown, the panels as before."""
        self._before_timeline = Place("requests", True)
        self._close_details()
        if self.current == name:
            self._go_to(self._before_alone)
        else:
            self._show_alone(name)

    def _show_alone(self, name: str) -> None:
        if self.current not in self.ALONE:
            self._before_alone = self._place
        self._go_to(Place(name, True))

    def on_timeline_opened(self, message: TimelineOpened) -> None:
        self._open_timeline()

    def _open_timeline(self) -> None:
        """Show the timeline of the selected request. Escape goes back to the panel before."""
        if self.current != "timeline":
            self._before_timeline = self._place
        self._show_alone("timeline")

    def on_timeline_closed(self, message: TimelineClosed) -> None:
        if not self._undo_jump():
            self._go_to(self._before_timeline)

    def on_jump_requested(self, message: JumpRequested) -> None:
        """Show the engine as it was after a step. Escape goes back to the panel and the moment before."""
        if self._jumps.go(message.step, self._place) and not self.small:
            self._go_to(Place("events", False))

    def go_to(self, kind: str, id: Any) -> None:
        """Show a step, request, block or node that the user has named. A step is shown by the panels that are shown,
        and Escape goes back; for the others, their own panel is shown."""
        self._close_details()
        if kind == "step":
            self._jumps.go(id, self._place)
            return
        self.app.view.select(kind, id)
        if kind == "request":
            self._open_timeline()
        else:
            maximised = self.maximised and self.current not in self.ALONE
            self._go_to(Place("map" if kind == "block" else "tree", maximised))

    @property
    def _place(self) -> Place:
        return Place(self.current, self.maximised)

    def _undo_jump(self) -> bool:
        """Go back to the panel and the moment before the last jump. Returns False if that step is no longer shown."""
        place = self._jumps.undo()
        if place is not None:
            self._go_to(place)
        return place is not None

    def action_maximise(self) -> None:
        """Show the current panel alone, or all panels again."""
        self.maximised = not self.maximised
        self.lay_out()

    def action_search(self) -> None:
        """Search the events. A tree with the focus is searched instead: its own key comes first."""
        self._show("events")
        self.query_one(Events).action_search()

    def action_colour(self) -> None:
        """Colour the blocks by another property."""
        self.query_one(BlockMap).action_colour()

    def action_back(self) -> None:
        """Undo the first of these that is active: popover, jump in time, panel without others, zoom, selection,
        maximised panel."""
        block_map = self.query_one(BlockMap)
        if self._details.display:
            self._details.action_close()
        elif self._undo_jump():
            pass
        elif self.current in self.ALONE:
            self.toggle(self.current)
        elif block_map.zoomed_at is not None:
            block_map.action_unzoom()
        elif self.app.view.selection is not None:
            self.app.view.select(None)
        elif self.maximised:
            self.action_maximise()
