"""A run of an engine, to be compared with another run: its clock, its lanes, and its figures.

The clock of a run begins with its first step. Time without work is shortened to at most IDLE_SHOWN; pauses and slow
motion do not count. Two runs on such clocks can be drawn one below the other: the same column is the same time after
the start. In the unit "steps", the clock counts steps, which is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from minitui.text import duration
from minitui.viewmodel.history.lane import DECODING, FINISHED, OPEN, PREEMPTED, PREFILLING, QUEUED, Lane
from minitui.viewmodel.history.spans import REQUESTS, Span
from minitui.viewmodel.history.steps import IDLE_SHOWN, KINDS
from minitui.viewmodel.history.tokens import Arrivals, percentiles
from minitui.viewmodel.view import View

if TYPE_CHECKING:
    from minitui.trace.reader import TraceReader

Value = float | None


@dataclass(frozen=True, slots=True)
class Longest:
    """The longest gap between two tokens: its ms, its request, and the number of the token after the gap."""

    ms: float
    request: int
    token: int


@dataclass(frozen=True, slots=True)
class Quantity:
    """A figure of a run. `name`: its field in RunFigures; `key`: its name in JSON, which says the unit, or what is
    counted; `words`: its name in a sentence.

    `less`: True if less is better, False if more is better, None for neither. `samples`: of a percentile: the field
    with the number of values. `each`: it is not a total, so it is compared also for runs that did different work.
    `told`: a candidate for the sentence about two runs of which nothing else is known, and for "In return".
    `optional`: left out if both runs have none.
    """

    name: str
    key: str
    title: str
    words: str
    less: bool | None
    samples: str
    each: bool
    told: bool
    optional: bool

    @property
    def timed(self) -> bool:
        """True for a duration or a speed, which varies from run to run."""
        return self.key.endswith(("_ms", "_per_second"))

    def of(self, figures: RunFigures) -> Value:
        value = getattr(figures, self.name)
        return None if value is None else float(value)

    def text(self, value: Value) -> str:
        """Returns a value with its unit; a dash if it is not known."""
        if value is None:
            return "–"
        if self.key.endswith("_ms"):
            return duration(value)
        if self.key.endswith("_per_second"):
            return f"{value:,.0f}/s"
        return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _figure(
    key: str, title: str = "", words: str = "", less: bool | None = True, samples: str = "", *, each: bool = False,
    told: bool = False, optional: bool = False,
) -> Any:
    """Returns a field of RunFigures (see Quantity). Without a title, the figure is only in the JSON."""
    return field(metadata={"key": key, "row": (title, words, less, samples, each, told, optional)})


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Totals of a run. Durations are in ms, without pauses and slow motion; None: not known."""

    requests: int = _figure("requests", "requests", "requests", None)
    finished: int = _figure("finished_requests")
    time: float = _figure("time_ms", "time", "time of the run", told=True)
    steps: int = _figure("steps", "steps", "number of steps", told=True)
    replies: int = _figure("reply_tokens", "reply tokens", "number of reply tokens", None)
    tok_s: float | None = _figure(
        "reply_tokens_per_second", "reply tokens a second", "speed", False, each=True, told=True)
    tokens_a_step: float | None = _figure(
        "reply_tokens_per_step", "reply tokens a step", "number of reply tokens a step", False)
    prompt_tokens: int = _figure("prompt_tokens", "prompt tokens", "number of prompt tokens", None)
    cached: int = _figure(  # of new requests, as `computed`
        "prompt_tokens_cached", "  from the cache", "number of prompt tokens from the cache", False)
    computed: int = _figure(
        "prompt_tokens_computed", "  computed", "number of prompt tokens computed", told=True)
    twice: int | None = _figure(  # computed again after a preemption
        "tokens_computed_twice", "tokens computed twice", "number of tokens computed twice", optional=True)
    firsts: int = _figure("first_tokens")  # requests whose time to first token is known
    first_p50: float | None = _figure(
        "first_token_p50_ms", "first token p50", "median time to first token", True, "firsts", each=True, told=True)
    first_p99: float | None = _figure(
        "first_token_p99_ms", "first token p99", "time to first token (p99)", True, "firsts", each=True, told=True)
    gaps: int = _figure("gaps")
    gap_p50: float | None = _figure(
        "gap_p50_ms", "token gap p50", "median gap between tokens", True, "gaps", each=True)
    gap_p99: float | None = _figure(
        "gap_p99_ms", "token gap p99", "gap between tokens (p99)", True, "gaps", each=True, told=True)
    gap_longest: float | None = _figure(
        "longest_gap_ms", "longest token gap", "longest gap between tokens", each=True, told=True)
    longest: Longest | None = _figure("longest_gap")  # noqa: RUF009
    delayed: float | None = _figure(  # time for which the host waited while another program had the core
        "host_waited_for_core_ms", "waited for a core", "time for which the host waited for a core", optional=True)
    preemptions: int = _figure(
        "preemptions", "preemptions", "number of preemptions", told=True, optional=True)
    evicted: int | None = _figure(
        "blocks_evicted", "blocks evicted", "number of evicted blocks", optional=True)
    drafted: int = _figure("draft_tokens", "drafts checked", "number of drafts checked", None, optional=True)
    accepted: int = _figure(
        "draft_tokens_accepted", "drafts accepted", "number of drafts accepted", None, optional=True)


