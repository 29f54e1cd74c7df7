"""What limits the speed: the host, the device or other programs, each from measured times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.tui.widgets.timings import StepTimings
from minitui.tui.widgets.waterfall import Waterfall
from minitui.viewmodel.limits import Limit, limits
from minitui.viewmodel.model import View
from minitui.viewmodel.story import tell
from minitui.viewmodel.summary import summary, summary_json
from tests.tui.test_lesson_panels import drawn

WORK = slice(4, 10)  # of a `parts` record: commit, emit, gate, plan, launch, wait
GATE, WAIT, GC, DELAYED = 6, 9, 10, 11


def replayed(name: str) -> View:
    """Returns the view at the end of a bundled recording."""
    reader, view = TraceReader(find_trace(name)), View()
    view.reset(reader.part(0).snapshot)
    view.fold(list(reader.records()))
    view.frame(0.0)
    return view


def recorded(work: float, wait: float, delayed: float | None, read: Callable[[int], bool] = lambda step: True) -> View:
    """A recording in which each step's host works for `work` ms and waits for `wait` ms; `delayed` of both is the time
    in which another program had the core. `read`: the steps that have it."""
    reader, view = TraceReader(find_trace("small-pool")), View()
    view.reset(reader.part(0).snapshot)
    changed: list[Any] = []
    for record in reader.records():
        fields: list[Any] = list(record)
        if fields[2] == "parts":
            fields[WORK] = [round(work * 1e3), 0, 0, 0, 0, round(wait * 1e3)]
            fields[GC], fields[DELAYED] = 0, None if delayed is None or not read(fields[3]) else round(delayed * 1e3)
        changed.append(tuple(fields))
    view.fold(changed)
    view.frame(0.0)
    return view


@pytest.mark.parametrize(
    "work, wait, delayed, words",
    [
        (1.0, 9.0, 0.0, ["the device limits: the host waits 90 % of the time"]),
        (9.0, 1.0, 0.0, ["the host limits: the host waits 10 % of the time"]),
        (1.0, 9.0, None, ["the device limits: the host waits 90 % of the time (other programs: unknown)"]),
        # 0 to 1 of these 3 ms delayed the host's work
        (1.0, 9.0, 3.0, ["another program had the core for 30 % of the time",
                         "the device limits when no other program has the core: "
                         "the host waits 86 to 100 % of that time"]),
        # a host that waits for 60 % of the time, of which others may have most
        (4.0, 6.0, 4.0, ["another program had the core for 40 % of the time",
                         "unknown what limits when no other program has the core: "
                         "the host waits 33 to 100 % of that time"]),
        (9.0, 1.0, 4.0, ["another program had the core for 40 % of the time",
                         "the host limits when no other program has the core: the host waits 0 to 17 % of that time"]),
        (0.0, 10.0, 7.0, ["other programs limit: they had the core for 70 % of the time",
                          "the device limits when no other program has the core: the host waits 100 % of that time"]),
    ],
)  # fmt: skip
def test_other_programs_are_told_from_the_host_and_the_device(
    work: float, wait: float, delayed: float | None, words: list[str]
) -> None:
    view = recorded(work, wait, delayed)
    lines = [f"{line} · last 159 steps" for line in words]
    assert ["".join(one.told()) for one in limits(view.steps, view.horizon)] == lines
    assert summary(view)[-len(lines) :] == lines
    brief = [text.replace("when no other program has the core", "the other time") for text in words]
    for panel in (StepTimings(), Waterfall()):
        for width in (76, 118):
            texts = [text if len(text) <= width else short for text, short in zip(words, brief, strict=True)]
            rows = drawn(panel, view, width, 30)
            assert all(any(row.startswith(text) for row in rows) for text in texts), (panel, width)
    found = summary_json(view)["limits"]
    assert [one["other_programs"] for one in found] == [delayed and delayed / 10] * len(found)
    by = {"the device": "device", "the host": "host", "other programs": "other_programs"}
    told = [next((by[name] for name in by if line.startswith(f"{name} limit")), None) for line in words]
    assert [one["by"] for one in found] == (told if told[0] else told[1:])
    assert found[-1]["host_waits"] <= found[-1]["host_waits_at_most"]


def test_steps_that_launch_prompts_and_the_others_have_their_number_and_share_of_the_time() -> None:
    view = replayed("h200-8b")
    device, host = found = summary_json(view)["limits"]
    assert [(one["by"], one["steps"]) for one in found] == [
        ("device", "launching no prompts"), ("host", "launching prompts"),
    ]  # fmt: skip
    assert device["number_of_steps"] + host["number_of_steps"] == 743
    assert device["share_of_time"] + host["share_of_time"] == pytest.approx(1.0, abs=1e-4)
    assert device["share_of_time"] > host["share_of_time"]  # what matters most is first
    words = [
        f"the {one['by']} limits steps {one['steps']} ({one['number_of_steps']}, {100 * one['share_of_time']:.0f} % of "
        f"the time): the host waits {100 * one['host_waits']:.0f} % of their time" for one in found
    ]  # fmt: skip
    assert summary(view)[-2:] == [f"{line} · last 743 steps" for line in words]
    for panel in (StepTimings(), Waterfall()):
        rows = drawn(panel, view, 118, 30)
        assert all(any(row.startswith(text) for row in rows) for text in words), panel
    rows = drawn(StepTimings(), view, 56, 9)
    assert [row.rstrip() for row in rows[-2:]] == [
        f"{one['by']} limits {100 * one['share_of_time']:.0f} % of the time: {one['steps'][10:]} launched"
        for one in found
    ]


def test_a_reading_of_the_delays_is_for_all_steps_since_the_one_before_and_none_after_it() -> None:
    third = recorded(1.0, 9.0, 0.0, lambda step: step % 3 == 0)  # the last of 159 steps, 158, is not read
    ended = recorded(1.0, 9.0, 3.0, lambda step: step < 50)
    alone = recorded(1.0, 9.0, 0.0, lambda step: step < 50)
    never = recorded(1.0, 9.0, None)
    for view, steps, share in ((third, 157, 0.0), (ended, 50, 0.3), (alone, 50, 0.0), (never, 0, None)):
        assert {one["other_programs_steps"] for one in summary_json(view)["limits"]} == {steps}
        assert {one["other_programs"] for one in summary_json(view)["limits"]} == {share}
    known = "(other programs: known for 50 of 159 steps)"
    assert "known for" not in " ".join(summary(third))
    assert f"another program had the core for 30 % of the time {known} · last 159 steps" in summary(ended)
    assert f"the device limits: the host waits 90 % of the time {known} · last 159 steps" in summary(alone)
    assert any(known in row for row in drawn(StepTimings(), alone, 118, 30))
    told = [str(tell(third, "step", step).lines) for step in (1, 3)]
    assert "on the core not read in this step" in told[0] and "on the core 0.00 ms" in told[1]


def test_a_narrow_line_is_a_sentence() -> None:
    prompts, decodes = " steps launching prompts", " steps launching no prompts"
    unknown, known = (0.3, 0.9), (0.8, 0.9)
    for width, limit, words in (
        (44, Limit("", 100, unknown, 0.3), "what limits the other time is unknown"),
        (44, Limit(prompts, 100, unknown, 0.3, 53, 0.6), "what limits 60 % of the time is unknown"),
        (62, Limit(prompts, 100, unknown, 0.0, 53, 0.6), "what limits 60 % of the time is unknown: prompts launched"),
        (44, Limit(decodes, 100, known, 0.3, 53, 0.6), "device limits 60 % (without other programs)"),
        (44, Limit(decodes, 100, known, 0.0, 53, 0.6), "device limits 60 % of the time"),
        (44, Limit("", 100), "what limits the speed is unknown"),
    ):
        assert "".join(limit.told(width)) == words
