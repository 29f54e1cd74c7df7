"""The inspect screen as a reader uses it, over the stress source."""

from __future__ import annotations

import os
import time

import pyte
import pytest
from textual._compositor import ChopsUpdate, LayoutUpdate

from minitui.dev.simulator import CLASSROOM, SMALL
from minitui.tui.glyphs import use_ascii
from minitui.tui.panels import ALONE, IN_ORDER
from minitui.tui.screens.inspect import InspectScreen
from minitui.tui.terminal.textual_insides import RowUpdate
from minitui.tui.widgets.inspect.block_map import BlockMap
from minitui.tui.widgets.inspect.details import Details
from minitui.tui.widgets.inspect.events import Events
from minitui.tui.widgets.inspect.lanes import BatchLanes
from minitui.tui.widgets.inspect.timings import StepTimings
from minitui.tui.widgets.inspect.tree import RadixTree
from minitui.tui.widgets.inspect.waterfall import Waterfall
from tests.support.app.driving import lines, text_of
from tests.support.paths import SNAPSHOTS
from tests.support.records.panels import simulated
from tests.support.records.simulated import StressApp


@pytest.mark.parametrize(
    ("size", "ascii_only"), [((80, 24), False), ((120, 36), False), ((200, 60), False), ((120, 36), True)]
)
async def test_the_screen_looks_as_it_did(size, ascii_only):
    """Readable pictures in tests/snapshots; UPDATE_SNAPSHOTS=1 writes them anew."""
    use_ascii(ascii_only)
    async with simulated(SMALL, size) as (app, _, _):
        text = "\n".join(line.rstrip() for line in lines(app)) + "\n"
    assert not ascii_only or text.isascii(), sorted({c for c in text if not c.isascii()})
    path = SNAPSHOTS / f"inspect-{size[0]}x{size[1]}{'-ascii' if ascii_only else ''}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path.name} differs: look, then UPDATE_SNAPSHOTS=1"


async def test_changed_cells_alone_make_the_terminals_picture_the_screens(monkeypatch):
    """What was written to the terminal is compared with a whole picture: letters and colours of all cells."""
    size, written = (120, 36), pyte.Screen(120, 36)
    stream, kinds, display = pyte.Stream(written), [], StressApp._display

    def displayed(app, screen, update):
        if update is not None and screen is app.screen:
            kinds.append(type(update))
            stream.feed(update.render_segments(app.console))
        display(app, screen, update)

    def whole(app):
        picture = pyte.Screen(*size)
        strips = [[strip] for strip in app.screen._compositor.render_strips()]
        pyte.Stream(picture).feed(LayoutUpdate(strips, app.screen.region).render_segments(app.console))
        return cells_of(picture)

    def cells_of(terminal):
        rows = [[terminal.buffer[y][x] for x in range(size[0])] for y in range(size[1])]
        return [[(c.data, c.fg, c.bg, c.bold) for c in row] for row in rows]

    monkeypatch.setattr(StressApp, "_display", displayed)
    async with simulated(SMALL, size) as (app, pilot, frames):
        for key in ("c", "tab", "down", "enter", "escape", "z", "z", "2", "T", "p", "n", "space"):
            await pilot.press(key)
            await frames(3)
            app.say(f"a notice over the panels, after {key}")
            await frames(3)
            deadline = time.monotonic() + 60
            while cells_of(written) != whole(app) and time.monotonic() < deadline:
                await pilot.pause(0.01)
            assert cells_of(written) == whole(app), key
    assert kinds.count(RowUpdate) > 20 and kinds.count(ChopsUpdate) < kinds.count(RowUpdate)


