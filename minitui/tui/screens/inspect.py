"""The inspect screen: all panels at once, or one at a time on a small terminal. All panels share one selection."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding

from minitui.text import count, ms
from minitui.tui.apps.app_base import AppBase
from minitui.tui.glyphs import glyphs
from minitui.tui.panels import ALONE, IN_ORDER, PANELS, Room
from minitui.tui.screens.base import BaseScreen, Hint
from minitui.tui.widgets.bars import Bar, PanelChosen, PanelStrip, StatusBar, TopBar
from minitui.tui.widgets.base import Column, Columns, LinePanel, selected
from minitui.tui.widgets.hit_card import HitCard
from minitui.tui.widgets.inspect.block_map import BlockMap
from minitui.tui.widgets.inspect.details import Details
from minitui.tui.widgets.inspect.events import Events
from minitui.tui.widgets.inspect.lanes import BatchLanes
from minitui.tui.widgets.inspect.timeline import JumpRequested, TimelineClosed, TimelineOpened
from minitui.tui.widgets.rows import clean, whole_words
from minitui.viewmodel.view import View

WIDE, TALL = 100, 32  # a smaller terminal shows one panel at a time
BOTH = 44  # a terminal with fewer rows shows either the requests or the timeline of one
BARS = (2, 1)  # `every` and `turn` (see Panel) of the top bar and the status bar
SKIPPING_EVERY = 4  # while frames are skipped, the least number of frames between two paintings of a panel
QUOTE = 16  # cells for an evicted text
NOTICED_MS = 50  # a shorter stall is marked in the lanes only
PAINT_S = 0.005  # the panels of a frame are painted in turns of about this time


class Place(NamedTuple):
    """The current panel, and whether it is maximised."""

    panel: str
    maximised: bool


class _Jump(NamedTuple):
    """`place`: the panel before the jump. `before`: the step that was shown; None: the present."""

    step: int
    place: Place
    before: int | None


class Jumps:
    """Goes to steps, and back to the panel and the moment before the last jump."""

    def __init__(self, app: AppBase) -> None:
        self._app = app
        self._last: _Jump | None = None

    @property
    def shown(self) -> bool:
        """True if the picture still shows the step of the last jump."""
        return self._last is not None and self._last.step == self._app.view.moment.horizon

    def go(self, step: int, place: Place) -> bool:
        """Show the engine as it was after a step. `place`: the panel to go back to. False: the step is not kept."""
        view = self._app.view
        stays = view.moment.travel_text or view.moment.playback is not None
        if view.moment.horizon != step or self._last is None:
            self._last = _Jump(step, place, view.moment.horizon if stays else None)
        if self._app.travel_to(step):
            return True
        self._last = None
        self._app.say(f"step {step:,} is no longer kept: the picture cannot go back so far", error=True)
        return False

    def undo(self) -> Place | None:
        """Go back to the moment before the last jump. Returns the panel to show; None if that step is no longer
        shown."""
        last, shown = self._last, self.shown
        self._last = None
        if last is None or not shown:
            return None
        if last.before is None:
            self._app.to_now()
        else:
            self._app.travel_to(last.before)
        return last.place


class PanelPainter:
    """Paints each panel at its rate. A panel that is due in a frame that is not drawn is painted in the next frame.
    After a selection, and in every frame while the picture does not move (frozen, paused, in the past), all panels are
    painted. `later` calls a function after the keys that have arrived are handled."""

    def __init__(
        self, app: AppBase, panels: Mapping[str, LinePanel], bars: Sequence[Bar], later: Callable[..., object]
    ) -> None:
        self.frames = 0
        self._app, self._panels, self._bars, self._later = app, panels, bars, later
        self._due: deque[str] = deque()
        self._at_once = False  # the picture must not wait: something was selected, or the picture does not move
        self._painted_moment: object = None

    def paint(self, view: View) -> None:
        """Paint what is due in this frame; called once a frame."""
        limiter = self._app.frame_limiter
        before, self.frames = self.frames, self.frames + limiter.stride
        moment = (view.version, view.moment.travel_text, view.moment.still)
        at_once = self._at_once = view.moment.still or moment != self._painted_moment
        self._painted_moment = moment
        least = SKIPPING_EVERY if limiter.skipping else 1

        def is_due(every: int, turn: int) -> bool:
            every = max(every, least)
            return at_once or (self.frames - turn) // every > (before - turn) // every

        if is_due(*BARS):
            for bar in self._bars:
                bar.paint(view)
        for name, panel in PANELS.items():
            drawn = self._panels[name]
            if (is_due(panel.every, panel.turn) or drawn.moving or not drawn.painted) and name not in self._due:
                self._due.append(name)
        if self._app.is_headless:
            self._paint_due()
        else:
            self._later(self._paint_due)

    def _paint_due(self) -> None:
        """Paint the panels of `_due`. After PAINT_S, the rest waits until the keys that arrived are handled."""
        began = time.monotonic()
        if self._app.feed.key_waits("panels") and not (self._at_once or self._app.is_headless):
            return  # the next frame paints them
        while self._due:
            panel = self._panels[self._due.popleft()]
            if panel.display:
                panel.paint(self._app.view)
                if time.monotonic() - began >= PAINT_S and self._due and not self._app.is_headless:
                    self._later(self._paint_due)
                    return


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
        layout: vertical; background: $ground; layers: base above; overflow: hidden;
        & #columns { height: 1fr; }
        & #left, & #right { width: 1fr; }
        & #left > LinePanel, & #right > LinePanel { height: 1fr; }
    }
    """
    FIGURES = True

    def __init__(self) -> None:
        super().__init__()
        self._panels: dict[str, LinePanel] = {}  # by name; empty until the screen is mounted
        self.absent = {name for name, panel in PANELS.items() if not panel.known(View())}  # without data yet
        self.current = "map"
        self.maximised = False
        self._before_alone = Place("map", False)  # before a panel of ALONE was shown
        self._before_timeline = Place("requests", True)
        self._jumps = Jumps(self.app)
        self._about = False  # the selected block is described below the map
        self._blocks = 0  # of the pool
        self._looked = -1  # the second, or the step of a still picture, at which the hidden lanes were computed
        self._wanted = (0, 0)  # rows that the table and the lanes need
        self._above = 1  # rows of the top bar, which is higher when it shows the story of a demo

    def compose(self) -> ComposeResult:
        yield TopBar()
        yield HitCard()
        columns: dict[str, list[LinePanel]] = {}
        for name, panel in PANELS.items():
            columns.setdefault(panel.column, []).append(panel.widget(id=name))
        yield from columns["top"]
        yield PanelStrip()
        with Columns(id="columns"):
            yield Column(*columns["left"], id="left")
            yield Column(*columns["right"], *columns["alone"], id="right")
        yield Details(id="details")
        yield StatusBar()

    def on_mount(self) -> None:
        self._panels = {panel.id: panel for panel in self.query(LinePanel) if panel.id}
        self._bars = list(self.query(Bar))
        self._strip, self._top = self.query_one(PanelStrip), self.query_one(TopBar)
        self._left, self._right = self.query_one("#left"), self.query_one("#right")
        self._details = self.query_one(Details)
        self.painter = PanelPainter(self.app, self._panels, self._bars, self.call_later)
        self.lay_out()
        self._panels[self.current].focus()

    def hints(self) -> list[Hint]:
        hints = super().hints()
        first = [("tab", "panel"), *(hint for hint in hints if hint[1] == "help")]
        panels = [("esc", "back")] if self.current in ALONE or self._jumps.shown else []
        panels += [(self.app.key_of("requests"), "requests")] if self.current not in ("requests", "timeline") else []
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
        self.query_one(HitCard).leave_room(self.maximised)
        if not single and self.current in ALONE:
            self.current = self._before_alone.panel
            self._panels[self.current].focus()
        home = PANELS[self.current].part_of or self.current  # in a high terminal, with the panels that are part of it
        for name in IN_ORDER:
            panel = PANELS[name]
            both = panel.alone and home in (name, panel.part_of) and self.size.height >= BOTH
            alone = name == self.current or both
            self._panels[name].display = alone if single else name not in self.absent | ALONE
        self._strip.display = self.small
        named = (name for name in IN_ORDER if name not in self.absent and not PANELS[name].part_of)
        self._strip.show(tuple(named), home)
        self._panels["about"].display = self._about = self._describes_block
        in_left = PANELS[self.current].column == "left"
        self._left.display = not single or in_left
        self._right.display = not single or not in_left
        step = self._panels["step"]
        step.frame = "none" if single else "box"
        step.styles.height = 2 if single else 4
        step.styles.padding = (0, 1) if single else 0
        rows, blocks = self.size.height - 7 - self._above, math.ceil(self._blocks / max(1, self.size.width - 8))
        table, lanes = self._wanted
        room = Room(rows, self.size.height, self._above, blocks, table, lanes or rows)
        if "experts" not in self.absent and (experts := PANELS["experts"].height):
            room = room._replace(lanes=room.lanes + experts(room))
        for name, panel in PANELS.items():
            if panel.column != "top":
                fixed = panel.height is not None and not (single and panel.can_focus)
                self._panels[name].styles.height = panel.height(room) if fixed and panel.height else "1fr"

    # ---- painting

    def paint(self, view: View) -> None:
        """Show the view; called once a frame while this screen is visible."""
        if not self._panels:
            return
        absent = {name for name, panel in PANELS.items() if not panel.known(view)}
        if absent != self.absent:
            self.absent = absent
            if self.current in self.absent:
                self.action_panel(1)
            self.lay_out()
        if (above := max(1, sum(bar.size.height for bar in self._bars[:-1] if bar.display))) != self._above:
            self._above = above
            self.lay_out()
        wanted = self._panels["table"].wanted, self._panels["lanes"].wanted
        known = self._about, self._blocks, wanted if self.single else self._wanted
        if known != (self._describes_block, view.moment.shown.total, wanted):
            self._blocks, self._wanted = view.moment.shown.total, wanted
            self.lay_out()
        if self._details.display:
            self._details.paint(view)
        if view.history.loaded:
            shown, other = (self._strip, self._top) if self._strip.display else (self._top, self._strip)
            shown.marks, other.marks = self._to_see(view), {}
        self.painter.paint(view)

    def _to_see(self, view: View) -> dict[str, Sequence[str]]:
        """Returns what there is to see in panels, which may be hidden or small: the worst stall of the lanes, and the
        text that was just evicted from the tree. Each in several texts, the longest first."""
        lanes, size = self._panels["lanes"], self.size
        assert isinstance(lanes, BatchLanes)
        moment = view.moment.horizon if view.moment.still else int(view.moment.now)
        if not lanes.display and moment != self._looked:
            lanes.picture(view, size.width - 4, size.height // 2)  # once a second
        self._looked = moment
        marks: dict[str, Sequence[str]] = {}
        if (stall := lanes.stall) is not None and stall.gap.ms >= NOTICED_MS:
            why = view.texts.labelled(stall.words)
            brief = why.replace(" device in the prefill", " prefill").removesuffix(" on the core")
            texts = why, brief, f"{ms(stall.gap.ms)} ms"
            marks["lanes"] = [f" {view.texts.request(stall.lane.id)} stalled {text} " for text in texts]
        if evicted := view.moment.just_evicted():
            tokens = count(sum(last.tokens for last in evicted), "token")
            quote = whole_words(clean(view.texts.evicted(evicted[-1].ids)), QUOTE)
            brief = f" {glyphs().times} {f'“{quote}”' if quote else tokens} evicted "
            marks["tree"] = f"{brief}{glyphs().middot} {tokens} " if quote else brief, brief
        return marks

    # ---- messages and actions

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        if event.widget.id in IN_ORDER:
            self.current = event.widget.id
            if self.single:
                self.lay_out()

    def action_panel(self, by: int) -> None:
        self._close_details()
        absent = self.absent if self.single else self.absent | ALONE
        present = [name for name in IN_ORDER if name not in absent or name == self.current]
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
        self._go_to(Place(self._before_alone.panel if self.current in ALONE else self.current, False))

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
        if self.current not in ALONE:
            self._before_alone = self._place
        self._go_to(Place(name, True))

    def on_panel_chosen(self, message: PanelChosen) -> None:
        if message.name not in ALONE:
            self._close_details()
            self._go_to(Place(message.name, self.maximised and self.current not in ALONE))
        elif message.name != self.current:
            self.toggle(message.name)

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
            maximised = self.maximised and self.current not in ALONE
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
        self.maximised = not self.maximised
        self.lay_out()

    def action_search(self) -> None:
        """Search the events. A tree with the focus is searched instead: its own key comes first."""
        self._show("events")
        self.query_one(Events).action_search()

    def action_colour(self) -> None:
        self.query_one(BlockMap).action_colour()

    def action_back(self) -> None:
        """Undo the first of these that is active: popover, jump in time, panel without others, zoom, selection,
        maximised panel."""
        block_map = self.query_one(BlockMap)
        if self._details.display:
            self._details.action_close()
        elif self._undo_jump():
            pass
        elif self.current in ALONE:
            self.toggle(self.current)
        elif block_map.zoomed_at is not None:
            block_map.action_unzoom()
        elif self.app.view.selection is not None:
            self.app.view.select(None)
        elif self.maximised:
            self.action_maximise()
