"""The panels that a lesson can show, by name, and their sizes."""

from __future__ import annotations

from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.chat.occupancy import Occupancy
from minitui.tui.widgets.inspect.block_map import BlockMap
from minitui.tui.widgets.inspect.block_table import BlockTable
from minitui.tui.widgets.inspect.events import Events
from minitui.tui.widgets.inspect.lanes import BatchLanes
from minitui.tui.widgets.inspect.step_bar import StepBar
from minitui.tui.widgets.inspect.timings import StepTimings
from minitui.tui.widgets.inspect.tree import RadixTree
from minitui.tui.widgets.lesson.attention import Attention, KeySlot
from minitui.tui.widgets.lesson.curves import CostCurves
from minitui.tui.widgets.lesson.recorded_runs import HostAndDevice
from minitui.tui.widgets.lesson.runs import Runs, RunsInSteps
from minitui.tui.widgets.lesson.tokens import CandidateBars, TextPieces
from minitui.tui.widgets.lesson.tree_blocks import NodeBlocks
from minitui.tui.widgets.lesson.wire import WireLines


class NumberedBlocks(BlockMap):
    """The block map with the number of each block, because the texts of lessons name blocks by their numbers."""

    NUMBERS = True


class TreeTable(RadixTree):
    """The prefix tree as a table, because the texts of lessons name the blocks and tokens of nodes by their numbers."""

    bars = False


PANELS: dict[str, type[LinePanel]] = {
    "step": StepBar, "attention": Attention, "slot": KeySlot, "map": NumberedBlocks, "table": BlockTable,
    "lanes": BatchLanes, "tree": TreeTable,
    "timings": StepTimings, "events": Events, "occupancy": Occupancy, "pieces": TextPieces, "runs": Runs,
    "runs-steps": RunsInSteps,
    "candidates": CandidateBars, "words": CandidateBars, "costs": CostCurves, "gpu": HostAndDevice,
    "blocks": NodeBlocks, "wire": WireLines,
}
# Rows of these panels; on a narrow screen, all other panels have PANEL_ROWS. The timings need 10 for their tracks.
HEIGHTS = {
    "step": 4, "occupancy": 2, "timings": 10, "candidates": 11, "words": 6, "attention": 12, "slot": 6, "costs": 11,
    "gpu": 9, "runs": 13, "runs-steps": 13, "blocks": 10,
}
TALL = (  # on a wide screen, these panels have its height
    "attention", "blocks", "costs", "gpu", "runs", "runs-steps",
)
RESULT_ROWS = {"lanes": 11}  # beside a result on a narrow screen: six requests, and the number of the others
LIVE = ("map", "occupancy")  # before an experiment has run, these panels show the pool as it is
PANEL_ROWS = 9
MIN_PANEL_ROWS = 5  # below the text, a panel with nothing to show is hidden if fewer rows are left
# Panel -> the panel under it. A narrow screen shows only the first of the two.
PARTNERS = {"step": "lanes", "occupancy": "map", "slot": "map"}
BOTH_ROWS = {"slot": 11}  # from this number of rows, a narrow screen also shows the partner of this panel


def arrangement(panel: str, below: int | None) -> dict[str, int | None]:
    """Returns {a panel to show: its rows; None: all rows that are left} for a page with this panel. `below`: the rows
    below the text; None: the panels are beside the text."""
    partner = PARTNERS.get(panel, "")
    if below is None:
        return {name: None if name in TALL else HEIGHTS.get(name) for name in (panel, partner) if name}
    if not panel or not below:
        return {}
    if BOTH_ROWS.get(panel) == below:
        return {panel: HEIGHTS[panel], partner: below - HEIGHTS[panel]}
    return {panel: below}
