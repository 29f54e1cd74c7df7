"""Models with several kinds of memory: what panels and texts say is what the engine did."""

from __future__ import annotations

import re

from engine.core.engine import Engine
from engine.core.request import Request
from engine.core.scheduler import SchedulerConfig
from engine.metrics.metrics import Metrics
from engine.params import SamplingParams
from engine.trace.kind import kind_of
from engine.trace.records import Record
from engine.trace.side_pool import OWN, SideGroup
from minitui.tui.glyphs import glyphs
from minitui.tui.widgets.chat.occupancy import Occupancy, PromptOrigin, side_strips, strip_rows
from minitui.tui.widgets.inspect.block_map import BlockMap
from minitui.tui.widgets.inspect.block_table import BlockTable
from minitui.tui.widgets.inspect.tree import RadixTree
from minitui.viewmodel.state.side_groups import (
    evicted_next,
    eviction_words,
    kept_ends,
    kept_places,
    strips,
    tokens_before,
)
from minitui.viewmodel.view import View
from minitui.viewmodel.words.narrate import narrate
from minitui.viewmodel.words.story import tell
from minitui.viewmodel.words.summary import summary, summary_json
from tests.support.simulation import SimulatedRunner, simulated

SHARED = [i % 40 for i in range(40)]
WINDOW = SideGroup("window 12", "window", 13, 12)
STATES = SideGroup("state", "state", 11)


def texts(rows: object) -> list[str]:
    return ["".join(text for text, _ in row) for row in rows]  # type: ignore[attr-defined]


class Hybrid:
    """An engine with blocks of 4 tokens and checkpoints after every 16 tokens, and the view of its records."""

    def __init__(self, *groups: SideGroup, blocks: int = 60) -> None:
        self.runner = SimulatedRunner(blocks + 1, 4, 4, groups=groups or (WINDOW, STATES))
        config = SchedulerConfig(64, 4, max_model_len=4096, checkpoint_interval=16)
        self.engine = simulated(Engine(self.runner, config, eos_ids=frozenset({49})))
        self.view = View()
        self.view.texts.ids_to_text = lambda ids: " ".join(f"w{id}" for id in ids)
        self.view.reset(self.engine.snapshot())
        self.snapshot = self.engine.snapshot()
        self.records: list[Record] = []
        self.now = 0.0

    def add(self, ids: list[int], tokens: int = 4) -> Request:
        return self.engine.add_request(ids, SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True))

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.engine.step()
            self.fold()

    def ask(self, ids: list[int], tokens: int = 4) -> Request:
        """Run a request to its end."""
        request = self.add(ids, tokens)
        while self.engine.has_work:
            self.step()
        return request

    def fold(self) -> None:
        records = self.engine.log.drain()
        self.records += records
        self.now += 0.05
        self.view.fold(records, self.now)
        self.view.frame(self.now)


def two_prompts(*groups: SideGroup) -> Hybrid:
    """The second prompt has the same 40 tokens: full attention has them, the state has a checkpoint at 32."""
    hybrid = Hybrid(*groups)
    hybrid.ask([*SHARED, 41, 42, 43, 44, 45])
    hybrid.ask([*SHARED, 1, 2, 3, 4, 5])
    return hybrid


def in_mid_answer() -> tuple[Hybrid, Request]:
    """A request that decodes; its prompt begins with that of a finished one."""
    hybrid = Hybrid()
    hybrid.ask(SHARED)
    request = hybrid.add([*SHARED, 7, 8], tokens=30)
    hybrid.step(3)
    return hybrid, request


