"""The waterfall as a reader uses it: what it shows, and its keys and mouse."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from typing import Any

import pytest
from textual import events

from minitui.dev.panel import Alone, stress_view
from minitui.dev.simulator import CLASSROOM, SMALL
from minitui.trace.bundled import bundled, find_trace
from minitui.trace.reader import TraceReader
from minitui.tui.glyphs import use_ascii
from minitui.tui.widgets.inspect.waterfall import Waterfall
from minitui.tui.widgets.rows import plain
from minitui.tui.widgets.tracks import mark, track
from minitui.viewmodel.explain.limits import limits
from minitui.viewmodel.history.spans import Span, Timeline
from minitui.viewmodel.history.steps import Steps
from minitui.viewmodel.view import View
from tests.support.records.golden import GOLDEN
from tests.viewmodel.test_spans import folded_view


def drawn(panel: Waterfall, view: View, width: int = 120, height: int = 30) -> list[str]:
    """Returns the rows of the panel's body."""
    panel.view = view
    return [plain(row) for row in panel.picture(view, width, height).rows]


@pytest.fixture(scope="module")
def gpu() -> View:
    return folded_view(TraceReader(bundled()["h200-8b"]))


def shown_at(spans: list[Span], begin: float, end: float) -> set[str]:
    """Returns the kinds of the spans that fill the largest part of a cell; several if they are about equal."""
    filled = [(min(span.end, end) - max(span.begin, begin), span.kind) for span in spans]
    most = max((amount for amount, _ in filled), default=0.0)
    return {kind for amount, kind in filled if amount > 0 and amount >= most - 1e-9}


@pytest.mark.parametrize("name", ["gpu", "golden"])
@pytest.mark.parametrize("scale_ms", [0.02, 0.5, 5.0])
def test_each_cell_of_the_tracks_shows_what_fills_most_of_it(name: str, scale_ms: float, gpu: View) -> None:
    view = gpu if name == "gpu" else folded_view(TraceReader(GOLDEN))
    use_ascii(True)  # one letter for each part
    line = Timeline(view.history.steps, view.moment.horizon)
    panel = Waterfall()
    panel.chosen_ms = scale_ms
    everything = line.host(line.first, line.last)
    seen = set()
    for share in (0.2, 0.5, 0.9):
        panel.right = line.begin + share * (line.end - line.begin)
        drawn(panel, view)
        left, ms, columns = panel.scale
        spans = [span for span in everything if span.end > left and span.begin < panel.scale.right]
        cells = "".join(text for text, _ in track(panel.host, panel.scale, None, lambda span: []))
        assert len(cells) == columns
        for x, cell in enumerate(cells):
            kinds = shown_at(spans, left + x * ms, left + (x + 1) * ms)
            assert cell in {mark(kind) for kind in kinds} | ({"|"} if kinds else {" "}), (x, kinds, cells)
            seen.add(cell)
    assert len(seen) >= 2


def without_parts(reader: TraceReader) -> View:
    """The view of a recording of an older version, which had no record "parts"."""
    view, snapshot = View(), reader.part(0).snapshot
    view.reset(snapshot)
    kept = [record for record in reader.records() if record[2] != "parts"]
    view.fold([(number, *record[1:]) for number, record in enumerate(kept, snapshot["seq"] + 1)])
    view.frame(kept[-1][1])
    return view


def test_the_figures_of_a_step_are_the_records() -> None:
    _, view = stress_view(SMALL, 3.0, 30)
    row = view.history.steps.get(view.moment.horizon)
    text = "\n".join(drawn(Waterfall(), view))
    assert row is not None and row.parts is not None and row.device_ms is not None
    for name in ("commit", "plan", "launch", "wait"):
        assert re.search(rf"{name} {getattr(row.parts, name):.2f}\b", text), name
    assert f"device ({row.kind}) {row.device_ms:.2f}" in text
    old = "\n".join(drawn(Waterfall(), without_parts(TraceReader(GOLDEN))))
    assert "emit –" in old and "gate –" in old and "gc –" in old and "wait –" in old and "not reported" in old


