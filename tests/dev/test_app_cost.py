"""What watching costs: hours of watching leave no more behind than one, and keys come first."""

from __future__ import annotations

import gc
import sys
from collections import deque
from dataclasses import replace
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from textual.app import App, ComposeResult

from engine.trace.records import PACKET, packets
from engine.trace.state import State
from engine.trace.views import RequestView
from minitui.dev.simulator import SMALL, Load, Stress
from minitui.tui.apps.frame_limiter import FrameLimiter
from minitui.tui.theme import THEMES
from minitui.tui.widgets.base import LinePanel, Picture
from minitui.tui.widgets.rows import Row
from minitui.viewmodel.history.events import EVENTS_ALWAYS, EVENTS_KEPT, Events
from minitui.viewmodel.history.lane import PREFILLING, Lane
from minitui.viewmodel.history.lanes import LANES_KEPT, Lanes
from minitui.viewmodel.history.steps import Steps
from minitui.viewmodel.history.tokens import TokenTimes
from minitui.viewmodel.history.trends import Trends
from minitui.viewmodel.state.time_travel import PastStates
from minitui.viewmodel.updater import AFTER_EFFECT_S, AFTER_KEY_S, LONGEST_DELAY_S, Updater
from minitui.viewmodel.view import View

LOAD = replace(SMALL, chats=6, step_ms=12.0)
_NOT_DATA = (ModuleType, type, FunctionType, BuiltinFunctionType, MethodType)


def blank(load: Load) -> State:
    """Returns the state before the first request."""
    return State(load.blocks + 1, load.block_size, load.budget, load.rows)


def bytes_reached(*roots: Any) -> int:
    """Returns the bytes of all objects that are reachable from `roots`, without modules, types and functions."""
    seen: set[int] = set()
    unvisited = list(roots)
    total = 0
    while unvisited:
        item = unvisited.pop()
        if id(item) in seen or isinstance(item, _NOT_DATA):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        unvisited += gc.get_referents(item)
    return total


def long_run(view: View, stress: Stress, steps: int) -> int:
    """So many steps folded, a frame at a time; the bytes of the view after them."""
    last = stress.steps_run + steps
    while stress.steps_run < last:
        stress.run_steps(25)
        stress.show(view)
        view.moment.tree.refresh(view.moment.shown, stress.now, force=True)
    return bytes_reached(view)


@pytest.fixture
def watched() -> tuple[View, Stress]:
    """A view with short histories, so that they fill within seconds."""
    stress, view = Stress(LOAD), View()
    view.texts.ids_to_text = stress.words.decode
    view.reset(blank(LOAD).snapshot())
    view.history.steps = Steps(400)
    view.history.tokens = TokenTimes(view.history.steps, view.history.lanes)
    view.history.past = PastStates(kept=2_000, every=400)
    view.history.past.begin(view.history.live)
    view.history.events = Events(300)
    view.history.block_log = deque(maxlen=300)
    view.history.trends = Trends(8, 8)
    return view, stress


def test_a_long_run_leaves_no_more_behind_than_a_short_one(watched: tuple[View, Stress]) -> None:
    view, stress = watched
    early = max(long_run(view, stress, 500) for _ in range(3))
    late = max(long_run(view, stress, 500) for _ in range(6))
    assert view.history.live.state.seq > 12_000 and view.history.steps.last - view.history.steps.first < 400
    assert late < 1.15 * early


def test_events_are_kept_as_far_back_as_records_are_and_always_some() -> None:
    events = Events()
    for seq in range(EVENTS_KEPT + 10):
        events.fold((seq, 0.0, "admit", 1, 0, "new"), seq)
    events.forget_before(1_000)
    assert events.since(0)[0].seq == 1_000
    events.forget_before(EVENTS_KEPT + 10)
    assert len(events) == EVENTS_ALWAYS and events.since(0)[-1].seq == EVENTS_KEPT + 9


def test_after_a_key_frames_wait_but_keys_that_follow_each_other_do_not_stop_the_picture() -> None:
    now = [10.0]
    feed = Updater(cast(Any, SimpleNamespace(drain_packets=list)), View(), lambda: now[0])
    assert not feed.key_waits("frame")
    feed.note_key()
    assert feed.key_waits("frame")
    now[0] += AFTER_KEY_S + 0.001
    assert not feed.key_waits("frame"), "the effect of the key is drawn"
    for apart in (0.5 * AFTER_KEY_S, 1.5 * AFTER_KEY_S):  # a key that is held down, and keys typed one after the other
        drawn = []
        for _ in range(40):
            now[0] += apart
            feed.note_key()
            now[0] += 0.001  # a frame is due after each key
            if not feed.key_waits("frame"):
                drawn.append(now[0])
        gaps = [after - before for before, after in pairwise(drawn)]
        assert len(gaps) > 5 and max(gaps) < 2 * (LONGEST_DELAY_S + apart)
    feed.note_key()
    now[0] += 0.001
    assert feed.key_waits("fold"), "a frame that was drawn does not let other work go first"
    feed.note_drawn()
    now[0] += 0.5 * AFTER_KEY_S
    assert feed.key_waits("fold"), "this was drawn before the application had the key"
    feed.note_handled()
    feed.note_drawn()
    assert feed.key_waits("fold"), "a second picture may follow"
    now[0] += AFTER_EFFECT_S + 0.001
    assert not feed.key_waits("fold")


