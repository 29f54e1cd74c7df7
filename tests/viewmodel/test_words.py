"""Texts that must hold for every recording: what a match, a gap, a minute and a shortened replay are called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.trace.state import State
from minitui.export.markdown import _shortened
from minitui.text import ms
from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
from minitui.tui.widgets.inspect.requests import RequestTable
from minitui.tui.widgets.inspect.vitals import vitals
from minitui.tui.widgets.rows import plain
from minitui.viewmodel.compare.runs import recorded_view
from minitui.viewmodel.explain.timing import why_briefly
from minitui.viewmodel.history.events import Event, describe
from minitui.viewmodel.requests import Requests
from minitui.viewmodel.view import View
from minitui.viewmodel.words.narrate import narrate
from minitui.viewmodel.words.request_words import first_token_words
from minitui.viewmodel.words.summary import summary


def folded(until: float) -> View:
    """Returns the small pool at an engine time."""
    reader, view = TraceReader(bundled()["small-pool"]), View()
    view.texts.ids_to_text, view.texts.group_names = reader.decode, reader.names
    view.reset(reader.part(0).snapshot)
    view.fold([record for record in reader.records() if record[1] <= until])
    view.frame(0.0)
    return view


@pytest.mark.parametrize(
    ("writer", "words"),
    [(-1, " · all full blocks were cached"), (4, " (r4 is still computing them) · these are all full blocks")],
)
def test_blocks_that_are_still_being_computed_are_not_called_cached(writer: int, words: str) -> None:
    record = (9, 1.0, "match", 7, 112, "whole", 112, "112 of 125 tokens")
    told = describe(Event(9, 2, "hit", 7, -1, record, writer=writer), None)
    assert told == f"r7 takes 112 of 125 tokens from the tree{words}"


@pytest.mark.parametrize(("taken", "words"), [(0, "the beginning was evicted"), (16, "the rest was evicted")])
def test_what_was_evicted_is_the_rest_only_behind_cached_tokens(taken: int, words: str) -> None:
    record = (9, 1.0, "match", 4, taken, "evicted", 120, f"{taken} of 41 tokens")
    assert describe(Event(9, 121, "hit", 4, -1, record), None).endswith(f"{words} at step 120")


def test_a_gap_that_has_not_ended_has_a_plus() -> None:
    rows = [plain(row) for row in RequestTable().drawn(folded(1.46), 120, 20)]
    marked = {row.split()[1]: row.count("+") for row in rows if row[2:5] in ("r1 ", "r2 ", "r3 ", "r4 ")}
    assert marked == {"r1": 0, "r2": 0, "r3": 1, "r4": 1}


def test_a_run_of_less_than_a_minute_has_no_last_minute() -> None:
    view = folded(9.0)
    assert view.moment.last_minute == "since step 0" and "since step 0" in summary(view)[0]
    units = next(vital.units for vital in vitals(view, 20) if vital.label == "hit rate")
    assert not any("minute" in unit or "60 s" in unit for unit in units) and "% since step 0" in units


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ((), "with idle times cut to 1 s"),
        (((1, 0.0, "gate", "closed", ""),), "with pauses and idle times cut to 1 s"),
        (((1, 0.0, "pace", 50),), "without slow motion, with idle times cut to 1 s"),
    ],
)
def test_a_shortened_replay_says_what_is_left_out(records: tuple[Any, ...], words: str) -> None:
    state = State(9, 16, 64, 4)
    reader: Any = SimpleNamespace(part=lambda i: SimpleNamespace(state=state), records=lambda: records)
    assert _shortened(reader) == words


def test_a_pause_is_not_counted_in_the_time_to_first_token() -> None:
    view = folded(9.0)
    words = first_token_words(Requests().of(view, view.history.lanes.lanes[1]))
    assert words == "21.1 ms = queue 1.18 + prefill 19.9 (not counted: 37.5 ms while paused or slowed)"


def test_a_wait_that_has_not_ended_is_so_far_also_beside_another_request() -> None:
    reader = TraceReader(bundled()["vllm-8b"])
    view = recorded_view(reader)
    assert view.travel_to(2600)
    view.frame(0.0)
    waiting = next(lane for lane in view.history.lanes.lanes.values() if lane.id == 1302)
    rows = Requests().figures(view)
    other = next(row for row in rows if row.id == 1300)
    waited = next(row for row in rows if row.id == waiting.id)
    assert waited.first_ms is None
    text = " ".join(plain(row) for row in RequestTable._first_token(view, other, waited, [waited.id], 200))
    assert f"(longest: r1302 with {ms(waited.first_so_far_ms or 0.0)} ms so far)" in text


def test_a_step_without_an_excess_has_its_parts_in_the_expected_time() -> None:
    view = recorded_view(TraceReader(bundled()["vllm-8b"]))
    row = view.history.steps.get(2700)
    assert row is not None and why_briefly(row, view.models.of(2700)).startswith("expected 40.4 ms: before prompts")


def test_the_request_with_most_evictions_comes_first() -> None:
    told = narrate(recorded_view(TraceReader(bundled()["vllm-8b"])), 2700)
    assert "86 blocks" in told and "(r1378 needs 82, r1364 needs 1, r1365 needs 1 and 2 other requests)" in told