def test_each_group_has_a_strip_with_the_numbers_of_its_pool() -> None:
    hybrid, _ = in_mid_answer()
    state = hybrid.view.history.live.state
    found = strips(state)
    assert [strip.name for strip in found] == ["full", "window 12", "state"]
    for strip, pool in zip(found[1:], state.groups, strict=True):
        held = {page for r in state.requests.values() for page in r.side[pool is state.groups[1]].values()}
        assert strip.total == pool.total == sum(strip.counts)
        assert strip.counts[1] + strip.counts[2] == len(held) > 0
    rows = texts(strip_rows(state, 100))
    for row, strip in zip(rows, found, strict=True):
        assert row.startswith(strip.name) and f"of {strip.total}" in row and len(row) == 100
        for name, number in zip(("free", "active", "shared", "cached"), strip.counts, strict=True):
            assert f"{name} {number:,}" in row
    for strip, row in zip(found, texts(strip_rows(state, 34)), strict=True):  # half of 80 columns
        assert row.rstrip().endswith(f" {strip.total - strip.counts[0]:,}/{strip.total:,}")
    for width in range(30, 100):
        rows = [re.sub(r"\d", "", row[16:]).split() for row in texts(strip_rows(state, width))]
        assert len({"of" in row for row in rows}) == 1, "either all rows have the number of all pages, or none"
    [one] = texts([side_strips(state, 100)])
    assert "window 12" in one and "state" in one and len(one) == 100
    for width, height in ((76, 20), (100, 30), (160, 50)):
        shown = texts(BlockMap().picture(hybrid.view, width, height).rows)
        assert len(shown) <= height and any("window 12" in row for row in shown)
    assert "state" in texts(Occupancy().picture(hybrid.view, 80, 2).rows)[1]


def test_a_model_with_one_kind_of_memory_has_no_strips() -> None:
    from minitui.dev.panel import stress_view

    _, view = stress_view(seconds=2.0)
    assert strips(view.history.live.state) == [] and strip_rows(view.history.live.state, 100) == []
    assert "groups" not in summary_json(view)


def test_a_hit_that_was_cut_names_the_group_the_position_and_the_time() -> None:
    hybrid = two_prompts(STATES)
    view = hybrid.view
    [hit] = [event for event in view.history.events.newest_first() if event.kind == "hit"]
    words = view.texts.event(hit)
    assert "full attention has 40 tokens, the nearest checkpoint is at 32: 8 tokens again" in words
    step = next(n for n in range(view.history.steps.last + 1) if 2 in [c[0] for c in view.history.steps.chunks(n)])
    took = view.history.steps.took_ms(step)
    [(_, start, n, _)] = view.history.steps.chunks(step)
    assert took and start == 32 and n == 13
    said = float(re.search(r"again, ([\d.]+) ms", words)[1])  # type: ignore[index]
    assert abs(said - took * 8 / 13) <= 0.01 * said + 0.006
    assert "the nearest checkpoint is at 32" in narrate(view, step)
    assert "8 tokens again" in dict(tell(view, "request", 2).lines)["prompt"]
    origin = " ".join(texts(PromptOrigin().picture(view, 60, 6).rows))
    assert "nearest checkpoint is at 32: 8 tokens again, " in " ".join(origin.split())


def test_the_end_of_a_hit_is_told_of_a_finished_request_too() -> None:
    """Which group cut it, and where: a window's name, too."""
    hybrid = Hybrid(WINDOW, blocks=120)
    text = [i % 40 for i in range(60)]
    hybrid.ask(text)
    for n in range(3):
        hybrid.ask([n + 3, *range(30)])
    hybrid.ask([*text[:30], 7, 8, 9])
    lane = hybrid.view.history.lanes.lanes[5]
    assert lane.request.match[0] == "window" and lane.finish_reason and not hybrid.view.history.live.state.requests
    words = dict(tell(hybrid.view, "request", 5).lines)["prompt"]
    assert f"the pages of window 12 serve {lane.request.cached_tokens}" in words
    shown = " ".join(texts(PromptOrigin().picture(hybrid.view, 90, 6).rows))
    assert "the pages of window 12 serve" in " ".join(shown.split())