async def test_tab_goes_through_the_panels_and_on_a_small_screen_shows_one_at_a_time():
    async with simulated(SMALL, (80, 24)) as (app, pilot, frames):
        screen = app.screen
        assert isinstance(screen, InspectScreen) and screen.single
        seen = []
        for _ in range(11):
            await frames()
            shown = [name for name in IN_ORDER if screen.query_one(f"#{name}").region.area]
            assert shown == [screen.current] and app.focused.id == screen.current
            seen.append(screen.current)
            await pilot.press("tab")
        right = ["tree", "timings", "waterfall", "events", "requests", "timeline", "trends"]
        assert seen == ["map", "table", "lanes", *right, "map"]
        await pilot.press("shift+tab")
        assert screen.current == "map"


async def test_z_shows_a_panel_alone_and_brings_the_others_back():
    async with simulated(SMALL, (140, 40)) as (app, pilot, frames):
        screen = app.screen
        tree = screen.query_one(RadixTree)
        small = tree.size
        tree.focus()
        await pilot.press("z")
        await frames()
        assert tree.size.width == 140 and tree.size.height > small.height
        assert not screen.query_one(BlockMap).region.area
        text = text_of(app)
        assert "hit rate" in text and "of 128 tokens" in text, "the vitals and the step stay in sight"
        await pilot.press("z")
        await frames()
        assert tree.size == small and screen.query_one(BlockMap).region.area


async def test_a_selection_made_in_one_panel_is_seen_in_the_others():
    async with simulated(CLASSROOM, (160, 48)) as (app, pilot, _frames):
        screen, view = app.screen, app.view
        lanes = screen.query_one(BatchLanes)
        lanes.focus()
        for _ in range(40):
            await pilot.press("down")
            if view.selection.id in view.history.live.state.requests:
                break
        id = view.selection.id
        request = view.history.live.state.requests[id]
        app.tick()
        await pilot.pause()

        def lit(panel) -> list[str]:
            shown = [run for row in panel.drawn_rows for run in row]
            return [text for text, words in shown if {"select", "underline"} & {*words.split()} or "accent" in words]

        assert any(f"r{id}" in text for text in lit(lanes))
        assert any(f"r{id}" in text for text in lit(screen.query_one("#table")))
        block_map = screen.query_one(BlockMap)
        drawn = block_map._cells[block_map._cells >= 0]
        assert ((drawn & 1) > 0).sum() == len(request.table) or block_map.grid.k > 1
        assert any("-lit" in words for row in block_map.drawn_rows for _, words in row)
        if request.node:
            screen.query_one(RadixTree).focus()
            app.tick()
            await pilot.pause()
            path = [node.id for node in view.history.live.state.path(request.node)]
            assert set(path) <= set(screen.query_one(RadixTree).nodes), "the selected path is pinned"
        await pilot.press("escape")
        assert view.selection is None


async def test_enter_tells_the_story_and_escape_closes_it():
    async with simulated(SMALL, (120, 36)) as (app, pilot, frames):
        screen = app.screen
        details = screen.query_one(Details)
        for panel in [name for name in IN_ORDER if name not in screen.absent | ALONE]:
            screen.query_one(f"#{panel}").focus()
            await pilot.press("down", "enter")
            await frames()
            assert details.display, panel
            assert details.text.splitlines()[0].startswith("╭─ "), panel
            assert app.focused is details
            await pilot.press("escape")
            await frames()
            assert not details.display and app.focused.id == panel


async def test_the_waterfall_follows_time_travel():
    async with simulated(SMALL, (120, 36)) as (app, _pilot, frames):
        app.screen.toggle("waterfall")
        await frames()
        waterfall = app.screen.query_one(Waterfall)
        assert app.view.travel(-8)
        await frames()
        row = app.view.history.steps.get(app.view.moment.horizon)
        assert waterfall.scale.right == pytest.approx(row.ended * 1e3 - row.cut_ms)
        assert f"step {row.step:,}" in waterfall.text