KEYS = {one.name: one.metadata["key"] for one in fields(RunFigures)}  # a figure -> its key in JSON
QUANTITIES = tuple(
    Quantity(name, KEYS[name], *row)
    for name, row in ((one.name, one.metadata["row"]) for one in fields(RunFigures)) if row[0]
)


SCORED = "score: "  # begins the bookmark with the figure of an exercise
DRAFTS, STALL = "drafts", "stall"  # parts of a decode phase: drafts were accepted; the longest gap between two tokens
STALLED, FEW = 3.0, 4  # a gap is a stall from this multiple of the median, if there are at least FEW gaps


class Clock:
    """The places at which the steps of a run begin and end, in ms or in steps since the run's start."""

    def __init__(self, first: int, begins: np.ndarray, ends: np.ndarray) -> None:
        self.first, self.begins, self.ends = first, begins, ends

    @property
    def end(self) -> float:
        """The end of the last step; 0 without steps."""
        return float(self.ends[-1]) if len(self.ends) else 0.0

    def begin_of(self, step: int) -> float:
        """Returns the begin of a step; of a later step, the end of the run."""
        at = max(0, step - self.first)
        return float(self.begins[at]) if at < len(self.begins) else self.end

    def end_of(self, step: int) -> float:
        """Returns the end of a step; of a step before the run, 0."""
        at = min(step - self.first, len(self.ends) - 1)
        return float(self.ends[at]) if at >= 0 else 0.0

    def step_at(self, place: float) -> int | None:
        """Returns the step that runs at a place; None if no step runs there."""
        at = int(np.searchsorted(self.begins, place, "right")) - 1
        return self.first + at if at >= 0 and place < self.ends[at] else None

    def ended_by(self, place: float) -> int:
        """Returns the last step that has ended at a place; the step before the run if none has."""
        return self.first + int(np.searchsorted(self.ends, place, "right")) - 1


@dataclass(frozen=True)
class Totals:
    """A run of which only the figures are known: it can be compared in words."""

    name: str
    figures: RunFigures
    forgotten = False
    stopped = ""
    lanes = None  # not known


