"""Spans: what the host and the device did, and the phases of each request, on one axis of time in milliseconds.

The waterfall (tui/widgets/inspect/waterfall.py) and the export for Perfetto (export/perfetto.py) draw these spans.

    host      emit, gate, plan, launch, wait and commit of the steps. With overlap, the host plans and launches step
              n+1 before step n arrives. Recordings of vLLM and of older versions have no "parts" records: what the host
              did between two steps is then "not reported". vLLM does not report its launches either: the time from a
              plan to the next results is then "launch or wait", which the records do not separate
    device    when it computed which step, see device_spans.py. A device that does not report its time has no spans
    pauses    garbage collection, delays by other programs, and stops by a signal. The records give their lengths but
              not their places, so the pauses of a step end where the step ends
    requests  queued, prefill (a span for each chunk), decode, preempted and finished
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from minitui.viewmodel.history.axis import Axis, Span, arrival, ended
from minitui.viewmodel.history.device_spans import device_spans
from minitui.viewmodel.history.lane import DECODING, FINISHED, OPEN, PREEMPTED, PREFILLING, QUEUED, Lane
from minitui.viewmodel.history.steps import GATE_SHOWN, PARTS, StepRow, Steps

NOT_REPORTED = "not reported"  # what the host did is not in the records
LAUNCH_OR_WAIT = "launch or wait"  # both, and the records do not separate them
HOST = ("commit", "emit", "gate", "plan", "launch", "wait", LAUNCH_OR_WAIT, NOT_REPORTED, "idle")
REQUESTS = {QUEUED: "queued", PREFILLING: "prefill", DECODING: "decode", PREEMPTED: "preempted", FINISHED: "finished"}
NOISE = 0.1  # ms: the time between two records may differ by this much from the sum of the measured parts


class Timeline(Axis):
    """The spans of a history of steps, up to step `horizon`. Each method computes only the spans that it returns."""

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
        """Returns what the host did from the commit of the step before `first` to the commit of step `last`.

        No two spans overlap.
        """
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
        """Returns the host's measured parts from the commit of the step `before` to the arrival of the step.

        `ahead`: the next step, if the host planned it before this step arrived.
        """
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
        """Returns the same as `_measured` for a recording without parts, from the moments of the steps.

        After a launch, the host waits. What it does between two steps is not known.
        """
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
        """Returns the steps on the device, see device_spans.py. No two spans overlap."""
        return device_spans(self, first, last)

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
            add("queued", lane.submitted_step, self.at(lane.submitted_t), self.planned(joined))
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
