"""When the tokens of a request arrived, and the gaps between them.

No time is stored per token. A request gets a token in each step in which it decodes, and in the step with the last
chunk of its prompt. So its tokens are computed from the spans of its lane and from the columns of Steps when a panel
asks for them. A step's tokens arrive when the device has finished: at its `time` record minus its commit. Time in which
the engine was paused or in slow motion does not count.

Steps keeps a limited number of steps. Before the oldest steps are overwritten, `TokenTimes` replaces their tokens by a
summary in the lane.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from engine.trace.kind import Reader
from engine.trace.speed import decode_speed
from minitui.text import exact
from minitui.viewmodel.history.lane import DECODING, OPEN, PREFILLING, Earlier, Gap, GapStats, Lane
from minitui.viewmodel.history.lanes import Lanes
from minitui.viewmodel.history.steps import Steps

IN_FLIGHT = 8  # steps: at least one of the last ones has results
LEAVING = 4_096  # steps whose tokens are summarised together
FINISHED_KEPT = 256  # finished requests whose tokens are summarised
MEASURED = 4_096  # recent gaps, for the percentiles


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The arrivals of a request's tokens, oldest first. Accepted drafts arrive with the token of their step."""

    steps: np.ndarray  # int64
    at: np.ndarray  # float64: seconds of engine time, without pauses and slow motion
    paused: np.ndarray  # float64: seconds of pauses and slow motion since the history began
    first: np.ndarray  # int64: the number of the first token of each arrival; the reply's first token has number 1
    last: np.ndarray  # int64: the number of the last token of each arrival

    def __len__(self) -> int:
        return len(self.steps)

    def gap(self, i: int) -> Gap:
        """Returns the gap before arrival `i`, which is not the first."""
        return Gap(
            float(self.at[i] - self.at[i - 1]) * 1e3, int(self.first[i]), int(self.steps[i]), int(self.steps[i - 1]),
            float(self.paused[i] - self.paused[i - 1]) * 1e3,
        )


NONE = Arrivals(np.empty(0, np.int64), np.empty(0), np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))


