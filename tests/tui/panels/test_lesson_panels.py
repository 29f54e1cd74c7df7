"""The panels that only lessons use: curves of costs, recorded steps of a GPU, HTTP as it is sent, blocks of a tree."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock

import pytest

from engine.errors import EngineError
from minitui.dev.panel import stress_view
from minitui.dev.simulator import Load
from minitui.teaching.lessons.l8_server import _curl, _httpx
from minitui.teaching.lessons.l10_cuda_graphs import (
    EAGER,
    GRAPHS,
    OVERLAP,
    eager_and_graphs,
    larger_model,
    overlap,
)
from minitui.teaching.lessons.page import Seen
from minitui.teaching.recorded_steps import recorded_device
from minitui.teaching.stage import Stage
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.lesson.curves import CostCurves
from minitui.tui.widgets.lesson.panels import NumberedBlocks
from minitui.tui.widgets.lesson.recorded_runs import HostAndDevice
from minitui.tui.widgets.lesson.tree_blocks import NodeBlocks
from minitui.tui.widgets.lesson.wire import WireLines
from minitui.tui.widgets.rows import plain
from minitui.viewmodel.board import Curve, Curves, RecordedRun, RecordedRuns, TreeBlocks, TreeLine, Wire
from minitui.viewmodel.view import View

SIZES = (1, 2, 4, 8)
MODES = (EAGER, GRAPHS, OVERLAP)


def drawn(panel: LinePanel, view: View, width: int, height: int) -> list[str]:
    rows = [plain(row) for row in panel.picture(view, width, height).rows]
    assert all(len(row) == width for row in rows)
    return rows


def curves(here: dict[int, float]) -> View:
    view = View()
    there = {n: 4.0 * n for n in SIZES}
    view.put(Curves("Costs", "rows", SIZES, (Curve("here", here), Curve("there", there))))
    return view


@pytest.mark.parametrize("height", [8, 30])
def test_a_curve_is_drawn_by_equal_factors_with_its_numbers_below(height: int) -> None:
    rows = drawn(CostCurves(), curves({1: 4.0, 2: 4.0, 4: 4.0, 8: 4.0}), 60, height)
    assert len(rows) == height
    numbers = [re.findall(r"\d+\.\d+", row) for row in rows[-2:]]
    assert numbers == [["4.00"] * 4, ["4.00", "8.00", "16.0", "32.0"]]
    assert rows[-3].split() == ["rows", "1", "2", "4", "8"]
    drawing = rows[:-3]
    assert drawing[0].startswith("32.0 ms") and drawing[-1].startswith("4.00 ms")
    [flat] = [y for y, row in enumerate(drawing) if "█" in row]
    assert flat == len(drawing) - 1 and drawing[flat].count("█") == 4, "a constant cost is a flat line"
    rising = [y for x in (24, 36, 48, 60) for y, row in enumerate(drawing) if row[x - 2] == "○"]
    assert rising == sorted(rising, reverse=True) and rising[-1] == 0


@pytest.mark.parametrize("play", [eager_and_graphs, larger_model, overlap])
async def test_a_lesson_draws_typical_steps_of_its_recording(play: Callable[[Stage], Awaitable[Seen]]) -> None:
    view = View()
    await play(cast(Stage, SimpleNamespace(view=view, pause=AsyncMock())))
    assert isinstance(view.board, RecordedRuns)
    for _, span, runs in view.board.groups:
        for run in runs:
            mean = float(run.line.split()[0])
            rows = [row for n in range(run.first, run.steps.last + 1) if (row := run.steps.get(n)) is not None]
            ends = [row.ended * 1e3 for row in rows if row.ended is not None]
            shown = [end - ends[0] for end in ends if end - ends[0] <= span]
            assert ends[-1] - ends[0] >= span * 0.999, "the steps fill the picture"
            assert shown[-1] / (len(shown) - 1) == pytest.approx(mean, rel=0.08), run.name


@pytest.mark.parametrize("height", [10, 30])
def test_recorded_runs_are_drawn_on_one_scale(height: int) -> None:
    model = recorded_device().models["8B"]

    def runs(rows: int) -> tuple[RecordedRun, ...]:
        timelines = (model.timeline(mode, rows) for mode in MODES)
        return tuple(RecordedRun(one.mode, one.steps, f"{one.mode}!", one.mode == "eager") for one in timelines)

    groups = tuple((f"{rows} rows", 16.0, runs(rows)) for rows in (1, 64))
    view = View()
    view.put(RecordedRuns("Steps", groups))
    rows = drawn(HostAndDevice(), view, 95, height)
    assert len(rows) == (10 if height == 10 else 20), "the second group only if there is room"
    assert "+5 ms" in rows[0] and rows[1].startswith("eager   host") and "eager!" in rows[3]
    assert rows[1].count("launch 5.9") == 3, "at least two eager steps of about 6.5 ms fit into 16 ms"
    assert "kernels and pauses" in rows[2] and "▘" in rows[2], "an eager device has pauses"
    assert rows[5].count("kernels") in (3, 4) and "▘" not in rows[5], "four steps with a graph"
    signs = [text for text, _ in HostAndDevice().picture(view, 95, height).legend if len(text) == 1 and text != " "]
    assert len(signs) == len(set(signs)) == 7, "one sign has one meaning"
    view.put(RecordedRuns("Steps", groups, until=0.5))
    half = drawn(HostAndDevice(), view, 95, height)
    assert half[5][:48] == rows[5][:48] and not half[5][60:].strip()
    assert "has not run" in drawn(HostAndDevice(), View(), 60, 8)[0]


def test_the_end_of_an_exchange_is_shown_and_nothing_of_it_reaches_the_terminal_raw() -> None:
    view = View()
    lines = (("sent", "curl http://127.0.0.1 " + "x" * 60), *(("got", f"data: {i} \x1b[31m") for i in range(9)))
    view.put(Wire("HTTP", lines))
    rows = drawn(WireLines(), view, 40, 20)
    assert rows[0].startswith("$ curl http://127.0.0.1") and "\x1b" not in "".join(rows)
    assert sum("data:" in row for row in rows) == 9
    picture = WireLines().picture(view, 40, 4)
    assert [plain(row).split()[1] for row in picture.rows] == ["5", "6", "7", "8"]
    assert "lines above" in picture.note[0][0]


def test_a_block_of_the_tree_has_a_sign_and_long_nodes_wrap() -> None:
    view = View()
    states = ("kept", "looked", "match", "new", "evicted")
    nodes = (
        TreeLine(0, "system You answer", tuple(enumerate(states)), 2),
        TreeLine(1, "user \x1b", tuple((number, "kept") for number in range(20, 40))),
    )
    view.put(TreeBlocks("Tree", nodes, "Block 1: compared."))
    rows = drawn(NodeBlocks(), view, 72, 9)
    assert re.findall(r" (.)(\d)", rows[0]) == [(" ", "0"), ("?", "1"), ("=", "2"), ("+", "3"), ("×", "4")]
    assert "\x1b" not in "".join(rows) and rows[1].startswith("  user")
    assert [int(n) for row in rows[1:-1] for n in re.findall(r"\d+", row)] == list(range(20, 40))
    assert rows[-1].startswith("Block 1: compared.")
    assert "+ 2 rows" in drawn(NodeBlocks(), view, 72, 3)[1]


@pytest.mark.parametrize("width", [52, 76])
def test_the_map_of_a_lesson_has_the_number_of_each_block(width: int) -> None:
    _, view = stress_view(Load(blocks=40, chats=6, rows=6, budget=48), 2.0, 20)
    total = view.moment.shown.total
    rows = drawn(NumberedBlocks(), view, width, 30)
    cells = re.findall(r"[·○●█▄](\d+)", "\n".join(rows))
    assert [int(number) for number in cells] == list(range(1, total + 1))
    _, ruler, line = drawn(NumberedBlocks(), view, width, 3)
    assert [line.index(mark) for mark in line[:1]] == [0] and not re.search(r"\d", line), "no room for numbers in cells"
    for number in ruler.split():
        assert ruler.index(number) == int(number) - 1, "the number is above its block"


@pytest.mark.parametrize("tool", ["curl", "httpx"])
async def test_the_lesson_reads_a_stream_line_by_line(tool: str) -> None:
    if tool == "curl" and not shutil.which("curl"):
        pytest.skip("curl is not installed")
    pytest.importorskip("httpx")
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        body = b"data: {}\n\ndata: [DONE]\n\n"
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    lines: list[str] = []
    async with server:
        if tool == "curl":
            await _curl(["curl", "-N", f"{url}/v1", "-H", "Authorization: Bearer k", "-d", "{}"], lines.append)
        else:
            await _httpx(url, "k", {}, lines.append)
    assert lines == ["data: {}", "", "data: [DONE]", ""]
    assert asked[0].startswith(b"POST /v1") and b"uthorization: Bearer k" in asked[0]
    if tool == "curl":
        with pytest.raises(EngineError, match="curl failed: "):
            await _curl(["curl", f"{url}/v1"], lines.append)
