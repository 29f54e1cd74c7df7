"""What a picture must show at a glance: the stalled stream, whose a thing is, every block, and the other panels."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from engine.trace.state import State
from minitui.chat.sessions import Chats
from minitui.dev.panel import stress_view
from minitui.dev.simulator import CLASSROOM, Load
from minitui.settings import Settings
from minitui.sources.replay import ReplaySource
from minitui.trace.bundled import bundled
from minitui.tui.apps.replay_app import ReplayApp
from minitui.tui.glyphs import glyphs
from minitui.tui.panels import ALONE, IN_ORDER, PANELS, Room
from minitui.tui.screens.inspect import InspectScreen
from minitui.tui.theme import COLOURS, STATES, owner_style
from minitui.tui.widgets.bars import PanelStrip, TopBar
from minitui.tui.widgets.inspect.block_colours import SIGNED, by_age, by_owner, by_refs
from minitui.tui.widgets.inspect.block_map import BlockMap, blocks_to_show, grid
from minitui.tui.widgets.inspect.block_table import BlockTable
from minitui.tui.widgets.inspect.details import story_lines
from minitui.tui.widgets.inspect.events import Events
from minitui.tui.widgets.inspect.lanes import BatchLanes
from minitui.tui.widgets.inspect.requests import RequestTable
from minitui.tui.widgets.inspect.step_bar import StepBar
from minitui.tui.widgets.inspect.tree import RadixTree
from minitui.tui.widgets.inspect.trends import TrendCharts
from minitui.tui.widgets.inspect.waterfall import ROOMY, Waterfall
from minitui.tui.widgets.rows import Runs, plain
from minitui.viewmodel.explain.stalls import STALL_FROM
from minitui.viewmodel.view import View
from tests.support.app.driving import click_at, drawn, press, until
from tests.tui.keys.test_keys import live
from tests.tui.keys.test_mouse import inspecting
from tests.viewmodel.test_stalls import GC, LONG, STALL_MS, STEP, stalled
from tests.viewmodel.test_stalls import run as stalled_run

STEADY = Load(blocks=600, chats=12, rows=12, budget=256, reply=(900, 1000), think=0.01, paste=0.0)


def style_of(rows: list[Runs], text: str) -> str:
    """Returns the style of the first run that has this text."""
    return next(style for row in rows for run, style in row if text in run)


# ---- the stalled stream


def test_the_worst_stall_is_red_on_its_lane_with_its_cause() -> None:
    view = stalled_run(LONG, STEP + 60, stalled(GC))
    panel = BatchLanes()
    panel.fixed_k = 1
    picture = panel.picture(view, 160, 20)
    assert panel.stall is not None and panel.stall.gap.step == STEP and panel.stall.gap.ms > STALL_MS
    row = picture.rows[2 + next(i for i, slot in enumerate(panel.rows.slots) if panel.stall.lane.id in slot)]
    column = panel.label + STEP - panel.first_step
    red = [at for at, style in enumerate(style for text, style in row for _ in text) if style.split()[-1] == "bad"]
    assert column in red and red == list(range(red[0], red[-1] + 1)), "one place of one lane"
    assert f" {panel.stall.words} " in plain(row) and panel.stall.words.endswith("ms: garbage collection")
    others = [run for other in picture.rows if other is not row for run in other if "×" not in run[0]]
    assert not any("bad" in style.split() for _, style in others)


def test_a_gap_near_the_median_is_no_stall_and_one_out_of_sight_is_not_marked() -> None:
    view = stalled_run(LONG, STEP + 200, stalled(GC))
    panel = BatchLanes()
    panel.fixed_k = 1
    panel.picture(view, 100, 20)
    assert panel.first_step > STEP
    if panel.stall is not None:
        found = view.history.tokens.arrivals(panel.stall.lane, view.moment.horizon)
        gaps = sorted(found.gap(i).ms for i in range(1, len(found)))
        assert panel.stall.gap.step > STEP and panel.stall.gap.ms >= STALL_FROM * gaps[len(gaps) // 2] * 0.99


def test_lanes_without_a_change_have_a_line_only_if_all_requests_have_one() -> None:
    stress, view = stress_view(STEADY, 0.1, 2)
    panel = BatchLanes()
    panel.fixed_k = 1

    def picture() -> list[Runs]:
        stress.run(0.02)
        stress.show(view)
        return panel.picture(view, 60, 8).rows

    def changing() -> set[int]:
        end = view.moment.horizon
        return {id for id, lane in view.history.lanes.active.items() if not lane.steady(panel.first_step, end)}

    def shown() -> set[int]:
        return {id for slot in panel.rows.slots for id in slot}

    lanes = view.history.lanes.active
    for _ in range(1000):
        rows = picture()
        if len(lanes) > 8 and not changing():
            break
    assert plain(rows[-1]).startswith(f"+ {len(lanes) - len(shown() & set(lanes))} decode throughout ")
    before = set(lanes)
    while not changing() - before:  # a request ends, another one begins
        picture()
    picture()
    assert changing() <= shown() and set(lanes) - shown(), "a change has a line, also if all lines were in use"


# ---- whose it is


def test_a_chat_has_one_label_and_one_colour_in_all_panels() -> None:
    _, view = stress_view(CLASSROOM, 4.0, 30)
    state = view.moment.shown.state
    request = max((r for r in state.requests.values() if r.table), key=lambda r: len(r.table))
    groups = sorted({r.group for r in state.requests.values()})
    numbers = {group: i for i, group in enumerate(groups, 3)}
    view.texts.group_names = {group: f"#{number} chat of {group}" for group, number in numbers.items()}
    label, colour = f"#{numbers[request.group]}·r{request.id}", owner_style(numbers[request.group] - 1)
    for panel in (BatchLanes(), RequestTable(), BlockTable(), RadixTree()):
        if isinstance(panel, BlockTable):
            view.select("request", request.id)
            view.frame(view.moment.now)
        rows = panel.picture(view, 120, 60).rows
        assert colour in style_of(rows, label).split(), type(panel).__name__
        view.select(None)
        view.frame(view.moment.now)
    own = next(block for block in request.table if view.moment.shown.holders[block] == 1)
    layer = by_owner(view)
    assert layer.looks[layer.codes[own]][1] == f"on-fill on {colour}"
    assert view.texts.request(request.id) == label and view.texts.title(request.group) == f"chat of {request.group}"


def test_events_steps_and_stories_name_a_request_with_its_chat_in_its_colour() -> None:
    _, view = stress_view(CLASSROOM, 4.0, 30)
    lanes = view.history.lanes.lanes
    groups = sorted({lane.request.group for lane in lanes.values()})
    view.texts.group_names = {group: f"#{number} some r1 chat" for number, group in enumerate(groups, 1)}
    event = next(event for event in view.history.events.newest_first() if event.kind == "hit")
    step = next(step for step in range(view.moment.horizon, 0, -1) if view.history.steps.get(step).chunks)
    chunk = view.history.steps.get(step).chunks[0][0]
    view.select("step", step)
    view.frame(view.moment.now)
    block = next(b for r in view.moment.shown.state.requests.values() for b in r.table)
    holder = view.moment.shown.holders_of(block)[0].id
    for rows, request in (
        (Events().picture(view, 120, 60).rows, event.request), (StepBar().picture(view, 120, 2).rows, chunk),
        (story_lines(view, "step", step, 80), chunk), (story_lines(view, "block", block, 80), holder),
    ):
        label, colour = view.texts.request(request), owner_style(view.texts.colour(lanes[request].request.group))
        assert label.startswith("#") and colour in style_of(rows, label).split()
    quoted = "r1: “r1 and r2” evicted, r1000000 and #3·r1"
    assert view.texts.labelled(quoted) == f"{view.texts.request(1)}: “r1 and r2” evicted, r1000000 and #3·r1"


@pytest.mark.parametrize(
    ("name", "label", "colour"),
    [("#12 paging", "#12·r7", 11), ("12 paging", "r7", 11), ("user 53", "r7", 52), ("#" + "9" * 5000, "r7", None)],
)
def test_the_label_and_the_colour_follow_the_number_of_the_chat(name: str, label: str, colour: int | None) -> None:
    view = View()
    view.reset(State(9, 16, 64, 4).snapshot())
    view.fold([(1, 0.0, "submit", 7, "g", 20, 30)])
    view.texts.group_names = {"g": name}
    assert view.texts.request(7) == label and view.texts.colour("") is None
    assert view.texts.colour("g") == colour or colour is None


# ---- every block


def test_a_pool_with_few_blocks_in_use_is_shown_as_large_as_it_fits() -> None:
    assert blocks_to_show(48_841, 1_400, 2_048) == 2_048
    for last_used, room in ((1_400, 1_404), (9_000, 1_404), (48_000, 1_404), (5, 80)):
        shown = blocks_to_show(48_841, last_used, room)
        per_cell = -(-shown // room)
        assert last_used < shown <= 48_841 and (per_cell - 1) * room < max(room, last_used * 1.1)
    room = Room(34, 50, 9, 8)
    assert PANELS["map"].height(room) == 12, "1,200 blocks at 160 columns have a half cell each"


def test_the_largest_owners_are_solid_fills_with_a_letter_only_under_the_cursor() -> None:
    _, view = stress_view(CLASSROOM, 3.0, 30)
    panel = BlockMap()
    panel.mode = "owner"
    rows = panel.picture(view, 100, 20).rows
    state = view.moment.shown.state
    own = next(b for r in state.requests.values() for b in r.table if view.moment.shown.holders[b] == 1)
    fills = {style for row in rows[-panel.grid.rows :] for text, style in row if "owner-" in style}
    assert fills and all(not text.strip() for row in rows[-panel.grid.rows :] for text, style in row if style in fills)
    view.select("block", own)
    view.frame(view.moment.now)
    panel.set_reactive(BlockMap.has_focus, True)
    letter = by_owner(view).looks[by_owner(view).codes[own]][0]
    rows = panel.picture(view, 100, 20).rows
    assert any(text.strip() == letter and style.endswith("on ink") for row in rows for text, style in row)


def test_a_ninth_chat_has_its_letter_in_every_cell_because_it_shares_a_colour() -> None:
    _, view = stress_view(CLASSROOM, 3.0, 30)
    tables: dict[str, list[int]] = {}
    for request in view.moment.shown.state.requests.values():
        tables.setdefault(request.group, []).extend(request.table)
    first, ninth, *_ = sorted(tables, key=lambda group: -len(tables[group]))
    view.texts.group_names = {first: "#1 one", ninth: "#9 nine"}
    layer = by_owner(view)
    looks = [layer.looks[layer.codes[tables[group][-1]]] for group in (first, ninth)]
    assert looks == [("1", "on-fill on owner-0"), ("9", f"{SIGNED} on owner-0")] and owner_style(8) == "owner-0"
    panel = BlockMap()
    panel.mode = "owner"
    drawn = {run for row in panel.picture(view, 100, 40).rows[3:] for run in row}
    assert {text.strip() for text, style in drawn if style == looks[0][1]} == {""}
    letters = {text.strip() for text, style in drawn if style == looks[1][1]}
    assert "9" in letters and "" not in letters
    halves = {style for row in panel.picture(view, 40, 8).rows[3:] for _, style in row}
    assert panel.grid.halves == 2 and any("owner-none" in style for style in halves), "half cells have no letters"


def test_ages_and_users_are_shades_of_the_state() -> None:
    _, view = stress_view(CLASSROOM, 3.0, 30)
    shown = view.moment.shown
    for layer in (by_age(view), by_refs(view)):
        for code, shade in zip(shown.codes[1:], layer.codes[1:], strict=True):
            assert layer.looks[shade][1].split()[-1].split("-")[0] == STATES[code]
    for colours in COLOURS.values():
        assert colours["shared-heat-5"] == colours["shared"] and colours["active-heat-0"] == colours["active-glow"]


def test_a_few_blocks_have_large_cells_and_panels_take_the_rows_that_their_content_needs() -> None:
    assert (grid(24, 73, 8).cell, grid(24, 73, 8).spread, grid(80, 73, 8).cell) == (6, True, 2)
    for rows in range(25, 60):
        for table, lanes in ((6, 8), (9, 12), (12, 40), (0, 0)):
            room = Room(rows, rows + 10, 1, 2, table, lanes)
            heights = [PANELS[name].height(room) for name in ("map", "table")]
            left = rows - sum(heights)
            usual = [PANELS[name].height(room._replace(table=0, lanes=1 << 10)) for name in ("map", "table")]
            assert all(now >= before for now, before in zip(heights, usual, strict=True))
            assert left >= min(lanes, rows - sum(usual)), "the lanes keep what they need"
    stress, view = stress_view(STEADY, 0.1, 2)
    panels = BatchLanes(), BlockTable()
    for _ in range(40):
        stress.run(0.02)
        stress.show(view)
        before = [panel.wanted for panel in panels]
        rows = [panel.picture(view, 80, 20).rows for panel in panels]
        assert panels[0].wanted in (0, before[0]) and panels[1].wanted >= before[1], "moving panels stay for a while"
    table = view.moment.shown.state.requests[view.subject()].table
    assert panels[1].wanted >= 6 and len(table) <= (panels[1].wanted - 3) // 3 * 13
    stress.gate(True)
    stress.show(view)
    rows = panels[0].picture(view, 80, 20).rows
    assert 0 < sum(bool(plain(row).strip()) for row in rows) <= panels[0].wanted <= len(view.history.lanes.lanes) + 5


# ---- what has just changed


def test_the_branches_of_a_split_and_an_evicted_text_move_for_a_moment_and_end_at_their_places() -> None:
    view = View()
    view.reset(State(9, 4, 64, 4).snapshot())
    view.fold([
        (1, 0.0, "submit", 1, "a", 8, 30), (2, 0.0, "admit", 1, 0, "new"), (3, 0.0, "alloc", 1, [1, 2]),
        (4, 0.0, "insert", 1, 0, 1, list(range(8)), [1, 2], -1),
    ])
    view.frame(10.0)
    panel = RadixTree()
    assert plain(panel.picture(view, 80, 12).rows[1]).strip() and not panel.moving
    view.fold([(5, 0.1, "split", 1, 2, 1)], 10.1)
    pictures = []
    for now in (10.1, 10.2, 10.5, 11.0):
        view.frame(now)
        pictures.append((panel.picture(view, 80, 12).rows[1], panel.moving))
    assert [moving for _, moving in pictures] == [True, True, False, False]
    assert pictures[0][0] != pictures[1][0] != pictures[2][0] == pictures[3][0]
    view.frame(20.0)
    assert panel.icicle is not None and all(not bar.moved for bar in panel.icicle.bars)


# ---- the axis of time, and the other panels


def test_trends_begin_where_the_data_begin_and_have_round_times() -> None:
    _, view = stress_view(CLASSROOM, 4.4, 40)
    panel = TrendCharts()
    axis = plain(panel.picture(view, 120, 30).rows[-1])
    seconds = [60 * int(m) + int(s) for m, s in re.findall(r"-(\d+):(\d\d)", axis)]
    assert panel.span == 5 and seconds == [5, 4, 3, 2, 1]
    places = [axis.index(f"-0:0{second}") for second in seconds]
    gaps = {after - before for before, after in pairwise(places)}
    assert max(gaps) - min(gaps) <= 2 * panel._wide, "equally far apart"


def test_host_and_device_have_three_rows_each_where_there_is_room() -> None:
    _, view = stress_view(CLASSROOM, 3.0, 30)
    for height, times in ((ROOMY, 3), (ROOMY - 1, 1)):
        rows = [plain(row)[11:] for row in Waterfall().picture(view, 100, height).rows]
        names = [plain(row)[:11].strip() for row in Waterfall().picture(view, 100, height).rows]
        assert names.index("device") - names.index("host") == times
        if times == 3:
            at = names.index("host")
            assert rows[at - 1] == rows[at + 1] != rows[at], "its words are in the middle row"


async def test_a_small_terminal_says_that_a_stream_stalled_and_a_text_was_evicted() -> None:
    source = ReplaySource(str(bundled()["small-pool"]))
    app = ReplayApp(source, Chats(source), Settings(), system="", speaker="model")
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.feed.live)
        app.open_mode("inspect")
        await source.control("pause")
        await app.seek(120)  # r4 comes back after 495 ms in the queue, and needs evicted blocks
        await until(pilot, lambda: isinstance(app.screen, InspectScreen) and app.position >= 120)
        strip = app.screen.query_one(PanelStrip)
        await until(pilot, lambda: "ms" in strip.text)
        assert strip.text == "[blocks] table  lanes  r4 stalled 495 ms  tree  × “The KV cache…” evicted  +5"
        await press(pilot, "tab", "tab")
        assert "[lanes] r4 stalled" in strip.text and " 495 ms: queue" in app.screen.query_one(BatchLanes).text
        await press(pilot, "tab")
        assert "// The KV cache".replace("/", glyphs().unused) in app.screen.query_one(RadixTree).text
        await pilot.resize_terminal(160, 50)
        bar = app.screen.query_one(TopBar)
        await until(pilot, lambda: " r4 stalled 495 ms: queue after a preemption " in bar.text)
        await pilot.click(bar, offset=(bar.text.index("evicted · 112 tokens"), 0))
        await until(pilot, lambda: app.screen.query_one(RadixTree).has_focus)


async def test_a_small_terminal_names_all_panels_and_a_click_shows_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InspectScreen, "_to_see", lambda *_: {})  # a busy machine has stalls
    async with live((80, 24)) as (app, pilot):
        screen = await inspecting(app, pilot)
        strip = screen.query_one(PanelStrip)
        present = [name for name in IN_ORDER if name not in screen.absent and not PANELS[name].part_of]
        for name in ("lanes", "requests", "tree", "map"):
            for _ in range(5):  # a card that comes or goes can move the word away from the click
                await click_at(pilot, strip, strip.text.index("blocks" if name == "map" else name), 0)
                if screen.current == name:
                    break
            shown = [panel for panel in present if screen._panels[panel].display]
            assert screen.current == name and shown == [name]
            assert f"[{'blocks' if name == 'map' else name}]" in strip.text
            assert len(strip.text.split()) == len(present) and set(strip.text.split()) & ALONE
        await press(pilot, "tab")
        assert f"[{screen.current}]" in strip.text and screen.current == "table"
        await pilot.resize_terminal(160, 48)
        await drawn(pilot)
        assert not strip.display
