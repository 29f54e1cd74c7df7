"""The radix tree as bars: every bar has the place of its tokens, and every running request a row of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.trace.kind import kind_of, time_of
from minitui.dev.panel import stress_view
from minitui.dev.simulator import CLASSROOM
from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.tui.theme import LIT, Palette
from minitui.tui.widgets.inspect.icicle import Icicle
from minitui.tui.widgets.inspect.tree import RadixTree
from minitui.tui.widgets.rows import plain
from minitui.viewmodel.view import View
from tests.support.records.panels import body
from tests.support.records.views import TIGHT

SIZES = [(66, 14), (76, 17), (110, 30), (200, 50)]


def drawn(view: View, width: int, height: int) -> tuple[RadixTree, Icicle, list[str]]:
    panel = RadixTree()
    rows = body(panel, view, width, height)
    assert panel.icicle is not None and all(len(row) == width for row in rows)
    return panel, panel.icicle, rows


def test_a_bar_lies_at_the_positions_of_its_tokens():
    _, view = stress_view(CLASSROOM, 4.0, 30)
    state = view.moment.shown.state
    for width, height in SIZES:
        panel, icicle, _ = drawn(view, width, height)
        nodes = [bar for bar in icicle.bars if bar.kind == "node"]
        assert nodes and {bar.id for bar in nodes} == set(panel.nodes)
        for bar in nodes:
            path = list(state.path(bar.id))
            assert bar.begin == sum(len(node.ids) for node in path[1:]) and bar.end - bar.begin == len(path[0].ids)
            parent = next((above for above in nodes if above.id == path[0].parent), None)
            if parent is not None:  # it is beside all its branches
                assert parent.first <= bar.first < parent.first + parent.rows and parent.end == bar.begin
        in_a_row = [(bar.first + y, bar) for bar in icicle.bars for y in range(bar.rows)]
        for y, bar in in_a_row:
            for other_y, other in in_a_row:
                assert y != other_y or bar is other or bar.end <= other.begin or other.end <= bar.begin


def test_each_running_request_has_a_row_and_its_name():
    _, view = stress_view(CLASSROOM, 4.0, 30)
    state = view.moment.shown.state
    _, icicle, rows = drawn(view, 110, 60)
    running = [request for request in state.requests.values() if state.computed(request)]
    bars = {bar.id: bar for bar in icicle.bars if bar.kind == "request"}
    assert len(running) > 1 and bars.keys() == {request.id for request in running}
    assert len({bar.first for bar in bars.values()}) == len(running), "also if two of them have the same text"
    for request in running:
        bar = bars[request.id]
        line = rows[1 + bar.first * icicle.apart]
        assert f"r{request.id} " in line + " " and bar.end == state.computed(request)


def test_fills_say_how_many_requests_use_a_node():
    _, view = stress_view(replace(CLASSROOM, step_ms=4.0), 3.0, 30)
    users = {node.id: node.users for node in view.moment.shown.state.nodes.values()}
    _, icicle, _ = drawn(view, 110, 40)
    nodes = [bar for bar in icicle.bars if bar.kind == "node" and LIT not in bar.style]
    fills = {bar.id: Palette.parts(bar.style)[1].split("-")[0] for bar in nodes}
    assert fills == {id: "shared" if users[id] > 1 else "active" if users[id] else "cached" for id in fills}
    assert {"active", "cached"} <= set(fills.values())


def test_an_evicted_text_is_hatched_where_it_was():
    stress, view = stress_view(TIGHT, 2.0, 20)
    stress.gate(True)
    for _ in range(3_000):
        stress.run_steps(1)
        records = stress.show(view)
        evicted = [record for record in records if record[2] == "evict"]
        assert len(view.moment.just_evicted()) == min(3, len(evicted))
        if evicted:
            break
    _, icicle, rows = drawn(view, 100, 20)
    gone = [bar for bar in icicle.bars if bar.kind == "evicted"]
    blocks: dict[int, int] = {}  # by node
    for record in evicted[-3:]:
        blocks[record[3]] = blocks.get(record[3], 0) + record[4]
    assert {bar.id: (bar.end - bar.begin) // view.moment.shown.state.block_size for bar in gone} == blocks
    for bar in gone:
        line = rows[1 + bar.first * icicle.apart]
        assert f"× {bar.end - bar.begin} tokens just evicted" in line and "╱" in line


def test_the_words_of_an_evicted_text_at_the_right_edge_are_whole():
    reader, view = TraceReader(find_trace("small-pool")), View()
    view.reset(reader.part(0).snapshot)
    widths = set()
    for record in reader.records():
        view.fold([record], time_of(record))
        if kind_of(record) != "evict":
            continue
        view.frame(time_of(record))
        for width in range(44, 100, 6):
            _, icicle, rows = drawn(view, width, 12)
            for bar in (bar for bar in icicle.bars if bar.kind == "evicted"):
                words = rows[1 + bar.first * icicle.apart].rpartition("×")[2].strip()
                tokens = f"{bar.end - bar.begin} tokens"
                assert words in ("", tokens, f"{tokens} just evicted")
                widths.add(words)
    assert len(widths) > 1


def test_a_click_on_a_bar_selects_it_and_v_shows_the_table():
    _, view = stress_view(CLASSROOM, 4.0, 30)
    panel, icicle, _ = drawn(view, 100, 30)
    bar = max((bar for bar in icicle.bars if bar.kind == "node"), key=lambda bar: bar.end - bar.begin)
    middle = round((bar.begin + bar.end) / 2 / icicle.per_column)
    panel.clicked(view, middle, 1 + bar.first * icicle.apart)
    assert view.selection is not None and (view.selection.kind, view.selection.id) == ("node", bar.id)
    panel.view = view
    panel.action_bars()
    assert "text after the shared part" in plain(panel.picture(view, 100, 30).rows[0])


@pytest.mark.parametrize("width", [20, 39])
def test_a_narrow_panel_has_the_table(width):
    _, view = stress_view(CLASSROOM, 4.0, 30)
    panel = RadixTree()
    panel.picture(view, width, 20)
    assert panel.icicle is None