def test_a_line_says_whether_the_host_or_the_device_limits(gpu: View) -> None:
    """In the recording, each decode step waits 4 ms for the device, and each prefill costs 25 ms of the host."""
    rows = ["".join(limit.told(160)) for limit in limits(gpu.history.steps, gpu.moment.horizon)]
    share = r"\(\d+ steps, \d+ % of the time\)"
    words = rf"the (\w+) limits the speed of steps that (launch.*) {share}: .* (\d+) % of their time · last 743 steps"
    said = [re.fullmatch(words, row) for row in rows]
    which = [("device", "launch no prompts"), ("host", "launch prompts")]
    assert [match and match.group(1, 2) for match in said] == which, rows
    without, launching = (int(match[3]) for match in said if match is not None)
    assert without > 80 and launching < 5
    assert (
        limits(gpu.history.steps, gpu.moment.horizon)[0]
        .told(120)[1]
        .endswith(f"the host waits for it {without} % of their time")
    )
    assert all(row in "\n".join(drawn(Waterfall(), gpu, 160)) for row in rows)
    assert limits(Steps(), -1) == []
    vllm = folded_view(TraceReader(find_trace("vllm-8b")))
    rows = drawn(Waterfall(), vllm, 80)
    assert any(row.startswith("limit unknown: the engine does not report") for row in rows), rows


@pytest.mark.parametrize("name", ["small-pool", "vllm-8b", "h200-8b"])
def test_a_small_panel_shows_what_limits_and_a_request(name: str) -> None:
    view = folded_view(TraceReader(find_trace(name)))
    panel = Waterfall()
    for back in range(0, 160, 3):
        panel.step = view.moment.horizon - back
        rows = drawn(panel, view, 76, 11)[:11]
        told = ["".join(limit.told(76)) for limit in view.timings.limits]
        assert all(any(row.startswith(text) for row in rows) for text in told), rows
        assert panel.lanes and rows[panel._lanes_row].startswith(f"r{panel.lanes[0].id}"), rows


def test_requests_show_their_phases_and_the_selected_one_is_in_sight(gpu: View) -> None:
    line = Timeline(gpu.history.steps, gpu.moment.horizon)
    panel = Waterfall()
    chunk = next(lane for lane in gpu.history.lanes.lanes.values() if lane.id == 40)
    joined = next(span for span in line.request(chunk, 0, line.last) if span.kind == "prefill")
    panel.chosen_ms, panel.right = 0.5, joined.end + 20.0
    rows = drawn(panel, gpu, 120, 16)
    assert re.search(r"\+ \d+ more requests", rows[-1])
    gpu.select("request", 40)
    try:
        row = next(row for row in drawn(panel, gpu, 120, 16) if row.startswith("r40"))
    finally:
        gpu.select(None)
    assert f"+{joined.tokens:,}" in row and "─" in row
    assert row.index("▒") < row.index("─")


def test_the_picture_follows_the_newest_step_until_it_is_moved() -> None:
    stress, view = stress_view(SMALL, 3.0, 30)
    panel = Waterfall()
    drawn(panel, view)

    def forward() -> None:
        stress.run(0.3)
        stress.show(view)
        drawn(panel, view)

    before = panel.scale.right
    forward()
    assert panel.scale.right == Timeline(view.history.steps, view.moment.horizon).end > before
    panel.action_zoom(1)
    drawn(panel, view)
    assert panel.right is None, "zooming does not stop the picture"
    panel.action_pan(-1)
    drawn(panel, view)
    still = panel.scale
    forward()
    assert panel.scale == still
    panel.action_latest()
    forward()
    assert panel.scale.right == Timeline(view.history.steps, view.moment.horizon).end


@asynccontextmanager
async def opened() -> Any:
    app = Alone(Waterfall, CLASSROOM, warm_up=3.0, fps=0)
    async with app.run_test(size=(100, 24)) as pilot:
        app.tick()
        app.stress.gate(True)
        app.show()
        await pilot.pause()
        yield app, pilot, app.panel


