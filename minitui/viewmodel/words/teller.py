"""Turns the engine's records into lines of text: one for each decision, step, and run of equal decode steps.

A slow step has its causes, and a step that prompts made long names these prompts. Every minute, and at the end, some
lines sum up: what the cache saved, what is evicted next, and whether the host or the device limits. If the results of a
step do not arrive, a line says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.trace.kind import Record, kind_of, named, seq_of
from minitui.text import count, duration, ms
from minitui.viewmodel.explain.causes import listed
from minitui.viewmodel.explain.stalls import explain_gap, in_words
from minitui.viewmodel.explain.timing import took_words
from minitui.viewmodel.history.lane import Lane
from minitui.viewmodel.history.steps import Chunk, StepRow
from minitui.viewmodel.requests import Requests, by_longest_gap, by_longest_wait
from minitui.viewmodel.view import View
from minitui.viewmodel.words.narrate import computed, why_long
from minitui.viewmodel.words.request_words import (
    as_long,
    first_token_words,
    request_json,
    request_text,
    stall_json,
    why_first,
)
from minitui.viewmodel.words.summary import summary, summary_json
from minitui.visible import json_text, visible_line

if TYPE_CHECKING:
    from minitui.trace.reader import TraceReader

SUMMARY_S = 60.0  # of engine time, between two summaries
STALL_S = 1.0  # without results for this long, a line says so; another one each time that the time has doubled
LONGEST_RUN_S = 2.0  # a run of decode steps that lasts longer gets several lines
# Kinds of events that the text of the event does not name.
KIND_PREFIXES = {"evict": "eviction: ", "lose": "eviction: ", "refuse": "refused: ", "fail": "failure: "}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text about one record, step or run. `step`: -1 before the first step. `kind`: one of
    minitui.viewmodel.history.events.KINDS, "step", "steps", "submit", "stall", "summary" or "gap"."""

    t: float
    step: int
    kind: str
    text: str
    place: str = "step"  # "before step" for what came before the first step; "after step" for what came after the last

    @property
    def where(self) -> str:
        """"step 12", or "before step 0". The text of a line of kind "steps" has it already."""
        return f"{self.place} {self.step:,}" if self.step >= 0 else "before step 0"

    def __str__(self) -> str:
        where = "" if self.kind == "steps" else self.where + "  "
        return f"{self.t:9.2f} s  {where}{visible_line(self.text)}"


@dataclass(slots=True)
class _Run:
    """Consecutive steps in which the same number of requests decoded and nothing else happened."""

    first: StepRow
    last: StepRow
    t: float
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    total_ms: float = 0.0
    worst_ms: float = 0.0
    worst_step: int = -1


