"""Drawing leaves nothing behind that only a garbage collection frees."""

from __future__ import annotations

import gc
from collections import Counter

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from minitui.dev.simulator import SMALL
from minitui.tui.textual_insides import keep_no_lines
from tests.support.simulated import LiveStress, StressApp


async def test_drawn_lines_are_freed_without_a_garbage_collection():
    """The frames are drawn as in a terminal; the test's driver draws nothing by itself."""
    now = [1000.0]
    app = StressApp(LiveStress(SMALL, 2.0), clock=lambda: now[0])
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.pause()

        async def draw(frames: int) -> None:
            for _ in range(frames):
                now[0] += 0.05
                app.source.stress.run(0.05)
                app.tick()
                await pilot.pause()
                app.screen._compositor.render_update(full=True)

        await draw(20)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await draw(30)
            gc.collect()
            left = Counter(type(one).__name__ for one in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert left["Strip"] == 0, left.most_common(10)


def test_a_strip_is_cut_and_padded_as_before():
    keep_no_lines()
    segment = Segment("a日b", Style(bold=True))
    assert [part.text for part in segment.split_cells(2)] == ["a ", " b"]
    assert not hasattr(segment._split_cells, "cache_info")
    strip, style = Strip.blank(6, Style(bold=True)), Style(bold=True)
    assert strip.divide([6]) == [strip] and [part.cell_length for part in strip.divide([2, 6])] == [2, 4]
    assert [part.cell_length for part in strip.divide([2, 9])] == [2]
    assert strip.crop_extend(0, 6, style) == strip and strip.crop_extend(1, 8, style).cell_length == 7
    assert [strip.adjust_cell_length(n, style).cell_length for n in (3, 6, 9)] == [3, 6, 9]
