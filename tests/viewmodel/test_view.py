"""The view model against the engine it looks at: the real scheduler and cache, driven by the stress source."""

from __future__ import annotations

import asyncio
import pickle
import random

import numpy as np
import pytest

from engine.errors import EngineDead
from engine.process.writer import FEW, on_the_wire
from engine.trace.records import PACKET, packets
from engine.trace.state import State
from engine.trace.views import ACTIVE, CACHED, FREE, SHARED
from minitui.dev.panel import stress_view
from minitui.dev.simulator import CLASSROOM, SMALL, Load, Stress
from minitui.viewmodel.history.history import EMPTY
from minitui.viewmodel.history.lane import DECODING, FINISHED, NOTHING, PREEMPTED, PREFILLING, QUEUED
from minitui.viewmodel.history.rates import BUCKET, Rates
from minitui.viewmodel.history.steps import Steps
from minitui.viewmodel.state import time_travel
from minitui.viewmodel.updater import AFTER_KEY_S, RETRY_S, Updater
from minitui.viewmodel.view import View
from minitui.viewmodel.words.story import tell
from tests.support.records.simulated import LiveStress
from tests.support.records.views import TIGHT, codes, empty_state, empty_view
from tests.support.waiting import until


def followed(load: Load, steps: int, seed: int = 0) -> tuple[Stress, View, list]:
    """A stress source run step by step, the view that followed it, and all records."""
    stress = Stress(Load(**{**{f: getattr(load, f) for f in load.__slots__}, "seed": seed}))
    view = empty_view(load)
    view.texts.ids_to_text = stress.words.decode
    records = []
    for _ in range(steps):
        stress.run_steps(1)
        batch = stress.drain()
        records += batch
        view.fold(batch, stress.now)
    view.frame(stress.now)
    return stress, view, records