class Teller:
    """Turns records into lines of text. Also folds the records into `view`."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._batch: list[Record] = []
        self._last_planned = self._last_ended = -1  # the last step that was planned, and the last that ended
        self._run: _Run | None = None
        self._summed_up: float | None = None  # engine time of the last summary, or of the first record
        self._news = False  # records were folded since the last summary
        self._stall_s = STALL_S  # the next line about a stall comes after this time without results

    def tell(self, records: Iterable[Record]) -> Iterator[Line]:
        """Yields the lines for these records. A line that later records may change is held back."""
        for record in records:
            _, t, kind, *_ = record
            yield from self._while_idle(t)
            self._batch.append(record)
            if kind == "step":
                self._last_planned = named(record).step
            elif kind in ("time", "fail"):
                self._last_ended = named(record).step if kind == "time" else self._last_planned
            # The speed of a request that has finished is known with the time of its last step.
            timed = self._last_ended >= self._last_planned
            if kind in ("time", "fail", "refuse", "gate", "pace") or (kind == "finish" and timed):
                yield from self._fold()
                yield from self._each_minute(t)

    def stalled(self, seconds: float) -> Iterator[Line]:
        """Yields a line if no record has arrived for `seconds` and requests wait for their tokens."""
        state = self.view.history.live.state
        waiting = [request.id for request in state.requests.values() if request.state == "running"]
        if seconds < STALL_S:
            self._stall_s = STALL_S
        if seconds < self._stall_s or state.gate == "closed" or state.pace > 1 or not waiting:
            return
        self._stall_s = 2 * seconds
        yield from self._flush()
        step, chunks = self._running_step()
        prefills = [request for request, *_ in chunks]
        text = f"no results for {duration(seconds * 1e3)} so far"
        if step is not None:
            text += f"; step {step:,}{f' (prefill of {listed(prefills)})' if prefills else ''} has not ended"
        names = [f"r{id}" for id in (waiting if len(waiting) <= 4 else waiting[:3])]
        names += [f"{len(waiting) - 3} more"] if len(waiting) > 4 else []
        whose = " and ".join(", ".join(names).rsplit(", ", 1))
        yield self._stall(seconds, step, prefills, waiting, f"{text}; waiting for tokens: {whose}")

    def _running_step(self) -> tuple[int | None, list[Chunk]]:
        """Returns the step whose results come next, and its chunks of prompts; None if no such step is planned."""
        row = self.view.history.steps.get(self.view.history.steps.committed + 1)
        if row is not None:
            return row.step, row.chunks
        planned = (named(record) for record in self._batch if kind_of(record) == "step")
        return next(((record.step, record.prefills) for record in planned), (None, []))

    def _stall(self, seconds: float, step: int | None, prefills: list[int], waiting: list[int], text: str) -> Line:
        """Returns the line about a step that has not ended. `waiting`: the requests that wait for its tokens."""
        state = self.view.history.live.state
        return Line(state.t + seconds, state.step, "stall", text)

    def _each_minute(self, t: float) -> Iterator[Line]:
        """Yields a summary if the last one is old. `t`: the engine time of the record that was folded last."""
        self._news = True
        if self._summed_up is None:
            self._summed_up = t
        elif t - self._summed_up >= SUMMARY_S:
            self._summed_up, self._news = t, False
            yield from self.summary()

    def idle(self, seconds: float) -> Iterator[Line]:
        """Yields a summary if a minute has passed and no record has arrived for `seconds`."""
        yield from self._while_idle(self.view.history.live.state.t + seconds)

    def _while_idle(self, t: float) -> Iterator[Line]:
        """Yields a summary if a minute ended while the engine was idle, before engine time `t`. The working time
        advances to this moment, as in the panels. Minutes without records have no summary."""
        view, since = self.view, self._summed_up
        closed = view.history.live.state.gate == "closed"
        if since is None or t - since < SUMMARY_S or self._batch or not view.moment.idle or closed:
            return
        self._summed_up = t - (t - since) % SUMMARY_S
        if self._news:
            self._news = False
            view.history.rates.advance(since + SUMMARY_S)
            yield from self.summary()

    def summary(self) -> Iterator[Line]:
        """Yields lines that sum up this moment."""
        for text in summary(self.view):
            yield Line(self.view.history.rates.t, self.view.history.steps.committed, "summary", text)

    def rest(self) -> Iterator[Line]:
        """Yields the lines held back so far."""
        yield from self._fold()
        yield from self._flush()

    def tell_all(self, reader: TraceReader) -> Iterator[Line]:
        """Yields the lines of a whole recording, with one line for each gap in its records. Their times begin with the
        recording, as in the bar and the waterfall of a replay."""
        records = reader.part(len(reader.keyframes) - 1).records
        planned = max((named(record).step for record in records if kind_of(record) == "step"), default=reader.last_step)
        for line in self._whole(reader):
            line = replace(line, t=line.t - self.view.history.origin)
            if line.step > planned:  # the recording ended before this step began
                line = replace(line, step=planned, place="after step")
            elif line.step <= reader.step_before:
                line = replace(line, step=reader.first_step, place="before step")
            yield line

    def _whole(self, reader: TraceReader) -> Iterator[Line]:
        for part, missing in reader.parts():
            if missing is not None:
                yield from self.rest()
                self.view.reset(part.snapshot, None if missing else reader.records())
            if missing:
                yield Line(part.state.t, part.keyframe.step, "gap", f"({missing:,} records are missing here)")
            yield from self.tell(part.records)
        yield from self.rest()
        yield from self._end()

    def _end(self) -> Iterator[Line]:
        """Yields the lines at the end of a recording."""
        yield from self.summary()

    def _fold(self) -> Iterator[Line]:
        batch, self._batch = self._batch, []
        if not batch:
            return
        view = self.view
        view.fold(batch)
        events = view.history.events.since(seq_of(batch[0]))
        submits = [named(record) for record in batch if kind_of(record) == "submit"]
        ended = [view.history.steps.get(named(record).step) for record in batch if kind_of(record) == "time"]
        rows = [row for row in ended if row is not None]
        quiet = not events and not submits and all(row.kind == "decode" for row in rows)
        if quiet:
            for row in rows:
                yield from self._extend(row)
            return
        yield from self._flush()
        lines = [
            Line(r.t, view.history.lanes.lanes[r.request].submitted_step, "submit", self._submit(r))
            for r in submits if r.request in view.history.lanes.lanes
        ]
        lines += [
            Line(event.record.t, event.step, event.kind, KIND_PREFIXES.get(event.kind, "") + view.texts.event(event))
            for event in events
        ]
        yield from sorted(lines, key=lambda line: line.t)
        for row in rows:
            yield Line(row.ended or row.t, row.step, "step", step_text(row, view) + self.why(row))

    def why(self, row: StepRow | None) -> str:
        """Returns " · expected 6.9 ms, +83.9: garbage collection 80.1" for a step that took long; else an empty
        string."""
        why = why_long(self.view, row) if row is not None else ""
        return f" · {why}" if why else ""

    def _submit(self, submit: Any) -> str:
        chat = f" of {self.view.texts.group_name(submit.group)}" if submit.group else ""
        return f"r{submit.request}{chat} joins the queue with {count(submit.prompt_tokens, 'prompt token')}"

    def _extend(self, row: StepRow) -> Iterator[Line]:
        run = self._run
        if run is not None and (run.last.decodes != row.decodes or (row.ended or row.t) - run.t > LONGEST_RUN_S):
            yield from self._flush()
            run = None
        if run is None:
            run = self._run = _Run(row, row, row.ended or row.t)
        run.last = row
        run.tokens += row.decodes + row.accepted
        run.drafted += row.drafted
        run.accepted += row.accepted
        took = row.took_ms or 0.0
        run.total_ms += took
        if took > run.worst_ms:
            run.worst_ms, run.worst_step = took, row.step

    def _flush(self) -> Iterator[Line]:
        run, self._run = self._run, None
        if run is None:
            return
        if run.first.step == run.last.step:
            yield Line(run.t, run.first.step, "step", step_text(run.first, self.view) + self.why(run.first))
            return
        n = run.last.step - run.first.step + 1
        requests = count(run.last.decodes, "request")
        verb = "decodes" if run.last.decodes == 1 else "decode"
        steps = f"steps {run.first.step:,} to {run.last.step:,}"
        text = f"{steps}  {requests} {verb} one token per step · {run.tokens:,} tokens"
        if run.drafted:
            text += f" · {run.accepted:,} of {run.drafted:,} drafts accepted"
        if run.total_ms:
            text += f" · {ms(run.total_ms / n)} ms per step"
            why = self.why(self.view.history.steps.get(run.worst_step)).removeprefix(" · ")
            if why or run.worst_ms > 2 * run.total_ms / n:
                text += f", the slowest {ms(run.worst_ms)} ms (step {run.worst_step:,}{': ' if why else ''}{why})"
        yield Line(run.last.ended or run.t, run.first.step, "steps", text)


def step_text(row: StepRow, view: View) -> str:
    """Returns what a step computed, how much of the token budget it used, and how long it took."""
    budget = view.history.live.state.budget
    text = f"{' '.join(computed(view, row)).removesuffix('.')} · {row.tokens:,} of {budget:,} tokens"
    if row.waiting:
        text += f" · {row.waiting:,} waiting"
    if row.took_ms is not None:
        text += f" · {took_words(row)}"
    return text.lstrip(" ·")


FORGET_EVERY = 256  # steps


class RequestTeller(Teller):
    """Tells each request that finishes, with its figures. `json`: a line is a JSON object."""

    def __init__(self, view: View, json: bool = False) -> None:
        super().__init__(view)
        self._json = json
        self._requests = Requests()
        self._ended: list[int] = []  # finished, but not told until the time of their last step is known
        self._waited = _Longest("the longest wait for a first token of all requests")
        self._stalled = _Longest("the longest gap of all requests")

    def tell(self, records: Iterable[Record]) -> Iterator[Line]:
        new = False
        for record in records:
            new = True
            _, t, kind, *_ = record
            yield from self._while_idle(t)
            self._batch.append(record)
            if kind == "time":
                yield from self._fold()
                yield from self._told()
                yield from self._each_minute(t)
                if named(record).step % FORGET_EVERY == 0:
                    self.view.history.lanes.forget_before(self.view.history.steps.first)
        yield from self._fold()
        if not new:
            yield from self._told()

    def rest(self) -> Iterator[Line]:
        yield from self._fold()
        yield from self._told()

    def summary(self) -> Iterator[Line]:
        """Yields lines about the longest wait for a first token and the longest gap of all; in JSON, what Teller sums
        up."""
        if self._json:
            if self.view.history.steps.last >= 0:
                yield JsonLine(0.0, 0, "summary", json_text({"summary": summary_json(self.view)}))
            return
        for longest in (self._waited, self._stalled):
            if longest.told:
                yield Line(self.view.history.rates.t, self.view.history.steps.committed, "longest", str(longest))

    def _stall(self, seconds: float, step: int | None, prefills: list[int], waiting: list[int], text: str) -> Line:
        if not self._json:
            return super()._stall(seconds, step, prefills, waiting, text)
        return JsonLine(0.0, 0, "stall", json_text(stall_json(seconds * 1e3, step, prefills, waiting, text)))

    def tell_all(self, reader: TraceReader) -> Iterator[Line]:
        for line in super().tell_all(reader):
            if not self._json or line.kind != "gap":
                yield line

    def _end(self) -> Iterator[Line]:
        """Yields the requests that have not finished, and the lines of `summary`."""
        for lane in sorted(self.view.history.lanes.active.values(), key=lambda lane: lane.id):
            yield self._line(lane)
        yield from self.summary()

    def _fold(self) -> Iterator[Line]:
        batch, self._batch = self._batch, []
        self.view.fold(batch)
        self._ended += [named(record).request for record in batch if kind_of(record) == "finish"]
        yield from ()

    def _told(self) -> Iterator[Line]:
        ended, self._ended = self._ended, []
        for id in ended:
            lane = self.view.history.lanes.lanes.get(id)
            if lane is not None:
                yield self._line(lane)

    def _line(self, lane: Lane) -> Line:
        view = self.view
        figures = self._requests.of(view, lane)
        gap, first = figures.longest, why_first(view, figures)
        reason = explain_gap(view, lane, gap) if gap is not None else None
        why = in_words(gap, reason) if gap is not None and reason is not None else ""
        if figures.first_so_far_ms is not None:
            self._waited.note(by_longest_wait(figures), f"r{lane.id}, {first_token_words(figures, first)}")
        if gap is not None:
            self._stalled.note(by_longest_gap(figures), f"r{lane.id}, {why}")
        if not self._json:
            text = request_text(figures, view.texts.group_name(lane.request.group), why, first)
            t, step = view.history.live.state.t, view.history.steps.committed
            if not figures.live:
                t, step = lane.finished_t, lane.finish_step
            return Line(t, step, "request", text)
        data = request_json(figures, view.texts.group_name(lane.request.group), reason, first)
        return JsonLine(0.0, 0, "request", json_text(data))


class _Longest:
    """The longest duration of all that were noted, in words, and how many others were as long."""

    def __init__(self, what: str) -> None:
        self._what, self.told = what, ""
        self._rank: tuple[float, ...] = ()
        self._others = 0

    def note(self, rank: tuple[float, ...], text: str) -> None:
        """Note a duration. `rank`: its ms to the microsecond, then what orders equal durations."""
        equal = self._rank[:1] == rank[:1]
        if equal or rank > self._rank:
            self._others = self._others + 1 if equal else 0
        if rank > self._rank:
            self._rank, self.told = rank, text

    def __str__(self) -> str:
        return f"{self._what}{as_long(self._others)}: {self.told}"


class JsonLine(Line):
    """A line that is JSON, without the time and the step of other lines."""

    def __str__(self) -> str:
        return self.text
