"""Reads the engine's records and writes a line, as text or JSON, for each request that has finished."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from engine.trace.kind import Record, kind_of, named
from minitui.viewmodel.explain.stalls import explain_gap, in_words
from minitui.viewmodel.history.lane import Lane
from minitui.viewmodel.requests import Requests, by_longest_gap, by_longest_wait
from minitui.viewmodel.view import View
from minitui.viewmodel.words.request_words import (
    as_long,
    first_token_words,
    request_json,
    request_text,
    stall_json,
    why_first,
)
from minitui.viewmodel.words.summary import summary_json
from minitui.viewmodel.words.teller import Line, Teller
from minitui.visible import json_text

if TYPE_CHECKING:
    from minitui.trace.reader import TraceReader

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
            text = request_text(figures, view.texts.group_name(lane.group), why, first)
            t, step = view.history.live.state.t, view.history.steps.committed
            if not figures.live:
                t, step = lane.finished_t, lane.finish_step
            return Line(t, step, "request", text)
        data = request_json(figures, view.texts.group_name(lane.group), reason, first)
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