class Run:
    """A run: what a view has folded since its last snapshot, up to its `run_end`. The view may still fold records."""

    def __init__(self, view: View, name: str = "") -> None:
        self.view, self.name = view, name or view.run_name
        self._read()

    def refresh(self) -> None:
        """Read the view again if it has folded records since."""
        if self.moment != self._moment():
            self._read()

    def _moment(self) -> tuple[object, int, int]:
        return self.view.history.steps, self.view.history.steps.committed, self.view.history.live.state.seq

    def _read(self) -> None:
        self.moment = self._moment()  # changes with each reading of new records
        steps = self.view.history.steps
        self.first = max(steps.first, 0)
        self.last = min(steps.committed, self.view.run_end) if steps.first >= 0 else -1
        self._at = steps.indices(self.first, self.last)
        self.forgotten = steps.last - self.first + 1 >= steps.capacity  # the run has more steps than are kept
        alive = (lane for lane in self.view.history.lanes.lanes.values() if lane.finish_step >= self.first)
        self.lanes = sorted((one for one in alive if one.submitted_step <= self.view.run_end), key=lambda lane: lane.id)
        self.clocks = {"ms": self._clock_ms(), "steps": self._clock_steps()}
        self.arrivals = {lane.id: self.view.history.tokens.arrivals(lane, self.last) for lane in self.lanes}
        written = np.zeros(len(self._at) + 1, np.int64)
        for found in self.arrivals.values():
            kept = found.steps >= self.first
            np.add.at(written, found.steps[kept] - self.first + 1, (found.last - found.first + 1)[kept])
        self._written = written.cumsum()
        self._figures: RunFigures | None = None
        self._spans: dict[tuple[str, int], list[Span]] = {}

    @property
    def stopped(self) -> str:
        """A sentence if the run ended with a failed step, before its requests did; else empty."""
        steps = self.view.history.steps
        if not steps.committed < steps.last == steps.last_ended or all(one.finish_step != OPEN for one in self.lanes):
            return ""
        failed = (event.record.error for event in self.view.history.events.newest_first() if event.kind == "fail")
        return f"{self.name or 'this run'} stopped at step {steps.last:,}: {next(failed, '')}."

    # ---- the clock

    def _clock_ms(self) -> Clock:
        steps = self.view.history.steps
        if not len(self._at):
            return Clock(self.first, np.empty(0), np.empty(0))
        arrived, took = (steps.column(name)[self._at] for name in ("arrived", "took"))
        timed = ~np.isnan(arrived)  # a failed step has no times
        ends = np.maximum.accumulate(np.where(timed, arrived * 1e3, -np.inf))
        begins = np.where(timed, ends - took, ends)
        begins[1:] = np.maximum(begins[1:], ends[:-1])  # a step counts from the results of the step before
        if not timed.any():
            return self._clock_steps()
        start = begins[np.argmax(timed)]
        begins, ends = np.maximum(begins, start), np.maximum(ends, start)
        cut = np.full(len(begins), start)
        waits = begins[1:] - ends[:-1]
        for i in np.flatnonzero(waits > IDLE_SHOWN).tolist():
            step = self.first + i
            if not any(lane.submitted_step <= step < lane.finish_step for lane in self.lanes):  # else: a stall
                cut[i + 1 :] += waits[i] - IDLE_SHOWN
        return Clock(self.first, begins - cut, ends - cut)

    def _clock_steps(self) -> Clock:
        numbers = np.arange(len(self._at), dtype=float)
        return Clock(self.first, numbers, numbers + 1)

    # ---- spans

    def steps_between(self, unit: str, begin: float, end: float) -> list[Span]:
        """Returns the steps between two places of a clock; their kinds are "decode", "mixed" or "prefill"."""
        clock, steps = self.clocks[unit], self.view.history.steps
        low = max(0, int(np.searchsorted(clock.ends, begin, "right")))
        high = min(len(clock.begins), int(np.searchsorted(clock.begins, end, "left")))
        at = self._at[low:high]
        return [
            Span(KINDS[kind], self.first + i, float(clock.begins[i]), float(clock.ends[i]),
                 float(clock.ends[i] - clock.begins[i]))
            for i, kind in zip(range(low, high), steps.kinds(at).tolist(), strict=True)
        ]

    def phases(self, unit: str, lane: Lane) -> list[Span]:
        """Returns the phases of a request on a clock: the kinds of REQUESTS, DRAFTS and STALL."""
        known = self._spans.get((unit, lane.id))
        if known is None:
            known = self._spans[unit, lane.id] = self._phases(unit, self.clocks[unit], lane)
        return known

    def _phases(self, unit: str, clock: Clock, lane: Lane) -> list[Span]:
        if not len(clock.begins):
            return []
        spans: list[Span] = []
        finished = self._finish(clock, lane)

        def add(kind: str, step: int, begin: float, end: float) -> None:
            end = min(end, clock.end if finished is None else finished)
            begin = max(begin, spans[-1].end if spans else 0.0)
            if end > begin:
                spans.append(Span(kind, step, begin, end, end - begin))

        phases = [*lane.spans, [FINISHED, OPEN, OPEN]]
        joined = next(first for code, first, _ in phases if code != QUEUED)
        if lane.submitted_step >= self.first and joined > self.first:
            at = clock.begin_of(joined)
            waited = at - clock.begin_of(lane.submitted_step)
            if unit == "ms" and lane.ttft is not None:
                waited = lane.ttft[0]
            add("queued", lane.submitted_step, at - waited, at)
        for (code, first, last), (_, following, _) in pairwise(phases):
            if last < self.first or first > self.last:
                continue
            if code == QUEUED:
                if first > joined:
                    add("queued", first, clock.begin_of(first), clock.begin_of(following))
            elif code in (PREFILLING, DECODING):
                add(REQUESTS[code], first, clock.begin_of(first), clock.end_of(last))
            elif code == PREEMPTED:
                place = clock.begin_of(first)
                spans.append(Span(REQUESTS[code], first, place, place, 0.0))
        for begun, ended in lane.gains:
            spans = _marked(spans, Span(DRAFTS, begun, clock.begin_of(begun), clock.end_of(ended), 0.0))
        if unit == "ms" and (stall := self._stall(clock, lane)) is not None:
            spans = _marked(spans, stall)
        if finished is not None:
            spans.append(Span("finished", lane.finish_step, finished, finished, 0.0))
        return spans

    def _stall(self, clock: Clock, lane: Lane) -> Span | None:
        """Returns the longest gap between two tokens of a request, if it is much longer than its other gaps."""
        found: Arrivals = self.arrivals[lane.id]
        gaps = np.diff(found.at)
        if len(gaps) < FEW or gaps.max() < STALLED * np.median(gaps):
            return None
        at = int(gaps.argmax())
        before, after = int(found.steps[at]), int(found.steps[at + 1])
        return Span(STALL, after, clock.end_of(before), clock.end_of(after), float(gaps[at]) * 1e3)

    def _finish(self, clock: Clock, lane: Lane) -> float | None:
        """Returns the place at which a request finished: the end of the step of its last token."""
        if lane.finish_step == OPEN:
            return None
        found: Arrivals = self.arrivals[lane.id]
        return clock.end_of(int(found.steps[-1]) if len(found) else lane.finish_step)

    # ---- figures

    def written_by(self, unit: str, place: float) -> int:
        """Returns the number of tokens of all replies that have arrived at a place of a clock."""
        return int(self._written[max(0, self.clocks[unit].ended_by(place) - self.first + 1)])

    def doing(self, unit: str, place: float) -> dict[str, int]:
        """Returns {"decode": number of requests, "prefill": …, "queued": …, "finished": …} at a place of a clock."""
        counts = dict.fromkeys(("decode", "prefill", "queued", "finished"), 0)
        for lane in self.lanes:
            spans = self.phases(unit, lane)
            if spans and spans[-1].kind == "finished" and spans[-1].begin <= place:
                counts["finished"] += 1
                continue
            kind = next((span.kind for span in spans if span.begin <= place < span.end), "")
            if kind:
                counts["decode" if kind in (DRAFTS, STALL) else kind] += 1
        return counts

    @property
    def figures(self) -> RunFigures:
        """The totals of the run so far."""
        if self._figures is None:
            self._figures = self._count()
        return self._figures

    def _count(self) -> RunFigures:
        lanes, time = self.lanes, self.clocks["ms"].end
        firsts = np.array([sum(lane.ttft) for lane in lanes if lane.ttft is not None])
        first_p50, first_p99 = percentiles(firsts) if len(firsts) else (None, None)
        gaps, longest = self._gaps()
        gap_p50, gap_p99 = percentiles(gaps) if len(gaps) else (None, None)
        replies, n = int(self._written[-1]), len(self._at)
        return RunFigures(
            requests=len(lanes), finished=sum(lane.finish_step != OPEN for lane in lanes), steps=n, time=time,
            prompt_tokens=sum(lane.request.prompt_tokens for lane in lanes),
            computed=sum(lane.missed_tokens for lane in lanes),
            cached=sum(lane.request.cached_tokens - lane.cached_before for lane in lanes),
            twice=None if any(lane.preempted_before for lane in lanes)
            else sum(lane.recomputed(self.last) for lane in lanes),
            replies=replies, drafted=sum(lane.drafted for lane in lanes),
            accepted=sum(lane.accepted for lane in lanes), delayed=self._delayed(),
            preemptions=sum(lane.preemptions for lane in lanes),
            evicted=self._evicted(), tok_s=replies / time * 1e3 if time else None,
            tokens_a_step=replies / n if n else None, firsts=len(firsts), first_p50=first_p50, first_p99=first_p99,
            gaps=len(gaps), gap_p50=gap_p50, gap_p99=gap_p99,
            gap_longest=None if longest is None else longest.ms, longest=longest,
        )

    def _gaps(self) -> tuple[np.ndarray, Longest | None]:
        """Returns (the gaps between the tokens of all requests in ms, the longest of them)."""
        gaps, longest = [np.empty(0)], None
        for id, found in self.arrivals.items():
            own = np.diff(found.at) * 1e3
            gaps.append(own)
            if len(own) and (longest is None or own.max() > longest.ms):
                at = int(own.argmax())
                longest = Longest(float(own[at]), id, int(found.first[at + 1]))
        return np.concatenate(gaps), longest

    def _delayed(self) -> float | None:
        delayed, wait = (self.view.history.steps.column(f"part:{name}")[self._at] for name in ("delayed", "wait"))
        known = delayed[~np.isnan(delayed) & ~np.isnan(wait)]  # without a wait, the parts of a step are not recorded
        return float(known.sum()) if len(known) else None

    def _evicted(self) -> int | None:
        """Returns the number of evicted blocks; None if some events of the run are no longer kept."""
        events = self.view.history.events
        if events.count > len(events):
            return None
        evictions = (one for one in events.since(0) if one.kind == "evict" and one.step <= self.view.run_end)
        return sum(event.record.blocks for event in evictions)


