"""Spans: what the host and the device did, and the phases of each request, on one axis of time in milliseconds.

The waterfall (tui/widgets/inspect/waterfall.py) and the export for Perfetto (export/perfetto.py) draw these spans.

    host      emit, gate, plan, launch, wait and commit of the steps. With overlap, the host plans and launches step
              n+1 before step n arrives. Recordings of vLLM and of older versions have no "parts" records: what the host
              did between two steps is then "not reported". vLLM does not report its launches either: the time from a
              plan to the next results is then "launch or wait", which the records do not separate
    device    when it computed which step, see `Timeline.device`. A device that does not report its time has no spans
    pauses    garbage collection, delays by other programs, and stops by a signal. The records give their lengths but
              not their places, so the pauses of a step end where the step ends
    requests  queued, prefill (a span for each chunk), decode, preempted and finished
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from minitui.viewmodel.history.lane import DECODING, FINISHED, OPEN, PREEMPTED, PREFILLING, QUEUED, Lane
from minitui.viewmodel.history.steps import GATE_SHOWN, PARTS, StepRow, Steps

NOT_REPORTED = "not reported"  # what the host did is not in the records
LAUNCH_OR_WAIT = "launch or wait"  # both, and the records do not separate them
HOST = ("commit", "emit", "gate", "plan", "launch", "wait", LAUNCH_OR_WAIT, NOT_REPORTED, "idle")
REQUESTS = {QUEUED: "queued", PREFILLING: "prefill", DECODING: "decode", PREEMPTED: "preempted", FINISHED: "finished"}
NOISE = 0.1  # ms: the time between two records may differ by this much from the sum of the measured parts


class Span(NamedTuple):
    """Something that lasted from `begin` to `end`, in ms on the axis; "stop", "preempted" and "finished" are moments.
    `kind`: one of HOST, PAUSES or REQUESTS; for the device "decode", "mixed", "prefill" or "perhaps"; "step" for a
    whole step."""

    kind: str
    step: int  # the step that the work is for
    begin: float
    end: float
    ms: float  # the measured time; the span is shorter if the axis is shortened or a neighbour covers a part
    tokens: int = 0  # prompt tokens of a chunk


class Timeline:
    """The spans of a history of steps, up to step `horizon`. Each method computes only the spans that it returns. The
    axis is the engine's time in ms, except that long delays by pauses and slow motion, and long times without work, are
    shortened (GATE_SHOWN, IDLE_SHOWN in steps.py). `Span.ms` is the time that the engine measured."""

    def __init__(self, steps: Steps, horizon: int) -> None:
        self.steps = steps
        self._known: dict[int, StepRow | None] = {}
        self.first = max(steps.first, 0)
        last = self._timed_before(horizon + 1)
        self.last = -1 if last is None else last.step  # the last step whose times are known; -1: none

    def row(self, step: int) -> StepRow | None:
        """Returns a step; None if it is not kept."""
        if step not in self._known:
            self._known[step] = self.steps.get(step)
        return self._known[step]

    @property
    def end(self) -> float:
        """The end of the last step; 0 without steps."""
        row = self.row(self.last)
        return 0.0 if row is None else ended(row)

    @property
    def begin(self) -> float:
        """The begin of the first step that is kept; 0 without steps."""
        row = self.row(self.first)
        return 0.0 if row is None else self.planned(self.first) - (row.plan_ms or 0.0)

    def at(self, t: float) -> float:
        """Returns the place of an engine time, in seconds, on the axis."""
        return self._place(t, self.steps.since(t, self.steps.last)) if self.steps.last >= 0 else t * 1e3

    def clock(self, place: float) -> float:
        """Returns the engine time, in seconds, of a place on the axis: with the time that the axis leaves out."""
        kept = range(self.first, self.last + 1)
        row = self.row(max(self.first, self.first + bisect_right(kept, place, key=self.planned) - 1))
        return (place + (0.0 if row is None else row.cut_ms)) / 1e3

    def planned(self, step: int) -> float:
        """Returns the moment at which a kept step was planned. Before the first step: its moment; later: the end."""
        step = max(step, self.first)
        row = self.row(step)
        return self.end if row is None else self._place(row.t, step)

    def _place(self, t: float, step: int) -> float:
        """Returns the place of an engine time; `step`: the first step that was planned at `t` or later."""
        before, row = self._timed_before(step), self.row(step)
        while before is not None and t < (before.ended or 0.0):  # planned while earlier steps ran
            before, row = self._timed_before(before.step), before
        while row is not None and row.ended is None and row.step < self.last:  # a failed step has no times
            row = self.row(row.step + 1)
        place = t * 1e3
        if row is None or row.ended is None or before is None:
            known = row or before
            return place - (0.0 if known is None else known.cut_ms)
        if row.t < (before.ended or 0.0):  # between the ends of both steps, the axis has one slope
            share = (t - (before.ended or 0.0)) / max(row.ended - (before.ended or 0.0), 1e-9)
            return ended(before) + share * (ended(row) - ended(before))
        # In a shortened time, the axis stands still until the step begins.
        return max(place - row.cut_ms, min(place - before.cut_ms, arrival(row) - (row.wall_ms or 0.0)))

    def arrived(self, step: int) -> float:
        """Returns the moment at which a step's results arrived; of an unknown step, as `planned`."""
        row = self.row(step)
        return self.planned(step) if row is None or row.ended is None else arrival(row)

    def steps_between(self, begin: float, end: float, most: int) -> tuple[int, int]:
        """Returns the first and the last step with spans between two places; only the last `most` of these steps."""
        kept = range(self.first, self.last + 1)
        last = min(self.last, self.first + bisect_right(kept, end, key=self.planned) + 1)
        first = self.first + bisect_right(kept, begin, key=self.planned) - 2
        return max(first, self.first, last - most + 1), last

    def _timed_before(self, step: int) -> StepRow | None:
        """Returns the last step before `step` whose times are known. A failed step has no times."""
        row = self.row(step - 1)
        while row is not None and row.ended is None:
            row = self.row(row.step - 1)
        return row

    def rows(self, first: int, last: int) -> Iterator[tuple[StepRow | None, StepRow]]:
        """Yields (the timed step before, the step) for the timed steps from `first` to `last`."""
        before = self._timed_before(first)
        for step in range(first, min(last, self.last) + 1):
            row = self.row(step)
            if row is not None and row.ended is not None:
                yield before, row
                before = row

    # ---- spans

    def arrivals(self, first: int, last: int) -> list[Span]:
        """Returns the time of each step: from the arrival of the step before, or from its begin after idle time."""
        spans = []
        for before, row in self.rows(first, last):
            end, took = arrival(row), row.wall_ms or 0.0
            begin = end - took
            if row.parts is not None:
                took = row.parts.took
                begin = end - took - min(row.parts.gate, GATE_SHOWN)
            spans.append(Span("step", row.step, begin if before is None else max(begin, arrival(before)), end, took))
        return spans

    def host(self, first: int, last: int) -> list[Span]:
        """Returns what the host did from the commit of the step before `first` to the commit of step `last`. No two
        spans overlap."""
        spans: list[Span] = []
        until = float("-inf")
        for before, row in self.rows(first, last):
            following = self.row(row.step + 1)
            overlapped = following is not None and row.ended is not None and following.t < row.ended
            ahead = following if overlapped else None
            work = self._derived(before, row, ahead) if row.parts is None else self._measured(before, row, ahead)
            work.append(Span("commit", row.step, arrival(row), ended(row), row.commit_ms or 0.0))
            for span in work:
                if span.begin < until:
                    span = span._replace(begin=until)
                if span.end > span.begin:
                    spans.append(span)
                    until = span.end
        return spans

    def _measured(self, before: StepRow | None, row: StepRow, ahead: StepRow | None) -> list[Span]:
        """Returns the host's measured parts from the commit of the step `before` to the arrival of the step. `ahead`:
        the next step, if the host planned it before this step arrived."""
        parts = row.parts
        assert parts is not None
        gate = min(parts.gate, GATE_SHOWN)
        planned_here = before is None or row.t >= (before.ended or 0.0)  # not while the step before ran
        n = row.step if planned_here else row.step + 1
        work = [("gate", row.step, parts.gate), ("plan", n, parts.plan), ("launch", n, parts.launch)]
        begin = arrival(row) - (parts.took - parts.commit + gate)
        emits = parts.emit
        if planned_here and ahead is not None:  # the first of a run of overlapping steps: two steps were planned
            plan, launch = min(row.plan_ms or 0.0, parts.plan), min(row.launch_ms or 0.0, parts.launch)
            emits = min(max(0.0, arrival(row) - (row.wall_ms or 0.0) - gate - begin), parts.emit)
            work = [
                ("gate", row.step, parts.gate), ("plan", n, plan), ("launch", n, launch),
                ("emit", n, parts.emit - emits), ("plan", n + 1, parts.plan - plan),
                ("launch", n + 1, parts.launch - launch),
            ]
        spans = []
        if before is not None and (gap := begin - ended(before)) > NOISE:
            left_out = row.cut_ms - before.cut_ms - (parts.gate - gate)
            kind = "gate" if row.held else NOT_REPORTED if parts.commit else "idle"
            spans.append(Span(kind, row.step, begin - gap, begin, gap + left_out))
        for kind, step, ms in (("emit", row.step, emits), *work, ("wait", row.step, parts.wait)):
            end = begin + (gate if kind == "gate" else ms)
            spans.append(Span(kind, step, begin, end, ms))
            begin = end
        return spans

    def _derived(self, before: StepRow | None, row: StepRow, ahead: StepRow | None) -> list[Span]:
        """Returns the same as `_measured` for a recording without parts, from the moments of the steps. After a launch,
        the host waits. What it does between two steps is not known."""
        spans: list[Span] = []
        at, left_out = (None, 0.0) if before is None else (ended(before), row.cut_ms - before.cut_ms)
        planned_here = before is None or row.t >= (before.ended or 0.0)
        for step in ((row,) if planned_here else ()) + ((ahead,) if ahead is not None else ()):
            if step.plan_ms is None or step.step > self.last:  # its times have not arrived
                at = arrival(row) if at is None else at
                return [*spans, Span(NOT_REPORTED, row.step, at, arrival(row), arrival(row) - at)]
            begin = arrival(row) - (row.wall_ms or 0.0) if step is row else self.planned(step.step) - step.plan_ms
            if at is not None:
                kind = "gate" if row.held and step is row else NOT_REPORTED
                spans.append(Span(kind, step.step, at, begin, begin - at + left_out))
            planned, left_out = begin + step.plan_ms, 0.0
            spans.append(Span("plan", step.step, begin, planned, step.plan_ms))
            at = min(planned + (step.launch_ms or 0.0), arrival(row))
            if step.launch_ms is not None:
                spans.append(Span("launch", step.step, planned, at, step.launch_ms))
        at = arrival(row) if at is None else at
        rest = NOT_REPORTED if not spans else LAUNCH_OR_WAIT if row.launch_ms is None else "wait"
        return [*spans, Span(rest, row.step, at, arrival(row), arrival(row) - at)]

    def device(self, first: int, last: int) -> list[Span]:
        """Returns the spans of the steps from `first` to `last` whose device times are known. No two spans overlap.

        A record has a step's time on the device, but not where it began. What is known: a device computes the steps in
        order. It begins a step while the host launches it; if the step before has not ended then, when that ends. The
        results arrive on the host when the step has ended. If the host waited for them, the step ended at this moment;
        a pause of the host may have extended its wait. So the end of a step lies between two moments. If these are not
        the same, the device was busy with the step for sure only in a part of this time; the rest is PERHAPS.
        """
        spans: list[Span] = []
        until = float("-inf")

        def add(kind: str, row: StepRow, begin: float, end: float) -> None:
            nonlocal until
            if end > (begin := max(begin, until)):
                spans.append(Span(kind, row.step, begin, end, row.device_ms or 0.0))
                until = end

        ends = _ends(self, first, last)
        for _, row in self.rows(first, last):
            if not row.device_ms:
                continue
            earliest, latest = ends[row.step]
            launched = self.planned(row.step)
            if latest - earliest <= PRECISE:
                earliest = latest = (earliest + latest) / 2
            sure = max(latest - row.device_ms, launched)  # until the earliest end, the device was busy with it
            add(PERHAPS, row, max(earliest - row.device_ms, launched), min(sure, latest))
            add(row.kind, row, sure, earliest)
            add(PERHAPS, row, max(sure, earliest), latest)
        return spans

    def pauses(self, first: int, last: int) -> list[Span]:
        """Returns the pauses of the host, with their ends at the arrival of their step."""
        spans: list[Span] = []
        until = float("-inf")
        for _, row in self.rows(first, last):
            if row.parts is None:
                continue
            end = arrival(row)
            begin = end - row.parts.gc - (row.parts.delayed or 0.0)
            for kind, ms in (("delayed", row.parts.delayed or 0.0), ("gc", row.parts.gc)):
                if ms and begin + ms > until:
                    spans.append(Span(kind, row.step, max(begin, until), begin + ms, ms))
                begin += ms
            if row.parts.stops:
                spans.append(Span("stop", row.step, end, end, 0.0))
            until = max(until, end)
        return spans

    # ---- requests

    def request(self, lane: Lane, first: int, last: int) -> list[Span]:
        """Returns the phases of a request in the steps from `first` to `last`; a phase may reach beyond them."""
        spans: list[Span] = []
        until, now = float("-inf"), self.end
        finished = self.at(lane.finished_t) if lane.finish_step != OPEN else float("inf")

        def add(kind: str, step: int, begin: float, end: float, tokens: int = 0) -> None:
            nonlocal until
            begin, end = max(begin, until), min(end, finished, now)
            if end > begin:
                spans.append(Span(kind, step, begin, end, end - begin, tokens))
                until = end

        phases = [*lane.spans, [FINISHED, OPEN, OPEN]]
        if lane.submitted is not None and lane.submitted_step >= self.first:
            joined = next(first for code, first, _ in phases if code != QUEUED)
            add("queued", lane.submitted_step, self.at(lane.request.submitted), self.planned(joined))
        for (code, begun, last_step), (_, following, _) in pairwise(phases):
            if last_step < first or begun > last + 1:
                continue
            if code == PREFILLING:
                for step in range(max(begun, first), min(last_step, last + 1) + 1):
                    tokens = next((n for id, _, n, _ in self.steps.chunks(step) if id == lane.id), 0)
                    end = self.arrived(step) if step <= self.last else now  # else: in flight
                    add("prefill", step, self.planned(step), end, tokens)
            elif code == DECODING:
                add("decode", begun, self.planned(begun), self.arrived(last_step) if last_step < self.last else now)
            elif code == QUEUED:
                add("queued", begun, self.planned(begun), self.planned(following))
            else:
                place = finished if code == FINISHED else self.planned(begun)
                if place <= now:
                    spans.append(Span(REQUESTS[code], begun, place, place, 0.0))
        return spans


