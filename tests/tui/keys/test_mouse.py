"""The mouse: a click goes to what is under it, in a running engine and in a recording."""

from __future__ import annotations

import re
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.selection import Selection
from textual.widgets._toast import Toast
from textual.widgets._tooltip import Tooltip

from minitui.tui.apps.app import MinituiApp
from minitui.tui.glyphs import glyphs
from minitui.tui.screens.help import HelpScreen
from minitui.tui.screens.inspect import InspectScreen
from minitui.tui.widgets.bars import StatusBar
from minitui.tui.widgets.base import LinePanel, selected
from minitui.tui.widgets.inspect.block_table import BlockTable
from minitui.tui.widgets.inspect.lanes import BatchLanes
from minitui.tui.widgets.inspect.timings import StepTimings
from minitui.tui.widgets.replay_bar import ReplayBar
from tests.support.app.driving import click_at, drawn, press, until
from tests.tui.keys.test_keys import live, recording
from tests.tui.screens.test_chat_screen import running


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
    await click_at(pilot, panel, column + beside, row + above)


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


async def test_a_pointer_that_rests_shows_the_card_of_a_block_and_of_a_request_and_selects_nothing() -> None:
    async with recording((160, 48)) as (app, pilot):
        screen = await inspecting(app, pilot)
        before, card = app.view.selection, screen.query_one(Tooltip)
        table, requests = screen.query_one(BlockTable), screen.query_one(BatchLanes)
        assert not card.display
        rows, columns, block = table._places[0]
        await pilot.hover(table, offset=(columns[0] + 3, rows[0] + table._heading + 1))
        await until(pilot, lambda: card.display)
        assert f"Block {block} " in str(card.render()) and app.view.selection == before
        assert not card.region.contains(*pilot.app.mouse_position), "the card hides what it is about"
        row = next(i for i, slot in enumerate(requests.rows.slots) if slot)
        await pilot.hover(requests, offset=(3, 3 + row))
        await until(pilot, lambda: card.display and "Request r" in str(card.render()))
        await pilot.hover(screen.query_one(StatusBar), offset=(2, 0))
        await until(pilot, lambda: not card.display)


async def test_a_click_on_a_question_of_the_welcome_asks_it() -> None:
    async with running() as (app, pilot, screen):
        await until(pilot, lambda: app.progress is None and "What is" in screen.transcript.text)
        question = app.suggestions[0]
        row = next(y for y, text in enumerate(screen.transcript.text.splitlines()) if question in text)
        await pilot.click(screen.transcript, offset=(15, row + 1))  # below the padding
        await until(pilot, lambda: app.session.messages)
        assert app.session.messages[0].text == question


async def test_selected_text_of_the_transcript_has_no_names_of_speakers() -> None:
    async with running() as (app, pilot, screen):
        app.ask_question("why")
        await until(pilot, lambda: not app.session.busy and "why" in screen.transcript.text)
        copied = screen.transcript.get_selection(Selection(None, None))
        assert copied is not None
        lines = copied[0].splitlines()
        assert "why" in lines and not any(line.startswith(("   ", "you ", "tutor ", "system ")) for line in lines)


async def test_a_notice_covers_only_the_hints_and_replaces_the_notice_before_it() -> None:
    async with running() as (app, pilot, screen):
        app.say("a notice")
        await until(pilot, lambda: any(toast.region.area for toast in screen.query(Toast)))
        notices = [toast.region for toast in screen.query(Toast)]
        panels = [panel for panel in (*screen.query(LinePanel), screen.transcript) if panel.region.area]
        covered = [panel for panel in panels if any(notice.overlaps(panel.region) for notice in notices)]
        assert len(panels) > 4 and covered == [screen.query_one(StatusBar)]
        for text in ("second notice", "third notice", "an error", "fourth notice"):
            app.say(text, error="error" in text)
            await pilot.pause()
        assert {notice.message for notice in app._notifications} == {"an error", "fourth notice"}


@pytest.mark.parametrize("size", [(50, 30), (80, 24), (120, 36)])
async def test_a_notice_of_a_recording_covers_no_panel_also_if_it_is_long(size: tuple[int, int]) -> None:
    async with recording(size) as (app, pilot):
        for mode in ("inspect", "lecture"):
            app.open_mode(mode)
            for text in ("a notice", "a notice of two lines and more " * 4):
                app.say(text)
                await until(pilot, lambda: any(toast.region.area for toast in app.screen.query(Toast)))
                lines = [toast.region for toast in app.screen.query(Toast)]
                await until(pilot, lambda lines=lines: app.screen.query_one(StatusBar).size.height >= lines[0].height)  # type: ignore[misc]
                await drawn(pilot)
                lines = [toast.region for toast in app.screen.query(Toast)]
                covered = [p for p in app.screen.query(LinePanel) if any(line.overlaps(p.region) for line in lines)]
                assert covered == [app.screen.query_one(StatusBar)] and len(lines) == 1


async def test_a_click_on_a_key_of_the_status_bar_presses_it() -> None:
    async with recording((120, 36)) as (app, pilot):
        bar = (await inspecting(app, pilot)).query_one(StatusBar)
        for width in range(60, 130):
            text = "".join(text for text, _ in bar.picture(app.view, width, 1).rows[0])
            assert re.search(r"\S {2,}[\d,]+ (steps/frame|dropped)", text), "a key seems to belong to the figures"
        for hint in ("w waterfall", "5 requests"):
            await click(pilot, bar, bar.text.index(hint) + 3, 0)
            await until(pilot, lambda hint=hint: app.screen.current == hint.split()[1])  # type: ignore[misc]
        await click(pilot, bar, 1, 0)
        assert app.screen.current == "requests", "the word KEYS is no key"
        await click(pilot, bar, bar.text.index("? help"), 0)
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))


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