class TokenTimes:
    """The arrivals and gaps of every lane. Tokens of steps before `first` are summarised in `Lane.earlier`."""

    def __init__(self, steps: Steps, lanes: Lanes) -> None:
        self._steps, self._lanes = steps, lanes
        self.first = -1  # -1: no step yet

    def before_step(self, step: int) -> None:
        """Summarise the oldest tokens if this step, which is folded next, would overwrite their step."""
        if self.first < 0:
            self.first = step
        elif step - self.first >= self._steps.capacity:
            self._summarise(min(self.first + LEAVING, self._steps.last))

    def arrivals(self, lane: Lane, horizon: int) -> Arrivals:
        """Returns the arrivals up to step `horizon`, from the last summarised one on if its time is known."""
        found, earlier = self._kept(lane, horizon) if not lane.lost else NONE, lane.earlier
        if earlier is None or earlier.end is None:
            return found
        step, at, paused = earlier.end
        return Arrivals(
            np.r_[step, found.steps], np.r_[at, found.at], np.r_[paused, found.paused],
            np.r_[earlier.stats.tokens, found.first], np.r_[earlier.stats.tokens, found.last],
        )

    def after_preemptions(self, step: int) -> list[float]:
        """Returns, in ms, the gaps that ended in this step and in which a request was preempted."""
        found = []
        for request, _, _, samples in self._steps.chunks(step) if step in self._steps else []:
            lane = self._lanes.lanes.get(request)
            if samples and lane is not None and lane.preemptions:
                arrivals = self.arrivals(lane, step)
                if len(arrivals) > 1 and arrivals.steps[-1] == step:
                    found.append(arrivals.gap(len(arrivals) - 1).ms)
        return found

    def dropped(self, request: int) -> list[int]:
        """Returns the steps in flight whose token is dropped, because the request has just finished or queues again."""
        lane, committed = self._lanes.lanes.get(request), self._steps.committed
        if lane is None:
            return []
        flight = [step for step in range(committed + 1, self._lanes.step + 1) if lane.code_at(step, DECODING)]
        if lane.finish_step == OPEN:
            return [step for step in flight if step in lane.void]
        if len(flight) < 1 + (lane.finish_reason in ("stop", "length")):  # then the first of these tokens is the last
            return []
        found = self.arrivals(lane, committed)
        tokens = int(found.last[-1]) if len(found) else lane.earlier.stats.tokens if lane.earlier is not None else 0
        return flight[max(0, lane.output_tokens - tokens) :]

    def running(self, lane: Lane, horizon: int, more_ms: float) -> Gap | None:
        """Returns the gap since the last token of a request that has not finished; None without a gap. `more_ms`: the
        time since the results of step `horizon` or of the last step before it."""
        found = self.arrivals(lane, horizon)
        _, times = self.clock(max(self.first, horizon - IN_FLIGHT), horizon)
        if not len(found) or not len(times):
            return None
        ms = float(times[-1] - found.at[-1]) * 1e3 + more_ms
        if ms <= 0:
            return None
        return Gap(ms, int(found.last[-1]) + 1, horizon, int(found.steps[-1]), 0.0, so_far=True)

    def _kept(self, lane: Lane, horizon: int) -> Arrivals:
        """Returns the arrivals in the steps from `first` to `horizon`."""
        spans = []
        for code, begin, end in lane.spans:
            if end < self.first or begin > horizon:
                continue
            if code == DECODING:
                spans.append((max(begin, self.first), min(end, horizon)))
            elif code == PREFILLING and end <= horizon and self._samples(lane.id, end):
                spans.append((end, end))
        if not spans:
            return NONE
        if len(spans) == 1:
            numbers = np.arange(spans[0][0], spans[0][1] + 1)
        else:
            begins, ends = np.array(spans, np.int64).T
            lengths = ends - begins + 1
            numbers = np.repeat(begins - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        steps = self._steps
        at = numbers % steps.capacity
        times = steps.column("arrived")[at]
        arrived = times == times  # not NaN: the step is committed
        if lane.void:
            arrived &= ~np.isin(numbers, lane.void)
        if not arrived.all():
            numbers, at, times = numbers[arrived], at[arrived], times[arrived]
        count = np.ones(len(numbers), np.int64)
        if lane.taken:
            taken_at, taken = np.array(lane.taken, np.int64).reshape(-1, 2).T
            found = np.isin(taken_at, numbers)
            count[np.searchsorted(numbers, taken_at[found])] += taken[found]
        last = count.cumsum() + (lane.earlier.stats.tokens if lane.earlier is not None else 0)
        first = last - count + 1
        if lane.finish_step != OPEN:  # a step that was in flight at the end may have drawn a token that was dropped
            n = int(np.searchsorted(first, lane.output_tokens, "right"))
            numbers, at, times = numbers[:n], at[:n], times[:n]
            first, last = first[:n], np.minimum(last[:n], lane.output_tokens)
        return Arrivals(numbers, times, steps.column("paused")[at], first, last)

    def clock(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (the steps from `first` to `last` whose time is known, when their tokens arrived)."""
        at = self._steps.indices(first, last)
        times = self._steps.column("arrived")[at]
        return self._steps.column("step")[at][times == times], times[times == times]

    def _samples(self, request: int, step: int) -> bool:
        return step in self._steps and any(id == request and last for id, _, _, last in self._steps.chunks(step))

    def stats(self, lane: Lane, horizon: int) -> GapStats | None:
        """Returns the gaps of the tokens that arrived up to step `horizon`; None if this is no longer known."""
        earlier = lane.earlier
        if lane.lost or (earlier is not None and earlier.end is not None and horizon < self.first - 1):
            return None
        if lane.final is not None and horizon >= lane.finish_step:
            return lane.final
        return self._stats(self.arrivals(lane, horizon), earlier)

    def _stats(self, found: Arrivals, earlier: Earlier | None) -> GapStats:
        before = earlier.stats if earlier is not None else GapStats()
        if not len(found):
            return before
        begin = before.begin or (int(found.last[0]), float(found.at[0]))
        tokens, seconds = int(found.last[-1]), float(found.at[-1]) - begin[1]
        speed = decode_speed(tokens - begin[0], seconds * 1e6)
        ms = np.diff(found.at) * 1e3
        if not len(ms):
            return GapStats(tokens, begin, speed, before.count, before.p50, before.p99, before.longest)
        p50, p99 = percentiles(ms[-MEASURED:])
        longest = found.gap(int(ms.round(3).argmax()) + 1)  # of several as long to the microsecond, the first
        if before.longest is not None and exact(before.longest.ms) >= exact(longest.ms):
            longest = before.longest
        return GapStats(tokens, begin, speed, before.count + len(ms), p50, p99, longest)

    def _summarise(self, until: int) -> None:
        """Summarise the tokens of the steps before `until`. Of the finished requests, only the last are summarised."""
        lost = len(self._lanes.ended) - FINISHED_KEPT
        for i, lane in enumerate(self._lanes.ended):
            if lane.submitted_step < until and not lane.lost:
                lane.lost = i < lost
                if not lane.lost and lane.final is None:
                    lane.final = self.stats(lane, self._steps.last)
        for lane in self._lanes.lanes.values():
            if lane.submitted_step < until and not lane.lost:
                found = self.arrivals(lane, until - 1)
                if len(found):
                    end = int(found.steps[-1]), float(found.at[-1]), float(found.paused[-1])
                    lane.earlier = Earlier(self._stats(found, lane.earlier), end)
                lane.forget_tokens(until)
        self.first = until


FEW = 10  # values


def place_of(share: float, count: int) -> float:
    """Returns the place of a percentile among `count` values in ascending order, from 0: between two of them, or one of
    them if they are few."""
    return math.ceil(share * count) - 1 if count < FEW else share * (count - 1)


def percentiles(values: np.ndarray) -> tuple[float, float]:
    """Returns the percentiles 50 and 99. numpy's `percentile` gives the same, but takes five times as long. Those of
    fewer than FEW values are two of the values (numpy's method "inverted_cdf"): the p99 is then the largest."""
    ordered = np.sort(values)
    found = []
    for share in (0.5, 0.99):
        place = place_of(share, len(ordered))
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        found.append(float(ordered[low] + (ordered[high] - ordered[low]) * (place - low)))
    return found[0], found[1]


FIRST_TOKENS_KEPT = 256


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The time to first token of a request, in ms, as two parts: queue, then prefill until the token arrives."""

    request: int
    seq: int
    queue_ms: float
    prefill_ms: float

    @property
    def total_ms(self) -> float:
        return self.queue_ms + self.prefill_ms


class FirstTokens(Reader):
    """The FIRST_TOKENS_KEPT most recent times to first token."""

    def __init__(self) -> None:
        self.items: deque[FirstToken] = deque(maxlen=FIRST_TOKENS_KEPT)

    def on_first(self, seq: int, request: int, queue_ms: float, prefill_ms: float) -> None:
        self.items.append(FirstToken(request, seq, queue_ms, prefill_ms))

    def until(self, seq: int) -> list[FirstToken]:
        """Returns the first tokens up to record `seq`, oldest first."""
        return [item for item in self.items if item.seq <= seq]