def ended(row: StepRow) -> float:
    """Returns the end of a timed step: its commit."""
    return (row.ended or 0.0) * 1e3 - row.cut_ms


def arrival(row: StepRow) -> float:
    """Returns the moment at which the results of a timed step arrived on the host."""
    return ended(row) - (row.commit_ms or 0.0)


PERHAPS = "perhaps"  # the kind of a span in which the device may have computed the step
WAITED = 0.1  # ms: a shorter wait is the cost of asking the device
PRECISE = 0.25  # ms: if the two moments are not further apart, the step is drawn with its end between them
CHAIN = 64  # steps: the longest run of steps whose ends may follow from each other


class End(NamedTuple):
    """The earliest and the latest end of a step on the device, in ms on the axis."""

    earliest: float
    latest: float


def _ends(axis: Timeline, first: int, last: int) -> dict[int, End]:
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


def _end(axis: Timeline, row: StepRow, ends: dict[int, End]) -> End:
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


def _follows(axis: Timeline, step: int) -> bool:
    """True if the step was launched before the results of the step before it arrived, on an axis that is not
    shortened there."""
    row, before = axis.row(step), axis.row(step - 1)
    if row is None or before is None or before.ended is None or step % CHAIN == 0:
        return False
    return axis.steps.planned_ahead(step) and row.cut_ms == before.cut_ms


