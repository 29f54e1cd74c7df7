"""Writes a trace for ui.perfetto.dev: the spans of the waterfall (viewmodel/history/spans.py), marks and counters.

The format is Chrome's trace events, which Perfetto reads. Times begin with the recording. As in the
waterfall, long pauses, slow motion and long times without work are shortened. The details of a slice of the host give
its measured time.

    requests   for each request: spans for waiting, the chunks of its prompt and decoding, and marks for decisions
    host       the parts of each step, in order of execution, and the pauses of the host
    device     the steps on the device, if their times are known; "perhaps": see Timeline.device there
    counters   blocks by state, running and waiting requests
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.trace.kind import Reader, Record, kind_of, named, time_of
from engine.trace.state import State
from minitui.text import count, exact, match_reason
from minitui.trace.reader import Part, TraceReader
from minitui.viewmodel.history.lane import OPEN, Lane
from minitui.viewmodel.history.lanes import Lanes
from minitui.viewmodel.history.spans import LAUNCH_OR_WAIT, Span, Timeline
from minitui.viewmodel.history.steps import StepRow, Steps
from minitui.viewmodel.state.side_groups import strips, unit
from minitui.visible import json_text

HOST, DEVICE, REQUESTS = 1, 2, 3  # Perfetto groups tracks by process
STAGES, PAUSES = 1, 2  # the tracks of the host
NAMES = {
    "wait": "wait for the device", "gc": "garbage collection", "delayed": "another program on the core",
    "stop": "stopped by a signal", "queued": "waiting", "decode": "decoding",
    LAUNCH_OR_WAIT: "launch or wait for the device: the engine does not report which",
}
Event = dict[str, Any]


class _Converter(Reader):
    """Converts records to events. A section is a part of the recording without a gap."""

    def __init__(self, reader: TraceReader) -> None:
        self.reader = reader
        self.origin = 0.0  # the beginning of the recording on the axis
        self.begun: dict[int, float] = {}  # request -> beginning of its track
        self._begin_section(reader.part(0))

    def _begin_section(self, part: Part, cut_ms: float = 0.0) -> None:
        self.state: State = part.state
        self.steps = Steps(max(1, self.reader.last_planned - self.state.step + 2))
        self.steps.cut_ms = cut_ms
        self.steps.adopt(self.state)
        self.lanes = Lanes()
        self.lanes.step = self.state.step
        self.moments: list[tuple[float, Event]] = []  # marks and counters: engine time, event
        for request in self.state.requests.values():
            self.lanes.adopt(request, self.state.computed(request))
        self.section_t = part.snapshot["t"] or (time_of(part.records[0]) if part.records else 0.0)

    def events(self) -> Iterator[Event]:
        self.origin = self.section_t * 1e3
        yield from self._names()
        for part, missing in self.reader.parts():
            if missing:
                yield from self._section(set(part.state.requests))
                self._begin_section(part, self.steps.cut_ms)
            for record in part.records:
                self._fold(record)
        yield from self._section(None)

    def _names(self) -> Iterator[Event]:
        info = self.reader.info
        about = f"{info.model} on {info.device}"
        ends = (named(record) for record in self.reader.records() if kind_of(record) == "time")
        times = any(end.device_ms is not None for end in ends)
        device = "device" if times else "device: the engine does not report its times"
        for pid, name in ((HOST, f"host: {about}"), (DEVICE, device), (REQUESTS, "requests")):
            yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
            yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        for pid, tid, name in ((HOST, STAGES, "stages"), (HOST, PAUSES, "pauses"), (DEVICE, 1, "steps")):
            yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}

    # ---- records

    def _fold(self, record: Record) -> None:
        t = time_of(record)
        mark = self.read(record)
        if mark is not None:
            self.moments.append((t, {"ph": "i", "s": "t", **mark}))
        self.steps.read(record)
        self.lanes.read_at(record, t)
        self.state.apply(record)
        if kind_of(record) == "submit":
            self.lanes.submit(self.state.requests[named(record).request])
        if kind_of(record) == "time":
            self.moments += ((t, counter) for counter in self._counters())

    # These handlers return the mark of a decision.

    def on_evict(self, node: int, blocks: int, reason: str) -> Event:
        args = {"node": node, "reason": reason}
        return {"pid": HOST, "tid": STAGES, "name": f"evict {count(blocks, 'block')}", "args": args}

    def on_lose(self, group: int, pages: list[int], reason: str) -> Event:
        side = self.state.groups[group].group
        what = f"evict {count(len(pages), unit(side))} of {side.name}"
        return {"pid": HOST, "tid": STAGES, "name": what, "args": {"reason": reason}}

    def on_fail(self, step: int, error: str) -> Event:
        return {"pid": HOST, "tid": STAGES, "name": f"step {step} failed", "args": {"error": error}}

    def on_admit(self, request: int, row: int, reason: str) -> Event | None:
        return self._of_request(request, f"admitted ({reason})", row=row)

    def on_match(self, request: int, tokens: int, stop: str, at: int, detail: str) -> Event | None:
        hit = "cached again" if self.lanes.resumed(request) else "hit"
        args = {"why the match ended": match_reason(stop, at, tokens, detail), "detail": detail}
        return self._of_request(request, f"{hit}: {tokens} tokens" if tokens else "miss", **args)

    def on_preempt(self, request: int, reason: str) -> Event | None:
        return self._of_request(request, "preempted", reason=reason)

    on_requeue = on_preempt

    def on_wait(self, request: int, reason: str) -> Event | None:
        return self._of_request(request, "not admitted", reason=reason)

    def _of_request(self, request: int, name: str, **args: Any) -> Event | None:
        return {"pid": REQUESTS, "tid": request, "name": name, "args": args} if request in self.lanes.lanes else None

    def _counters(self) -> Iterator[Event]:
        free, active, shared, cached = self.state.counts
        values = {"active": active, "shared": shared, "cached": cached, "free": free}
        yield {"ph": "C", "pid": HOST, "name": "KV blocks", "args": values}
        for strip in strips(self.state)[1:]:
            values = dict(zip(("free", "active", "shared", "cached"), strip.counts, strict=True))
            yield {"ph": "C", "pid": HOST, "name": f"{strip.name}: {strip.unit}s", "args": values}
        running = sum(1 for request in self.state.requests.values() if request.state == "running")
        yield {
            "ph": "C", "pid": HOST, "name": "requests",
            "args": {"running": running, "waiting": len(self.state.queue)},
        }

    # ---- sections

    def _section(self, following: set[int] | None) -> Iterator[Event]:
        """Yields the events of the section. `following`: the requests after the gap; None: the recording ends."""
        line = Timeline(self.steps, self.steps.last)
        first, last = line.first, line.last
        for t, event in self.moments:
            yield {**event, "ts": self._us(line.at(t))}
        for tid, spans in ((STAGES, line.host(first, last)), (PAUSES, line.pauses(first, last))):
            for span in spans:
                args = self._args(span)
                if span.kind == "stop":
                    yield {"ph": "i", "s": "t", "pid": HOST, "tid": tid, "name": NAMES["stop"],
                           "ts": self._us(span.begin), "args": args}
                else:
                    yield from self._slice(HOST, tid, NAMES.get(span.kind, span.kind), span.begin, span.end, args)
        for span in line.device(first, last):
            name = f"step {span.step} · {span.kind}"
            yield from self._slice(DEVICE, 1, name, span.begin, span.end, self._args(span))
        for lane in self.lanes.lanes.values():
            yield from self._request(line, lane, following)

    def _args(self, span: Span) -> dict[str, Any]:
        args: dict[str, Any] = {"step": span.step, "ms": exact(span.ms)}
        row = self.steps.get(span.step)
        return args | _about(row) if row is not None else args

    def _request(self, line: Timeline, lane: Lane, following: set[int] | None) -> Iterator[Event]:
        end = line.at(self.state.t)
        name = f"r{lane.id} {self.reader.names.get(lane.request.group, lane.request.group)}".strip()
        if lane.id not in self.begun:
            yield {"ph": "M", "pid": REQUESTS, "tid": lane.id, "name": "thread_name", "args": {"name": name}}
            yield {"ph": "M", "pid": REQUESTS, "tid": lane.id, "name": "thread_sort_index",
                   "args": {"sort_index": lane.id}}
            self.begun[lane.id] = line.at(self.section_t if lane.submitted is None else lane.request.submitted)
        for span in line.request(lane, line.first, line.last):
            args: dict[str, Any] = {"step": span.step}
            what = NAMES.get(span.kind, span.kind)
            if span.kind == "prefill":
                what = f"prefill +{span.tokens}"
                chunk = next(c for c in self.steps.chunks(span.step) if c[0] == lane.id)
                args |= {"from token": chunk[1], "tokens": chunk[2], "samples a token": chunk[3]}
            end = max(end, span.end)
            yield from self._slice(REQUESTS, lane.id, what, span.begin, span.end, args)
        args = {"prompt tokens": lane.request.prompt_tokens}
        if lane.finish_step != OPEN:
            end = line.at(lane.finished_t)
            args |= {"end": lane.finish_reason, "output tokens": lane.output_tokens}
        elif following is None:
            args["end"] = "still running at the end of the recording"
        elif lane.id not in following:
            args["end"] = "finished in a gap of the recording"
        else:
            return
        yield from self._slice(REQUESTS, lane.id, name, self.begun[lane.id], end, args)

    # ---- events

    def _slice(self, pid: int, tid: int, name: str, begin: float, end: float, args: dict[str, Any]) -> Iterator[Event]:
        ts, dur = self._us(begin), round(self._us(end) - self._us(begin), 3)
        if dur > 0:
            yield {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": dur, "args": args}

    def _us(self, ms: float) -> float:
        return round(max(0.0, ms - self.origin) * 1e3, 3)


def _about(row: StepRow) -> dict[str, Any]:
    """Returns the details that all slices of a step have: what it computed and how long it took."""
    args: dict[str, Any] = {"kind": row.kind, "tokens": row.tokens, "prefill tokens": row.prefill_tokens}
    if row.drafts:
        args |= {"draft tokens": row.drafted, "accepted": row.accepted}
    if row.comm_ms is not None:
        args["exchange between ranks, ms"] = exact(row.comm_ms)
    if row.took_ms is not None:
        args["step ms"] = exact(row.took_ms)
    if row.parts is not None and row.parts.stops:
        args["stops"] = row.parts.stops
    return args


def write_perfetto(reader: TraceReader, path: Path) -> None:
    """Write the trace as Chrome trace events, sorted by time; a slice precedes the slices inside it."""
    events = list(_Converter(reader).events())
    events.sort(key=lambda e: (e["ph"] != "M", e.get("ts", 0.0), -e.get("dur", 0.0)))
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(json_text(event) for event in events))
        file.write("\n]}\n")
