"""Lanes: the phases of each request over steps: waiting, prefilling, decoding, preempted, finished.

A lane is a list of spans `(code, first step, last step)`; the last step of the current span is OPEN. On screen, a
column of `k` steps shows the code with the highest priority: preempted, finished, prefill, decode, waiting.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, takewhile

from engine.trace.records import Record
from engine.trace.views import RequestView
from minitui.viewmodel.token_gaps import Earlier, GapStats

NOTHING, QUEUED, DECODING, GAINING, PREFILLING, FINISHED, PREEMPTED = range(7)  # lowest priority first;
#   GAINING: a decode step in which drafts were accepted
OPEN = 1 << 60  # the last step of a span that has not ended
LANES_KEPT = 4_096  # lanes of finished requests
SLACK = 1_024  # steps that a span may be kept too long, so that old spans are dropped in batches


@dataclass(slots=True)
class Lane:
    """The known history of a request, running or finished."""

    id: int
    group: str
    prompt_tokens: int
    submitted: float | None  # working time (see Rates), as in admitted, first_token and finished
    submitted_step: int  # the first step that the request could have joined
    spans: list[list[int]] = field(default_factory=list)  # [code, first, last]
    submitted_t: float = 0.0  # engine time of the submission
    paused_s: float = 0.0  # time in the queue while the engine was paused or slowed; not part of `waited_ms`
    admitted: float | None = None
    first_token: float | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0  # prompt tokens prefilled
    preemptions: int = 0
    finished: float | None = None
    finished_t: float = 0.0  # engine time of the finish
    running: bool = False  # admitted and not preempted since
    finish_reason: str = ""
    finish_step: int = OPEN
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    stop: str = ""  # why the last prefix match stopped (`stop` and `at` of the match record)
    stop_at: int = 0
    ttft: tuple[float, float] | None = None  # queue and prefill, in ms
    blocks: int | None = None  # blocks that it held when it finished
    highest: int = 0  # the largest number of its tokens that had KV when it lost its blocks
    # Most lanes have none of these. Empty lists would be thousands of objects for the garbage collector.
    gains: tuple[list[int], ...] = ()  # [first, last]: steps in which drafts were accepted
    again: tuple[tuple[int, int], ...] = ()  # (step, tokens): computed a second time
    evicted: tuple[tuple[int, int], ...] = ()  # (step, tokens): computed after their eviction
    reused: tuple[tuple[int, int], ...] = ()  # (step, tokens): from the tree after a preemption
    taken: array[int] | None = None  # (step, accepted drafts), one after the other
    void: tuple[int, ...] = ()  # steps whose token was dropped
    earlier: Earlier | None = None
    lost: bool = False  # some of its tokens are neither kept nor summarised
    final: GapStats | None = None  # of a finished request whose first tokens are no longer kept

    def close(self, step: int) -> None:
        """End the open span at `step`; remove the span if it would be empty."""
        if self.spans and self.spans[-1][2] == OPEN:
            if self.spans[-1][1] > step:
                self.spans.pop()
            else:
                self.spans[-1][2] = step

    def mark(self, code: int, first: int, last: int) -> None:
        """Add a span, or extend the last span if it has the same code and ended at the step before."""
        spans = self.spans
        if spans and spans[-1][0] == code and spans[-1][2] == first - 1 and last != OPEN:
            spans[-1][2] = last
        else:
            spans.append([code, first, last])

    def gain(self, step: int) -> None:
        """Mark a step in which drafts were accepted."""
        if self.gains and self.gains[-1][1] == step - 1:
            self.gains[-1][1] = step
        else:
            self.gains += ([step, step],)

    def forget_before(self, step: int) -> None:
        """Drop spans that ended before this step."""
        if self.spans and self.spans[0][2] < step - SLACK:
            self.spans = [span for span in self.spans if span[2] >= step]
        if self.gains and self.gains[0][1] < step - SLACK:
            self.gains = tuple(gain for gain in self.gains if gain[1] >= step)

    def forget_tokens(self, step: int) -> None:
        """Drop what was kept for the tokens of the steps before this one. Numbers of tokens are added up."""
        if self.taken is not None:
            kept = next((i for i in range(0, len(self.taken), 2) if self.taken[i] >= step), len(self.taken))
            del self.taken[:kept]
        self.void = tuple(at for at in self.void if at >= step)
        self.again, self.evicted = _summed(self.again, step), _summed(self.evicted, step)
        self.reused = _summed(self.reused, step)

    def code_at(self, step: int, code: int) -> bool:
        """Returns True if the lane has `code` at `step`."""
        return any(kind == code and first <= step <= last for kind, first, last in self.spans)

    def preempted_in(self, since: int, step: int) -> bool:
        """Returns True if the request was preempted after step `since`, and at `step` at the latest."""
        return any(code == PREEMPTED and since < first <= step for code, first, _ in self.spans)

    def pieces(self, first_step: int, k: int, n: int, until: int) -> Iterator[tuple[int, range]]:
        """Yields (code, columns) for its phases up to step `until`, in any order. A column is `k` steps; the first of
        the `n` columns begins at `first_step`. In a column with several codes, the highest has priority."""
        end = min(until, first_step + k * n - 1)
        gains = takewhile(lambda gain: gain[1] >= first_step, reversed(self.gains))
        for code, first, last in chain(self.spans, ((GAINING, *gain) for gain in gains)):
            if last < first_step or first > end:
                continue
            yield code, range(max(0, (first - first_step) // k), min(n, (min(last, end) - first_step) // k + 1))

    def recomputed(self, step: int) -> int:
        """Returns how many of its tokens were computed a second time, up to this step."""
        return sum(tokens for at, tokens in self.again if at <= step) if self.again else 0

    def taken_again(self, step: int) -> int:
        """Returns how many of its tokens came from the tree after a preemption, up to this step."""
        return sum(tokens for at, tokens in self.reused if at <= step) if self.reused else 0

    def after_evictions(self, step: int) -> int:
        """Returns how many of its prompt's tokens were computed because their blocks had been evicted, up to this
        step."""
        return sum(tokens for at, tokens in self.evicted if at <= step) if self.evicted else 0

    @property
    def tok_s(self) -> float:
        """Tokens per second from the first token to the end of the reply; 0 while unknown."""
        if self.finished is None or self.first_token is None or self.output_tokens < 2:
            return 0.0
        seconds = self.finished - self.first_token
        return (self.output_tokens - 1) / seconds if seconds > 0 else 0.0

    @property
    def waited_ms(self) -> float | None:
        """Milliseconds in the queue. From the first token on, this is the engine's measurement; until then, it is
        computed from records. None while the request waits, or if it was submitted before the history began."""
        return self.ttft[0] if self.ttft is not None else self.queued_ms

    @property
    def queued_ms(self) -> float | None:
        """`waited_ms` as computed from records."""
        if self.submitted is None or self.admitted is None:
            return None
        return (self.admitted - self.submitted) * 1e3


def _summed(tokens: tuple[tuple[int, int], ...], step: int) -> tuple[tuple[int, int], ...]:
    """Returns (step, tokens) pairs with all steps before `step` added up."""
    old = [n for at, n in tokens if at < step]
    return ((step - 1, sum(old)), *tokens[len(old) :]) if len(old) > 1 else tokens


class Lanes:
    """The lanes of the requests in the step history, by id. Of finished requests, only the last LANES_KEPT are kept."""

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        self.active: dict[int, Lane] = {}  # not finished, by id
        self.ended: deque[Lane] = deque()  # finished, in order of finish
        self.newest = -1  # the highest request id seen
        self.step = -1  # the last planned step
        self.now = 0.0  # working time at the record being folded
        self._unnumbered: set[int] = set()  # requests from the snapshot; their next token's number is not certain yet

    def fold(self, record: Record, now: float) -> None:
        """Fold one record; `now` is its working time."""
        self.now = now
        handler = self._HANDLERS.get(record[2])
        if handler is not None:
            handler(self, record)

    def adopt(self, request: RequestView, computed: int) -> None:
        """Add a request from the snapshot with which the history begins; its lane starts at the next step. `computed`
        of its tokens have KV."""
        begin = self.step + 1
        lane = Lane(
            request.id, request.group, request.prompt_tokens, None, begin, cached_tokens=request.cached_tokens,
            preemptions=request.preemptions,
        )  # fmt: skip
        lane.running = request.state == "running"
        self.lanes[lane.id] = self.active[lane.id] = lane
        self.newest = max(self.newest, lane.id)
        if not lane.running:
            lane.mark(QUEUED, begin, OPEN)
        elif request.joined_at >= 0:
            lane.mark(DECODING, begin, OPEN)
        if lane.running and computed >= lane.prompt_tokens:
            lane.earlier = Earlier(GapStats(computed + 1 - lane.prompt_tokens))  # the last token has no KV yet
        if request.joined_at < 0:
            self._unnumbered.add(lane.id)

    def forget_before(self, step: int) -> None:
        """Drop lanes that ended before this step, lanes beyond LANES_KEPT, and old spans of the others."""
        while self.ended and (self.ended[0].finish_step < step or len(self.ended) > LANES_KEPT):
            del self.lanes[self.ended.popleft().id]
        for lane in self.active.values():
            lane.forget_before(step)

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

    def _submit(self, record: Record) -> None:
        _seq, _t, _kind, id, group, prompt_tokens, _max_total = record
        lane = self.lanes[id] = self.active[id] = Lane(
            id, group, prompt_tokens, self.now, self.step + 1, submitted_t=record[1]
        )
        self.newest = id
        lane.mark(QUEUED, self.step + 1, OPEN)

    def _admit(self, record: Record) -> None:
        lane = self.lanes.get(record[3])
        if lane is not None:
            lane.close(self.step)
            lane.running = True
            if lane.admitted is None:
                lane.admitted = self.now
                if lane.submitted is not None:
                    lane.paused_s = max(0.0, record[1] - lane.submitted_t - (self.now - lane.submitted))

    def _match(self, record: Record) -> None:
        lane = self.lanes.get(record[3])
        # As in the engine's figures, only matches before the first preemption count.
        if lane is not None and lane.preemptions:
            lane.reused += ((self.step + 1, record[4]),)
        elif lane is not None:
            lane.cached_tokens = min(lane.prompt_tokens, lane.cached_tokens + record[4])
            lane.stop, lane.stop_at = record[5], record[6]

    def _again(self, record: Record) -> None:
        lane = self.lanes.get(record[3])
        if lane is not None:
            lane.evicted += ((self.step + 1, record[4]),)

    def fold_step(self, record: Record) -> None:
        """Fold a `step` record. If the step only continues the decodes of the step before, no lane changes."""
        _seq, _t, _kind, step, prefills, joined, left, _tokens, _waiting = record
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
                if lane.highest > start:
                    lane.again += ((step, min(n, lane.highest - start)),)
                if samples and id in self._unnumbered:
                    self._unnumbered.discard(id)
                    lane.earlier = Earlier(GapStats(start + n - lane.prompt_tokens))

    def _preempt(self, record: Record) -> None:
        lane = self.lanes.get(record[3])
        if lane is None:
            return
        lane.close(self.step)
        lane.running = False
        lane.preemptions += 1
        lane.mark(PREEMPTED, self.step + 1, self.step + 1)
        lane.mark(QUEUED, self.step + 1, OPEN)

    def release(self, record: Record, computed: int, blocks: int, committed: int) -> None:
        """Fold a `finish`, `preempt` or `requeue` record. `computed`: the request's tokens with KV, `blocks`: its
        blocks, both before the record. `committed`: the last step that is committed."""
        lane = self.lanes.get(record[3])
        if lane is None:
            return
        lane.highest = max(lane.highest, computed)
        if record[2] == "finish":
            lane.blocks = blocks
        elif record[2] == "requeue":  # its tokens in flight are dropped
            lane.void += tuple(range(committed + 1, self.step + 1))

    def _first(self, record: Record) -> None:
        lane = self.lanes.get(record[3])
        if lane is not None:
            lane.first_token = self.now
            lane.ttft = (record[4], record[5])

    def _finish(self, record: Record) -> None:
        lane = self.lanes.get(record[3])
        if lane is None:
            return
        lane.close(self.step)
        lane.mark(FINISHED, max(self.step, 0), max(self.step, 0))
        lane.finished, lane.finish_reason, lane.output_tokens = self.now, record[4], record[5]
        lane.finish_step, lane.finished_t = self.step, record[1]
        self.ended.append(self.active.pop(lane.id))

    def _accept(self, record: Record) -> None:
        for id, drafted, accepted in record[4]:
            lane = self.lanes.get(id)
            if lane is not None:
                lane.drafted += drafted
                lane.accepted += accepted
                if accepted:
                    lane.gain(record[3])
                    lane.taken = array("q") if lane.taken is None else lane.taken
                    lane.taken.extend((record[3], accepted))

    _HANDLERS = {  # noqa: RUF012  a table of methods, never changed
        "submit": _submit, "admit": _admit, "match": _match, "step": fold_step, "preempt": _preempt,
        "requeue": _preempt, "first": _first, "finish": _finish, "accept": _accept, "again": _again,
    }  # fmt: skip