@pytest.mark.parametrize("load", [SMALL, CLASSROOM, TIGHT])
@pytest.mark.parametrize("seed", [0, 1])
def test_counts_codes_and_tables_equal_the_allocators(load, seed):
    stress, view, _ = followed(load, 400, seed)
    allocator = stress.cache.allocator
    stress.cache.check(stress.scheduler.requests.values())
    assert view.moment.shown.counts == (
        allocator.num_free, allocator.num_active, allocator.num_shared, allocator.num_cached,
    )
    codes = view.moment.shown.codes
    for block in range(1, load.blocks + 1):
        holders = allocator.holders(block)
        state = SHARED if holders > 1 else ACTIVE if holders else CACHED if allocator.in_tree(block) else FREE
        assert codes[block] == state
    for request in stress.scheduler.requests.values():
        assert view.moment.shown.state.requests[request.id].table == request.table
        assert view.moment.shown.state.computed(view.moment.shown.state.requests[request.id]) == request.planned
    filling = {r.table[r.planned // 16] for r in stress.scheduler.running if r.planned % 16}
    assert set(view.moment.shown.filling()) == filling


def test_a_gap_stops_the_fold_until_a_snapshot_and_known_records_are_skipped():
    stress, view, _ = followed(SMALL, 50)
    stress.run_steps(5)
    lost = stress.drain()
    stress.run_steps(5)
    later = stress.drain()
    before = view.history.live.state.snapshot()
    view.fold(later)
    assert view.history.gap and view.history.dropped == len(lost)
    assert view.history.live.state.snapshot() == before, "records after a gap must not be applied"
    view.fold(later)
    assert view.history.dropped == len(lost), "the same gap is counted once"
    state = State.from_snapshot(before)
    state.apply_all(lost)
    view.reset(state.snapshot())
    view.fold(lost[-3:] + later)  # an overlap with the snapshot
    state.apply_all(later)
    assert not view.history.gap
    assert view.history.live.state.snapshot() == state.snapshot()


def test_lanes_have_the_phase_of_every_request_in_every_step():
    _, view, records = followed(TIGHT, 500, seed=3)
    assert any(record[2] == "preempt" for record in records), "the load must preempt, or this tests little"
    truth: dict[int, dict[int, int]] = {}
    waiting, decoding, step = set(), set(), -1

    def mark(request: int, at: int, code: int) -> None:
        lane = truth.setdefault(request, {})
        lane[at] = max(lane.get(at, NOTHING), code)

    for _seq, _t, kind, *fields in records:
        if kind == "submit":
            waiting.add(fields[0])
        elif kind == "admit":
            waiting.discard(fields[0])
        elif kind == "preempt":
            mark(fields[0], step + 1, PREEMPTED)
            decoding.discard(fields[0])
            waiting.add(fields[0])
        elif kind == "finish":
            mark(fields[0], step, FINISHED)
            decoding.discard(fields[0])
        elif kind == "step":
            step = fields[0]
            decoding = (decoding | set(fields[2])) - set(fields[3])
            for request in decoding:
                mark(request, step, DECODING)
            for request in waiting:
                mark(request, step, QUEUED)
            for chunk in fields[1]:
                mark(chunk[0], step, PREFILLING)
    for request, lane in view.history.lanes.lanes.items():
        each = codes(lane, 0, 1, step + 1, step)
        assert each == [truth[request].get(at, NOTHING) for at in range(step + 1)], f"r{request}"
        # In columns of several steps, what is rare wins.
        for k in (2, 7):
            columns = codes(lane, 0, k, -(-(step + 1) // k), step)
            assert columns == [max(each[at : at + k]) for at in range(0, step + 1, k)]
    assert {id for id, lane in view.history.lanes.active.items()} == set(view.history.live.state.requests)


def test_steps_are_kept_exactly_in_a_ring():
    _, view, records = followed(TIGHT, 300)
    small = Steps(capacity=64)
    plans = {}
    for record in records:
        if record[2] == "step":
            plans[record[3]] = record
        small.read(record)
    for steps, first in ((view.history.steps, 0), (small, small.last - 63)):
        assert steps.first == first
        for step in range(first, steps.last + 1):
            row = steps.get(step)
            record = plans[step]
            assert (row.tokens, row.waiting, row.chunks) == (record[7], record[8], record[4])
            assert row.decodes + row.prefill_tokens == row.tokens
            assert row.wall_ms > 0 and row.device_ms > 0
        assert steps.get(first - 1) is None
        assert steps.get(steps.last + 1) is None
    assert small.column("tokens")[small.indices(0, 10**9)].tolist() == [
        plans[step][7] for step in range(small.first, small.last + 1)
    ]


def test_a_frame_sums_up_its_steps_and_marks_the_peak():
    stress, view = stress_view(CLASSROOM, 2.0, 8)
    for _ in range(6):
        first = view.history.steps.last + 1
        stress.run(0.05)
        records = stress.show(view)
        plans = [record for record in records if record[2] == "step"]
        if not plans:
            continue
        tokens = [plan[7] for plan in plans]
        frame = view.last_frame
        assert (frame.count, frame.first, frame.last) == (len(plans), first, first + len(plans) - 1)
        assert view.steps_per_frame == len(plans)
        assert frame.tokens == pytest.approx(sum(tokens) / len(tokens))
        assert frame.decodes + frame.prefill_tokens == pytest.approx(frame.tokens)
        assert frame.peak_tokens == max(tokens)
        assert frame.chunks == pytest.approx(sum(len(plan[4]) for plan in plans) / len(plans))
    view.frame(stress.now)
    assert view.steps_per_frame == 0, "a frame without steps says so"
    assert view.last_frame.count > 0, "but keeps the last picture"


@pytest.mark.parametrize("load", [SMALL, TIGHT])
def test_the_keys_of_a_step_are_the_tokens_of_the_requests_that_decode_in_it(load):
    """Finished and preempted requests count no longer."""
    _, view, records = followed(load, 300)
    assert any(record[2] == "finish" for record in records)
    state, keys = empty_state(load), {}
    for record in records:
        state.apply(record)
        if record[2] == "step":
            keys[record[3]] = sum(state.computed(r) - 1 for r in state.requests.values() if r.joined_at >= 0)
    assert {step: view.history.steps.column("keys")[step] for step in keys} == keys


def test_accepted_drafts_count_as_keys_of_the_next_step():
    steps = Steps()
    steps.read((0, 0.0, "step", 4, [(1, 0, 10, True)], [], [], 10, 0))
    steps.read((1, 0.0, "step", 5, [], [1], [], 1, 0))
    steps.read((2, 0.0, "draft", 6, [(1, 3)]))
    steps.read((3, 0.0, "step", 6, [], [], [], 4, 0))
    steps.read((4, 0.0, "accept", 6, [(1, 3, 2)]))
    steps.read((5, 0.0, "step", 7, [], [], [], 1, 0))
    assert steps.column("keys")[5:8].tolist() == [10, 11, 14]


@pytest.mark.parametrize("parts", [False, True])
def test_a_replay_in_slow_motion_does_not_lengthen_the_gaps_between_tokens(parts: bool):
    steps = Steps()
    steps.read((0, 0.0, "pace", 10.0))
    for n in range(5):  # each step takes 5 ms, and its records come every 50 ms
        steps.read((3 * n, n * 0.05, "step", n, [], [], [], 1, 0))
        if parts:
            steps.read((3 * n + 1, n * 0.05, "parts", n, 0, 0, 0, 1_000, 1_000, 3_000, 0, None, 0))
        steps.read((3 * n + 2, n * 0.05 + 0.05, "time", n, 1_000, 1_000, 0, 5.0, 3.0, "decode"))
    assert np.diff(steps.column("arrived")[:5]) == pytest.approx([0.005] * 4)


@pytest.mark.parametrize("load", [SMALL, TIGHT])
def test_the_view_at_step_k_is_the_state_at_step_k(load):
    stress = Stress(load)
    view = empty_view(load)
    view.history.past.every = 300
    states = {}
    for _ in range(600):
        stress.run_steps(1)
        view.fold(stress.drain(), stress.now)
        states[view.history.steps.last] = (view.history.live.state.snapshot(), view.history.live.saved.copy())
    view.frame(stress.now)
    assert len(view.history.past) == view.history.live.state.seq
    steps = list(states)[:-1]
    random.Random(0).shuffle(steps)
    for step in steps[:40]:
        assert view.travel_to(step)
        assert view.moment.horizon == step and view.moment.exact
        assert view.moment.shown.state.snapshot() == states[step][0]
        assert (view.moment.shown.saved == states[step][1]).all()
        assert view.moment.travel_text == f"PAST step {step:,}, {view.history.steps.last - step:,} back"
    at = view.moment.horizon
    assert view.travel(-1) and view.moment.horizon == at - 1
    assert view.travel(1) and view.moment.horizon == at
    stress.run_steps(3)
    stress.show(view)
    assert view.moment.horizon == at, "the picture of the past does not change while the engine runs"
    assert not view.travel_to(10**9), "there is nothing after the present"
    assert view.moment.shown is view.history.live and view.moment.travel_text == ""
    assert not view.travel_to(-5), "nor before the beginning"


def test_history_is_bounded_and_says_where_it_begins(monkeypatch):
    stress = Stress(SMALL)
    view = empty_view(SMALL)
    view.history.past.every, view.history.past.kept = 200, 600
    monkeypatch.setattr(time_travel, "KEYFRAME_SECONDS", 0.0)
    for _ in range(900):
        stress.run_steps(1)
        view.fold(stress.drain(), stress.now)
    view.frame(stress.now)
    total = view.history.live.state.seq
    assert total - 600 - 2 * 200 <= view.history.past.first_seq <= total - 600
    assert len(view.history.past) <= 600 + 2 * 200 + 50
    with pytest.raises(ValueError, match="the history begins at"):
        view.history.past.state_at(view.history.past.first_seq - 1)
    assert not view.travel_to(0)
    assert view.moment.shown is view.history.live


def test_slow_motion_and_pauses_do_not_lower_the_rates():
    def run(pace: float, closed: bool, longer: float) -> Rates:
        rates = Rates()
        rates.reset(0.0, False, 1.0)
        t = delay = 0.0
        rates.pace(pace)
        rates.gate(closed)
        for _ in range(2000):
            rates.advance(t)
            rates.add_step(4, 0, 0)
            t += 0.005
            rates.advance(t)
            rates.add_durations(5.0, 5.0, 1e3 * delay)
            delay = longer * 0.005 * (pace - 1) + (0.7 if closed else 0.0)  # of slow motion, or a pause
            t += delay
        rates.advance(t)
        return rates

    for pace, closed, longer in ((1.0, False, 1.0), (50.0, False, 1.0), (50.0, False, 1.1), (1.0, True, 1.0)):
        rates = run(pace, closed, longer)
        assert rates.per_second("decode", 5.0) == pytest.approx(800, rel=0.02), (pace, closed)
        assert rates.bucket == pytest.approx(10.0 / BUCKET, abs=1)


def test_rates_sum_to_the_tokens_of_the_steps():
    _, view, records = followed(CLASSROOM, 500)
    plans = [record for record in records if record[2] == "step"]
    prefill = sum(chunk[2] for plan in plans for chunk in plan[4])

    def total(name: str) -> float:
        return view.history.rates.series(name, 1600, view.history.rates.bucket + 1).sum()

    assert total("prefill") == prefill
    assert total("decode") == sum(plan[7] for plan in plans) - prefill
    assert total("cached") == sum(record[4] for record in records if record[2] == "match")


def test_events_keep_each_decision_with_its_reason():
    _, view, records = followed(TIGHT, 500, seed=3)
    kinds = {"admit", "match", "preempt", "evict", "finish", "wait"}
    told = [record for record in records if record[2] in kinds]
    assert [event.seq for event in view.history.events.since(0)] == [record[0] for record in told]
    for event, record in zip(view.history.events.since(0), told, strict=True):
        words = view.texts.event(event)
        if record[2] == "preempt":
            assert record[4] in words and f"r{record[3]}" in words
        elif record[2] == "match":
            assert event.kind == ("hit" if record[4] else "miss")
            assert (f"takes {record[4]:,} of" in words) == (record[4] > 0)
        elif record[2] == "evict":
            assert f" · {record[4]} block" in words and record[5] in words, "the victim comes first"
        elif record[2] == "finish":
            assert f"finished ({record[4]}) after {record[5]:,} token" in words
    newest = view.history.events.tail(5, view.history.live.state.seq, lambda event: event.kind == "evict", skip=2)
    evictions = [record[0] for record in told if record[2] == "evict"]
    assert [event.seq for event in newest] == evictions[::-1][2:7]


def test_glow_marks_recent_changes_and_while_paused_the_changes_of_the_last_step():
    stress, view = stress_view(SMALL, 4.0, 80)
    while not stress.scheduler.running:
        stress.run_steps(1)
    stress.gate(True)
    view.fold(stress.drain(), stress.now)
    for _ in range(40):
        stress.run_steps(1)
        records = stress.drain()
        touched = {block for record in records if record[2] == "alloc" for block in record[4]}
        if touched and not any(record[2] in ("hold", "finish", "evict") for record in records):
            break
        view.fold(records, stress.now)
    view.fold(records, stress.now)
    view.frame(stress.now)
    assert set(np.flatnonzero(view.moment.glow())) == touched
    view.frame(stress.now + 100)
    assert set(np.flatnonzero(view.moment.glow())) == touched, "at the gate it glows until the next step"
    stress.gate(False)
    view.fold(stress.drain(), stress.now + 100)
    view.frame(stress.now + 200)
    assert not view.moment.glow().any(), "running, it fades"


def test_a_selected_and_folded_node_that_is_merged_stays_selected_and_folded():
    stress, view, _ = followed(TIGHT, 1)
    merges = 0
    for _ in range(600):
        stress.run_steps(1)
        batch = stress.drain()
        left = {max(record[3:]): min(record[3:]) for record in batch if record[2] == "merge"}
        for gone in left.keys() & view.history.live.state.nodes.keys():
            view.select("node", gone)
            view.moment.tree.folded = {gone}
            view.fold(batch, stress.now)
            kept = left[gone]
            assert kept in view.history.live.state.nodes and gone not in view.history.live.state.nodes
            assert view.selection.id == kept and view.moment.tree.folded == {kept}
            merges += 1
        view.fold(batch, stress.now)
    assert merges > 0


def test_a_selection_is_linked_to_its_requests_nodes_and_blocks():
    stress, view, _ = followed(CLASSROOM, 600)
    state = view.moment.shown.state
    request = max((r for r in state.requests.values() if r.table), key=lambda r: len(r.table))
    view.select("request", request.id)
    assert view.links.blocks == set(request.table)
    assert view.links.nodes == {node.id for node in state.path(request.node)}
    assert view.subject() == request.id
    block = request.table[0]
    view.select("block", block)
    assert view.links.requests == {r.id for r in stress.scheduler.requests.values() if block in r.table}
    node = state.node_of[block]
    assert view.links.nodes == {n.id for n in state.path(node)}
    view.select("node", node)
    assert view.links.blocks == set(state.nodes[node].blocks)
    users = {r.id for r in stress.scheduler.requests.values() if set(state.nodes[node].blocks) <= set(r.table)}
    assert view.links.requests == users
    view.select("group", request.group)
    assert request.id in view.links.requests
    step = next(at for at in range(view.history.steps.last, 0, -1) if view.history.steps.chunks(at))
    view.select("step", step)
    assert view.links.step == step and view.links.requests == {chunk[0] for chunk in view.history.steps.chunks(step)}
    assert view.shown_step().step == step
    view.select(None)
    assert not view.links.blocks
    assert view.subject() == max(r.id for r in state.requests.values() if r.state == "running")


def test_the_story_of_a_block_leads_to_its_holders_tokens_and_node():
    stress, view, _ = followed(CLASSROOM, 600)
    request = max(stress.scheduler.running, key=lambda r: r.shared_blocks)
    block = request.table[0]
    story = tell(view, "block", block)
    lines = dict(story.lines)
    assert lines["held by"].startswith("r") and f"r{request.id}" in " ".join(text for _, text in story.lines)
    assert "logical block 0, tokens 0 to 15" in " ".join(text for _, text in story.lines)
    words = stress.words.decode(request.ids[:16])
    assert lines["tokens"] and lines["tokens"] in " ".join(words.split())
    assert lines["node"].startswith(f"{view.moment.shown.state.node_of[block]}: block 1 of")
    for kind, id in (
        ("request", request.id), ("group", request.group), ("node", view.moment.shown.state.node_of[block]),
        ("step", view.history.steps.last), ("request", 10**6), ("node", 10**6), ("step", 10**6),
    ):
        story = tell(view, kind, id)
        assert story.title and story.lines


def test_time_in_a_paused_engine_does_not_count_as_waiting():
    view = View()
    view.reset(EMPTY.snapshot())
    lanes = view.history.lanes

    def told(t: float, *records: tuple) -> None:
        seq = view.history.live.state.seq
        view.fold([(seq + 1 + i, t, *record) for i, record in enumerate(records)], t)

    told(1.0, ("submit", 1, "", 20, 40), ("submit", 2, "", 20, 40))
    told(1.25, ("gate", "closed", "paused"))
    told(61.25, ("gate", "open", ""))  # a minute of explaining
    told(61.5, ("admit", 1, 0, "new"), ("match", 1, 0, "empty", 0, ""))
    assert lanes.lanes[1].waited_ms == pytest.approx(500)
    admitted = next(event for event in view.history.events.since(0) if event.kind == "admit")
    waited = "waited 500 ms (and 60.0 s more while the engine was paused or slowed)"
    assert view.texts.event(admitted).endswith(waited)
    assert lanes.lanes[2].waited_ms is None


def test_figures_are_right_from_the_first_record_after_a_snapshot_with_any_clocks():
    """The clocks of the engine and of the caller may begin at any value."""
    view = empty_view(SMALL)
    stress = Stress(SMALL)
    view.frame(54_321.0)
    for i in range(100):
        stress.run(0.05)
        shifted = [(record[0], record[1] + 777.0, *record[2:]) for record in stress.drain()]
        view.fold(shifted, 54_321.0 + 0.05 * i)
        view.frame(54_321.0 + 0.05 * i)
    assert view.history.rates.bucket == pytest.approx(5.0 / BUCKET, abs=2)
    assert view.moment.engine_now == pytest.approx(782.0, abs=0.2)
    tokens = view.history.rates.series("decode", 18).sum()
    assert tokens == pytest.approx(
        sum(view.history.steps.get(s).decodes for s in range(view.history.steps.last)), rel=0.2
    )


def test_the_table_of_a_finished_request_stays_with_the_present_use_of_its_blocks():
    stress, view, records = followed(SMALL, 700)
    assert list(view.moment.shown.last_tables)
    in_tree = {b for node in stress.cache.tree.nodes.values() for b in node.blocks}
    given = {record[0]: record[4] for record in records if record[2] == "alloc"}
    seen = set()
    for last in view.moment.shown.last_tables:
        for block in last.table:
            reused = any(seq > last.seq and block in blocks for seq, blocks in given.items())
            held = stress.cache.allocator.holders(block) > 0
            expected = "reused" if reused else "free" if block not in in_tree else "held" if held else "cached"
            assert view.moment.shown.fate(block, last.seq) == expected
            seen.add(expected)
    assert {"cached", "reused"} <= seen


async def test_records_of_a_replaced_engine_do_not_count_as_dropped():
    stress = Stress(SMALL)
    stress.run(1.0)

    class Replaced(LiveStress):
        """A replaced engine: its last records have not arrived yet."""

        def drain_records(self) -> list:
            late, self.late = self.late, []
            return late

        async def snapshot(self) -> dict:
            return EMPTY.snapshot()

    records = stress.drain()
    feed = Updater(source := Replaced(SMALL, 0.0), View())
    feed.restart()
    source.late = list(records)
    feed.pump()  # some come while the other engine starts
    source.late = list(records)  # and some are drained only when it is there
    feed.replaced()
    await feed.sync()
    feed.pump()
    assert feed.dropped == 0 and feed.backlog == 0 and not feed.view.history.gap


async def test_a_server_that_restarts_is_asked_for_a_snapshot_until_it_gives_one():
    class Busy(LiveStress):
        """A server that refuses the first two snapshots, because its engine is being restarted."""

        refusals = 2

        def drain_records(self) -> list:
            return []

        async def snapshot(self) -> dict:
            if self.refusals:
                self.refusals -= 1
                raise EngineDead("the engine does not respond or is being restarted")
            return EMPTY.snapshot()

    now = 0.0
    feed = Updater(Busy(SMALL, 0.0), View(), clock=lambda: now)
    await feed.sync()
    assert not feed.live and not feed.pump(), "not at once: the server is busy"
    now += RETRY_S
    assert feed.pump()
    await feed.sync()
    now += RETRY_S
    feed.source.error = "the server has not been reached for 30 s"
    assert not feed.pump(), "a dead engine is not asked again"
    feed.source.error = None
    assert feed.pump()
    await feed.sync()
    assert feed.live and not feed.pump()


@pytest.mark.parametrize("frozen", [False, True])
async def test_the_backlog_is_bounded_and_dropped_records_are_counted(monkeypatch, frozen):
    monkeypatch.setattr("minitui.viewmodel.updater.MAX_BACKLOG", 300)
    stress = Stress(SMALL)
    state = empty_state(SMALL)

    class Fast(LiveStress):
        """It sends a hundred times more records than can be folded."""

        def drain_records(self) -> list:
            records = stress.drain()
            state.apply_all(records)
            return records

        async def snapshot(self) -> dict:
            return state.snapshot()

    feed = Updater(Fast(SMALL, 0.0), View())
    await feed.sync()
    feed.frozen = frozen
    stress.run(3.0)
    assert feed.pump() is False and feed.backlog == 0 and feed.steps_behind > 100
    lost = state.seq
    feed.frozen = False
    stress.run(0.1)
    assert feed.pump(), "a snapshot is needed"
    await feed.sync()
    assert (
        feed.dropped == lost and feed.steps_behind == 0 and feed.view.history.live.state.snapshot() == state.snapshot()
    )


def test_records_come_out_of_their_packets_as_they_went_in():
    _, _, records = followed(TIGHT, 300)
    gap = records[:700] + records[720:]  # as when too many had waited
    packed = packets(gap)
    assert [record for packet in packed for record in packet.records()] == gap
    assert all(len(packet) == len(packet.records()) <= PACKET for packet in packed) and len(packed) == 4
    steps = [[record[3] for record in packet.records() if record[2] == "step"] for packet in packed]
    assert [packet.step for packet in packed] == [some[-1] if some else -1 for some in steps]
    assert packed[1].last + 21 == packed[2].first and packets([]) == []
    for some in (records[:FEW], records[: FEW + 1]):  # the client packs a few itself
        kind, _, sent = pickle.loads(on_the_wire(("news", [], some)))
        assert (kind, sent) == ("news", some) if len(some) == FEW else kind == "packed"
        assert (sent if kind == "news" else [r for packet in sent for r in packet.records()]) == some


async def test_a_backlog_is_folded_between_frames_and_keys_come_first(monkeypatch):
    monkeypatch.setattr("minitui.viewmodel.updater.SLICE_S", 0.0)  # a packet at a time
    stress = Stress(SMALL)
    empty = empty_state(SMALL).snapshot()

    class Steady(LiveStress):
        def drain_records(self) -> list:
            return stress.drain()

        async def snapshot(self) -> dict:
            return empty

    now = 100.0
    feed = Updater(Steady(SMALL, 0.0), View(), clock=lambda: now)
    await feed.sync()
    stress.run(4.0)
    feed.pump()
    waited = feed.backlog
    assert waited > PACKET and feed.steps_behind > 0
    feed.keep_up()
    feed.note_key()
    now += 0.4 * AFTER_KEY_S
    await asyncio.sleep(0.02)  # enough for many slices
    assert feed.backlog == waited, "a key was pressed: its echo comes first"
    now += AFTER_KEY_S
    await until(lambda: not feed.backlog)
    assert feed.steps_behind == 0 and feed.view.history.live.state.seq == stress.log.seq and not feed.dropped
