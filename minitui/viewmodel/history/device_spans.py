"""The spans of the device: when it computed each step.

A record has a step's time on the device, but not where it began. What is known:

- A device computes the steps in order. It begins a step while the host launches it; if the step before has not ended
  then, when that ends.
- The results arrive on the host when the step has ended. If the host waited for them, the step ended at this moment. A
  pause of the host (garbage collection, another program) may have extended its wait.

So the end of a step lies between two moments. If these are not the same, the device was busy with the step for sure
only in a part of this time; the rest is "perhaps".
"""

from __future__ import annotations

from typing import NamedTuple

from minitui.viewmodel.history.axis import Axis, Span, arrival
from minitui.viewmodel.history.steps import StepRow

PERHAPS = "perhaps"  # the kind of a span in which the device may have computed the step
WAITED = 0.1  # ms: a shorter wait is the cost of asking the device
PRECISE = 0.25  # ms: if the two moments are not further apart, the step is drawn with its end between them
CHAIN = 64  # steps: the longest run of steps whose ends may follow from each other


class End(NamedTuple):
    """The earliest and the latest end of a step on the device, in ms on the axis."""

    earliest: float
    latest: float


def device_spans(axis: Axis, first: int, last: int) -> list[Span]:
    """Returns the spans of the steps from `first` to `last` whose device times are known. No two spans overlap."""
    spans: list[Span] = []
    until = float("-inf")

    def add(kind: str, row: StepRow, begin: float, end: float) -> None:
        nonlocal until
        if end > (begin := max(begin, until)):
            spans.append(Span(kind, row.step, begin, end, row.device_ms or 0.0))
            until = end

    ends = _ends(axis, first, last)
    for _, row in axis.rows(first, last):
        if not row.device_ms:
            continue
        earliest, latest = ends[row.step]
        launched = axis.planned(row.step)
        if latest - earliest <= PRECISE:
            earliest = latest = (earliest + latest) / 2
        sure = max(latest - row.device_ms, launched)  # from here to the earliest end, the device was busy with the step
        add(PERHAPS, row, max(earliest - row.device_ms, launched), min(sure, latest))
        add(row.kind, row, sure, earliest)
        add(PERHAPS, row, max(sure, earliest), latest)
    return spans


def _ends(axis: Axis, first: int, last: int) -> dict[int, End]:
    """Returns the ends of the steps from `first` to `last`, and of steps beside them that these depend on."""
    while first > axis.first and _follows(axis, first) and not _seen(axis, first - 1):
        first -= 1
    while last < axis.last and _follows(axis, last + 1) and not _seen(axis, last):
        last += 1
    ends: dict[int, End] = {}
    rows = [row for _, row in axis.rows(first, last)]
    for row in rows:
        ends[row.step] = _end(axis, row, ends)
    for row in reversed(rows):  # a step has ended when the next one begins
        following = ends.get(row.step + 1)
        if following is not None and _follows(axis, row.step + 1) and not _seen(axis, row.step):
            after = axis.row(row.step + 1)
            latest = following.latest - ((after.device_ms if after is not None else None) or 0.0)
            earliest = ends[row.step].earliest
            ends[row.step] = End(earliest, max(earliest, min(latest, ends[row.step].latest)))
    return ends


def _end(axis: Axis, row: StepRow, ends: dict[int, End]) -> End:
    """Returns the end of a step, from its own record and the ends of the steps before it."""
    arrived, computed = arrival(row), row.device_ms or 0.0
    begin = axis.planned(row.step)
    launched = arrived if row.launch_ms is None else begin + row.launch_ms
    before = axis.row(row.step - 1)
    if before is not None and before.ended is not None and axis.steps.planned_ahead(row.step):
        known = ends.get(before.step) if _follows(axis, row.step) else None
        if known is None:
            known = End(arrival(before) if _seen(axis, before.step) else begin, arrival(before))
        begin, launched = max(begin, known.earliest), max(launched, known.latest)
    if (waited := _waited(axis, row)) is not None:
        return End(max(min(begin + computed, arrived), arrived - waited), arrived)
    latest = min(arrived, launched + computed)
    return End(min(begin + computed, latest), latest)


def _follows(axis: Axis, step: int) -> bool:
    """True if the step was launched before the results of the step before it arrived, on an axis that is not
    shortened there."""
    row, before = axis.row(step), axis.row(step - 1)
    if row is None or before is None or before.ended is None or step % CHAIN == 0:
        return False
    return axis.steps.planned_ahead(step) and row.cut_ms == before.cut_ms


def _seen(axis: Axis, step: int) -> bool:
    """True if the host's wait shows when the step ended."""
    row = axis.row(step)
    return row is not None and row.ended is not None and _waited(axis, row) == 0


def _waited(axis: Axis, row: StepRow) -> float | None:
    """Returns how long the step may have ended before its arrival, in ms: the pauses of a host that waited for the
    step. None if the host did not wait, or if this is unknown."""
    parts = row.parts
    if parts is None:
        following = axis.row(row.step + 1) if axis.steps.planned_ahead(row.step + 1) else None
        last = row if following is None or following.plan_ms is None else following
        if last.launch_ms is None:
            return None
        return 0.0 if arrival(row) - axis.planned(last.step) - last.launch_ms > WAITED else None
    pauses = parts.gc + (parts.delayed or 0.0)
    # If no next step was found, the search for it is in `wait`. It takes at most as long as planning a step.
    search = 0.0 if axis.steps.planned_ahead(row.step + 1) else row.plan_ms or 0.0
    return pauses if parts.wait - pauses - search > WAITED else None
