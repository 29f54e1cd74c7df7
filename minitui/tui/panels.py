"""The panels of the inspect screen: one row each. The screen, its painting, the keys, the slash commands, the palette,
the help, minitui.dev.panel and the tests that run over all panels read PANELS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minitui.tui import help
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.inspect.block_map import BlockMap
from minitui.tui.widgets.inspect.block_table import BlockTable
from minitui.tui.widgets.inspect.details import SelectedBlock
from minitui.tui.widgets.inspect.events import Events
from minitui.tui.widgets.inspect.experts import ExpertMap
from minitui.tui.widgets.inspect.lanes import BatchLanes
from minitui.tui.widgets.inspect.requests import RequestTable
from minitui.tui.widgets.inspect.step_bar import StepBar
from minitui.tui.widgets.inspect.timeline import RequestTimeline
from minitui.tui.widgets.inspect.timings import StepTimings
from minitui.tui.widgets.inspect.tree import RadixTree
from minitui.tui.widgets.inspect.trends import TrendCharts
from minitui.tui.widgets.inspect.vitals import Vitals
from minitui.tui.widgets.inspect.waterfall import Waterfall
from minitui.viewmodel.view import View

COLUMNS = ("top", "left", "right", "alone")


class Room(NamedTuple):
    """`rows`: those of the columns. `screen`: those of the terminal. `above`: those of the top bar. `blocks`: rows of
    half cells that the pool needs, a half cell for each block. `table`, `lanes`: rows that the content of the block
    table needs, and that of the panels below it."""

    rows: int
    screen: int
    above: int
    blocks: int
    table: int = 0
    lanes: int = 1 << 10


def _map_share(room: Room) -> int:
    """Returns the rows of the map: those for the whole pool, if they are not many more than its usual share."""
    usual = max(9, round(room.rows * 0.38)) if room.above < 4 else max(7, round(room.rows * 0.3))
    whole = room.blocks + 4  # with the frame, the bar and the waste
    return max(usual, whole) if whole <= room.rows * 0.42 else usual


def _table_rows(room: Room) -> int:
    """Returns the rows of the block table: more than its usual ones if its content needs them and the lanes do not."""
    usual = 6 if room.rows >= 32 else 5
    return max(usual, min(room.table, room.rows - _map_share(room) - room.lanes) // 3 * 3)  # a line of chips has 3


def _map_rows(room: Room) -> int:
    """Returns the rows of the map: its share, and what the table and the lanes do not need."""
    return max(_map_share(room), min(round(room.rows * 0.6), room.rows - _table_rows(room) - room.lanes))


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of the inspect screen.

    `widget`: its class. `name`: its id on the screen, and the name of its action and its slash command.
    `column`: "top" (always shown, without focus), "left", "right", or "alone": never beside others.
    `every`, `turn`: it is painted in frame `turn` of every `every` frames (from 0); equal turns of many panels would
    put their work into one frame. Panels that change with every step are painted often, figures less often.
    `help`: its line in the help of the screen. `height`: its rows; None: those that the others of the column leave.
    `key`, `does`: the key and the sentence of the action that shows a panel of "alone".
    `title`: the name of this action, and of the panel in the help; if empty, the widget's TITLE.
    `part_of`: the panel with which it is shown: below the map when a block is selected, beside the requests.
    `known`: whether the source has its data; it is not shown before.
    """

    widget: type[LinePanel]
    name: str = ""
    column: str = ""
    every: int = 0
    turn: int = 0
    help: str = ""
    height: Callable[[Room], int] | None = None
    key: str = ""
    title: str = ""
    does: str = ""
    part_of: str = ""
    known: Callable[[View], bool] = lambda view: True

    def __post_init__(self) -> None:
        lacks = [
            (not self.name.isidentifier(), "a `name` of letters, which is its id on the screen"),
            (not self.widget.TITLE, f"a TITLE: write it into {self.widget.__name__}"),
            (self.widget.picture is LinePanel.picture, f"a picture: {self.widget.__name__} inherits LinePanel.picture"),
            (self.column not in COLUMNS, f"a `column`: one of {', '.join(COLUMNS)}"),
            (self.every < 1 or not 0 <= self.turn < self.every,
             "a rate: it is painted in frame `turn` of every `every` frames, with every >= 1 and 0 <= turn < every"),
            (not self.help, "a line of `help`"),
            (self.can_focus and self.widget.TITLE not in help.PANELS,
             f"help for its keys and figures: write a section {self.widget.TITLE!r} into minitui/tui/help.md"),
            (self.alone and not self.part_of and not (self.key and self.does),
             "`key` and `does`: a panel that is never beside others is reached by a key"),
            (bool(self.key) and not self.alone, 'the column "alone": only its panels are shown by a key'),
        ]
        for missing, what in lacks:
            if missing:
                name = self.name or self.widget.__name__
                raise TypeError(f"the panel {name!r} in minitui/tui/panels.py lacks {what}")
        if not self.title:
            object.__setattr__(self, "title", self.widget.TITLE)

    @property
    def alone(self) -> bool:
        """True if it is never beside others."""
        return self.column == "alone"

    @property
    def can_focus(self) -> bool:
        """True if tab reaches it."""
        return self.column != "top" and (self.alone or not self.part_of)


