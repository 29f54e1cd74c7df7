"""The card of the last cache hit, and the reused blocks that light up: compared with the records of the same engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minitui.dev.panel import stress_view
from minitui.dev.simulator import CLASSROOM
from minitui.tui.theme import LIT, Palette, palette
from minitui.tui.widgets.hit_card import large, rows
from minitui.tui.widgets.inspect.block_map import BlockMap
from minitui.tui.widgets.inspect.block_table import BlockTable
from minitui.tui.widgets.inspect.tree import RadixTree
from minitui.tui.widgets.rows import plain, runs_width
from minitui.viewmodel.requests import Hit, last_hit
from minitui.viewmodel.view import View

SIZES = [(80, 24), (100, 30), (160, 50), (220, 60)]


def run_to_a_hit() -> tuple[View, list[int], int]:
    """Returns a paused view just after a step with a hit, the reused blocks, and the request that computed the last."""
    stress, view = stress_view(replace(CLASSROOM, step_ms=4.0), 2.0, 10)
    stress.gate(True)
    makers: dict[int, int] = {}
    for _ in range(2_000):
        stress.run_steps(1)
        records = stress.show(view)
        reused: list[int] = []
        maker = -1
        for record in records:  # (seq, t, kind, …)
            if record[2] == "alloc":
                makers.update(dict.fromkeys(record[4], record[3]))
            elif record[2] == "match" and record[4] > 0 and not reused:
                request = stress.scheduler.requests[record[3]]
                reused = list(request.table[: record[4] // 16])
                maker = makers.get(reused[-1], -1)
        if reused and maker >= 0 and len(view.moment.shown.reuses[-1][1]) == len(reused):
            return view, reused, maker
    raise AssertionError("the simulated engine had no hit")


def classroom() -> tuple[View, Hit]:
    _, view = stress_view(CLASSROOM, 4.0, 40)
    hit = last_hit(view)
    assert hit is not None and hit.source is not None
    return view, hit


def cells_in(picture: list[tuple[tuple[str, str], ...]], fill: str) -> list[str]:
    return [text for row in picture for text, style in row if fill in Palette.parts(style)[:2]]


def test_the_reused_blocks_light_up_in_map_tree_and_table_at_once():
    view, reused, maker = run_to_a_hit()
    assert set(reused) <= view.lit and view.history.lanes.lanes[maker].id == maker
    map_rows = BlockMap().picture(view, 150, 30).rows
    lit = [text for row in map_rows[2:] for text, style in row if LIT in style]
    assert len(lit) == len(view.lit)
    assert cells_in(RadixTree().picture(view, 100, 30).rows, LIT)
    request = next(r for r in view.moment.shown.state.requests.values() if r.table[: len(reused)] == reused)
    view.select("request", request.id)
    chips = cells_in(BlockTable().picture(view, 200, 12).rows, LIT)
    assert {int(chip) for chip in chips} == view.lit & set(request.table)
    before = view.moment.horizon - 1
    assert view.travel_to(before)
    view.frame(1e6)
    assert not set(reused) <= view.lit


def test_the_card_has_the_figures_of_both_requests():
    view, hit = classroom()
    state = view.moment.shown.state
    for width, _ in SIZES:
        card = rows(view, hit, width)
        assert len(card) == 3 and {runs_width(row) for row in card} == {width}
        text = "\n".join(map(plain, card))
        request = hit.lane.request
        assert f"{request.cached_tokens:,} cached + {request.prompt_tokens - request.cached_tokens:,}" in text
        assert f"{hit.lane.request.cached_tokens // state.block_size} blocks" in text
        cached = sum(map(len, cells_in(card[1:2], "cached")))
        computed = sum(len(t) for t, style in card[1] if style == "prefill on select")
        share = hit.lane.request.cached_tokens / hit.lane.request.prompt_tokens
        assert cached == pytest.approx(share * (cached + computed), abs=1)
    first = view.history.first_tokens.items[0]
    step = view.history.lanes.lanes[first.request].submitted_step
    assert step <= 0 or (view.travel_to(max(0, step - 1)) and last_hit(view) is None)


def test_on_a_phone_no_figure_covers_another():
    view, hit = classroom()
    view.texts.group_names = {hit.source.request.group: "#9 tokens", hit.lane.request.group: "#12 paging"}
    faster = Hit(hit.lane, 23.5, replace(hit.source, ttft=(5.0, 200.0)))
    for width in range(34, 110):
        card = [plain(row) for row in rows(view, faster, width)]
        assert {len(row) for row in card} == {width}
        for row, took in zip(card, (" 200 ms ", " 23.5 ms "), strict=False):
            assert took in row and row.count("█") + row.count("○") >= 1, "the whole time, and a bar"
        shown = [digit in row for digit, row in zip(large("8.5×"), card, strict=True)]
        assert all(shown) or (width < 48 and not any(shown))
        assert f" #12·r{hit.lane.id} " in card[1]


def test_the_quotient_of_the_times_is_in_large_digits():
    view, hit = classroom()
    source = replace(hit.source, ttft=(5.0, 200.0))
    faster = Hit(hit.lane, 23.5, source)
    assert faster.times_faster == pytest.approx(8.51, abs=0.01), "without the queue"
    text = [plain(row) for row in rows(view, faster, 100)]
    digits = large("8.5×")
    assert all(digit in row for digit, row in zip(digits, text, strict=True))
    assert [row.split()[-1] for row in text[:2]] == ["faster", "prefill"]
    no_gain = Hit(hit.lane, 140.0, source)
    share = f"{100 * hit.lane.request.cached_tokens / hit.lane.request.prompt_tokens:.0f}"
    assert no_gain.times_faster is None and f"{large(share)[0]} % of the" in plain(rows(view, no_gain, 100)[0])
    assert [len({len(row) for row in large(sign)}) for sign in "0123456789×<."] == [1] * 13
    assert palette().style("bold hit on select")