async def test_keys_move_the_cursor_over_parts_and_steps_and_select_the_step() -> None:
    async with opened() as (app, pilot, panel):
        await pilot.press("left")
        assert panel.cursor is not None and "cursor +" in panel.text
        assert app.view.selection == ("step", panel.step) or app.view.selection.id == panel.step
        places = [panel.cursor]
        for _ in range(6):
            await pilot.press("left")
            places.append(panel.cursor)
        assert places == sorted(places, reverse=True) and len(set(places)) == 7
        line = Timeline(app.view.history.steps, app.view.moment.horizon)
        begins = {span.begin for span in line.host(line.first, line.last)}
        assert set(places) <= begins, "the cursor stops at each part"
        await pilot.press("right")
        assert panel.cursor == places[-2]
        step = panel.step
        await pilot.press("shift+left")
        assert panel.step == step - 1 and panel.cursor == pytest.approx(line.arrived(step - 1))
        await pilot.press("shift+right", "shift+right")
        assert panel.step == step + 1
        assert panel.text.count(f"step {step + 1:,}") >= 1
        for _ in range(40):
            await pilot.press("shift+left")
        assert panel.scale.left <= panel.cursor < panel.scale.right, "the picture moves with the cursor"
        await pilot.press("end")
        assert panel.cursor is None and panel.right is None and app.view.selection is None


async def test_keys_zoom_around_the_cursor_and_move_the_picture() -> None:
    async with opened() as (_app, pilot, panel):
        await pilot.press("left", "left", "left")
        column = panel.scale.column(panel.cursor)
        scale = panel.scale.ms
        await pilot.press("left_square_bracket")
        assert panel.scale.ms < scale and abs(panel.scale.column(panel.cursor) - column) <= 1
        await pilot.press("right_square_bracket")
        assert panel.scale.ms == scale
        right = panel.scale.right
        await pilot.press("pageup")
        assert panel.scale.right == pytest.approx(right - panel.scale.columns * scale / 2)
        await pilot.press("pagedown")
        assert panel.scale.right == pytest.approx(right)
        await pilot.press(*["right_square_bracket"] * 4, *["pageup"] * 30)
        line = Timeline(panel.view.history.steps, panel.view.moment.horizon)
        assert panel.scale.left < line.begin < panel.scale.right, "the picture cannot leave the history"


async def test_the_mouse_sets_the_cursor_drags_and_zooms() -> None:
    async with opened() as (app, pilot, panel):
        x = panel.label + 42
        await pilot.click(panel, offset=(x, 3))
        assert panel.scale.column(panel.cursor) == x - 2 - panel.label
        place = panel.scale.left + (x - 2 - panel.label + 0.5) * panel.scale.ms
        assert panel.cursor == pytest.approx(place)
        request = panel.lanes[1].id
        await pilot.click(panel, offset=(4, 1 + panel._lanes_row + 1))
        assert app.view.selection.kind == "request" and app.view.selection.id == request
        left, ms, cursor = panel.scale.left, panel.scale.ms, panel.cursor
        await pilot.mouse_down(panel, offset=(40, 3))
        await pilot.hover(panel, offset=(50, 3))
        await pilot.mouse_up(panel, offset=(50, 3))
        assert panel.scale.left == pytest.approx(left - 10 * ms) and panel.cursor == cursor
        await pilot.hover(panel, offset=(60, 3))
        assert panel.scale.left == pytest.approx(left - 10 * ms), "the button is up"
        under = panel.scale.left + (70 - 2 - panel.label + 0.5) * ms
        scroll: Any = dict.fromkeys(("delta_x", "delta_y", "button"), 0) | {"x": 70, "y": 3}
        scroll |= dict.fromkeys(("shift", "meta", "ctrl"), False)
        panel.on_mouse_scroll_up(events.MouseScrollUp(panel, **scroll))
        assert panel.scale.ms < ms and panel.scale.column(under) == 70 - 2 - panel.label
        before = panel.scale
        panel.on_mouse_scroll_down(events.MouseScrollDown(panel, **{**scroll, "shift": True}))
        assert panel.scale.ms == before.ms and panel.scale.left > before.left


async def test_enter_opens_the_step_and_up_and_down_choose_a_request() -> None:
    async with opened() as (app, pilot, panel):
        await pilot.press("up")
        assert app.view.selection.id == panel.lanes[-1].id
        await pilot.press("up")
        assert app.view.selection.id == panel.lanes[-2].id
        for _ in range(len(app.view.history.lanes.lanes) + 2):
            await pilot.press("up")
        assert app.view.selection.id == panel.lanes[0].id
        assert panel.text.count(f"r{panel.lanes[0].id} ") >= 1