def test_a_key_ends_a_slice_and_no_collection_interrupts_a_packet() -> None:
    """The thread that reads the terminal notes the key while the event loop folds."""
    now, view = [10.0], View()
    records = [(seq, 0.0, "wait", 1, "blocks") for seq in range(1, 6 * PACKET)]
    feed = Updater(cast(Any, SimpleNamespace(drain_packets=lambda: packets(records))), view, lambda: now[0])
    feed.live = True
    folded: list[int] = []

    def fold(packet: list, _now: float, _packed: bytes) -> None:
        assert not gc.isenabled()
        folded.append(len(packet))
        if len(folded) == 3:
            now[0] += 0.001
            feed.note_key()

    view.fold = fold  # type: ignore[method-assign]
    feed.pump()
    assert folded == [PACKET] * 3 and feed.backlog == len(records) - 3 * PACKET and gc.isenabled()


def test_spans_of_a_request_that_goes_on_are_forgotten_with_the_steps() -> None:
    lanes = Lanes()
    lane = lanes.lanes[1] = lanes.active[1] = Lane(1, RequestView(1, "g", 8, 16), None, 0)
    for step in range(0, 20_000, 2):
        lane.gain(step)
        lane.mark(PREFILLING, step, step)
        lanes.forget_before(step - 3_000)
    assert len(lane.gains) < 2_100 and len(lane.spans) < 2_100
    assert lane.code_at(19_998 - 2_800, PREFILLING), "it is kept as long as its step"


def test_lanes_of_requests_that_ended_are_bounded_in_number() -> None:
    lanes = Lanes()
    for id in range(2 * LANES_KEPT):  # requests too short for a step of their own
        lanes.submit(RequestView(id, "g", 8, 9))
        lanes.read_at((id, 0.0, "finish", id, "abort", 0), 0.0)
        lanes.forget_before(-1)
    assert len(lanes.lanes) == len(lanes.ended) == LANES_KEPT


async def test_what_was_drawn_leaves_no_regions_behind() -> None:
    class Panel(LinePanel):
        at = 0

        def picture(self, view: View, width: int, height: int) -> Picture:
            cells = [("x" if x == self.at else ".", ("ink", "dim")[x % 2]) for x in range(width)]  # a run each
            return Picture([Row().extend(cells).done(width)] * height)

    class Drawing(App[None]):
        def __init__(self) -> None:
            super().__init__()
            self.register_theme(THEMES[0])
            self.theme = THEMES[0].name

        def compose(self) -> ComposeResult:
            yield Panel()

    app, view = Drawing(), View()
    async with app.run_test(size=(80, 24)) as pilot:
        panel = app.query_one(Panel)
        for panel.at in range(70):
            panel.paint(view)
            await pilot.pause()
        assert panel.text and len(panel._dirty_regions) < 100, f"{len(panel._dirty_regions)} regions"


def test_every_second_frame_is_left_out_while_drawing_costs_too_much() -> None:
    now, spent = [0.0], [0.0]
    limiter = FrameLimiter(lambda: now[0], lambda: spent[0])

    def drawn(share: float, seconds: float = 3.0, happens: bool = True) -> int:
        """Of the frames of the last second, how many were drawn, with this share of a core used."""
        frames = []
        for _ in range(round(seconds * 20)):
            now[0] += 0.05
            spent[0] += 0.05 * share
            if happens:
                limiter.wake()
            frames.append(limiter.draws())
        return sum(frames[-20:])

    assert drawn(0.10) == 20
    assert drawn(0.30) == 10
    assert drawn(0.15) == 10, "with half the frames this is no reason to draw them all again"
    assert drawn(0.05) == 20
    assert drawn(0.05, happens=False) == 2 and drawn(0.30, happens=False) == 2, "nothing happens: two a second"
    limiter.wake()
    now[0] += 0.05
    assert limiter.draws(), "the first record after a rest is drawn in the next frame"
