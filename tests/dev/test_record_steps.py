"""record_steps: each time is the time of the steps that it names, and the timelines fold into spans."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from engine.trace.records import Record
from minitui.bench import limits
from minitui.dev import record_steps
from minitui.viewmodel.history.spans import Timeline
from minitui.viewmodel.history.steps import Steps


def test_costs_and_timelines_of_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits.SIZES, "tiny", (64, 96, 2, 8, True))
    monkeypatch.setitem(limits.QWEN3, "vocab_size", 2_000)
    small = {"PROMPT": 8, "MOST_ROWS": 8, "MOST_PROMPT": 16, "ROWS": (1, 3), "STEPS": 5, "REPEATS": 3, "PASSES": 2}
    small["KV_TOKENS"] = 512
    for name, value in small.items():
        monkeypatch.setattr(record_steps, name, value)
    found = record_steps.record_shape(str(limits.write_config("tiny", tmp_path)), device="cpu", cpu_threads=1)

    assert [cost["n"] for cost in found["decode"]] == [1, 2, 4, 8]
    assert [cost["n"] for cost in found["prefill"]] == [1, 2, 4, 8, 16]
    assert {cost["steps"] for cost in found["decode"]} == {2 * 5}
    assert {cost["steps"] for cost in found["prefill"]} == {record_steps.REPEATS}
    assert all(cost["wall_ms"] > 0 for cost in found["decode"] + found["prefill"])
    modes = [(one["mode"], one["rows"]) for one in found["timelines"]]
    assert modes == [(mode, rows) for mode in ("overlap", "graphs", "eager") for rows in (1, 3)]
    for one in found["timelines"]:
        steps = folded(one["records"])
        rows = [steps.get(step) for step in range(steps.first, steps.last + 1)]
        assert [(row.decodes, row.kind) for row in rows if row] == [(one["rows"], "decode")] * 5
        planned_early = [a.ended > b.t for a, b in pairwise(rows) if a and b and a.ended]
        assert planned_early == [one["mode"] == "overlap"] * 4
        line = Timeline(steps, steps.last)
        assert {"plan", "launch", "commit"} <= {span.kind for span in line.host(line.first, line.last)}


def folded(records: list[Record]) -> Steps:
    steps = Steps(64)
    for record in records:
        steps.read(record)
    return steps


def test_time_that_kernels_share_counts_once() -> None:
    assert record_steps._covered([(0.0, 4.0), (1.0, 2.0), (3.0, 6.0), (8.0, 9.0)]) == 7.0
