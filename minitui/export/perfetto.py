"""Writes a trace for ui.perfetto.dev: a track for each request, the host's stages, and the device's steps.

The format is Chrome's trace events, which Perfetto reads. Start times are in play time (minitui/trace/reader.py), which
leaves out slow motion and long pauses. Durations are as measured.

    requests   for each request: spans for waiting, the chunks of its prompt and decoding, and marks for decisions
    host       plan, launch and commit of each step, in order of execution
    device     the steps on the device, if their times are known
    counters   blocks by state, running and waiting requests
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.trace.records import Record
from engine.trace.state import State
from minitui.text import match_reason
from minitui.trace.reader import TraceReader
from minitui.visible import json_text

HOST, DEVICE, REQUESTS = 1, 2, 3  # Perfetto groups tracks by process
Event = dict[str, Any]


@dataclass(slots=True)
class _Lane:
    """The track of one request. `open`: the name of its open span (empty: none), which began at `since`."""

    id: int
    name: str
    begin: float
    prompt_tokens: int
    open: str = "waiting"
    since: float = 0.0
    drawn_until: float = 0.0  # end of the last span in the output


class _Converter:
    """Converts records to events; follows the state of the engine."""

    def __init__(self, reader: TraceReader) -> None:
        self.reader = reader
        self.state = reader.part(0).state
        self.lanes: dict[int, _Lane] = {}
        self.stages: list[tuple[float, float, str, dict[str, Any]]] = []  # begin, end, name, args
        self.device_until = 0.0  # end of the last device step in the output
        self.exchanged: dict[int, float] = {}  # step -> ms that rank 0 spent in collectives
        self.planned: dict[int, tuple[float, Record]] = {}  # step -> (time, its `step` record)
        self.drafts: dict[int, dict[str, int]] = {}  # step -> numbers of draft and accepted tokens

    def events(self) -> Iterator[Event]:
        yield from self._names()
        t = 0.0
        yield from self._continue_from(self.state, t)
        for index in range(len(self.reader.keyframes)):
            part = self.reader.part(index)
            if index and part.keyframe.seq != self.state.seq:  # the recording has a gap here
                t = part.keyframe.played
                yield from self._continue_from(part.state, t)
            for record, due in zip(part.records, part.due, strict=True):
                t = due
                yield from self._convert(record, t)
                self.state.apply(record)
                if record[2] == "time":
                    yield from self._counters(t)
        for lane in list(self.lanes.values()):
            yield from self._close(lane, t, "still running at the end of the recording")
        yield from self._host()

    def _names(self) -> Iterator[Event]:
        info = self.reader.info
        about = f"{info.get('model', 'engine')} on {info.get('device', '?')}"
        for pid, name in ((HOST, f"host: {about}"), (DEVICE, "device"), (REQUESTS, "requests")):
            yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
            yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        yield {"ph": "M", "pid": HOST, "tid": 1, "name": "thread_name", "args": {"name": "stages"}}
        yield {"ph": "M", "pid": DEVICE, "tid": 1, "name": "thread_name", "args": {"name": "steps"}}

    # ---- requests

    def _continue_from(self, state: State, t: float) -> Iterator[Event]:
        """Continue from `state`, at the start or after a gap: opens and closes lanes to match its requests."""
        self.state = state
        self.planned.clear()
        for lane in list(self.lanes.values()):
            if lane.id not in state.requests:
                yield from self._close(lane, t, "finished in a gap of the recording")
        for id, request in state.requests.items():
            if id not in self.lanes:
                yield from self._begin(id, request.group, request.prompt_tokens, t)
            lane = self.lanes[id]
            yield from self._end_span(lane, t)
            lane.open = "waiting" if request.state != "running" else "decoding" if request.joined_at >= 0 else ""
            lane.since = t

    def _begin(self, id: int, group: str, prompt_tokens: int, t: float) -> Iterator[Event]:
        chat = self.reader.names.get(group, group)
        name = f"r{id} {chat}".strip()
        self.lanes[id] = _Lane(id, name, t, prompt_tokens, since=t, drawn_until=t)
        yield {"ph": "M", "pid": REQUESTS, "tid": id, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": REQUESTS, "tid": id, "name": "thread_sort_index", "args": {"sort_index": id}}

    def _convert(self, record: Record, t: float) -> Iterator[Event]:
        kind, fields = record[2], record[3:]
        if kind == "submit":
            yield from self._begin(fields[0], fields[1], fields[2], t)
        elif kind == "step":
            yield from self._step(record, t)
        elif kind == "comm":
            self.exchanged[fields[0]] = fields[2]
        elif kind == "time":
            yield from self._time(record, t)
        elif kind == "draft":
            self.drafts[fields[0]] = {"draft tokens": sum(n for _, n in fields[1]), "accepted": 0}
        elif kind == "accept":
            self.drafts.setdefault(fields[0], {})["accepted"] = sum(n for _, _, n in fields[1])
        elif kind == "evict":
            yield self._mark(HOST, 1, f"evict {fields[1]} blocks", t, {"node": fields[0], "reason": fields[2]})
        elif kind == "fail":
            self.planned.pop(fields[0], None)  # a failed step has no `time` record
            yield self._mark(HOST, 1, f"step {fields[0]} failed", t, {"error": fields[1]})
        elif fields and isinstance(fields[0], int) and fields[0] in self.lanes:
            yield from self._request(kind, fields, self.lanes[fields[0]], t)

    def _request(self, kind: str, fields: tuple[Any, ...], lane: _Lane, t: float) -> Iterator[Event]:
        if kind == "admit":
            yield from self._end_span(lane, t)
            lane.open = ""
            yield self._mark(REQUESTS, lane.id, f"admitted ({fields[2]})", t, {"row": fields[1]})
        elif kind == "match":
            _, tokens, stop, at, detail = fields
            name = f"hit: {tokens} tokens" if tokens else "miss"
            yield self._mark(REQUESTS, lane.id, name, t, {"why it ended": match_reason(stop, at), "detail": detail})
        elif kind in ("preempt", "requeue"):
            yield from self._end_span(lane, t)
            lane.open, lane.since = "waiting again", t
            yield self._mark(REQUESTS, lane.id, "preempted", t, {"reason": fields[1]})
        elif kind == "wait":
            yield self._mark(REQUESTS, lane.id, "not admitted", t, {"reason": fields[1]})
        elif kind == "finish":
            yield from self._close(lane, t, fields[1], fields[2])

    def _step(self, record: Record, t: float) -> Iterator[Event]:
        _, _, _, step, _, joined, left, _, _ = record
        self.planned[step] = (t, record)
        for id in left:
            if id in self.lanes:
                yield from self._end_span(self.lanes[id], t)
                self.lanes[id].open = ""
        for id in joined:
            lane = self.lanes[id]
            yield from self._end_span(lane, t)
            lane.open, lane.since = "decoding", max(t, lane.drawn_until)

    def _end_span(self, lane: _Lane, t: float) -> Iterator[Event]:
        if lane.open and t > lane.since:
            yield self._slice(REQUESTS, lane.id, lane.open, lane.since, t, {})
            lane.drawn_until = t
        lane.open = ""

    def _close(self, lane: _Lane, t: float, reason: str, output_tokens: int | None = None) -> Iterator[Event]:
        yield from self._end_span(lane, t)
        args: dict[str, Any] = {"prompt tokens": lane.prompt_tokens, "end": reason}
        if output_tokens is not None:
            args["output tokens"] = output_tokens
        yield self._slice(REQUESTS, lane.id, lane.name, lane.begin, max(t, lane.drawn_until), args)
        del self.lanes[lane.id]

    # ---- host and device

    def _time(self, record: Record, t: float) -> Iterator[Event]:
        _, _, _, step, plan_us, launch_us, commit_us, wall_ms, device_ms, kind = record
        planned = self.planned.pop(step, None)
        if planned is None:
            return
        at, (_, _, _, _, prefills, _, _, tokens, _) = planned
        args = {"step": step, "kind": kind, "tokens": tokens, "prefill tokens": sum(chunk[2] for chunk in prefills)}
        args |= self.drafts.pop(step, {})
        if step in self.exchanged:
            args["exchange between ranks, ms"] = self.exchanged.pop(step)
        commit = t - commit_us / 1e6
        launched = at + launch_us / 1e6
        stages = [("plan", at - plan_us / 1e6, at), ("launch", at, min(launched, commit)), ("commit", commit, t)]
        if not self.planned:  # otherwise the host plans the next step during this time
            stages.insert(2, ("wait for the device", launched, commit))
        self.stages += [(begin, end, name, args) for name, begin, end in stages]
        if device_ms is not None:
            begin = max(commit - device_ms / 1e3, self.device_until, 0.0)
            if commit > begin:
                yield self._slice(DEVICE, 1, f"step {step} · {kind}", begin, commit, {**args, "wall ms": wall_ms})
                self.device_until = commit
        for id, start, n, samples in prefills:
            lane = self.lanes.get(id)
            if lane is None:
                continue  # the request has finished: the slice of the whole request covers the chunk
            begin = max(at, lane.drawn_until)
            if commit > begin and not lane.open:
                chunk = {"step": step, "from token": start, "tokens": n, "samples a token": samples}
                yield self._slice(REQUESTS, id, f"prefill +{n}", begin, commit, chunk)
                lane.drawn_until = commit

    def _host(self) -> Iterator[Event]:
        """Yields the host's stages in order of their start. A stage that overlaps an earlier stage is shortened."""
        until = 0.0
        for begin, end, name, args in sorted(self.stages, key=lambda stage: stage[:2]):
            begin = max(begin, until)
            if end > begin:
                yield self._slice(HOST, 1, name, begin, end, args)
                until = end

    def _counters(self, t: float) -> Iterator[Event]:
        state: State = self.state
        free, active, shared, cached = state.counts
        values = {"active": active, "shared": shared, "cached": cached, "free": free}
        yield {"ph": "C", "pid": HOST, "name": "KV blocks", "ts": _us(t), "args": values}
        running = sum(1 for request in state.requests.values() if request.state == "running")
        load = {"running": running, "waiting": len(state.queue)}
        yield {"ph": "C", "pid": HOST, "name": "requests", "ts": _us(t), "args": load}

    # ---- events

    @staticmethod
    def _slice(pid: int, tid: int, name: str, begin: float, end: float, args: dict[str, Any]) -> Event:
        ts = _us(begin)
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": round(_us(end) - ts, 3), "args": args}

    @staticmethod
    def _mark(pid: int, tid: int, name: str, t: float, args: dict[str, Any]) -> Event:
        return {"ph": "i", "s": "t", "pid": pid, "tid": tid, "name": name, "ts": _us(t), "args": args}


def _us(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e6, 3)


def write_perfetto(reader: TraceReader, path: Path) -> None:
    """Write the trace as Chrome trace events, sorted by time; a slice precedes the slices inside it."""
    events = list(_Converter(reader).events())
    events.sort(key=lambda e: (e["ph"] != "M", e.get("ts", 0.0), -e.get("dur", 0.0)))
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(json_text(event) for event in events))
        file.write("\n]}\n")