def table(rows: Sequence[Panel]) -> dict[str, Panel]:
    """Returns the panels by name, in the order of the screen and of tab. Raises TypeError if two have one name."""
    found = {row.name: row for row in rows}
    for row in rows:
        if found[row.name] is not row:
            raise TypeError(f"two panels in minitui/tui/panels.py are named {row.name!r}")
        if row.part_of and row.part_of not in found:
            raise TypeError(f"the panel {row.name!r} is part of {row.part_of!r}, and there is no such panel")
    return found


PANELS = table((
    Panel(name="vitals", title="Vitals", widget=Vitals, column="top", every=4,
        help="the engine's health: tokens per second of answers and prompts over the last second of working time, "
             "running and waiting requests, the share of new prompts' tokens that came from the cache in the last "
             "minute, the pool, the median time of decode steps. Working time passes also while no request runs, but "
             "not while the engine is paused, and without the delay of slow motion. (After such a delay the "
             "processor's caches are cold: a step of a small model on a CPU can take two or three times as long.) "
             '"Since step 2,509": no earlier records are known'),
    Panel(name="step", widget=StepBar, column="top", every=2,
        help="what one step computes: tokens of decoding requests, and chunks of prompts"),
    Panel(name="map", widget=BlockMap, column="left", every=2,
        height=_map_rows,  # a long story in the top bar shrinks the map, not the lanes
        help="the pool: free, cached (only in the tree), active (one request), shared (several requests); the waste"),
    Panel(name="about", widget=SelectedBlock, column="left", part_of="map", every=4, turn=2,
        height=lambda room: max(10, room.screen // 3),
        help="below the map when it is shown alone: the selected block's tokens, users, age and history"),
    Panel(name="table", widget=BlockTable, column="left", every=2, turn=1,
        height=_table_rows,
        help="positions → blocks of the selected request; the last block may be partly filled"),
    Panel(name="lanes", widget=BatchLanes, column="left", every=4, turn=1,
        help="waiting and running requests over time"),
    Panel(name="experts", widget=ExpertMap, column="left", every=4, turn=3,
        height=lambda room: max(5, round(room.rows * 0.2)), known=lambda view: view.history.experts.known,
        help="the tokens of each expert of a mixture-of-experts model"),
    Panel(name="tree", widget=RadixTree, column="right", every=4, turn=2,
        help="the cached texts: the requests that use them, the tokens saved, the order of eviction"),
    Panel(name="timings", widget=StepTimings, column="right", every=10, turn=4,
        height=lambda room: 10 + (room.screen >= 36) + (room.screen >= 44) if room.rows >= 26 else 7,  # room for a tree
        help="decode, mixed and prefill steps; the slowest steps and why; whether the host or the device limits"),
    Panel(name="waterfall", widget=Waterfall, column="alone", every=2, turn=1, key="w",
        does="Show host, device and requests on an axis of time (inspect). Again: all panels.",
        help="host, device and requests on an axis of time: what each step spent its time on"),
    Panel(name="events", widget=Events, column="right", every=4, turn=3,
        height=lambda room: max(6 if room.rows >= 22 else 5, round(room.rows * 0.27)),  # the tree takes the rest
        help="every decision with its reason, the newest first"),
    Panel(name="requests", widget=RequestTable, column="alone", every=4, key="5",
        does="Show every request with its times and token gaps, and why one stalled (inspect). Again: all panels.",
        help="a line for each request: its token gaps and what caused the longest; enter: each token"),
    Panel(name="timeline", widget=RequestTimeline, column="alone", part_of="requests", every=4, turn=3,
        help="the gap before each token of the selected request"),
    Panel(name="trends", widget=TrendCharts, column="alone", every=10, turn=2, key="6",
        does="Show first tokens, gaps, hit rate, pool and queue over the last minutes or hours. Again: all panels.",
        help="first tokens, token gaps, hit rate, pool and queue over the last minutes and hours"),
))
ALONE = frozenset(name for name, panel in PANELS.items() if panel.alone)
BY_KEY = tuple(name for name, panel in PANELS.items() if panel.key)
IN_ORDER = tuple(name for name, panel in PANELS.items() if panel.can_focus)
