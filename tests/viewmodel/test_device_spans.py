"""The device's track: a step is drawn where the device computed it, or where it may have, by a clock that counts."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.viewmodel.history.spans import PERHAPS, Span, Timeline
from tests.engine.core import test_step_clock
from tests.engine.core.test_step_clock import DEVICE, PLAN
from tests.viewmodel.test_spans import folded, folded_view, host, played

SLACK = 0.13  # ms: half of PRECISE, and the microseconds of the records


def drawn(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, delayed_us: int = 0, **options: Any
) -> tuple[Timeline, list[list[float]]]:
    """Returns the timeline of two requests, and when the device began and ended each step. `delayed_us`: each step's
    time for garbage collection, and for other programs."""
    computed: list[tuple[float, float]] = []
    records, _ = played(monkeypatch, overlap, computed=computed, **options)
    pauses = (delayed_us, delayed_us, 0)  # those of this machine are left out
    steps, _ = folded([(*r[:10], *pauses) if r[2] == "parts" else r for r in records])
    return Timeline(steps, steps.last), [list(times) for times in computed]


def of_step(spans: list[Span], step: int) -> tuple[list[Span], list[Span]]:
    """Returns the step's spans: (certain, perhaps)."""
    own = [span for span in spans if span.step == step]
    return [span for span in own if span.kind != PERHAPS], [span for span in own if span.kind == PERHAPS]


@pytest.mark.parametrize(("overlap", "device"), [(False, DEVICE), (False, 5 * DEVICE), (True, 5 * DEVICE)])
def test_a_step_for_which_the_host_waited_is_where_the_device_computed_it(
    overlap: bool, device: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_step_clock, "DEVICE", device)
    line, computed = drawn(monkeypatch, overlap)
    waited = {span.step for span in host(line.steps) if span.kind == "wait" and span.ms > PLAN * 1e3 + 1}
    assert len(waited) >= 10
    spans = line.device(line.first, line.last)
    for step in waited:
        (sure,), perhaps = of_step(spans, step)
        assert sure.kind == ("decode" if step % 6 else "prefill")
        assert not perhaps and [sure.begin, sure.end] == pytest.approx(computed[step], abs=SLACK)
        assert sure.ms == pytest.approx(device * 1e3)


def test_a_step_that_ended_while_the_host_worked_is_not_drawn_at_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host works 23 s for each step, the device 8 s: it begins at a moment of the launch, which takes 2 s."""
    line, computed = drawn(monkeypatch, True)
    for step in (2, 3, 4):
        (sure,), (before, after) = of_step(line.device(line.first, line.last), step)
        begin, end = computed[step]
        assert [before.begin, before.end] == pytest.approx([begin - 2_000, begin])
        assert [sure.begin, sure.end] == pytest.approx([begin, end - 2_000])
        assert [after.begin, after.end] == pytest.approx([end - 2_000, end])
        assert line.arrived(step) > end + 5_000


@pytest.mark.parametrize("seed", range(12))
def test_the_device_computed_a_step_in_all_of_its_certain_time_and_never_outside_of_the_rest(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, computed = drawn(monkeypatch, bool(seed % 4), vary=random.Random(seed))
    spans = line.device(line.first, line.last)
    assert [span.begin for span in spans] == sorted(span.begin for span in spans)
    assert all(before.end <= after.begin + 1e-6 for before, after in pairwise(spans))
    certain = 0.0
    for step, (begin, end) in enumerate(computed):
        sure, perhaps = of_step(spans, step)
        assert all(span.begin >= begin - SLACK and span.end <= end + SLACK for span in sure), (step, sure, begin, end)
        inside = [(max(span.begin, begin), min(span.end, end)) for span in (*sure, *perhaps)]
        covered = sum(right - left for left, right in inside if right > left)
        assert covered == pytest.approx(end - begin, abs=SLACK), step
        certain += sum(span.end - span.begin for span in sure)
    assert certain > 0.5 * sum(end - begin for begin, end in computed)


@pytest.mark.parametrize("name", ["h200-8b", "small-pool"])
def test_the_place_is_almost_known_in_a_recording_and_the_same_in_every_window(name: str) -> None:
    view = folded_view(TraceReader(find_trace(name)))
    line = Timeline(view.history.steps, view.moment.horizon)
    everything = line.device(line.first, line.last)
    for first in range(line.first, line.last, 7):
        alone = [span for span in everything if first + 1 <= span.step <= first + 3]
        assert [span for span in line.device(first, first + 3) if span.step > first] == alone
    times = {kind: sum(span.end - span.begin for span in everything if (span.kind == PERHAPS) == kind)
             for kind in (True, False)}
    assert times[True] < 0.05 * times[False]
