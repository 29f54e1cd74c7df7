"""The panel of two runs: both on one clock, with one cursor, at every size."""

from __future__ import annotations

from math import ceil

import pytest

from minitui.dev.panel import Alone
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
from minitui.tui.glyphs import glyphs, use_ascii
from minitui.tui.widgets.lesson.runs import RunsInSteps
from minitui.tui.widgets.rows import plain
from minitui.tui.widgets.side_by_side import SideBySide
from minitui.viewmodel.compare.runs import Run, recorded_view
from minitui.viewmodel.view import View
from tests.support.records.panels import body
from tests.viewmodel.test_runs import played, viewed


@pytest.fixture
def batching(monkeypatch: pytest.MonkeyPatch) -> View:
    """Returns the view of five requests with continuous batching; the earlier run had static batching."""
    view = viewed(played(monkeypatch), "continuous")
    view.earlier = viewed(played(monkeypatch, policy="static"), "static")
    return view


def drawn(panel: SideBySide, view: View, width: int = 100, height: int = 24) -> list[str]:
    panel.view = view
    return body(panel, view, width, height)


def of_run(rows: list[str], name: str) -> list[str]:
    at = next(i for i, row in enumerate(rows) if row.startswith(name + " "))
    return rows[at : at + 7]


def test_a_column_is_the_same_time_in_both_runs(batching: View) -> None:
    panel = SideBySide()
    panel.unit = "steps"
    rows = drawn(panel, batching)
    each = round(1 / panel.scale.ms)  # columns of a step
    static, continuous = of_run(rows, "static"), of_run(rows, "continuous")
    assert static[0].split(" · ")[2] == "21 steps" and continuous[0].split(" · ")[2] == "17 steps"

    def ends(row: str) -> int:
        return (row.index("■") - panel.label) // each

    # The first two requests are the same; continuous batching gives the row of the first to the third at once.
    assert [ends(row) for row in static[2:]] == [3, 9, 13, 11, 21]
    assert [ends(row) for row in continuous[2:]] == [3, 9, 7, 9, 17]
    assert all(row.startswith(f"r{i} ") for i, row in enumerate(static[2:], 1))
    panel.unit = "ms"
    rows = drawn(panel, batching)
    places = [ends(row) * each * panel.scale.ms for row in of_run(rows, "static")[2:4]]
    clock = panel.comparison.runs[0].clocks["ms"]
    assert places == pytest.approx([clock.ends[2], clock.ends[8]], abs=each * panel.scale.ms)


async def test_one_cursor_tells_what_both_runs_do(batching: View) -> None:
    app = Alone(SideBySide, warm_up=0.0, fps=0)
    async with app.run_test(size=(110, 24)) as pilot:
        panel = app.query_one(SideBySide)
        panel.paint(batching)
        await pilot.press("k", "right")
        panel.cursor = 3.5
        panel.repaint()
        static, continuous = (line.strip("│ ") for line in panel.text.splitlines()[-3:-1])
        assert static.split(" · ")[1:] == ["1 decode, 3 wait, 1 done", "6 of 26 tokens"], static
        assert continuous.split(" · ")[1:] == ["1 decode, 1 prefill, 2 wait, 1 done", "6 of 26 tokens"]
        await pilot.press("right")
        assert panel.cursor == pytest.approx(3.5 + panel.scale.ms)
        each = panel.scale.ms
        column = panel.scale.column(panel.cursor)
        await pilot.press("left_square_bracket")
        assert panel.scale.ms < each
        assert panel.scale.column(panel.cursor) == pytest.approx(column, abs=1) or panel.left == 0.0
        await pilot.press("end")
        assert panel.cursor is None and panel.scale.ms == each
        await pilot.press("down", "down")
        assert panel.chosen == 1
        lit = [row for row in panel.drawn_rows if any("accent on select" in style for _, style in row)]
        assert [plain(row)[2:4] for row in lit] == ["r2", "r2"]


@pytest.mark.parametrize("ascii", [False, True])
@pytest.mark.parametrize("size", [(80, 9), (80, 20), (240, 66), (30, 6), (8, 3)])
def test_every_size_shows_whole_rows(batching: View, size: tuple[int, int], ascii: bool) -> None:
    use_ascii(ascii)
    small = recorded_view(TraceReader(bundled()["small-pool"]))
    large = recorded_view(TraceReader(bundled()["h200-8b"]))
    large.earlier = small
    large.texts.group_names = {lane.request.group: "\x1b[31m名前" for lane in large.history.lanes.lanes.values()}
    large.run_name = "\x1b[2J a name from outside"
    for view in (batching, large, View()):
        panel = SideBySide(frame="none")
        panel.view = view
        for cursor in (None, 4.0):
            panel.picture(view, *size)
            panel.cursor = cursor
            for unit in ("ms", "steps"):
                panel.unit = unit
                rows = panel.drawn(view, *size)
                assert len(rows) == size[1]
                text = [plain(row) for row in rows]
                assert all("\x1b" not in line for line in text)
                if ascii and view is batching:
                    assert all(line.isascii() for line in text)


def test_more_requests_than_rows_are_counted_and_can_be_reached() -> None:
    large = recorded_view(TraceReader(bundled()["h200-8b"]))
    large.earlier = recorded_view(TraceReader(bundled()["small-pool"]))
    panel = SideBySide()
    rows = drawn(panel, large, 100, 24)
    seen = sum(row.startswith("r") for row in rows) - 4
    assert f"+ {64 - seen} more requests: up and down show them" in [row.rstrip() for row in rows]
    panel.chosen = 63
    assert any(row.startswith("r68") for row in drawn(panel, large, 100, 24))


@pytest.mark.parametrize("ascii", [False, True])
@pytest.mark.parametrize("width", [14, 18, 30, 60])
def test_each_prefill_leaves_a_mark_however_short_it_is(batching: View, width: int, ascii: bool) -> None:
    use_ascii(ascii)
    panel = RunsInSteps()
    rows = of_run(drawn(panel, batching, width, 24), "continuous")
    run, each = Run(batching), panel.scale.ms
    lanes = {row.split()[0]: row[panel.label :] for row in rows if row.startswith("r")}
    short = 0
    for lane in run.lanes:
        moments = {int(span.begin // each) for span in run.phases("steps", lane) if span.begin == span.end}
        for span in run.phases("steps", lane):
            inside = range(int(span.begin // each), ceil(span.end / each))
            if span.kind == "prefill" and not moments & {*inside}:
                assert glyphs().prefill in {lanes[f"r{lane.id}"][x] for x in inside}
                short += span.end - span.begin < each / 2
    assert short or width > 14, "the narrowest picture has prefills of less than half a column"