async def test_tree_search_takes_the_letters_that_are_keys_elsewhere():
    async with simulated(CLASSROOM, (120, 36)) as (app, pilot, frames):
        tree = app.screen.query_one(RadixTree)
        tree.focus()
        await pilot.press("slash", *"poems")
        await frames()
        assert tree.search == "poems" and tree.typing
        assert all("poems" in line for line in tree.text.splitlines()[2:3])
        await pilot.press("enter", "escape")
        assert tree.search == ""


async def test_the_gate_freezing_and_travelling_show_in_the_picture():
    async with simulated(SMALL, (120, 36)) as (app, pilot, frames):
        await pilot.press("p")
        await frames()
        gated = app.view.history.steps.last
        assert f"PAUSED at step {gated:,}" in lines(app)[0]
        assert f"step {gated:,}  " in text_of(app), "the bar is exactly this step"
        await pilot.press("n")
        await frames()
        assert app.view.history.steps.last == gated + 1
        await pilot.press("comma", "comma")
        await frames()
        assert f"PAST step {gated - 1:,}, 2 back" in lines(app)[0]
        await pilot.press("full_stop", "full_stop", "p")
        await frames(4)
        assert "PAST" not in lines(app)[0] and "PAUSED" not in lines(app)[0]
        await pilot.press("space")
        await frames(12)  # panels that are painted less often catch up with the last picture
        before = lines(app)[1:-1]
        await frames(20)
        assert "FROZEN" in lines(app)[0] and "steps behind" in lines(app)[0]
        assert lines(app)[1:-1] == before, "a frozen picture does not move"
        await pilot.press("space")
        await frames()
        assert "FROZEN" not in lines(app)[0] and app.feed.backlog == 0


async def test_keys_reach_the_steps_of_the_lanes_and_the_slowest_step():
    async with simulated(CLASSROOM, (140, 40)) as (app, pilot, frames):
        screen, view = app.screen, app.view
        lanes = screen.query_one(BatchLanes)
        lanes.focus()
        await pilot.press("left", "left")
        assert view.selection.kind == "step" and view.selection.id == view.moment.horizon - lanes.k
        assert f"step {view.selection.id:,}" in screen.query_one("#step").text or not app.tick()
        k = lanes.k
        await pilot.press("left_square_bracket")
        assert lanes.k < k
        await pilot.press("pageup")
        assert lanes.back > 0
        await pilot.press("end")
        assert lanes.back == 0 and lanes.fixed_k is None
        timings = screen.query_one(StepTimings)
        timings.focus()
        await pilot.press("enter")
        assert view.selection.id == view.timings.slowest.step
        assert f"Step {view.timings.slowest.step:,} · " in screen.query_one(Details).text
        await pilot.press("escape")
        events = screen.query_one(Events)
        events.focus()
        await pilot.press("f")
        await frames()
        assert "show hits and misses" in events.text


async def test_clicks_select_what_they_hit():
    async with simulated(SMALL, (160, 48)) as (app, pilot, _frames):
        view, block_map = app.view, app.screen.query_one(BlockMap)
        g = block_map.grid
        row, column = divmod(20, g.per_row)
        row *= 2 if g.spread else 1
        head = len(block_map.drawn_rows) - 2 - g.height
        await pilot.click(block_map, offset=(2 + column * (g.cell + g.gap), 1 + head + row))
        assert (view.selection.kind, view.selection.id) == ("block", 21)
        tree = app.screen.query_one(RadixTree)
        await pilot.click(tree, offset=(10, 3))
        assert (view.selection.kind, view.selection.id) == ("node", tree.nodes[1])


async def test_the_screen_survives_every_size_and_theme():
    async with simulated(SMALL, (160, 48)) as (app, pilot, frames):
        for size in ((80, 24), (40, 10), (100, 32), (99, 40), (220, 70), (60, 24)):
            await pilot.resize_terminal(*size)
            await frames(3)
            assert len(lines(app)) == size[1] and len(lines(app)[0]) == size[0]
        for _ in range(3):
            await pilot.press("T")
            await frames(2)
