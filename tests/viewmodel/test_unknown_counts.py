"""What happened before the records is unknown: no number is given for it."""

from __future__ import annotations

import pytest

from engine.trace.state import State
from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.tui.widgets.inspect.requests import RequestTable
from minitui.tui.widgets.rows import plain
from minitui.viewmodel.compare.runs import Run, recorded_view
from minitui.viewmodel.requests import Requests
from minitui.viewmodel.view import View
from minitui.viewmodel.words.request_words import figures_in_words, request_data
from minitui.viewmodel.words.story import tell


def from_the_middle(begin: int) -> View:
    """The view of the bundled recording with preemptions whose records begin after step `begin`."""
    reader = TraceReader(find_trace("small-pool"))
    state, records = State.from_snapshot(reader.part(0).snapshot), list(reader.records())
    at = 1 + next(i for i, record in enumerate(records) if record[2] == "time" and record[3] == begin)
    state.apply_all(records[:at])
    view = View()
    view.reset(state.snapshot())
    view.fold(records[at:])
    view.frame(0.0)
    return view


def test_of_a_request_that_was_preempted_before_the_records_the_tokens_computed_twice_are_unknown() -> None:
    view = from_the_middle(100)  # r4 was preempted in step 81, r3 is preempted in step 113
    rows = {row.id: row for row in Requests().figures(view)}
    assert (rows[4].request.preemptions, rows[4].recomputed_tokens, rows[4].reused_tokens) == (1, None, None)
    words = "preempted 1 time, the first before these records began; tokens computed twice: unknown"
    assert words in figures_in_words(rows[4])
    assert (rows[3].recomputed_tokens, rows[3].reused_tokens) == (32, 96), "its preemption is in the records"
    data = request_data(view, view.history.lanes.lanes[4])
    assert (data["tokens_computed_twice"], data["tokens_cached_after_preemption"]) == (None, None)
    assert "tokens from the tree again: unknown" in dict(tell(view, "request", 4).lines)["preempted"]
    lines = [plain(row) for row in RequestTable().picture(view, 200, 12).rows]
    heads = lines[0].split()
    line = next(line for line in lines if line.startswith("r4 ")).split()
    assert line[heads.index("twice")] == line[heads.index("reused")] == "–" and line[heads.index("preempt")] == "1"
    assert Run(view).figures.twice is None


@pytest.mark.parametrize(("name", "known"), [("small-pool", True), ("vllm-8b", False), ("h200-8b", False)])
def test_what_was_computed_after_an_eviction_is_unknown_if_the_engine_does_not_record_it(
    name: str, known: bool
) -> None:
    view = recorded_view(TraceReader(find_trace(name)))
    for lane in list(view.history.lanes.lanes.values())[:20]:
        assert (request_data(view, lane)["tokens_computed_after_eviction"] is not None) == known