def _marked(spans: list[Span], mark: Span) -> list[Span]:
    """Returns the spans with the kind and step of `mark` where it covers a decode phase."""
    marked: list[Span] = []
    for span in spans:
        begin, end = max(span.begin, mark.begin), min(span.end, mark.end)
        if span.kind != "decode" or end <= begin:
            marked.append(span)
            continue
        pieces = (
            span._replace(end=begin, ms=begin - span.begin), mark._replace(begin=begin, end=end, ms=end - begin),
            span._replace(begin=end, ms=span.end - end),
        )
        marked += [piece for piece in pieces if piece.end > piece.begin]
    return marked


def scored(readers: Sequence[TraceReader], names: Sequence[str]) -> str:
    """Returns the figures that two runs of an exercise are scored with; empty for other recordings."""
    parts = [f"{name}: {text.removeprefix(SCORED)}" for reader, name in zip(readers, names, strict=True)
             for _, text in reader.bookmarks if text.startswith(SCORED)]
    return f"The score is of: {'; '.join(parts)}." if parts else ""


def recorded_view(reader: TraceReader, name: str = "", last: int | None = None, on_all_cores: bool = False) -> View:
    """Returns the view at the end of a recording. If records are missing, the view begins after the last gap. `last`:
    records of a part of the file that begins after this step are left out. Raises TraceError if a part of the file
    cannot be read. `on_all_cores`: see TraceReader.parts."""
    view = View()
    view.texts.ids_to_text, view.texts.group_names = reader.decode, reader.names
    for part, missing in reader.parts(on_all_cores):
        if last is not None and part.keyframe.step > last:
            break
        if missing is not None:
            view.reset(part.snapshot, None if missing else reader.records())
        view.fold(part.records)
    view.history.caching = reader.info.prefix_caching is not False
    view.run_name = name
    return view