def _seen(axis: Timeline, step: int) -> bool:
    """True if the host's wait shows when the step ended."""
    row = axis.row(step)
    return row is not None and row.ended is not None and _waited(axis, row) == 0


def _waited(axis: Timeline, row: StepRow) -> float | None:
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


@dataclass(frozen=True, slots=True)
class StepPart:
    """`kind`: one of step_row.PARTS but "gate", or NOT_REPORTED. `step`: the step that the work was for."""

    kind: str
    step: int
    ms: float | None  # None: not reported; it is then in NOT_REPORTED

    def name(self, step: int) -> str:
        """Returns its name in `step`: "launch of 57" for the launch of another step."""
        return self.kind if self.step == step or self.kind == "commit" else f"{self.kind} of {self.step:,}"


def parts_of(steps: Steps, row: StepRow) -> list[StepPart]:
    """Returns the parts of a timed step. With overlap, it contains the plan and the launch of the next step."""
    if row.took_ms is None:
        return []
    here, ahead = not steps.planned_ahead(row.step), steps.planned_ahead(row.step + 1)
    planned = [row] if here else []
    if ahead and (following := steps.get(row.step + 1)) is not None:
        planned.append(following)
    if row.parts is None:
        return _without_parts(steps, row, planned, here)
    found = []
    for kind in PARTS:
        took = getattr(row.parts, kind)
        if kind in ("plan", "launch") and planned:
            for step in planned[:-1]:  # the first of a run of overlapping steps: two steps were planned
                own = min(getattr(step, f"{kind}_ms") or 0.0, took)
                found.append(StepPart(kind, step.step, own))
                took -= own
            found.append(StepPart(kind, planned[-1].step, took))
        elif kind != "gate":
            found.append(StepPart(kind, row.step, took))
    return found


def _without_parts(steps: Steps, row: StepRow, planned: list[StepRow], here: bool) -> list[StepPart]:
    """Returns the parts that the `time` records tell, and the rest."""
    before, found, left = steps.get(row.step - 1), [], row.took_ms or 0.0
    work: list[tuple[str, int, float | None]] = []
    if not here and before is not None:
        work.append(("commit", row.step, before.commit_ms))
    work += [(kind, step.step, getattr(step, f"{kind}_ms")) for step in planned for kind in ("plan", "launch")]
    for kind, step, took in work:
        part = min(took, left) if took is not None else None
        found.append(StepPart(kind, step, part))
        left -= part or 0.0
    return [*found, StepPart(NOT_REPORTED, row.step, left)]
