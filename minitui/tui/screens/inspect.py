"""The inspect screen: every panel at once, or on a small terminal one at a time, and one selection through them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding

from minitui.tui.screens.one_size import OneSize
from minitui.tui.widgets.base import Column, Columns, LinePanel, Opened
from minitui.tui.widgets.block_map import BlockMap
from minitui.tui.widgets.block_table import BlockTable
from minitui.tui.widgets.chrome import StatusBar, TopBar
from minitui.tui.widgets.details import Details
from minitui.tui.widgets.events import Events
from minitui.tui.widgets.experts import ExpertMap
from minitui.tui.widgets.lanes import BatchLanes
from minitui.tui.widgets.occupancy import Occupancy
from minitui.tui.widgets.step_bar import StepBar
from minitui.tui.widgets.timings import StepTimings
from minitui.tui.widgets.tree import RadixTree
from minitui.tui.widgets.vitals import Vitals

if TYPE_CHECKING:
    from minitui.viewmodel.model import View

WIDE, TALL = 100, 32  # smaller than this: one panel at a time
TIMINGS_HEIGHT = 10
# Frames between two paints of a panel, and on which of them: the offsets spread the work. What moves with every step is
# painted with every frame; figures that a reader reads and does not watch, less often. After a selection, and
# while the picture stands (frozen, at the gate, in the past), all are painted at once.
EVERY = {
    "step": (1, 0), "occupancy": (1, 0), "map": (2, 0), "table": (2, 1), "lanes": (4, 1), "events": (4, 3),
    "tree": (5, 1), "vitals": (5, 2), "timings": (10, 4), "experts": (5, 3),
}  # fmt: skip


class InspectScreen(OneSize[None]):
    """Composes and routes: the panels know the view, the view knows the engine."""

    BINDINGS: ClassVar = [
        Binding("tab", "panel(1)", "next panel", show=False, id="inspect.next"),
        Binding("shift+tab", "panel(-1)", "previous panel", show=False, id="inspect.previous"),
        Binding("z", "maximise", "maximise", show=False, id="inspect.maximise", tooltip="this panel alone, and back"),
        Binding("c", "colour", "colours", show=False, id="inspect.colour", tooltip="colour the blocks another way"),
        Binding("escape", "back", "back", show=False, id="inspect.back", tooltip="undo the selection or the zoom"),
    ]
    DEFAULT_CSS = """
    InspectScreen {
        layout: vertical; background: $ground; layers: base above;
        & #columns { height: 1fr; }
        & #left { width: 1fr; }
        & #right { width: 1fr; }
        & #lanes, & #tree, & #events { height: 1fr; }
        & #experts { display: none; }
        & #glance { height: auto; }
        & #timings { height: 10; }
        &.-single #vitals { display: none; }
        &.-many #occupancy { display: none; }
        &.-single #map, &.-single #table, &.-single #timings { height: 1fr; }
    }
    """
    LEFT: ClassVar = ("map", "table", "lanes", "experts")
    PANELS: ClassVar = (*LEFT, "tree", "timings", "events")

    def __init__(self) -> None:
        super().__init__()
        self.absent = {"experts"}  # panels of which this engine has nothing to show
        self.current = "map"
        self.maximised = False
        self._frames = 0
        self._painted_moment: object = None
        self._above = 1  # rows of the top bar: a demo's story stands in it

    def compose(self) -> ComposeResult:
        yield TopBar()
        yield Vitals(id="vitals")
        with Column(id="glance"):
            yield Occupancy(id="occupancy")
            yield StepBar(id="step")
        with Columns(id="columns"):
            with Column(id="left"):
                yield BlockMap(id="map")
                yield BlockTable(id="table")
                yield BatchLanes(id="lanes")
                yield ExpertMap(id="experts")
            with Column(id="right"):
                yield RadixTree(id="tree")
                yield StepTimings(id="timings")
                yield Events(id="events")
        yield Details(id="details")
        yield StatusBar()

    def on_mount(self) -> None:
        self._panels: dict[str, LinePanel] = {str(panel.id): panel for panel in self.query(LinePanel) if panel.id}
        self._bars = list(self.query("Bar"))
        self._left, self._right = self.query_one("#left"), self.query_one("#right")
        self._details = self.query_one(Details)
        self.lay_out()
        self._panels[self.current].focus()

    # ---- arrangement

    @property
    def single(self) -> bool:
        """One panel at a time: the terminal is small, or a panel is maximised."""
        return self.maximised or self.size.width < WIDE or self.size.height < TALL

    def on_resize(self, event: events.Resize) -> None:
        self.lay_out()

    def lay_out(self) -> None:
        """Show the panels that fit, at their heights."""
        if not self.is_mounted or not hasattr(self, "_panels"):
            return
        single = self.single
        self.set_class(single, "-single")
        self.set_class(not single, "-many")
        for name in self.PANELS:
            self._panels[name].display = name == self.current if single else name not in self.absent
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
        least, share = (9, 0.38) if self._above < 4 else (7, 0.3)  # a long story takes from the map, not from the lanes
        self._panels["map"].styles.height = max(least, round(rows * share))
        self._panels["table"].styles.height = 6 if rows >= 32 else 5
        self._panels["timings"].styles.height = TIMINGS_HEIGHT
        self._panels["experts"].styles.height = max(5, round(rows * 0.2))

    # ---- painting

    def paint(self, view: View) -> None:
        """Show the view as it stands; called once a frame while this screen is visible."""
        if not hasattr(self, "_panels"):
            return
        self._frames += 1
        if view.experts.known == ("experts" in self.absent):
            self.absent = set() if view.experts.known else {"experts"}
            if self.current in self.absent:
                self.action_panel(1)
            self.lay_out()
        if (above := max(1, self._bars[0].size.height)) != self._above:
            self._above = above
            self.lay_out()
        moment = (view.version, view.travel_text, view.still)
        at_once = view.still or moment != self._painted_moment
        self._painted_moment = moment
        for bar in self._bars:
            bar.paint(view)  # type: ignore[attr-defined]
        for name, (every, offset) in EVERY.items():
            panel = self._panels[name]
            if panel.display and (at_once or panel.view is None or self._frames % every == offset):
                panel.paint(view)
        if self._details.display:
            self._details.paint(view)

    # ---- routing

    def on_opened(self, message: Opened) -> None:
        """A panel asks for the story of something."""
        message.stop()
        panel = self._panels[self.current]
        if panel.view is not None:
            self._details.show(panel.view, message.kind, message.id, panel)

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """The panel with the focus is the current one."""
        if event.widget.id in self.PANELS:
            self.current = event.widget.id
            if self.single:
                self.lay_out()

    def action_panel(self, by: int) -> None:
        """Go to the next or previous panel."""
        if self._details.display:
            self._details.action_close()
        there = [name for name in self.PANELS if name not in self.absent or name == self.current]
        self.current = there[(there.index(self.current) + by) % len(there)]
        self.lay_out()
        panel = self._panels[self.current]
        panel.focus()
        panel.refresh(layout=True)

    def action_maximise(self) -> None:
        """This panel alone, and back."""
        self.maximised = not self.maximised
        self.lay_out()

    def action_colour(self) -> None:
        """Colour the blocks by something else."""
        panel = self._panels["map"]
        assert isinstance(panel, BlockMap)
        panel.action_colour()

    def action_back(self) -> None:
        """Close what is open: the popover, the zoom of the map, the selection, the maximised panel."""
        block_map = self._panels["map"]
        view = block_map.view
        assert isinstance(block_map, BlockMap)
        if self._details.display:
            self._details.action_close()
        elif block_map.zoomed_at is not None:
            block_map.action_unzoom()
        elif view is not None and view.selection is not None:
            view.select(None)
        elif self.maximised:
            self.action_maximise()
