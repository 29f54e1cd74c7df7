"""The table of requests and the timeline of one, as a reader of a recording uses them."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minitui.dev.panel import stress_view
from minitui.text import ms
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
from minitui.tui.apps.replay_app import ReplayApp, replay_app
from minitui.tui.screens.inspect import InspectScreen
from minitui.tui.widgets.base import Opened
from minitui.tui.widgets.inspect.details import Details, SelectedBlock
from minitui.tui.widgets.inspect.events import Events
from minitui.tui.widgets.inspect.requests import COLUMNS, RequestTable
from minitui.tui.widgets.inspect.timeline import RequestTimeline
from minitui.tui.widgets.inspect.timings import StepTimings
from minitui.tui.widgets.inspect.trends import TrendCharts
from minitui.tui.widgets.inspect.waterfall import Waterfall
from minitui.tui.widgets.rows import plain
from minitui.viewmodel.history.trends import METRICS
from minitui.viewmodel.requests import RequestFigures, Requests
from minitui.viewmodel.view import View
from minitui.viewmodel.words.request_words import figures_in_words, first_token_words, why_first
from tests.support.app.driving import press, text_of, until
from tests.support.records.golden import GOLDEN
from tests.support.records.panels import body
from tests.support.records.views import TIGHT


@asynccontextmanager
async def replayed(tmp_path: Path, size: tuple[int, int]) -> AsyncIterator[tuple[ReplayApp, Any, InspectScreen]]:
    """The recording at its end, in Inspect. It was folded at once: how far it was played does not matter."""
    shutil.copy(GOLDEN, tmp_path / "a.trace")
    app = replay_app(str(tmp_path / "a.trace"), speed=0.005)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.feed.live)
        await app.replay.control("pause")
        app._frame()
        reader = TraceReader(GOLDEN)
        app.view.reset(reader.part(0).snapshot)
        app.view.fold(list(reader.records()), time.monotonic())
        app._frame()
        assert isinstance(app.screen, InspectScreen)
        yield app, pilot, app.screen


async def pressed(app: ReplayApp, pilot: Any, *keys: str) -> None:
    for key in keys:
        await press(pilot, key)
    for _ in range(2):  # in the first frame, a panel may not have its size yet
        await pilot.pause()
        app._frame()


def table_of(screen: InspectScreen) -> RequestTable:
    return screen.query_one(RequestTable)


def timeline_of(screen: InspectScreen) -> RequestTimeline:
    return screen.query_one(RequestTimeline)


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_five_opens_the_requests_enter_a_timeline_and_enter_goes_to_the_stall(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    async with replayed(tmp_path, size) as (app, pilot, screen):
        await pressed(app, pilot, "3", "5")
        assert app.current_mode == "inspect" and screen.current == "requests"
        table, timeline = table_of(screen), timeline_of(screen)
        await until(pilot, lambda: app.focused is table and table.region.area)
        assert timeline.display == (size[1] >= 44)
        await pressed(app, pilot)
        assert "finished · " in text_of(app) and "Batch lanes" not in text_of(app)
        # which request stalled longest, and why: in words at the bottom, and by sorting
        while COLUMNS[table.sorted_by].name != "longest":
            await pressed(app, pilot, "left")
        stalled = table.rows[0]
        assert stalled.gaps is not None and stalled.gaps.longest is not None
        gap = stalled.gaps.longest
        foot = " ".join(line.strip("│ ") for line in table.text.splitlines()[-6:-1])
        longest = f"{ms(gap.ms)} ms before token {gap.token}, step {gap.step}"
        assert f"r{stalled.id}, the longest gap of all: {longest}" in foot
        assert "queue after a preemption" in foot
        waited = max(table.rows, key=lambda row: (row.first_ms or 0.0, -row.id))
        equal = r"( \(as long as that of another\))?"
        words = rf"r{waited.id}( and 1 other)?, the longest wait for a first token{equal}: "
        assert re.search(rf"{words}{ms(waited.first_ms or 0.0)} ms = queue ", foot)
        await pressed(app, pilot, "down", "enter")
        assert app.focused is timeline and app.view.selection is not None and app.view.selection.id == stalled.id
        assert f"Timeline of r{stalled.id} " in timeline.text and f"before token {gap.token}, step {gap.step}" in (
            " ".join(line.strip("│ ") for line in timeline.text.splitlines())
        )
        await pressed(app, pilot, "enter")
        assert app.view.moment.horizon == gap.step and f"PAST step {gap.step}" in app.view.moment.travel_text
        assert screen.current == ("timeline" if size == (80, 24) else "events")
        await pressed(app, pilot, "end", "5", "5")
        assert screen.current == ("map" if size == (80, 24) else "events") and not app.view.moment.travel_text


async def test_enter_opens_the_longest_gap_of_all_which_is_always_named(tmp_path: Path) -> None:
    async with replayed(tmp_path, (80, 24)) as (app, pilot, screen):
        await pressed(app, pilot, "5")
        table = table_of(screen)

        def foot() -> str:
            return " ".join(line.strip("│ ") for line in table.text.splitlines()[-6:-1])

        named = re.match(r"r(\d+), the longest gap of all: ([0-9.,]+) ms ", foot())
        assert named is not None and table.rows[0].id != int(named[1])
        footer = text_of(app).splitlines()[-2]
        assert "esc back" in footer and "w waterfall" in footer and "g go to" in footer
        await pressed(app, pilot, "down")
        assert f"r{table.rows[0].id}, its longest gap (of all: r{named[1]} with {named[2]} ms): " in foot()
        await pressed(app, pilot, "l")
        assert app.view.selection is not None and app.view.selection.id == int(named[1])
        app.view.select(None)
        await pressed(app, pilot, "enter")
        assert f"Timeline of r{named[1]} " in timeline_of(screen).text


async def test_the_end_key_returns_to_now_from_every_panel(tmp_path: Path) -> None:
    async with replayed(tmp_path, (80, 24)) as (app, pilot, screen):
        for name in ("waterfall", "lanes"):  # they have another use of the key
            while screen.current != name:
                await pressed(app, pilot, "tab")
            await pressed(app, pilot, "comma", "comma")
            assert app.view.moment.travel_text and f"step {app.view.moment.horizon} of" in text_of(app), screen.current
            await pressed(app, pilot, "end")
            assert not app.view.moment.travel_text, screen.current


async def test_escape_goes_back_the_way_that_enter_went(tmp_path: Path) -> None:
    async with replayed(tmp_path, (80, 24)) as (app, pilot, screen):
        begin, now = screen.current, app.view.moment.horizon
        await pressed(app, pilot, "5", "l", "enter")
        assert screen.current == "timeline"
        for _ in range(2):  # there and back
            await pressed(app, pilot, "enter")
            assert app.view.moment.horizon < now and "esc back" in text_of(app)
            assert screen.current == "timeline"
            await pressed(app, pilot, "escape")
            assert screen.current == "timeline" and app.view.moment.horizon == now
        await pressed(app, pilot, "escape")
        assert screen.current == "requests"
        await pressed(app, pilot, "escape")
        assert screen.current == begin and app.view.moment.horizon == now
        for panel in ("events", "lanes", "waterfall"):  # what names a request leads to its timeline, and back
            await pressed(app, pilot, "2")
            await pressed(app, pilot, *("w" if panel == "waterfall" else ()))
            screen._show(panel)
            request = app.view.history.steps.last and max(app.view.moment.shown.state.requests)
            app.view.select("request", request)
            if panel == "events":
                screen.post_message(Opened("request", request))
            await pressed(app, pilot, *(() if panel == "events" else ("enter",)))
            assert screen.query_one(Details).display and "enter: each token" in text_of(app), panel
            await pressed(app, pilot, "enter")
            assert app.focused is timeline_of(screen) and f"Timeline of r{request}" in text_of(app)
            await pressed(app, pilot, "escape")
            assert screen.current == panel and app.focused is screen.query_one(f"#{panel}")
        await pressed(app, pilot, "2")
        screen._show("timings")
        screen.maximised = True
        screen.lay_out()
        await pressed(app, pilot, "down", "down", "enter")
        assert app.view.moment.horizon < now
        await pressed(app, pilot, "comma", "escape")
        assert app.view.moment.horizon < now, "another step is shown: esc does not undo the jump"


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_w_shows_the_waterfall_at_the_selected_step_and_goes_back(tmp_path: Path, size: tuple[int, int]) -> None:
    async with replayed(tmp_path, size) as (app, pilot, screen):
        waterfall = screen.query_one(Waterfall)
        before, step = screen.current, app.view.moment.horizon - 8
        app.view.select("step", step)
        await pressed(app, pilot, "w")
        assert app.focused is waterfall and waterfall.size.width == size[0]
        text = text_of(app)
        assert "Waterfall" in text and f"step {step:,}" in text and "host" in text and "device" in text
        assert waterfall.cursor is not None
        assert waterfall.step == step and waterfall.scale.left < waterfall.cursor < waterfall.scale.right
        await pressed(app, pilot, "w")
        assert screen.current == before and app.focused is screen.query_one(f"#{before}")
        assert app.focused.region.area and not waterfall.region.area
        await pressed(app, pilot, "w")
        assert "esc back" in text_of(app).splitlines()[-2]
        await pressed(app, pilot, "escape")
        assert screen.current == before and "w waterfall" in text_of(app).splitlines()[-2]


async def test_a_key_that_names_a_screen_shows_it_from_everywhere(tmp_path: Path) -> None:
    async with replayed(tmp_path, (80, 24)) as (app, pilot, screen):
        before = screen.current
        shows = {"5": "requests", "6": "trends", "w": "waterfall", "2": before}
        for first in ("5", "6", "w", "3"):
            for key, panel in shows.items():
                if key != first:
                    await press(pilot, "2", first, key)
                    assert app.current_mode == "inspect" and screen.current == panel, (first, key)
                    assert app.focused is screen.query_one(f"#{panel}")
        await press(pilot, "5", "down", "enter", "5")
        assert screen.current == "requests", "from the timeline of a request to all requests"
        await pressed(app, pilot, "2", "z", "enter", "2")
        assert not screen.maximised and not screen.query_one(Details).display and screen.current == before
        assert not screen.query_one("#lanes").region.area


async def test_a_click_on_a_heading_sorts_and_a_click_on_a_row_chooses(tmp_path: Path) -> None:
    async with replayed(tmp_path, (200, 60)) as (app, pilot, screen):
        await pressed(app, pilot, "5")
        table = table_of(screen)
        await until(pilot, lambda: table.region.area)
        head = table.text.splitlines()[1]
        for name in ("prompt", "tok/s", "state", "twice"):
            value = next(column.value for column in COLUMNS if column.name == name)
            for order in (name == "state", name != "state"):
                await pilot.click(table, offset=(head.index(name) + 1, 1))
                app._frame()
                values = [value(row) for row in table.rows if value(row) is not None]
                assert values == sorted(values, reverse=not order), name  # type: ignore[type-var]
                assert len(set(values)) > 1 and len(table.rows) > 20
        await pilot.click(table, offset=(5, 4))
        assert app.view.selection is not None and app.view.selection.id == table.rows[2].id
        await pilot.click(table, offset=(5, 4))
        app._frame()
        assert app.focused is timeline_of(screen)


async def test_in_the_past_the_table_shows_the_requests_of_that_step(tmp_path: Path) -> None:
    async with replayed(tmp_path, (120, 36)) as (app, pilot, screen):
        await pressed(app, pilot, "5")
        table, view = table_of(screen), app.view
        now = {row.id for row in table.rows}
        waited = [step for step in range(view.history.steps.last // 2) if view.history.steps.column("waiting")[step]]
        assert view.travel_to(waited[-1] + 1)
        await pressed(app, pilot, "comma")
        rows = {row.id: row for row in table.rows}
        assert set(rows) < now and {id for id, row in rows.items() if row.live} == set(
            app.view.moment.shown.state.requests
        )
        assert view.moment.horizon == waited[-1] and {row.state for row in rows.values()} & {"waits", "preempted"}


def cell(name: str, row: RequestFigures) -> str:
    column = next(column for column in COLUMNS if column.name == name)
    value = column.value(row)
    so_far = "+" * (row.waits_ms is not None and (name == "first" or (name == "queue" and row.state == "waits")))
    return "–" if value is None else column.text(value) + so_far


@pytest.mark.parametrize(("name", "id"), [("small-pool", 1), ("h200-8b", 63)])
@pytest.mark.parametrize("width", [80, 120])
def test_the_timeline_has_the_whole_cause_of_a_first_token(name: str, id: int, width: int) -> None:
    reader, view = TraceReader(bundled()[name]), View()
    view.texts.ids_to_text, view.texts.group_names = reader.decode, reader.names
    view.reset(reader.part(0).snapshot)
    view.fold(list(reader.records()))
    view.select("request", id)
    lane = view.history.lanes.lanes[id]
    figures = Requests().of(view, lane)
    words = f"first token: {first_token_words(figures, why_first(view, figures))}"
    rows = [plain(row)[2:-2].strip() for row in RequestTimeline().drawn(view, width, 17)]
    assert words in " ".join(rows)
    assert any(row.startswith(f"r{id}") or "before token" in row for row in rows[5:]), "and its longest gap"


def test_every_cell_of_the_table_is_the_figure_of_its_request() -> None:
    _, view = stress_view(TIGHT, 6.0, 60)
    table = RequestTable()
    lines = body(table, view, 200, 60)
    assert len(table.rows) > 30 and any(row.request.preemptions for row in table.rows)
    names = [column.name for column in COLUMNS if column.name != "chat"]
    for line, row in zip(lines[1:], table.rows, strict=False):
        assert line.split()[0] == f"r{row.id}" and line.split()[1] == row.state
        figures = line[9 + 10 + 14 :].split()[: len(names) - 2]
        assert figures == [cell(name, row) for name in names[2:]]
    assert any(row.waits_ms is not None for row in table.rows)


def test_the_chart_has_its_highest_bar_under_the_mark_and_shows_every_token() -> None:
    _, view = stress_view(TIGHT, 6.0, 60)
    checked = 0
    for lane in list(view.history.lanes.lanes.values())[::3]:
        view.select("request", lane.id)
        for width in (40, 196):
            timeline = RequestTimeline()
            rows = body(timeline, view, width, 24)
            found = view.history.tokens.arrivals(lane, view.moment.horizon)
            gaps = np.diff(found.at) * 1e3
            if not len(gaps):
                continue
            marks = next(i for i, row in enumerate(rows) if row.lstrip().startswith("ms") and "▾" in row)
            figures = Requests().of(view, lane)  # no figure at the top is cut off in the middle
            every = figures_in_words(figures, why_first(view, figures))
            said = " ".join(" ".join(rows[:marks]).split()).split(" · ")
            assert said[0] == figures.state and set(said[1:]) <= set(every), said
            column = rows[marks].index("▾")
            assert column == 9 + int(gaps.argmax()) // timeline.per_column
            assert rows[marks + 1][column] == "█" and ms(gaps.max()) in rows[marks + 1]
            axis = next(i for i, row in enumerate(rows) if row.startswith("token  "))
            bars = rows[axis - 1][9:].rstrip()
            assert len(bars) == -(-len(gaps) // timeline.per_column) and " " not in bars
            assert f"▲{found.first[int(gaps.argmax()) + 1]}" in rows[axis]
            checked += 1
    assert checked > 5


def test_keys_of_the_timeline_choose_tokens_in_order_and_by_length() -> None:
    _, view = stress_view(TIGHT, 6.0, 60)
    lane = next(lane for lane in view.history.lanes.lanes.values() if lane.preemptions and lane.output_tokens > 40)
    view.select("request", lane.id)
    timeline = RequestTimeline()
    timeline.picture(view, 200, 24)
    gaps = np.diff(view.history.tokens.arrivals(lane, view.moment.horizon).at)
    order = np.argsort(-gaps, kind="stable").tolist()
    seen = [timeline._chosen()]
    for _ in range(5):
        timeline.action_rank(1)
        seen.append(timeline._chosen())
    assert seen == order[:6]
    timeline.action_move(-10_000)
    assert timeline._chosen() == 0
    for expected in range(1, 6):
        timeline.action_move(1)
        assert timeline._chosen() == expected
    timeline.action_longest()
    assert timeline._chosen() == order[0]


@pytest.mark.parametrize("size", [(80, 24), (240, 70)])
async def test_the_large_timings_show_the_slowest_steps_and_enter_goes_there(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    async with replayed(tmp_path, size) as (app, pilot, screen):
        screen._show("timings")
        screen.maximised = True
        screen.lay_out()
        await pressed(app, pilot)
        panel = screen.query_one(StepTimings)
        wall = app.view.history.steps.column("took")[app.view.history.steps.indices(0, app.view.history.steps.last)]
        slowest = [row.took_ms for row in panel.slowest]
        assert slowest == sorted(wall[~np.isnan(wall)].tolist(), reverse=True)[:10]
        await pressed(app, pilot, "down")
        assert panel.chosen == panel.slowest[0].step, "the first row"
        await pressed(app, pilot, "down", "down")
        third = panel.slowest[2]
        assert f"{third.step:,} " in panel.text and ms(slowest[2] or 0.0) in panel.text
        assert "d details" in panel.text
        await pressed(app, pilot, "d")
        assert f"Step {third.step:,} · " in screen.query_one(Details).text
        await pressed(app, pilot, "escape", "enter")
        assert app.view.moment.horizon == third.step and app.view.moment.travel_text
        if size == (80, 24):
            assert panel.chosen == third.step, "the row stays chosen, although the list is that of another moment"


@pytest.mark.parametrize("size", [(80, 24), (240, 70)])
async def test_six_opens_the_trends_and_enter_goes_back_to_the_cursor(tmp_path: Path, size: tuple[int, int]) -> None:
    async with replayed(tmp_path, size) as (app, pilot, screen):
        await pressed(app, pilot, "6")
        panel = screen.query_one(TrendCharts)
        assert all(f"{metric.name}  {'now' if metric.level else 'p50'} " in panel.text for metric in METRICS)
        assert "3 seconds" in panel.text, "the shortest span that shows the whole recording"
        await pressed(app, pilot, "up", "left", "left")
        assert "5 seconds" in panel.text and panel.back == 1
        end = panel._ends[-2]
        await pressed(app, pilot, "enter")
        assert app.view.moment.travel_text and app.view.moment.bucket * 0.25 < end


async def test_events_are_searched_by_request_kind_and_words(tmp_path: Path) -> None:
    async with replayed(tmp_path, (120, 40)) as (app, pilot, screen):
        panel = screen.query_one(Events)
        panel.focus()
        every = list(app.view.history.events.newest_first())

        async def found(query: str) -> set[int]:
            await pressed(app, pilot, "slash", *(key.replace(" ", "space") for key in query), "enter")
            return {event.seq for event in every if panel._wanted(app.view)(event)}

        assert await found("r3") == {event.seq for event in every if event.request == 3}
        assert await found("hit r3") == {event.seq for event in every if (event.kind, event.request) == ("hit", 3)}
        told = {event.seq for event in every if "blocks" in f"{event.kind} {app.view.texts.event(event)}"}
        assert told and await found("blocks") >= told
        assert await found("walrus") == set() and "no event contains 'walrus'" in panel.text
        await pressed(app, pilot, "slash", "escape", "tab")
        assert screen.current != "events"
        await pressed(app, pilot, "slash", "x")  # in a panel without a search of its own
        assert screen.current == "events" and screen.query_one(Events).search == "x"
        await pressed(app, pilot, "escape")
        assert not panel.search and "no event contains" not in panel.text


@pytest.mark.parametrize("size", [(80, 24), (240, 70)])
async def test_a_large_map_describes_the_selected_block_with_its_history(tmp_path: Path, size: tuple[int, int]) -> None:
    async with replayed(tmp_path, size) as (app, pilot, screen):
        about = screen.query_one(SelectedBlock)
        app.view.select("block", 3)
        screen.maximised = True
        screen._show("map")
        await pressed(app, pilot)
        reader = TraceReader(GOLDEN)
        told = [record for record in reader.records() if record[2] == "alloc" and 3 in record[4]]
        history = app.view.history.block_events(3, 100, app.view.moment.shown.state.seq)
        assert [event[0] for event in history if event[2] == "alloc"] == [record[0] for record in reversed(told)]
        assert {"alloc", "finish"} <= {event[2] for event in history}
        assert about.display and about.text.startswith("╭─ Block 3") and "history" in about.text
        await pressed(app, pilot, "escape")
        assert not about.display
