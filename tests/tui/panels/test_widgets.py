"""Screen == model: what each panel shows is compared with the view, over sequences of real records."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest

from engine.trace.views import ACTIVE, CACHED, FREE, SHARED
from minitui.dev import panel
from minitui.dev.panel import Alone, stress_view
from minitui.dev.simulator import CLASSROOM, SMALL, Load
from minitui.text import ms
from minitui.trace.reader import TraceReader
from minitui.tui import theme
from minitui.tui.glyphs import ASCII, UNICODE, glyphs, use_ascii
from minitui.tui.theme import COLOURS, Palette, palette
from minitui.tui.widgets.base import LinePanel, changes
from minitui.tui.widgets.chat.occupancy import Occupancy, PromptOrigin, shares
from minitui.tui.widgets.inspect.block_colours import COLOURINGS
from minitui.tui.widgets.inspect.block_map import BlockMap, grid
from minitui.tui.widgets.inspect.block_table import BlockTable
from minitui.tui.widgets.inspect.events import Events
from minitui.tui.widgets.inspect.lanes import BatchLanes
from minitui.tui.widgets.inspect.step_bar import StepBar
from minitui.tui.widgets.inspect.timing_rows import kind_rows
from minitui.tui.widgets.inspect.timings import StepTimings
from minitui.tui.widgets.inspect.tree import LARGE as LARGE_PANEL
from minitui.tui.widgets.inspect.tree import TALL, RadixTree
from minitui.tui.widgets.inspect.vitals import Vitals, vitals
from minitui.tui.widgets.lesson.attention import Attention, KeySlot, triangle
from minitui.tui.widgets.lesson.tokens import CandidateBars, TextPieces
from minitui.tui.widgets.rows import cells, cut, fit, plain
from minitui.viewmodel.board import Candidate, Candidates, KeyRead, Pieces
from minitui.viewmodel.explain.timing import why_briefly, why_slow
from minitui.viewmodel.history.lane import DECODING, FINISHED, NOTHING, PREEMPTED, PREFILLING, QUEUED
from minitui.viewmodel.state.eviction import EvictionOrder, free_words, is_under_pressure, pressure_words
from minitui.viewmodel.view import View
from minitui.viewmodel.words.story import tell
from tests.support.records.golden import GOLDEN
from tests.support.records.panels import body
from tests.support.records.views import TIGHT
from tests.support.records.views import codes as lane_codes

PANELS = dict.fromkeys(panel.PANELS.values())  # a class once, if two names have it


class TreeTable(RadixTree):
    BARS = False


def styled(strip) -> list[tuple[str, object]]:
    """Each cell of a strip with its style."""
    return [(character, segment.style) for segment in strip for character in segment.text]


# ---- what holds for every panel


@cache
def tight_view(exact: bool = False) -> View:
    """A view that tests only select in. `exact`: the engine is paused."""
    stress, view = stress_view(TIGHT, 3.0, 30)
    stress.gate(exact)
    stress.show(view)
    return view


SHAPES = [(30, 4), (40, 10), (77, 1), (80, 2), (80, 20), (123, 37), (200, 60)]
SHAPES += [(4, 9), (5, 2), (8, 5), (9, 1), (14, 7), (23, 2), (40, 3)]  # a terminal that is being resized


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.__name__)
def test_every_row_has_exactly_the_width_of_the_panel(panel):
    view, empty = tight_view(), View()
    for ascii_only in (False, True):
        use_ascii(ascii_only)
        for width, height in SHAPES:
            for shown in (view, empty):
                widget = panel()
                rows = widget.drawn(shown, width, height)
                assert len(rows) == height
                for row in rows:
                    assert sum(cells(text) for text, _ in row) == width, plain(row)
                if ascii_only:
                    assert all(plain(row).isascii() for row in rows), [plain(r) for r in rows if not plain(r).isascii()]


def test_before_the_state_is_known_a_panel_claims_nothing_about_it():
    view = View()
    view.history.missing = "the recording is being read"
    needing = [kind for kind in PANELS if kind.NEEDS_STATE]
    assert len(needing) > 12
    for kind in needing:
        shown = "\n".join(plain(row) for row in kind().drawn(view, 60, 8))
        assert view.history.missing in shown and not re.search(r"\d|empty|\byet\b", shown), (kind, shown)


def test_an_idle_hour_does_not_empty_what_the_cache_saved():
    _, view = stress_view(CLASSROOM, 4.0, 40)
    saved, rate = view.moment.reused.saved, view.moment.reused.hit_rate
    assert saved == view.moment.reused_lately.saved > 0 and rate == view.moment.reused_lately.hit_rate
    view.history.rates.advance(view.history.rates.t + 3_600)
    assert view.moment.reused_lately.saved == 0 and view.moment.reused_lately.hit_rate is None
    assert (view.moment.reused.saved, view.moment.reused.hit_rate) == (saved, rate)
    foot = body(TreeTable(), view, 120, 20)[-1]
    assert f"{saved:,} prompt tokens saved since step 0, 0 in the last minute" in foot
    vital = next(vital for vital in vitals(view, 20) if vital.label == "hit rate")
    assert vital.value == f"{100 * rate:.1f}" and vital.units[0] == "% of prompt tokens since step 0"
    middle = view.moment.horizon // 2
    assert view.travel_to(middle) and view.moment.reused.saved < saved


BOARDS = [
    Pieces("Merge 1 of 2", ("a", " wörld", "<f0 9f>", "\x1b[31m", "x" * 90), "rule 3", lit=frozenset({1})),
    Pieces("The text so far", ("What", " is") * 60, "120 tokens", prompt=4, ids=tuple(range(1000, 1120))),
    Candidates(
        "top_k 2",
        (
            Candidate(" the", 0.5, 0.8), Candidate("\x1b\n", 0.2, 0.2), Candidate("漢" * 20, 0.2, None),
            Candidate("rare", 0.0, 0.001, at_most=True),
        ),
        "drawn with seed 1: “ the”", 0,
    ),
]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.title)
def test_what_a_lesson_shows_fits_its_panel(board):
    _, view = stress_view(SMALL, 1.0, 5)
    view.put(board)
    for ascii_only in (False, True):
        use_ascii(ascii_only)
        for width, height in SHAPES:
            panel = TextPieces() if isinstance(board, Pieces) else CandidateBars()
            rows = panel.drawn(view, width, height)
            assert [sum(cells(text) for text, _ in row) for row in rows] == [width] * height
            assert not any("\x1b" in plain(row) for row in rows)


def test_a_cut_candidate_is_crossed_out_and_the_drawn_one_has_an_arrow():
    _, view = stress_view(SMALL, 1.0, 5)
    view.put(BOARDS[2])
    the, escape, cut, rare, line = body(CandidateBars(), view, 60, 8)
    assert the.startswith("→ “ the”") and round(the.count("█") / escape.count("█")) == 4
    assert the.endswith(" 80.0%   (50.0%)")
    assert "×" in cut and "█" not in cut and " cut " in cut and "␛␊" in escape
    assert rare.split()[-2:] == ["<0.1%", "(<0.1%)"] and line.startswith("drawn with seed 1")


def drawn_triangle(start, queries, width, height):
    return ["".join(mark for mark, _ in row) for row in triangle(start, queries, width, height)[0]]


def test_attention_is_a_triangle_and_after_a_cached_prefix_a_rectangle_with_a_slanted_end():
    assert drawn_triangle(0, 4, 40, 9) == ["█···", "██··", "███·", "████"]
    assert drawn_triangle(5, 3, 40, 9) == ["○○○○○█··", "○○○○○██·", "○○○○○███"]
    assert drawn_triangle(20, 1, 40, 9) == ["○" * 20 + "█"], "a decode step has one query"
    rows, per_row, per_cell = triangle(112, 14, 70, 7)
    assert (len(rows), per_row, per_cell) == (7, 2, 2) and {len(row) for row in rows} == {63}
    assert ["".join(mark for mark, _ in row).count("█") for row in rows] == [1, 2, 3, 4, 5, 6, 7]


def test_the_picture_of_attention_is_that_of_the_steps_chunk():
    _, view = stress_view(TIGHT, 3.0, 30)
    step = next(step for step in range(view.history.steps.last, -1, -1) if view.history.steps.chunks(step))
    view.select("step", step)
    request, start, n, _ = view.history.steps.chunks(step)[0]
    picture = Attention().picture(view, 100, 30)
    quer = "query" if n == 1 else "queries"
    assert picture.title == f"Who sees whom · step {step} · r{request}: {n} {quer}, {start + n} keys"
    axis, first, *_, scale = map(plain, picture.rows)
    assert axis.split()[0] == "query" and axis.split()[-1] == str(start + n - 1), "the keys, up to the last"
    assert first.split()[0] == str(start) and scale.startswith("1 cell = ")


def test_a_key_that_is_read_has_its_slot_and_its_block_lights_up():
    _, view = stress_view(TIGHT, 2.0, 20)
    request = max(view.moment.shown.state.requests.values(), key=lambda request: len(request.table))
    size, table = view.moment.shown.state.block_size, tuple(request.table)
    plain_map = BlockMap().picture(view, 80, 12).rows
    read = KeyRead(request.id, table, size, size + 9, size + 3)
    view.put(read)
    assert read.block == table[1] and read.slot == table[1] * size + 3
    text = "\n".join(body(KeySlot(), view, 80, 4))
    assert f"table[1] = {table[1]}" in text and f"{table[1]} * {size} + 3 = {read.slot}" in text
    lit = BlockMap().picture(view, 80, 12).rows
    styles = {style for row in lit for _, style in row} - {style for row in plain_map for _, style in row}
    assert styles == {"active on ink", "underline active-lit"}, "the block that is read, and those read before it"
    for width, height in SHAPES:
        rows = KeySlot().drawn(view, width, height)
        assert [sum(cells(text) for text, _ in row) for row in rows] == [width] * height


@pytest.mark.parametrize("panel", [BlockMap, BatchLanes, StepTimings, Vitals], ids=lambda panel: panel.__name__)
async def test_what_is_on_the_screen_is_what_a_fresh_panel_would_show(panel):
    """Only rows that changed are drawn; after any number of frames the lines drawn must be those of a whole picture."""
    app = Alone(panel, SMALL, warm_up=2.0, fps=0)
    async with app.run_test(size=(90, 24)) as pilot:
        widget, drawn = app.panel, {}
        refresh, refresh_cells = LinePanel.refresh, LinePanel.refresh_cells

        def recording(self, *regions, **options):
            if not regions:
                drawn.update({y: styled(self.render_line(y)) for y in range(self.size.height)})
            for region in regions:
                for y in range(region.y, region.bottom):
                    new = styled(self.render_line(y))
                    drawn[y] = drawn[y][: region.x] + new[region.x : region.right] + drawn[y][region.right :]
            return refresh(self, *regions, **options) if not regions else refresh_cells(self, list(regions))

        widget.refresh = recording.__get__(widget)
        widget.refresh_cells = lambda regions: widget.refresh(*regions)
        changes = 0
        for frame in range(24):
            app.stress.run(0.1)
            app.stress.show(app.view)
            if frame == 12:
                app.view.select("request", app.view.subject())
            changes += widget.paint(app.view)
            if frame == 0:
                drawn.update({y: styled(widget.render_line(y)) for y in range(widget.size.height)})
            if frame % 6 == 5:
                whole = [plain(row) for row in widget.drawn_rows]
                fresh = [[(c, words) for text, words in row for c in text] for row in widget.drawn_rows]
                style = palette(app).style
                expected = [[(character, style(words)) for character, words in row] for row in fresh]
                assert [drawn[y] for y in range(len(fresh))] == expected
                await pilot.pause()
                screen = [line.text for line in app.screen._compositor.render_strips()]
                x, y = widget.region.offset
                assert [line[x : x + widget.size.width] for line in screen[y : y + len(whole)]] == whole
        assert changes > 0
        await pilot.resize_terminal(70, 20)
        await pilot.pause()
        assert [plain(row) for row in widget.drawn_rows] == [
            widget.render_line(y).text for y in range(widget.size.height)
        ]
        assert len(widget.drawn_rows) == widget.size.height


def contrast(colour: str, ground: str) -> float:
    """WCAG contrast ratio of two `#rrggbb` colours, 1 to 21."""

    def luminance(hex_colour: str) -> float:
        channels = [int(hex_colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(colour), luminance(ground)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.__name__)
def test_every_text_has_a_contrast_of_four_and_a_half_in_every_theme(panel):
    styles: dict[str, str] = {}
    for view in (tight_view(), tight_view(exact=True)):
        for selected in (None, view.subject()):
            view.select("request" if selected is not None else None, selected)
            for row in panel().drawn(view, 118, 30):
                styles |= {words: text for text, words in row if re.search(r"[A-Za-z0-9]", text)}
    for words, text in styles.items():
        ink, ground, _, _ = Palette.parts(words)
        for name, colours in COLOURS.items():
            ratio = contrast(colours[ink], colours[ground])
            assert ratio >= 4.5, f"{name}: {words!r} {ratio:.2f} for {text!r}"


def test_only_the_parts_of_a_row_that_differ_are_drawn_again():
    before = (("ab", "ink"), ("c" * 20, "dim"), ("d" * 8, "ink"))
    assert changes(before, before, 30) == []
    assert changes(before, (("a", "ink"), ("b", "ink"), ("c" * 20, "dim"), ("d" * 8, "ink")), 30) == []
    assert changes(before, (("aX", "ink"), ("c" * 20, "dim"), ("d" * 7, "ink"), ("d", "bad")), 30) == [(0, 2), (29, 30)]
    assert changes(before, (("ab", "bad"), ("c" * 20, "dim"), ("d" * 8, "bad")), 30) == [(0, 2), (22, 30)]
    assert changes(before, (("ab", "ink"), ("c" * 4 + "X" + "c" * 9 + "Y", "dim"), *before[1:]), 30)[0][0] == 2
    assert changes(before, (*before, ("  ", "ink")), 32) == [(30, 32)], "a wider panel"
    assert changes(before, (("意", "ink"), *before[1:]), 30) == [(0, 30)], "cells are not characters"
    rng = random.Random(0)
    for _ in range(300):
        one, other = ([(rng.choice("ab"), rng.choice(("ink", "dim"))) for _ in range(40)] for _ in "12")
        other = [new if rng.random() < 0.1 else old for old, new in zip(one, other, strict=True)]
        parts = changes(tuple(one), tuple(other), 40)
        inside = {x for begin, end in parts for x in range(begin, end)}
        assert {x for x in range(40) if one[x] != other[x]} <= inside
        assert all(one[b] != other[b] and one[e - 1] != other[e - 1] for b, e in parts)


def test_fit_and_cut_count_cells_not_characters():
    assert fit("abc", 5) == "abc  " and fit("abcdef", 4) == "abc…"
    assert cells("注意力") == 6 and cells(fit("注意力 heads", 6)) == 6
    assert cells(cut("注意力", 3)) == 3
    assert cells("é·…█─✓") == 6


async def test_without_colour_no_meaning_is_lost(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    app = Alone(BlockMap, SMALL, warm_up=3.0, fps=0)
    async with app.run_test(size=(90, 24)) as pilot:
        app.tick()
        await pilot.pause()
        strips = app.screen._compositor.render_strips()
        seen = {glyph for strip in strips for glyph in strip.text if glyph in "·○●█"}
        assert {"·", "○"} <= seen
        for strip in strips:
            for segment in strip:
                colour = segment.style.color.triplet if segment.style and segment.style.color else None
                assert colour is None or colour.red == colour.green == colour.blue, segment


# ---- the block map


def test_occupancy_bars_are_exact_and_nothing_that_exists_vanishes():
    for counts in ((1000, 1, 0, 3), (0, 5, 5, 5), (44000, 0, 0, 0), (1, 43000, 2, 997), (3, 3, 3, 3)):
        for width in (4, 10, 60, 133):
            bar = shares(counts, width)
            assert sum(bar.values()) == width
            for code, cells_given in bar.items():
                assert (cells_given > 0) == (counts[code] > 0) or width < 4
                if width > 40:
                    assert abs(cells_given - counts[code] * width / sum(counts)) < 4


def test_the_legends_counts_sum_to_the_allocators():
    stress, view = stress_view(CLASSROOM, 3.0, 30)
    text = body(Occupancy(), view, 100, 1)[0]
    counts = {word: int(n.replace(",", "")) for word, n in re.findall(r"(active|shared|cached|free) ([\d,]+)", text)}
    allocator = stress.cache.allocator
    assert counts == {
        "active": allocator.num_active, "shared": allocator.num_shared, "cached": allocator.num_cached,
        "free": allocator.num_free,
    }
    assert sum(counts.values()) == allocator.total


@pytest.mark.parametrize(
    ("load", "size"), [(SMALL, (60, 14)), (SMALL, (90, 20)), (TIGHT, (38, 10)), (CLASSROOM, (100, 20))]
)
def test_each_cell_of_the_map_is_the_state_of_its_block(load, size):
    stress, view = stress_view(load, 0.5)
    widget = BlockMap()
    seen = set()
    for _ in range(40):
        stress.run(0.1)
        stress.show(view)
        rows = body(widget, view, *size)
        g = widget.grid
        assert g.k == 1 and g.blocks == load.blocks
        lines = g.rows
        apart = 2 if g.spread else 1
        head = len(rows) - (lines * apart - apart + 1)
        filling = {r.table[r.planned // 16] for r in stress.scheduler.running if r.planned % 16}
        for block in range(1, load.blocks + 1):
            y, x = divmod(block - 1, g.per_row)
            start = x * (g.cell + g.gap)
            cell = rows[head + y * apart][start : start + g.cell]
            assert g.block_at(start, y * apart) == block
            allocator = stress.cache.allocator
            holders = allocator.holders(block)
            glyph = "●" if holders > 1 else "█" if holders else "○" if allocator.in_tree(block) else "·"
            if block in filling and holders == 1:
                glyph = "▄"
            assert cell == (glyph * g.cell if glyph in "█▄" else glyph.ljust(g.cell)), f"block {block}"
            seen.add(glyph)
    assert len(seen) >= 4


def half_cells(widget: BlockMap, view: View, width: int, height: int) -> list[int]:
    """The state of each half cell of a map whose cells are half blocks, read from its colours."""
    rows = widget.picture(view, width, height).rows
    g = widget.grid
    assert g.halves == 2
    shown = []
    for row in rows[len(rows) - -(-g.rows // 2) :]:
        line = [(letter, *Palette.parts(style)[:2]) for text, style in row for letter in text][: g.per_row]
        upper = [ink if letter in "█▀" else "" for letter, ink, _ in line]
        lower = [ink if letter in "█▄" else ground if letter == "▀" else "" for letter, ink, ground in line]
        shown += upper + lower
    states = {"free": FREE, "active": ACTIVE, "shared": SHARED, "cached": CACHED}
    return [states.get(colour.split("-")[0], FREE) for colour in shown][: g.cells]


def test_half_blocks_show_each_block_in_half_a_cell():
    _, view = stress_view(CLASSROOM, 4.0, 20)
    view.lit = frozenset()
    widget = BlockMap()
    assert half_cells(widget, view, 40, 12) == view.moment.shown.codes[1:].tolist()
    g = widget.grid
    assert g.k == 1 and g.blocks == 640 and widget.picture(view, 40, 12).title == "KV blocks · 640 blocks of 16"
    assert g.block_at(3, 2) == 1 + 4 * g.per_row + 3, "the upper half"
    use_ascii(True)
    body(widget, view, 40, 12)
    assert widget.grid.halves == 1, "ASCII has no half blocks"


def test_with_more_blocks_than_cells_a_cell_shows_the_majority():
    _, view = stress_view(CLASSROOM, 4.0, 20)
    view.lit = frozenset()
    widget = BlockMap()
    shown = half_cells(widget, view, 20, 8)
    g = widget.grid
    assert g.k > 1
    assert f"1 half cell = {g.k} of the first {g.blocks} blocks" in widget.picture(view, 20, 8).title
    codes = view.moment.shown.codes[1:].tolist()
    for cell in range(g.cells):
        inside = codes[cell * g.k : (cell + 1) * g.k]
        assert inside.count(shown[cell]) == max(map(inside.count, range(4))), f"cell {cell}"


def test_a_large_pool_that_is_hardly_used_shows_the_part_that_is():
    stress, view = stress_view(Load(blocks=4096, chats=2, reply=(20, 60), think=0.1, paste=0.0), 2.0, 10)
    widget = BlockMap()
    rows = body(widget, view, 72, 12)
    g = widget.grid
    allocator = stress.cache.allocator
    last = max(b for b in range(1, 4097) if allocator.holders(b) or allocator.in_tree(b))
    assert g.k == 1 and last <= g.blocks < 4096
    assert f"first {g.blocks:,} of 4,096, the others are free" in widget.picture(view, 72, 12).title
    below_the_bar = "".join(rows[1:])
    in_use = 4096 - allocator.num_free
    shown = sum(below_the_bar.count(glyph) / (g.cell if glyph in "█▄" else 1) for glyph in "○●█▄")
    assert shown == in_use


def test_zoom_shows_one_block_a_cell_around_the_cursor_and_has_pages():
    _, view = stress_view(CLASSROOM, 3.0, 10)
    view.lit = frozenset()
    widget = BlockMap()
    body(widget, view, 30, 6)
    widget.view = view
    view.select("block", 300)
    widget.action_open()
    body(widget, view, 30, 6)
    assert widget.grid.k == 1 and widget.grid.first <= 300 < widget.grid.first + widget.grid.blocks
    assert widget.cursor_cell(view) == 300 - widget.grid.first
    widget.zoomed_at, pages = 1, []
    while not pages or pages[-1][-1] < view.moment.shown.total:
        states = half_cells(widget, view, 30, 6)
        first, last = widget.grid.first, widget.grid.first + widget.grid.blocks - 1
        assert states == view.moment.shown.codes[first : last + 1].tolist(), "a half cell for each block"
        keys = " · PgUp" * bool(pages) + " · PgDn" * (last < view.moment.shown.total)
        assert widget.picture(view, 30, 6).title == f"KV blocks · {first}–{last} of 640{keys}"
        pages.append((first, last))
        widget.action_page(1)
    assert len(pages) > 1 and pages[0][0] == 1, "all blocks are on some page"
    assert all(after[0] <= before[1] + 1 for before, after in pairwise(pages))
    widget.action_page(-1)
    body(widget, view, 30, 6)
    assert widget.grid.first < pages[-1][0]
    widget.action_unzoom()
    body(widget, view, 30, 6)
    assert widget.grid.k > 1


@pytest.mark.parametrize("mode", COLOURINGS)
def test_each_way_to_colour_has_glyphs_that_say_it_without_colour(mode, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")  # with colours, the fills tell the owners
    stress, view = stress_view(CLASSROOM, 3.0, 30)
    widget = BlockMap()
    widget.mode = mode
    rows = body(widget, view, 100, 20)
    g = widget.grid
    head = len(rows) - g.rows
    allocator = stress.cache.allocator
    by_block = {b: rows[head + (b - 1) // g.per_row][(b - 1) % g.per_row * (g.cell + g.gap)] for b in range(1, 641)}
    names = {r.id: view.texts.group_name(r.group).split(" ")[0] for r in stress.scheduler.requests.values()}
    for block, glyph in by_block.items():
        holders = allocator.holders(block)
        if mode == "refcount":
            expected = min(holders, 9) if holders else None
            assert glyph == (str(expected) if expected else "○" if allocator.in_tree(block) else "·")
        elif mode == "owner" and holders == 1:
            owner = next(r.id for r in stress.scheduler.requests.values() if block in r.table)
            assert glyph == names[owner]
        elif mode == "age" and (holders or allocator.in_tree(block)):
            age = view.moment.engine_now - view.moment.shown.changed[block]
            assert int(glyph) == sum(age > limit for limit in (1, 5, 15, 60, 300))


@pytest.mark.parametrize("ascii_only", [False, True], ids=["unicode", "ascii"])
@pytest.mark.parametrize("mode", COLOURINGS)
def test_every_glyph_of_the_map_stands_in_a_legend_or_is_counted_there(mode, ascii_only):
    use_ascii(ascii_only)
    _, view = stress_view(CLASSROOM, 3.0, 30)
    for width, frame in ((34, "box"), (56, "box"), (56, "none"), (100, "box"), (200, "none")):
        widget = BlockMap(frame=frame)
        widget.mode = mode
        picture = widget.picture(view, width, 16)
        rows = [plain(row) for row in picture.rows]
        first = len(rows) - widget.grid.rows
        legend = rows[1] + "  " + "".join(text for text, _ in picture.legend)
        told = {word.split(" ")[0] for word in re.split(r"  +", legend)}
        told |= set("23456789") if "2-9" in told else set()
        missing = set("".join(rows[first:])) - {" "} - told - ({glyphs().filling} if mode == "state" else set())
        more = re.search(r"\+(\d+) more", legend)
        assert len(missing) <= (int(more[1]) if more else 0), (width, frame, missing, legend)
        assert all(cells(row) <= width for row in rows)
        assert width < 100 or frame == "none" or not missing


def test_the_roomiest_grid_that_fits_is_taken():
    assert (grid(64, 80, 10).cell, grid(64, 80, 10).gap) == (2, 2)
    assert grid(640, 60, 12).k == 1
    assert grid(44_000, 90, 20).k == 25
    for blocks in (1, 7, 64, 640, 5000):
        for width, height in ((10, 1), (33, 4), (120, 30)):
            g = grid(blocks, width, height)
            assert g.per_row * (g.cell + g.gap) - g.gap <= width
            assert g.rows <= height
            assert g.cells * g.k >= blocks


# ---- the other panels


def test_the_block_table_lists_the_requests_blocks_in_order():
    stress, view = stress_view(SMALL, 2.0, 10)
    for _ in range(30):
        while not stress.scheduler.running:
            stress.run_steps(1)
        stress.run_steps(7)
        stress.show(view)
        if not stress.scheduler.running:
            continue
        request = max(stress.scheduler.running, key=lambda r: r.id)
        assert view.subject() == request.id
        rows = body(BlockTable(), view, 76, 40)
        assert rows[0].startswith(f"r{request.id} ")
        assert f"{len(request.table)} blocks for {request.planned:,} tokens" in rows[0]
        logical = [int(n) for row in rows[1::3] for n in row.split()]
        physical = [int(n) for row in rows[2::3] for n in row.split()]
        assert logical == list(range(len(request.table))) and physical == request.table
        marks = " ".join(rows[3::3])
        if request.planned % 16:
            assert f"{request.planned % 16}/16" in marks
        allocator = stress.cache.allocator
        assert marks.count("×") == sum(allocator.holders(b) > 1 for b in request.table[: request.planned // 16])


def test_the_block_table_beside_a_chat_leaves_out_what_does_not_fit():
    _, view = stress_view(CLASSROOM, 2.0, 10)
    request = view.history.live.state.requests[view.subject()]
    view.texts.group_names[request.group] = "#2 Hello there, tell me about paging"
    for block in request.table:
        view.history.live.state.holders[block] = 2
    head = body(BlockTable(), view, 35, 4)[0].rstrip()
    assert head == f"#2·r{request.id} Hello there, tel…  {len(request.table)} blocks"


def test_a_long_block_table_shows_both_ends_and_how_many_lie_between():
    stress, view = stress_view(Load(blocks=400, chats=1, reply=(900, 1000), think=0.01, paste=0.0), 3.2, 10)
    request = stress.scheduler.running[0]
    rows = body(BlockTable(), view, 60, 4)
    chips = re.findall(r"\+?\d+", rows[2])
    left_out = next(int(chip) for chip in chips if chip.startswith("+"))
    shown = [int(chip) for chip in chips if not chip.startswith("+")]
    assert len(shown) + left_out == len(request.table) > 20
    head = chips.index(f"+{left_out}")
    assert shown == request.table[:head] + request.table[len(request.table) - len(shown) + head :]


def test_lanes_show_the_codes_of_their_requests_under_stable_rows(monkeypatch):
    monkeypatch.setattr(BatchLanes, "_find_stall", lambda *_: None)  # its mark would cover codes
    marks = {NOTHING: " ", QUEUED: "·", DECODING: "─", PREFILLING: "▒", FINISHED: "■", PREEMPTED: "×"}
    stress, view = stress_view(TIGHT, 0.2)
    widget = BatchLanes()
    places: dict[int, tuple[int, int]] = {}
    seen, named = set(), set()
    for _ in range(60):
        stress.run(0.05)
        stress.show(view)
        rows = body(widget, view, 80, 16)
        k = widget.k
        for i, slot in enumerate(widget.rows.slots):
            for id in slot:
                before = places.get(id, (k, i))
                assert before == (k, i) or before[0] != k, f"r{id} moved at the same scale"
            codes = [NOTHING] * widget.columns
            for id in slot:
                lane = lane_codes(
                    view.history.lanes.lanes[id], widget.first_step, k, widget.columns, view.moment.horizon
                )
                codes = [max(a, b) for a, b in zip(codes, lane, strict=True)]
            text = rows[2 + i]
            cells = list(text[widget.label :])
            for id in slot[:-1]:  # where there is room, those that ended before are named behind their ends
                at = (view.history.lanes.lanes[id].finish_step - widget.first_step) // k + 1
                if at > 0 and "".join(cells[at:]).startswith(f"r{id} "):
                    assert set(codes[at : at + len(str(id)) + 1]) == {NOTHING}
                    cells[at : at + len(str(id)) + 1] = " " * (len(str(id)) + 1)
                    named.add(id)
            assert "".join(cells) == "".join(marks[code] for code in codes).ljust(80 - widget.label)
            seen |= set(codes)
            others = f" +{len(slot) - 1}" if len(slot) > 1 else ""
            assert not slot or text[: widget.label].rstrip() == f"r{slot[-1]}{others}"
        places = {id: (k, i) for i, slot in enumerate(widget.rows.slots) for id in slot}
        shown = {id for slot in widget.rows.slots for id in slot}
        last = view.history.lanes.ended_since(widget.first_step)
        hidden = [lane for lane in [*last, *view.history.lanes.active.values()] if lane.id not in shown]
        told = re.findall(r"([\d,]+) (?:decode throughout|decoding|prefilling|waiting|done)", rows[-1])
        assert sum(int(n.replace(",", "")) for n in told) == len(hidden)
        title = widget.picture(view, 80, 16).note[0][0]
        assert title == ("1 column = 1 step" if k == 1 else f"1 column = {k} steps")
    assert seen == set(marks)
    assert named, "nobody was named in the row of another, so this tests little"


def test_a_large_tree_has_the_whole_text_of_the_selected_node():
    _, view = stress_view(CLASSROOM, 4.0, 40)
    node = max((n for n in view.moment.shown.state.nodes.values() if n.id), key=lambda n: len(n.ids))
    view.select("node", node.id)
    rows = body(TreeTable(), view, 100, 40)
    begin = next(i for i, row in enumerate(rows) if row.startswith(f"text of node {node.id}: {len(node.ids):,} tokens"))
    shown = " ".join(" ".join(rows[begin + 1 :]).split())
    whole = " ".join(view.texts.decode(list(node.ids)).split())
    assert shown.startswith(whole[:400]) and len(whole) > 400
    assert rows[-1].startswith("+") or "evictable" in rows[-1]
    assert not any("text of node" in row for row in body(TreeTable(), view, 100, LARGE_PANEL - 1))


def test_the_tree_shows_each_nodes_tokens_users_savings_and_rank():
    stress, view = stress_view(CLASSROOM, 4.0, 40)
    widget = TreeTable()
    view.moment.tree.refresh(view.moment.shown, 1e9)
    picture = view.moment.tree.picture(view.moment.shown, view.texts.decode, 1000)
    nodes = stress.cache.tree.nodes
    assert {row.node for row in picture.rows} == set(nodes) - {0}
    rows = body(widget, view, 90, len(picture.rows) + 20)
    blocks = []
    while stress.cache.tree.evict(1, "test"):
        blocks.append(stress.cache.allocator.free_blocks[-1])
    went = list(dict.fromkeys(view.moment.shown.state.node_of[block] for block in blocks))
    depth_of = {0: -1}
    for shown, text in zip(picture.rows, rows[1:], strict=False):
        node = view.moment.shown.state.nodes[shown.node]
        depth_of[shown.node] = depth_of[node.parent] + 1
        assert shown.depth == depth_of[shown.node]
        assert f"{len(node.ids):,}" in text
        assert ("●" in text) == (node.users > 0) or node.id in view.moment.shown.state.pending.values()
        assert shown.users == node.users
        assert shown.saved == int(view.moment.shown.saved[node.blocks].sum())
        assert shown.rank == (went.index(node.id) + 1 if node.id in went else 0)
    siblings = [row for row in picture.rows if row.depth == 0]
    assert [row.saved for row in siblings] == sorted((row.saved for row in siblings), reverse=True)


def test_the_nodes_and_blocks_that_go_next_are_in_sight_at_each_size():
    stress, view = stress_view(TIGHT, 0.5, 5)
    most, pressed = 0, 0
    for step in range(300):
        width, height = ((34, 6), (56, 8), (236, 40))[step % 3]
        stress.run_steps(1)
        view.fold(stress.drain(), stress.now)
        state, order = view.moment.shown.state, EvictionOrder(view.moment.shown.state)
        rows = [row.rstrip() for row in body(TreeTable(), view, width, height)]
        texts = [view.moment.tree.text(state, node, view.texts.decode)[1].lstrip("…")[:3] for node in order.nodes[:4]]
        if height >= TALL and texts:
            below = rows[rows.index(f"evicted next · {free_words(state)}") + 1 :]
            assert all(below[i].endswith(f" {i + 1}") and text in below[i] for i, text in enumerate(texts))
        else:
            said = " ".join(rows)
            for i, text in enumerate(texts, 1):
                assert re.search(rf"(next|  |…) {i} (\w\w\w )?{re.escape(text)}", said), (said, text)
        most = max(most, len(texts))
        words = [found[1] for row in rows if (found := re.search("next(?: blocks)?: (.*)", row))]
        assert bool(words) == is_under_pressure(state)
        if words:
            sizes = range(1, width // 5 + 1)
            assert words[0] in {pressure_words(state, order, n, brief) for n in sizes for brief in (False, True)}
            pressed += 1
        elif texts and height >= 8:
            assert free_words(state, brief=True) in " ".join(rows)
    assert most >= 3 and 0 < pressed < 300


def test_a_nodes_text_begins_where_it_diverges_and_says_who_speaks():
    _, view = stress_view(CLASSROOM, 4.0, 40)
    tops = [node for node in view.moment.shown.state.nodes.values() if node.id and node.parent == 0]
    assert len(tops) > 1
    for node in tops:
        role, text = view.moment.tree.text(view.moment.shown.state, node, view.texts.decode)
        assert role == "sys"
        assert not text.startswith("…You"), "all system prompts begin with 'You': that is no difference"
        assert text.startswith("…")
    for node in view.moment.shown.state.nodes.values():
        if node.id and node.parent:
            role, text = view.moment.tree.text(view.moment.shown.state, node, view.texts.decode)
            assert role in ("sys", "usr", "ast") and "<|" not in text


def test_tree_search_and_folding():
    _, view = stress_view(CLASSROOM, 4.0, 40)
    everything = view.moment.tree.picture(view.moment.shown, view.texts.decode, 1000, everything=True)
    assert len(everything.rows) == len(view.moment.shown.state.nodes) - 1
    found = view.moment.tree.picture(view.moment.shown, view.texts.decode, 5, search="haiku")
    assert 0 < len(found.rows) < len(everything.rows)
    parents = {view.moment.shown.state.nodes[row.node].parent for row in found.rows}
    leaves = [row for row in found.rows if row.node not in parents]
    assert all("haiku" in row.text.lower() for row in leaves)
    parent = next(row.node for row in everything.rows if row.has_children)
    view.moment.tree.folded.add(parent)
    folded = view.moment.tree.picture(view.moment.shown, view.texts.decode, 1000, everything=True)
    below = {
        n.id
        for n in view.moment.shown.state.nodes.values()
        if any(a.id == parent for a in view.moment.shown.state.path(n.id))
    }
    assert {row.node for row in everything.rows} - {row.node for row in folded.rows} == below - {parent}


def test_no_node_is_missing_between_two_orderings():
    """The order is kept for a while; nodes that came, went or were split meanwhile must be shown all the same."""
    stress, view = stress_view(SMALL, 0.5, 5)
    for step in range(500):
        stress.run_steps(1)
        view.fold(stress.drain(), stress.now)
        if step % 50 == 0:
            view.moment.tree.refresh(view.moment.shown, 0.0, force=True)
        picture = view.moment.tree.picture(view.moment.shown, view.texts.decode, 1000)
        assert {row.node for row in picture.rows} == set(stress.cache.tree.nodes) - {0}
        assert picture.hidden_nodes == 0
        few = view.moment.tree.picture(view.moment.shown, view.texts.decode, 3)
        assert len(few.rows) == min(3, picture.nodes) and few.hidden_nodes == picture.nodes - len(few.rows)


def test_the_step_bar_at_the_gate_is_exactly_the_step():
    stress, view = stress_view(TIGHT, 1.0, 10)
    stress.gate(True)
    for _ in range(120):
        stress.run_steps(1)
        stress.show(view)
        row = view.history.steps.get(view.history.steps.last)
        text, bar = StepBar().picture(view, 120, 2).rows
        assert plain(text).startswith(f"step {row.step:,}  {row.tokens:,} of {TIGHT.budget:,} tokens")
        widths = {}
        for piece, words in bar:
            widths[words] = widths.get(words, 0) + len(piece)
        if row.decodes:
            assert f"D×{row.decodes}" in plain(bar)
        for request, _start, n, _samples in row.chunks:
            if n * 120 / TIGHT.budget > len(f"r{request} +{n}"):
                assert f"r{request} +{n}" in plain(bar), plain(bar)
        prefill = sum(len(piece) for piece, words in bar if "prefill" in words)
        assert abs(prefill - row.prefill_tokens * 120 / TIGHT.budget) <= 8
        assert ("╱" in plain(bar)) == (row.tokens < TIGHT.budget) or widths.get("faint", 0) < 2


def test_while_running_the_step_bar_is_the_mean_with_the_peak_marked():
    stress, view = stress_view(CLASSROOM, 4.0, 40)
    peaks = 0
    for _ in range(60):
        stress.run(0.05)
        stress.show(view)
        frame = view.last_frame
        if frame.count < 2:
            continue
        text, bar = (plain(row) for row in StepBar().picture(view, 120, 2).rows)
        assert text.startswith(f"mean of {frame.count} steps  {frame.tokens:,.0f} of 512 tokens")
        assert f"last: step {frame.last:,} = " in text
        if f"peak {frame.peak_tokens:,}" in bar:
            peaks += 1
            assert abs(bar.index("▲") - frame.peak_tokens / 512 * 120) <= 8
    assert peaks > 3


def test_timings_show_the_summarys_figures():
    _, view = stress_view(CLASSROOM, 6.0, 60)
    rows = body(StepTimings(), view, 90, 8)
    kinds = (("decode only", "decode"), ("mixed", "mixed"), ("prefill only", "prefill"))
    for row, (label, name) in zip(rows[1:4], kinds, strict=True):
        stats = getattr(view.timings, name)
        assert row.startswith(label)
        steps, *figures = row[13:41].split()
        assert steps == f"{stats.steps:,}"
        if stats.steps:
            assert [float(f) for f in figures] == pytest.approx([stats.p50, stats.p99, stats.worst], abs=0.06)
            assert f"{100 * stats.share:.0f} %" in row
        else:
            assert figures == ["–"] * 3
    slowest = view.timings.slowest
    assert f"step {slowest.step:,}" in rows[4] and "prefill of r" in rows[4]
    first = view.timings.first_token
    assert "= queue" in rows[5] and f"r{first.request}" in rows[5]
    assert rows[6].startswith("per step") and rows[7].startswith("the device limits the speed: the host waits")
    rows = body(StepTimings(), view, 90, 9)
    assert rows[6].startswith("host") and rows[7].startswith("device") and "at most" in rows[7]
    assert rows[8].startswith("the device limits the speed: the host waits")
    panel = StepTimings()
    rows = body(panel, view, 78, 13)  # no room for charts
    listed = next(i for i, row in enumerate(rows) if row.startswith("slowest 10"))
    assert rows[listed - 1].startswith("the device limits the speed: the host waits ")
    for i, step in enumerate(panel.slowest[: panel._listed - 1]):
        assert rows[listed + 1 + i].split()[:2] == [str(i + 1), f"{step.step:,}"]
        model = view.models.of(step.step)
        told = (why_briefly(step, model), why_slow(step, model))
        assert rows[listed + 1 + i].rstrip().endswith(told)
    below = 0
    for at, width in ((0, 78), (9, 78), (0, 56), (9, 56)):  # the whole cause of the chosen step is below the list
        chosen = panel.slowest[at]
        panel.chosen = chosen.step
        rows = [row.rstrip() for row in body(panel, view, width, 13)]
        end = panel._list_row + panel._listed
        own = next(row for row in rows[:end] if row.split()[:2] == [str(at + 1), f"{chosen.step:,}"])
        why = why_slow(chosen, view.models.of(chosen.step))
        below += " ".join(rows[end:]) == f"step {chosen.step:,}: {why}"
        assert own.endswith(why) or rows[end].startswith(f"step {chosen.step:,}: ")
    assert below


def test_timings_say_whose_times_they_show_and_of_how_many_steps():
    _, view = stress_view(CLASSROOM, 6.0, 60)
    t, panel = view.timings, StepTimings()
    for width, height in ((78, 13), (78, 24), (118, 30)):  # with the list, and with the charts
        picture = panel.picture(view, width, height)
        rows = [plain(row) for row in picture.rows]
        assert picture.title == f"Timings · {t.steps:,} steps in {t.seconds:.1f} s"
        head = next(row for row in rows if row.startswith("slowest 10"))
        hidden = 10 + 1 - panel._listed
        last = f"of the last {len(panel.times.took):,} steps" if width > 78 else f"of {len(panel.times.took):,} steps"
        assert head.rstrip().endswith(f"{last} · +{hidden} more: ↑ ↓" if hidden > 0 else last)
        shown = [row for row in rows if row[:9].strip().isdigit()]
        assert len(shown) == 10 - hidden
    for by_device, kind, wide, narrow in (
        (True, "device ms", "share of the device's time", "of device time"),
        (False, "took ms", "share of time", "share of time"),
    ):
        timings = replace(t, by_device=by_device)
        for width, share in ((78, wide), (60, narrow), (50, "share"), (46, "")):
            head = plain(kind_rows(timings, width)[0]).split()
            assert head == [*kind.split(), "steps", "p50", "p99", "max", *share.split()]


def test_timings_and_vitals_show_what_ranks_exchange():
    stress, view = stress_view(CLASSROOM, 3.0, 30)
    assert view.timings.ranks == 1 and not any(row.startswith("ranks") for row in body(StepTimings(), view, 90, 9))
    append = stress.log.append

    def with_exchange(kind, *fields):
        if kind == "time":
            append("comm", fields[0], 4, 0.25 * fields[4])
        return append(kind, *fields)

    stress.log.append = with_exchange
    for _ in range(110):  # the steps of more than ten seconds
        stress.run(0.1)
        view.fold(stress.drain(), stress.now)
    view.frame(stress.now)
    t = view.timings
    assert t.ranks == 4 and t.comm_share == pytest.approx(0.25)
    for height in (8, 10):
        (row,) = (row for row in body(StepTimings(), view, 90, height) if row.startswith("ranks"))
        told = f"4, exchange 25 % of the time: {ms(t.comm_ms)} ms per step, waiting included"
        assert row.split() == ["ranks", *told.split()]
    assert body(StepTimings(), view, 90, 10)[8].startswith("device")
    (step,) = (vital for vital in vitals(view, 10) if vital.label == "step")
    assert step.units[0] == "ms median, 25 % exchange"
    story = tell(view, "step", view.history.steps.last - 2)
    assert any(label == "exchange" and "between 4 ranks" in text for label, text in story.lines)


def test_events_are_the_newest_first_each_with_its_step_kind_and_words():
    _, view = stress_view(TIGHT, 3.0, 30)
    widget = Events()
    rows = body(widget, view, 110, 20)
    newest = list(view.history.events.newest_first())[:20]
    for row, event in zip(rows, newest, strict=True):
        step, kind = row.split()[:2]
        assert int(step.replace(",", "")) == max(event.step, 0) and kind == event.kind
        assert row.split(maxsplit=2)[2].rstrip(" …") in view.texts.event(event)
    for width in range(30, 110):
        for height in range(3, 9):
            last = body(widget, view, width, height)[-1].rstrip()
            told = " ".join(view.texts.event(event, width < 50) for event in newest)
            word = re.search(r"(\w+) ?…$", last)
            assert word is None or re.search(rf"\b{word[1]}\b", told), "the last word is whole"
    widget.filter = 2
    assert {row.split()[1] for row in body(widget, view, 110, 20)} <= {"evict", "preempt"}
    view.select("request", view.subject())
    widget.filter = 4
    body(widget, view, 110, 20)
    assert widget.shown and all(event.request == view.subject() for event in widget.shown)


def test_an_event_is_told_to_its_last_word_also_where_the_panel_is_narrow():
    _, view = stress_view(TIGHT, 3.0, 30)
    for width in (37, 56, 110):
        widget = Events()
        rows = body(widget, view, width, 24)
        told = " ".join(" ".join(rows).split())
        for event in widget.shown[:-1]:  # the last may end with the panel
            text = view.texts.event(event, short=width < 50)
            rows_of = sum(at is event for at in widget._at)
            assert text in told or (event.kind == "evict" and rows_of == 1 and text[: width // 2] in told)
        evicted = next((event for event in widget.shown[:-1] if event.kind == "evict"), None)
        if evicted is not None:  # whole if it is chosen
            widget.chosen = evicted.seq
            told = " ".join(" ".join(body(widget, view, width, 24)).split())
            assert view.texts.event(evicted, short=width < 50) in told
    last = next(y for y, event in enumerate(widget._at) if event is widget.shown[-1])
    widget.clicked(view, 0, last)
    assert widget.chosen == widget.shown[-1].seq


def test_a_chosen_event_keeps_its_row_when_newer_ones_arrive_and_the_list_ends_with_the_oldest():
    reader, view, widget = TraceReader(GOLDEN), View(), Events()
    view.reset(reader.part(0).snapshot)
    records = list(reader.records())
    view.fold(records[:200])
    widget.view = view
    few = len(body(widget, view, 200, 60)) and len(widget.shown)
    assert 3 < few < 60
    for _ in range(few + 5):
        widget.action_move(1)
    body(widget, view, 200, 60)
    assert widget.skip == 0 and widget.chosen == widget.shown[-1].seq, "there is nothing below"
    widget.action_latest()
    for width, height in ((110, 20), (50, 9)):
        widget.chosen = None
        body(widget, view, width, height)
        for _ in range(3):
            widget.action_move(1)
        chosen = widget.chosen
        rows = [row[5:] for row in body(widget, view, width, height)]  # without the step: it may begin meanwhile
        at = [event.seq for event in widget._at].index(chosen)
        view.fold(records[view.history.live.state.seq :][:200])
        view.frame(1.0)
        assert [row[5:] for row in body(widget, view, width, height)] == rows and widget.skip > 0
        assert widget._at[at].seq == widget.chosen == chosen
        for _ in range(40):  # it is in sight with all its lines, wherever it is
            widget.action_move(1)
            told = " ".join(" ".join(body(widget, view, width, height)).split())
            event = next(event for event in widget.shown if event.seq == widget.chosen)
            assert view.texts.event(event, short=width < 50) in told
        widget.action_latest()


def test_vitals_show_the_rates_and_the_pool():
    stress, view = stress_view(CLASSROOM, 5.0, 50)
    head = body(Vitals(), view, 200, 2)[0]
    assert f"decode   {view.history.rates.per_second('decode'):,.0f} tok/s" in head
    running = sum(r.state.value == "running" for r in stress.scheduler.requests.values())
    assert f"running  {running:,} +{len(stress.scheduler.waiting)} waiting" in head
    allocator = stress.cache.allocator
    used = 100 * (allocator.total - allocator.num_free) / allocator.total
    held = 100 * (allocator.num_active + allocator.num_shared) / allocator.total
    assert f"pool     {used:,.0f} % used, {held:.0f} % held" in head
    cached, prefill = (view.moment.recent(name, 121).sum() for name in ("cached", "prefill"))
    assert f"hit rate {100 * cached / (cached + prefill):.1f} %" in head


def test_the_prompts_origin_is_its_match():
    stress, view = stress_view(SMALL, 1.0, 10)
    checked = 0
    for _ in range(100):
        stress.run_steps(3)
        stress.show(view)
        running = [r for r in stress.scheduler.running if r.planned >= r.prompt_len]
        if running:
            request = max(running, key=lambda r: r.id)
            rows = body(PromptOrigin(), view, 60, 3)
            computed = request.prompt_len - request.cached_tokens
            assert rows[1].startswith(f"{request.cached_tokens:,} from the tree · {computed:,} computed")
            found, made = rows[0].count("█"), rows[0].count("▒")
            assert found + made == 60 and found == round(60 * request.cached_tokens / request.prompt_len)
            checked += 1
    assert checked > 20


def test_a_waiting_prompts_origin_fits_beside_the_chat():
    stress, view = stress_view(TIGHT, 2.0, 20)
    newest = max(stress.scheduler.waiting, key=lambda request: request.id)
    view.select("request", newest.id)
    assert newest.prompt_len > 99
    assert body(PromptOrigin(), view, 37, 3)[1].rstrip() == f"0 cached · 0 computed · {newest.prompt_len} left"


# ---- looks


def test_one_glyph_for_every_meaning_and_an_ascii_one_too():
    states = ("free", "cached", "shared", "active", "filling")
    lanes = ("queued", "decode", "prefill", "finished", "preempted")
    tree = ("in_use", "evictable", "pending")
    for either in (UNICODE, ASCII):
        for names in (states, lanes, tree):
            for a, b in combinations(names, 2):
                assert getattr(either, a) != getattr(either, b), (a, b)
    assert "".join(getattr(UNICODE, name) for name in states) == "·○●█▄"
    assert "".join(getattr(ASCII, name) for name in states) == ".oS#+"
    assert all(getattr(ASCII, name).isascii() for name in ASCII.__slots__)


# Machado, Oliveira and Fernandes 2009, severity 1.0, in linear RGB.
DEFICIENCIES = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def seen_as(colour: str, matrix: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """A colour in CIE Lab as somebody with this deficiency sees it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    r, g, b = (max(0.0, min(1.0, sum(m * c for m, c in zip(row, linear, strict=True)))) for row in matrix)
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089
    f = [v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z)]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


