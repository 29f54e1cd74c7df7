"""Texts that must hold for every recording: what a match, a gap, a minute and a shortened replay are called."""

from __future__ import annotations

import pytest

from minitui.trace.bundled import bundled
from minitui.trace.reader import TraceReader
from minitui.tui.widgets.inspect.vitals import vitals
from minitui.viewmodel.history.events import Event, describe
from minitui.viewmodel.view import View
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


def test_a_run_of_less_than_a_minute_has_no_last_minute() -> None:
    view = folded(9.0)
    assert view.moment.last_minute == "since step 0" and "since step 0" in summary(view)[0]
    units = next(vital.units for vital in vitals(view, 20) if vital.label == "hit rate")
    assert not any("minute" in unit or "60 s" in unit for unit in units) and "% since step 0" in units
