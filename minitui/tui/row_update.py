"""Writes the changed cells of panels, without composing the other widgets of the screen.

For an update, Textual asks every widget in the rectangle around all changes for its lines, cuts each line at every edge
of a widget, and writes a line from the left edge of the changed widget. Several panels change in each frame, so
this rectangle is most of the screen. Here only the changed cells are taken, from the panel in front.
"""

from __future__ import annotations

from rich.color import ColorSystem
from rich.console import Console
from rich.segment import Segment
from textual._compositor import Compositor, CompositorUpdate
from textual.geometry import Region
from textual.strip import Strip

from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.rows import cells

Front = tuple[int, int, LinePanel | None, Region]  # columns from, to; the panel in front (None: another widget); region
Part = tuple[int, int, list[Segment]]  # column and row of the first cell; what to write there


class RowUpdate(CompositorUpdate):
    """Parts of lines."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts

    def render_segments(self, console: Console) -> str:
        """Returns the parts as text for the terminal."""
        colours = console._color_system or ColorSystem.TRUECOLOR
        render = Strip.render_style
        out: list[str] = []
        for x, y, segments in self.parts:
            out.append(f"\x1b[{y + 1};{x + 1}H")
            out += [render(style, text, colours) if style else text for text, style, _ in segments]
        return "".join(out)


class RowUpdates:
    """Makes the updates of one screen."""

    def __init__(self) -> None:
        self._cuts: list[list[int]] = []  # the layout of `_fronts`: Textual makes a new list for each layout
        self._fronts: dict[int, list[Front]] = {}  # by line of the screen

    def update(self, compositor: Compositor) -> RowUpdate | None:
        """Returns the update for all dirty regions, and clears them; None if a widget that is no panel is dirty."""
        regions = compositor._dirty_regions
        if not regions or compositor.size.region in regions:
            return None
        if compositor.cuts is not self._cuts:
            self._cuts, self._fronts = compositor.cuts, {}
        parts: list[Part] = []
        for y, left, right in compositor._regions_to_spans(regions):
            for start, end, panel, region in self._line(compositor, y):
                if start >= right or end <= left:
                    continue
                if panel is None:
                    return None
                panel._dirty_regions.clear()  # as in LinePanel.render_lines
                first, last = max(start, left), min(end, right)
                parts.append((first, y, _crop(panel.render_line(y - region.y), first - region.x, last - region.x)))
        regions.clear()
        return RowUpdate(parts)

    def _line(self, compositor: Compositor, y: int) -> list[Front]:
        """Returns what is in front on a line of the screen, from left to right."""
        fronts = self._fronts.get(y)
        if fronts is None:
            fronts = self._fronts[y] = []
            for start, end in zip(self._cuts[y], self._cuts[y][1:], strict=False):
                for widget, cropped, region in compositor.layers_visible[y]:
                    if cropped.x <= start < cropped.right:
                        panel = widget if isinstance(widget, LinePanel) and not widget.styles.gutter else None
                        fronts.append((start, end, panel, region))
                        break
        return fronts


def _crop(strip: Strip, first: int, last: int) -> list[Segment]:
    """Returns the cells from `first` to `last` of a line. Changes begin and end between two segments almost always, and
    then this is faster than `Strip.crop`, which divides a segment at both ends and keeps the result."""
    segments, column, begin = strip._segments, 0, -1
    for at, segment in enumerate(segments):
        if column == first and begin < 0:
            begin = at
        if column >= last:
            break
        column += cells(segment.text)
    else:
        at = len(segments)
    return segments[begin:at] if begin >= 0 and column == last else strip.crop(first, last)._segments
