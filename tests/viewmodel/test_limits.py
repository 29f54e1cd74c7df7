"""What limits the speed: the host, the device or other programs, each from measured times."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.tui.widgets.inspect.timings import StepTimings
from minitui.tui.widgets.inspect.waterfall import Waterfall
from minitui.viewmodel.compare.runs import recorded_view
from minitui.viewmodel.explain.limits import limits
from minitui.viewmodel.view import View
from minitui.viewmodel.words.summary import summary, summary_json
from tests.tui.panels.test_lesson_panels import drawn

WORK = slice(4, 10)  # of a `parts` record: commit, emit, gate, plan, launch, wait
GATE, WAIT, GC, DELAYED = 6, 9, 10, 11


def recorded(work: float, wait: float, delayed: float | None, read: Callable[[int], bool] = lambda step: True,
             name: str = "small-pool") -> View:
    """A recording in which each step's host works for `work` ms and waits for `wait` ms; `delayed` of both is the time
    in which another program had the core. `read`: the steps that have it."""
    reader, view = TraceReader(find_trace(name)), View()
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


WITHOUT = "apart from that, "


@pytest.mark.parametrize(
    "work, wait, delayed, by, words, brief",
    [
        (1.0, 9.0, 0.0, ["device"], ["the device limits the speed: the host waits for it 90 % of the time"], None),
        (9.0, 1.0, 0.0, ["host"], ["the host limits the speed: it waits for the device only 10 % of the time"], None),
        (1.0, 9.0, None, ["device"],
         ["the device limits the speed: the host waits for it 90 % of the time (other programs: unknown)"],
         ["the device limits the speed: the host waits for it 90 % of the time"]),
        # 0 to 1 of these 3 ms delayed the host's work
        (1.0, 9.0, 3.0, ["device"],
         ["another program had the core for 30 % of the time",
          f"{WITHOUT}the device limits the speed: the host waits for it 86 to 100 % of the rest"],
         ["another program had the core for 30 % of the time",
          "else, the device limits: the host waits for it 86 to 100 % of the rest"]),
        # a host that waits for 60 % of the time, of which others may have most
        (4.0, 6.0, 4.0, [None],
         ["another program had the core for 40 % of the time",
          f"{WITHOUT}limit unknown: the host waits for the device 33 to 100 % of the rest"],
         ["another program had the core for 40 % of the time",
          "else, limit unknown: the host waits for the device 33 to 100 % of the rest"]),
        (9.0, 1.0, 4.0, ["host"],
         ["another program had the core for 40 % of the time",
          f"{WITHOUT}the host limits the speed: it waits for the device only 0 to 17 % of the rest"],
         ["another program had the core for 40 % of the time",
          "else, the host limits: it waits for the device only 0 to 17 % of the rest"]),
        (0.0, 10.0, 7.0, ["other_programs", "device"],
         ["other programs limit the speed: they had the core for 70 % of the time",
          f"{WITHOUT}the device limits the speed: the host waits for it 100 % of the rest"],
         ["other programs limit the speed: they had the core for 70 % of the time",
          "else, the device limits the speed: the host waits for it 100 % of the rest"]),
    ],
)
def test_other_programs_are_told_from_the_host_and_the_device(
    work: float, wait: float, delayed: float | None, by: list[str | None], words: list[str], brief: list[str] | None
) -> None:
    view = recorded(work, wait, delayed)
    lines = [f"{line} · last 159 steps" for line in words]
    assert ["".join(one.told()) for one in limits(view.history.steps, view.moment.horizon)] == lines
    assert summary(view)[-len(lines) :] == lines
    rows = [row.rstrip() for row in drawn(StepTimings(), view, 76, 30)]
    at = next(i for i, row in enumerate(rows) if row.startswith((brief or words)[0]))
    assert [row.removesuffix(" · last 159 steps") for row in rows[at : at + len(brief or words)]] == (brief or words)
    for width in (76, 118):
        texts = ["".join(one.told(width)) for one in limits(view.history.steps, view.moment.horizon)]
        assert all(any(row.startswith(text) for row in drawn(Waterfall(), view, width, 30)) for text in texts)
    found = summary_json(view)["limits"]
    assert [one["by"] for one in found] == by and {one["share_of_time"] for one in found} == {1.0}
    assert [one["other_programs"] for one in found] == [delayed and delayed / 10] * len(found)
    assert found[-1]["host_waits"] <= found[-1]["host_waits_at_most"]


def test_steps_that_launch_prompts_and_the_others_have_their_number_and_share_of_the_time() -> None:
    view = recorded_view(TraceReader(find_trace("h200-8b")))
    view.frame(0.0)
    device, host = found = summary_json(view)["limits"]
    assert [(one["by"], one["steps"]) for one in found] == [
        ("device", "launching no prompts"), ("host", "launching prompts"),
    ]
    assert device["number_of_steps"] + host["number_of_steps"] == 743
    assert device["share_of_time"] + host["share_of_time"] == pytest.approx(1.0, abs=1e-4)
    assert device["share_of_time"] > host["share_of_time"]  # what matters most is first
    words = [
        f"the {one['by']} limits the speed of steps that launch{one['steps'].removeprefix('launching')} "
        f"({one['number_of_steps']} steps, {100 * one['share_of_time']:.0f} % of the time): "
        f"{waits} {100 * one['host_waits']:.0f} % of their time"
        for one, waits in zip(found, ("the host waits for it", "it waits for the device only"), strict=True)
    ]
    assert summary(view)[-2:] == [f"{line} · last 743 steps" for line in words]
    for panel in (StepTimings(), Waterfall()):
        rows = drawn(panel, view, 150, 30)
        assert all(any(row.startswith(text) for row in rows) for text in words), panel
    rows = [row.rstrip() for row in drawn(StepTimings(), view, 76, 30)]  # a reason has a row of its own there
    (claim, why), (second, because) = (re.sub(r"\d+ steps, ", "", line).split(":") for line in words)
    at = rows.index(claim.replace("the speed of ", ""))
    assert rows[at + 1 : at + 4] == [f" {why}", second, f" {because}"]
    rows = drawn(StepTimings(), view, 56, 9)
    assert [row.rstrip() for row in rows[-2:]] == [
        "the device limits steps that launch no prompts", "the host limits the speed of steps that launch prompts",
    ]
