"""Lanes: the history of each request (lane.py), folded from records."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from itertools import takewhile

from engine.trace.kind import Reader, Record
from engine.trace.views import RequestView
from minitui.viewmodel.history.lane import (
    DECODING,
    FINISHED,
    OPEN,
    PREEMPTED,
    PREFILLING,
    QUEUED,
    Earlier,
    GapStats,
    Lane,
)

LANES_KEPT = 4_096  # lanes of finished requests


class Lanes(Reader):
    """The lanes of the requests in the step history, by id. Of finished requests, only the last LANES_KEPT are kept."""

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        self.active: dict[int, Lane] = {}  # not finished, by id
        self.ended: deque[Lane] = deque()  # finished, in order of finish
        self.newest = -1  # the highest request id seen
        self.step = -1  # the last planned step
        self.ended_step: int | None = None  # the last step with results; None: none since the history began
        self.now = 0.0  # working time at the record being folded
        self._unnumbered: set[int] = set()  # requests from the snapshot; their next token's number is not certain yet

    @property
    def ending(self) -> int:
        """The step whose results finish requests now. Where steps overlap, later steps are planned already."""
        return self.step if self.ended_step is None else min(self.ended_step + 1, self.step)

    def read_at(self, record: Record, now: float) -> None:
        """Fold one record; `now` is its working time."""
        self.now = now
        self.read(record)

    def adopt(self, request: RequestView, computed: int) -> None:
        """Add a request from the snapshot with which the history begins; its lane starts at the next step. `computed`
        of its tokens have KV."""
        begin = self.step + 1
        lane = Lane(
            request.id, request, None, begin, cached_before=request.cached_tokens,
            preemptions=request.preemptions, preempted_before=request.preemptions > 0,
            admitted_before=request.state == "running" or request.preemptions > 0,
        )
        lane.running = request.state == "running"
        self.lanes[lane.id] = self.active[lane.id] = lane
        self.newest = max(self.newest, lane.id)
        if not lane.running:
            lane.mark(QUEUED, begin, OPEN)
        elif request.joined_at >= 0:
            lane.mark(DECODING, begin, OPEN)
        if lane.running and computed >= request.prompt_tokens:
            lane.earlier = Earlier(GapStats(computed + 1 - request.prompt_tokens))  # the last token has no KV yet
        if request.joined_at < 0:
            self._unnumbered.add(lane.id)

    def forget_before(self, step: int) -> None:
        """Drop lanes that ended before this step, lanes beyond LANES_KEPT, and old spans of the others."""
        while self.ended and (self.ended[0].finish_step < step or len(self.ended) > LANES_KEPT):
            del self.lanes[self.ended.popleft().id]
        for lane in self.active.values():
            lane.forget_before(step)

    def resumed(self, request: int) -> bool:
        """True if a request was preempted before: what it computes or takes from the cache now, it had before."""
        lane = self.lanes.get(request)
        return lane is not None and lane.preemptions > 0

    def around(self, step: int) -> list[Lane]:
        """Returns the lanes of the requests that may have waited or run in this step."""
        return [lane for lane in (*self.active.values(), *self.ended_since(step)) if lane.submitted_step <= step]

    def ended_since(self, step: int) -> list[Lane]:
        """Returns the lanes that ended at this step or later, the most recent first."""
        return list(takewhile(lambda lane: lane.finish_step >= step, reversed(self.ended)))

    def number_ended(self, first: int, last: int) -> int:
        """Returns how many lanes ended at the steps from `first` to `last`."""
        end, begin = (bisect_left(self.ended, step, key=lambda lane: lane.finish_step) for step in (last + 1, first))
        return max(0, end - begin)

    def submit(self, request: RequestView) -> None:
        """Add a request that has just been submitted."""
        lane = self.lanes[request.id] = self.active[request.id] = Lane(request.id, request, self.now, self.step + 1)
        self.newest = request.id
        lane.mark(QUEUED, self.step + 1, OPEN)

    def on_admit(self, t: float, request: int) -> None:
        lane = self.lanes.get(request)
        if lane is not None:
            lane.close(self.step)
            lane.running = True
            if lane.admitted is None:
                lane.admitted = self.now
                if lane.submitted is not None:
                    lane.paused_s = max(0.0, t - lane.request.submitted - (self.now - lane.submitted))

    def on_match(self, request: int, tokens: int) -> None:
        lane = self.lanes.get(request)
        if lane is not None and lane.preemptions:
            lane.reused += ((self.step + 1, tokens),)

    def on_again(self, request: int, tokens: int) -> None:
        lane = self.lanes.get(request)
        if lane is not None:
            lane.evicted += ((self.step + 1, tokens),)

    def on_step(
        self, step: int, prefills: list[tuple[int, int, int, bool]], joined: list[int], left: list[int]
    ) -> None:
        """If the step only continues the decodes of the step before, no lane changes."""
        self.step = step
        if not (prefills or joined or left):
            return
        lanes = self.lanes
        for id in left:
            if id in lanes:
                lanes[id].close(step - 1)
        for id in joined:
            if id in lanes:
                lanes[id].mark(DECODING, step, OPEN)
        self._unnumbered.difference_update(joined)
        for id, start, n, samples in prefills:
            lane = lanes.get(id)
            if lane is not None:
                lane.mark(PREFILLING, step, step)
                lane.computed_tokens += n
                if lane.highest or not lane.preemptions:  # after a preemption, the rest of the prompt
                    lane.missed_tokens += max(0, min(start + n, lane.request.prompt_tokens) - max(start, lane.highest))
                if lane.highest > start:
                    lane.again += ((step, min(n, lane.highest - start)),)
                if samples and id in self._unnumbered:
                    self._unnumbered.discard(id)
                    lane.earlier = Earlier(GapStats(start + n - lane.request.prompt_tokens))

    def on_preempt(self, request: int) -> None:
        lane = self.lanes.get(request)
        if lane is None:
            return
        lane.close(self.step)
        lane.running = False
        lane.preemptions += 1
        lane.mark(PREEMPTED, self.step + 1, self.step + 1)
        lane.mark(QUEUED, self.step + 1, OPEN)

    on_requeue = on_preempt

    def release(self, kind: str, request: int, computed: int, blocks: int, committed: int) -> None:
        """Fold what a `finish`, `preempt` or `requeue` record releases. `computed`: the request's tokens with KV,
        `blocks`: its blocks, both before the record. `committed`: the last step that is committed."""
        lane = self.lanes.get(request)
        if lane is None:
            return
        lane.highest = max(lane.highest, computed)
        if kind == "finish":
            lane.blocks = blocks
        elif kind == "requeue":  # its tokens in flight are dropped
            lane.void += tuple(range(committed + 1, self.step + 1))

    def on_first(self, request: int, queue_ms: float, prefill_ms: float) -> None:
        lane = self.lanes.get(request)
        if lane is not None:
            lane.first_token = self.now
            lane.ttft = (queue_ms, prefill_ms)

    def on_finish(self, t: float, request: int, reason: str, output_tokens: int) -> None:
        lane = self.lanes.get(request)
        if lane is None:
            return
        lane.close(self.step)  # its row is in the steps that were planned, whose tokens are dropped
        lane.mark(FINISHED, max(self.ending, 0), max(self.ending, 0))
        lane.finish_reason, lane.output_tokens = reason, output_tokens
        lane.finish_step, lane.finished_t = self.ending, t
        self.ended.append(self.active.pop(lane.id))

    def on_accept(self, step: int, drafts: list[tuple[int, int, int]]) -> None:
        for id, drafted, accepted in drafts:
            lane = self.lanes.get(id)
            if lane is not None:
                lane.drafted += drafted
                lane.accepted += accepted
                if accepted:
                    lane.gain(step)
                    lane.taken = array("q") if lane.taken is None else lane.taken
                    lane.taken.extend((step, accepted))


ENDED_PER_ROW = 8  # the most finished requests for each row in a new layout


class LaneRows:
    """Gives each request a row, which it keeps. If no row is free, a request uses the row of a finished one, or else of
    one that decodes all the time: lanes without a change are the first that have no row."""

    def __init__(self) -> None:
        self.slots: list[list[int]] = []  # the requests of each row, oldest first
        self._placed_for: object = None  # the layout in which the requests got their rows
        self._seen = -1  # the newest request that `place` has seen

    def place(self, lanes: Lanes, room: int, start: int, end: int, scale: object, chosen: int | None) -> None:
        """Place the requests that are in sight from step `start` to step `end` in `room` rows. With another room or
        another `scale`, all requests are placed anew. The request `chosen` always gets a row."""
        known = lanes.lanes
        layout = (lanes, room, scale)
        if self._placed_for != layout:
            self._placed_for, self.slots, self._seen = layout, [[] for _ in range(room)], -1
            new = [*lanes.ended_since(start)[: ENDED_PER_ROW * room], *lanes.active.values()]
            new = sorted((lane for lane in new if lane.submitted_step <= end + 1), key=lambda lane: lane.id)
            if len(new) > room:
                new.sort(key=lambda lane: lane.steady(start, end))
        else:
            for slot in self.slots:
                slot[:] = [id for id in slot if id in known and known[id].finish_step >= start]
            shown = {id for slot in self.slots for id in slot}
            hidden = (lane for lane in lanes.active.values() if lane.id not in shown and lane.id <= self._seen)
            new = [lane for lane in hidden if not lane.steady(start, end)]
            new += [known[id] for id in range(self._seen + 1, lanes.newest + 1) if id in known]
        for lane in new:
            target = next((slot for slot in self.slots if not slot), None)
            if target is None:
                idle = [slot for slot in self.slots if known[slot[-1]].finish_step < lane.submitted_step]
                target = min(idle, key=lambda slot: known[slot[-1]].finish_step, default=None)
            if target is None and not lane.steady(start, end):
                still = (slot for slot in self.slots if known[slot[-1]].steady(start, end) and slot[-1] != chosen)
                if (target := next(still, None)) is not None:
                    target.clear()
            if target is not None:
                target.append(lane.id)
            self._seen = max(self._seen, lane.id)
        placed = any(chosen in slot for slot in self.slots)
        if chosen in known and not placed and self.slots and known[chosen].finish_step >= start:
            self.slots[-1] = [chosen]
