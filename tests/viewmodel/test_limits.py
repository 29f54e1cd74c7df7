"""What limits the speed: the host, the device or other programs, each from measured times."""

from __future__ import annotations

from typing import Any

import pytest

from minitui.trace.bundled import find_trace
from minitui.trace.reader import TraceReader
from minitui.tui.widgets.timings import StepTimings
from minitui.tui.widgets.waterfall import Waterfall
from minitui.viewmodel.limits import limits
from minitui.viewmodel.model import View
from minitui.viewmodel.summary import summary, summary_json
from tests.tui.test_lesson_panels import drawn

WORK = slice(4, 10)  # of a `parts` record: commit, emit, gate, plan, launch, wait
GATE, WAIT, GC, DELAYED = 6, 9, 10, 11


def recorded(work: float, wait: float, delayed: float | None) -> View:
    """A recording in which each step's host works for `work` ms and waits for `wait` ms; `delayed` of both is the time
    in which another program had the core."""
    reader, view = TraceReader(find_trace("small-pool")), View()
    view.reset(reader.part(0).snapshot)
    changed: list[Any] = []
    for record in reader.records():
        fields: list[Any] = list(record)
        if fields[2] == "parts":
            fields[WORK] = [round(work * 1e3), 0, 0, 0, 0, round(wait * 1e3)]
            fields[GC], fields[DELAYED] = 0, None if delayed is None else round(delayed * 1e3)
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
                         "the device limits the rest: the host waits 86 to 100 % of it"]),
        # a host that waits for 60 % of the time, of which others may have most
        (4.0, 6.0, 4.0, ["another program had the core for 40 % of the time",
                         "host or device limits the rest? unknown: the host waits 33 to 100 % of it"]),
        (9.0, 1.0, 4.0, ["another program had the core for 40 % of the time",
                         "the host limits the rest: the host waits 0 to 17 % of it"]),
        (0.0, 10.0, 7.0, ["other programs limit: they had the core for 70 % of the time",
                          "the device limits the rest: the host waits 100 % of it"]),
    ],
)  # fmt: skip
def test_other_programs_are_told_from_the_host_and_the_device(
    work: float, wait: float, delayed: float | None, words: list[str]
) -> None:
    view = recorded(work, wait, delayed)
    lines = [f"{line} · last 159 steps" for line in words]
    assert ["".join(one.told()) for one in limits(view.steps, view.horizon)] == lines
    assert summary(view)[-len(lines) :] == lines
    for panel in (StepTimings(), Waterfall()):
        for width in (76, 118):
            rows = drawn(panel, view, width, 30)
            assert all(any(row.startswith(text) for row in rows) for text in words), (panel, width)
    found = summary_json(view)["limits"]
    assert [one["other_programs"] for one in found] == [delayed and delayed / 10] * len(found)
    by = {"the device": "device", "the host": "host", "other programs": "other_programs"}
    told = [next((by[name] for name in by if line.startswith(f"{name} limit")), None) for line in words]
    assert [one["by"] for one in found] == (told if told[0] else told[1:])
    assert found[-1]["host_waits"] <= found[-1]["host_waits_at_most"]
