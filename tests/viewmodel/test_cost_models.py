"""The expected time of a step is told only if the steps before it tell what its rows cost."""

from __future__ import annotations

from collections import Counter
from statistics import median

from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.viewmodel.compare.runs import recorded_view
from minitui.viewmodel.explain.causes import explain
from minitui.viewmodel.explain.cost_models import REFIT_SOON
from minitui.viewmodel.view import View
from minitui.viewmodel.words.story import tell


def test_a_step_with_fewer_rows_than_all_before_has_no_expected_time_until_such_steps_are_fitted() -> None:
    """A CPU's run: steps of two to four rows take 11 ms, and the last 32 steps, of one row, take 5 ms."""
    view = recorded_view(TraceReader(find_trace("small-pool")))
    rows = [
        row
        for row in map(view.history.steps.get, range(view.history.steps.last + 1))
        if row is not None and row.took_ms
    ]
    took: dict[int, list[float]] = {}
    for row in rows:
        took.setdefault(row.decodes, []).append(row.took_ms or 0.0)
    unknown = Counter[int]()
    for row in rows:
        model = view.models.of(row.step)
        found = explain(row, model) if model is not None else None
        if found is None:
            unknown[row.decodes] += 1
            told = [text for label, text in tell(view, "step", row.step).lines if label == "took"]
            assert told[0].endswith("; expected time unknown: too few such steps have a time")
        elif row.decodes:
            assert abs(found.expected / median(took[row.decodes]) - 1) < 0.2, row
    assert not unknown[4] and 0 < unknown[3] < REFIT_SOON and 0 < unknown[1] < 2 * REFIT_SOON


def test_while_it_is_recorded_a_step_has_the_same_expected_time_as_in_the_replay() -> None:
    reader, live, seen = TraceReader(find_trace("small-pool")), View(), 0
    whole = recorded_view(reader)
    live.reset(reader.part(0).snapshot)
    for record in reader.records():
        live.fold([record])
        if record[2] != "time" or record[3] < 64:
            continue
        step = record[3]
        row, again = live.history.steps.get(step), whole.history.steps.get(step)
        assert row is not None and again is not None
        models = live.models.of(step), whole.models.of(step)
        found = [explain(r, m) if m is not None else None for r, m in zip((row, again), models, strict=True)]
        assert found[0] == found[1]
        seen += found[0] is None
    assert seen > REFIT_SOON
