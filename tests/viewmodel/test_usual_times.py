"""The usual times of steps beside prompts, for an engine that reports only when a step ended: a recording of vLLM."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from minitui.export.markdown import write_markdown
from minitui.text import count
from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.viewmodel.compare.runs import recorded_view
from minitui.viewmodel.explain.causes import explain
from minitui.viewmodel.explain.stalls import explain_gap
from minitui.viewmodel.explain.timing import why_slow
from tests.viewmodel.test_stalls import gap_at, preempted_in


def test_in_a_recording_of_vllm_a_step_beside_prompts_is_compared_with_other_such_steps() -> None:
    """vLLM reports only when a step ended. A step takes 10 ms, and 25 to 60 ms if the next step has a prompt."""
    view = recorded_view(TraceReader(find_trace("vllm-8b")))
    rows = [
        row
        for row in map(view.history.steps.get, range(view.history.steps.first, view.history.steps.committed))
        if row is not None
    ]
    model = view.models.of(view.history.steps.committed)
    assert model is not None and model.device is None and not model.reports
    ahead = {row.step: following.prefill_tokens for row, following in pairwise(rows)}
    before_prompts = [
        row for row in rows[:-1] if not row.chunks and ahead[row.step] and row.took_ms is not None
    ]  # decode steps directly before prompts
    for row in rows[:-1]:
        found, text = explain(row, model), why_slow(row, model)
        assert found is not None and not found.prefills and not found.causes
        assert "of it for" not in text and ("reports only when" in text) == ("unexplained" in text)
        assert (found.beside is None) == (not row.chunks and not ahead[row.step])
        if found.beside is None:
            assert 9 < found.expected < 12
            continue
        assert found.beside.ahead == ahead[row.step] and found.expected == found.beside.usual.ms
        if ahead[row.step]:
            assert f"; next step {row.step + 1:,} has {count(ahead[row.step], 'prefill token')}" in text
        if not row.chunks:
            others = [other.took_ms for other in before_prompts if other is not row and other.took_ms is not None]
            assert found.expected == pytest.approx(median(others)) and found.beside.usual.steps == len(others)
    slowest = sorted(rows[:-1], key=lambda row: -(row.took_ms or 0.0))[:40]
    assert all(ahead[row.step] for row in slowest)
    assert sum("unexplained" in why_slow(row, model) for row in slowest) < 20


def test_the_markdown_of_vllm_s_recording_and_its_gaps_tell_what_is_usual_beside_prompts(tmp_path: Path) -> None:
    reader, out = TraceReader(find_trace("vllm-8b")), tmp_path / "vllm.md"
    write_markdown(reader, out)
    view = recorded_view(reader)
    row = view.history.steps.get(2516)
    assert row is not None
    why = why_slow(row, view.models.of(2516))
    assert "usual before a step with prompts (median of " in why and "; next step 2,517 has 408 prefill tokens" in why
    step = next(line for line in out.read_text().splitlines() if "step 2,516: " in line)
    assert step.endswith(f" It took 25.9 ms ({why}).")
    told = 0
    for lane in view.history.lanes.lanes.values():
        gap = gap_at(view, lane, 2516)
        if gap is None or preempted_in(lane, gap):
            continue
        reason, told = explain_gap(view, lane, gap), told + 1
        words = "usual extra time before a step with prompts (next step 2,517 has 408 prefill tokens) "
        assert str(reason).startswith(words) and reason.unexplained == 0
        assert reason.by_key.keys() <= {"usual", "beside_prompts", "variation"}
        assert reason.by_key["beside_prompts"] == pytest.approx(gap.ms - (reason.usual or 0.0))
    assert told > 40