def test_the_tree_marks_what_each_group_holds_of_a_node() -> None:
    hybrid = two_prompts()
    state = hybrid.view.history.live.state
    windows, states = state.groups
    for node in state.nodes.values():
        ends = kept_ends(state, node)
        at = [end // state.block_size - 1 for end, kind in ends if kind == "state"]
        assert at == kept_places(states, node)
        assert {end // state.block_size - 1 for end, kind in ends if kind == "window"} <= {*kept_places(windows, node)}
    picture = RadixTree().picture(hybrid.view, 160, 20)
    shown = "".join(texts(picture.rows))
    assert not re.search(r"\w[◆◇]\w", shown), "no sign is within a word"
    # A window that ends where a checkpoint is has the sign of the checkpoint.
    assert shown.count("◆") == len(states.kept) > 2
    assert "".join(text for text, _ in picture.legend).count("◆") == 1
    narrow = "".join(text for text, _ in RadixTree().picture(hybrid.view, 56, 11).legend)
    assert narrow == "◆ checkpoint  ◇ window kept", "half of 120 columns"


def test_the_tree_as_a_table_names_where_each_group_goes_on() -> None:
    hybrid = two_prompts()
    state, tree = hybrid.view.history.live.state, RadixTree()
    tree.bars = False
    for width, all_fit in ((160, True), (50, False)):
        rows = texts(tree.picture(hybrid.view, width, 9).rows)
        assert all(len(row) == width for row in rows)
        for row, id in zip(rows[1:], tree.nodes, strict=False):
            node, before = state.nodes[id], tokens_before(state, state.nodes[id])
            ends = [f"{'◆' if kind == 'state' else '◇'}{before + end}" for end, kind in kept_ends(state, node)]
            shown = re.findall(r"[◆◇]\d+", row)
            assert shown == ends[len(ends) - len(shown) :] and shown and (len(shown) == len(ends) or not all_fit)
            assert ("… " in row) or len(shown) == len(ends)
    assert len(tree.nodes) > 2


def test_without_a_measured_prefill_the_time_is_left_out() -> None:
    hybrid = Hybrid(STATES)
    hybrid.ask([*SHARED, 41, 42, 43, 44, 45])
    hybrid.add([*SHARED, 1, 2, 3, 4, 5])
    hybrid.engine.step()
    records = list(hybrid.engine.log.drain())
    at = next(i for i, record in enumerate(records) if kind_of(record) == "step")
    hybrid.view.fold(records[: at + 1])
    [hit] = [event for event in hybrid.view.history.events.newest_first() if event.kind == "hit"]
    assert hybrid.view.texts.event(hit).endswith("8 tokens again")


def test_records_of_pages_become_events_and_sentences() -> None:
    hybrid = Hybrid()
    hybrid.ask(SHARED)
    hybrid.ask([*SHARED, 7, 8], tokens=30)
    for n in range(8):
        hybrid.ask([n + 3, *range(30)])
    view = hybrid.view
    written = [record for record in hybrid.records if kind_of(record) in ("take", "borrow", "drop", "keep", "lose")]
    events = list(view.history.pages.newest_first())[::-1]
    assert [event.seq for event in events] == [record[0] for record in written]
    assert {event.kind for event in events} == {"take", "borrow", "drop", "keep", "lose"}
    for event in events:
        group = view.history.live.state.groups[event.record.group].group
        assert group.name in view.texts.event(event) and group.name in view.texts.event(event, short=True)
        counted = sum(e.kind == event.kind and e.step == event.step for e in events)
        assert counted and event.step >= 0
    lost = [event for event in view.history.events.newest_first() if event.kind == "lose"]
    assert len(lost) == sum(event.kind == "lose" for event in events) > 0
    assert all(event.record.reason in view.texts.event(event) for event in lost)
    step = next(event.step for event in events if event.kind == "borrow")
    assert re.search(r"State: .*1 slot read from the tree", narrate(view, step))


def test_the_inspector_names_the_pages_of_requests_nodes_and_blocks() -> None:
    hybrid, request = in_mid_answer()
    view = hybrid.view
    state = view.history.live.state
    lines = dict(tell(view, "request", request.id).lines)
    assert f"slot {request.side[1][OWN]}: its newest state" in lines["state"]
    assert all(str(page) in lines["window 12"] or "–" in lines["window 12"] for page in request.side[0].values())
    for node in [node for node in state.nodes.values() if node.id]:
        lines = dict(tell(view, "node", node.id).lines)
        for pool in state.groups:
            places = kept_places(pool, node)
            assert places == [i for i, block in enumerate(node.blocks) if block in pool.kept]
            assert (f"{len(places)} " in lines[pool.group.name]) == bool(places)
    for pool, unit in zip(state.groups, ("page", "checkpoint in slot"), strict=True):
        block, page = next(iter(pool.kept.items()))
        assert dict(tell(view, "block", block).lines)[pool.group.name].startswith(f"{unit} {page}, ")


def test_the_order_of_eviction_of_a_group_is_the_engines() -> None:
    hybrid = two_prompts(STATES)
    state = hybrid.view.history.live.state
    [pool] = state.groups
    told = [page for page, _, _ in evicted_next(state, pool, 100)]
    assert told == list(hybrid.engine.cache.sides[0].pool.idle) and len(told) > 2
    assert f"slot {told[0]} (node" in eviction_words(state, pool)
    assert any(text.startswith("state: evicted next") for text in summary(hybrid.view))
    [full, side] = summary_json(hybrid.view)["groups"]
    assert (full["name"], side["name"], side["cached"]) == ("full", "state", len(told))
    for n in range(30):  # the next evictions are these
        hybrid.ask([n % 7 + 50 % 49, *range(n, n + 20)])
    lost = [page for record in hybrid.records if kind_of(record) == "lose" for page in record[4]]
    assert lost[:2] == told[:2]


def test_prometheus_has_the_use_of_each_group() -> None:
    hybrid, _ = in_mid_answer()
    metrics = Metrics()
    metrics.measure(hybrid.view.history.live.state)
    page = metrics.page("m")
    for strip in strips(hybrid.view.history.live.state)[1:]:
        used = re.search(rf'minitui_side_cache_usage_ratio{{.*group="{strip.name}".*}} ([\d.]+)', page)
        assert used and abs(float(used[1]) - (strip.counts[1] + strip.counts[2]) / strip.total) < 1e-6


def test_the_block_table_has_a_row_for_each_group() -> None:
    hybrid, request = in_mid_answer()
    state = hybrid.view.history.live.state
    for width, height in ((100, 6), (100, 30), (40, 30)):
        picture = texts(BlockTable().picture(hybrid.view, width, height).rows)
        assert all(len(row) == width for row in picture) and len(picture) <= height
        found: dict[str, dict[int, int]] = {"full": {}, "window 12": {}, "state": {}}
        columns: list[tuple[int, int]] = []  # (end of a logical number, the number)
        for row in picture[1:]:
            name = next((name for name in found if row.startswith(name)), "")
            numbers = [(number.end(), int(number[0])) for number in re.finditer(r"\d+", row[len("window 12 ") :])]
            if not name and "/" not in row and "×" not in row:
                columns = numbers
            elif name:
                found[name] |= {dict(columns)[end]: page for end, page in numbers}
        assert found["full"] == dict(enumerate(request.table))
        windows, states = state.groups
        for pool, held, name in zip((windows, states), request.side, ("window 12", "state"), strict=True):
            expected = {i: pool.kept[block] for i, block in enumerate(request.table) if block in pool.kept}
            expected |= {len(request.table) - 1: held[OWN]} if OWN in held else {}
            expected |= {place: page for place, page in held.items() if place >= 0}
            assert found[name] == expected and len(expected) > 2


def test_the_block_table_of_a_finished_request_has_what_the_tree_keeps() -> None:
    hybrid = Hybrid(STATES)
    hybrid.ask([*SHARED, 41, 42, 43, 44, 45])
    kept = hybrid.view.history.live.state.groups[0].kept
    picture = texts(BlockTable().picture(hybrid.view, 120, 8).rows)
    [row] = [row for row in picture if row.startswith("state")]
    assert [int(n) for n in re.findall(r"\d+", row)] == [kept[block] for block in sorted(kept)] and len(kept) > 2


def test_pages_of_blocks_that_do_not_fit_are_counted() -> None:
    hybrid = Hybrid(STATES)
    hybrid.ask([*SHARED, 41, 42, 43, 44, 45])
    kept = hybrid.view.history.live.state.groups[0].kept
    rows = texts(BlockTable().picture(hybrid.view, 46, 4).rows)
    full, state = (next(row for row in rows if row.startswith(name)) for name in ("full", "state"))
    hidden = int(re.search(r"\+(\d+)", full)[1])  # type: ignore[index]
    shown = re.findall(r"(?<![+\d])\d+", state)
    counted = int(re.search(r"\+(\d+)", state)[1])  # type: ignore[index]
    assert hidden > counted > 0 and counted + len(shown) == len(kept)
    assert full.index("+") + len(f"+{hidden}") == state.index("+") + len(f"+{counted}"), "one column"


def test_the_origin_of_a_prompt_is_shown_for_each_group() -> None:
    view = two_prompts(STATES).view
    for height, first in ((6, 2), (4, 0)):
        rows = texts(PromptOrigin().picture(view, 60, height).rows)
        assert rows[first].startswith("full ") and rows[first].endswith(" 40")
        assert rows[first + 1].startswith("state ") and rows[first + 1].endswith(" 32")
        full, state = (row.count(glyphs().busy) for row in rows[first : first + 2])
        assert round(state * 40 / 32) in (full, full + 1) and full > state
        assert "8 tokens" in " ".join(rows[first + 2 :]) and re.search(r"again, [\d.]+ ms", " ".join(rows))
