"""The mouse: a click goes to what is under it, in a running engine and in a recording."""

from __future__ import annotations

from typing import Any

import pytest
from textual.pilot import Pilot

from minitui.tui.app import MinituiApp
from minitui.tui.glyphs import glyphs
from minitui.tui.screens.inspect import InspectScreen
from minitui.tui.widgets.base import LinePanel, selected
from minitui.tui.widgets.inspect.block_table import BlockTable
from minitui.tui.widgets.inspect.lanes import BatchLanes
from minitui.tui.widgets.inspect.timings import StepTimings
from minitui.tui.widgets.replay_bar import ReplayBar
from tests.support.driving import drawn, press, until
from tests.tui.test_keys import live, recording


async def inspecting(app: MinituiApp, pilot: Pilot[Any]) -> InspectScreen:
    """Returns the inspect screen, with the focus outside the prompt."""
    app.leave_prompt()
    app.action_do("inspect")
    await drawn(pilot)
    screen = app.screen
    assert isinstance(screen, InspectScreen)
    return screen


async def click(pilot: Pilot[Any], panel: LinePanel, column: int, row: int) -> None:
    """Click on a cell of the panel's body."""
    beside, above = (0, 0) if panel.frame == "none" else (2, 1)
    await pilot.click(panel, offset=(column + beside, row + above))
    await drawn(pilot)


def body(panel: LinePanel) -> list[str]:
    """Returns the rows inside the frame."""
    return panel.text.splitlines() if panel.frame == "none" else [row[2:] for row in panel.text.splitlines()[1:]]


def chosen(app: MinituiApp) -> tuple[str, Any]:
    assert app.view.selection is not None
    return app.view.selection.kind, app.view.selection.id


@pytest.mark.parametrize("opened", [live, recording])
async def test_a_click_in_the_lanes_selects_the_step_or_the_request(opened: Any) -> None:
    async with opened((160, 48)) as (app, pilot):
        lanes = (await inspecting(app, pilot)).query_one(BatchLanes)
        column = (app.view.moment.horizon - lanes.first_step) // lanes.k - 3
        await click(pilot, lanes, lanes.label + column, 0)
        kind, step = chosen(app)
        assert kind == "step" and (step - lanes.first_step) // lanes.k == column
        row = next(i for i, slot in enumerate(lanes.rows.slots) if slot)
        await click(pilot, lanes, 0, 2 + row)
        assert chosen(app) == ("request", lanes.rows.slots[row][-1])


async def test_a_click_in_the_block_table_selects_the_block() -> None:
    async with recording((160, 48)) as (app, pilot):
        table = (await inspecting(app, pilot)).query_one(BlockTable)
        running = [id for id, request in app.view.moment.shown.state.requests.items() if request.table]
        app.view.select("request", max(running or app.view.history.lanes.lanes))
        await drawn(pilot)
        logical, physical = body(table)[1:3]
        assert logical.split()[1] == "1"
        block = int(physical.split()[1])
        await click(pilot, table, physical.index(f" {block} ") + 1, 2)
        assert chosen(app) == ("block", block)
        await click(pilot, table, 1, 0)
        assert chosen(app) == ("block", block), "the heading is no block"


async def test_a_click_on_a_slow_step_chooses_it_and_another_goes_there() -> None:
    async with recording((160, 60)) as (app, pilot):
        screen = await inspecting(app, pilot)
        timings = screen.query_one(StepTimings)
        await press(pilot, "tab", "tab", "tab", "tab", "z")
        timings.focus()
        await drawn(pilot)
        assert timings.times is not None and len(timings.slowest) > 3
        step = timings.slowest[2].step
        row = next(i for i, text in enumerate(body(timings)) if text.split()[:2] == ["3", f"{step:,}"])
        await click(pilot, timings, 3, row)
        assert timings.chosen == step and selected(app.view, "step") is None, "the first click only chooses"
        await click(pilot, timings, 3, row)
        await until(pilot, lambda: app.view.moment.horizon == step)
        assert chosen(app) == ("step", step)


async def test_a_click_on_the_slowest_step_of_small_timings_selects_it() -> None:
    async with recording((100, 32)) as (app, pilot):
        timings = (await inspecting(app, pilot)).query_one(StepTimings)
        slowest = app.view.timings.slowest
        assert timings.times is None and slowest is not None
        for height in (7, 9):
            timings.styles.height = height
            app.view.select(None)
            # The text may still be that of the height before, whose rows stand elsewhere.
            await until(pilot, lambda height=height: timings.size.height == height == len(timings.text.splitlines()))  # type: ignore[misc]
            await drawn(pilot)
            row = next(i for i, text in enumerate(body(timings)) if f"step {slowest.step:,}" in text)
            await click(pilot, timings, 3, row)
            assert chosen(app) == ("step", slowest.step), timings.text


async def test_a_click_on_the_line_of_a_recording_goes_there() -> None:
    async with recording((160, 48)) as (app, pilot):
        bar, trace = app.screen.query_one(ReplayBar), app.replay.trace
        steps = trace.last_step - trace.step_before
        for share in (0.25, 0.75, 1.0):
            await drawn(pilot)  # the line begins behind the text, whose length changes
            places, near = bar._places, 2 * steps / len(bar._places)
            await pilot.click(bar, offset=(places[round(share * (len(places) - 1))], 0))
            there = share * steps + trace.step_before
            await until(pilot, lambda there=there, near=near: abs(app.position - there) <= near)  # type: ignore[misc]
        assert app.position == trace.last_step
        mark = bar._places.start + bar.text[bar._places.start :].index(glyphs().peak)
        await pilot.click(bar, offset=(mark, 0))
        await until(pilot, lambda: app.position in [step for step, _ in trace.bookmarks])
        before = app.position
        await pilot.click(bar, offset=(2, 0))
        await drawn(pilot)
        assert app.position == before, "only the line moves the playhead"