@pytest.mark.parametrize("name", sorted(COLOURS))
@pytest.mark.parametrize("deficiency", sorted(DEFICIENCIES))
def test_states_stay_apart_for_colour_blind_eyes(name, deficiency):
    colours, matrix = COLOURS[name], DEFICIENCIES[deficiency]
    for group in (("free", "cached", "shared", "active"), ("decode", "prefill", "hit")):
        for a, b in combinations(group, 2):
            one, other = seen_as(colours[a], matrix), seen_as(colours[b], matrix)
            distance = sum((p - q) ** 2 for p, q in zip(one, other, strict=True)) ** 0.5
            assert distance >= (14 if "free" in group else 10), f"{a} and {b} are {distance:.1f} apart"


def test_blocks_stand_out_from_the_ground():
    """Each cell of the map has a contrast of 3 or more to the ground, and its sign has it to the cell."""
    _, view = stress_view(TIGHT, 3.0, 30)
    for name, colours in COLOURS.items():
        for colouring in COLOURINGS.values():
            layer = colouring(view)
            for glyph, style in [*layer.looks, *(run for entry in layer.legend for run in entry[:1])]:
                assert not set(glyph) & set("░▒▓"), "dithering takes most of the contrast"
                for suffix in ("", "-lit", *(("-glow", "-warm") if layer.glows else ())):
                    ink, fill, *_ = Palette.parts(style + suffix)
                    whole = colours[ink if fill == "ground" else fill]
                    assert contrast(whole, colours["ground"]) >= 3, f"{name}: {style}{suffix}"
                    if fill != "ground":
                        assert contrast(colours[ink], whole) >= 3, f"{name}: the sign on {style}{suffix}"
        for state in ("cached", "shared", "active"):
            for brighter in ("glow", "lit"):
                assert contrast(colours[f"{state}-{brighter}"], colours[state]) >= 1.5, f"{name}: {state} must glow"


@pytest.mark.parametrize("mode", COLOURINGS)
def test_a_selection_changes_no_hue(mode):
    """A selected cell is brighter and underlined; its state, owner or age remains visible."""
    _, view = stress_view(TIGHT, 3.0, 30)

    def hues() -> tuple[list[list[str]], list[tuple[str, str]]]:
        panel = BlockMap()
        panel.mode = mode
        rows = panel.picture(view, 60, 14).rows
        cells = [(letter, style) for row in rows for text, style in row for letter in text]
        return [[letter, re.sub("^underline |-(glow|warm|lit)$", "", style)] for letter, style in cells], cells

    plain_hues, _ = hues()
    view.select("request", view.subject())
    lit_hues, lit = hues()
    assert plain_hues == lit_hues
    marked = [style for _, style in lit if style.startswith("underline ")]
    assert marked and all(style.endswith("-lit") for style in marked)


def test_every_theme_has_every_colour():
    names = [set(colours) for colours in COLOURS.values()]
    assert names[0] == names[1] == names[2]
    assert {theme.name for theme in theme.THEMES} == set(COLOURS)
