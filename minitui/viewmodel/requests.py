"""The figures of each request, live or finished recently, at the moment of the picture: the rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from minitui.text import exact
from minitui.viewmodel.history.lane import DECODING, Gap, GapStats, Lane
from minitui.viewmodel.history.lanes import Lanes
from minitui.viewmodel.history.tokens import FINISHED_KEPT

if TYPE_CHECKING:
    from engine.trace.views import RequestView
    from minitui.viewmodel.view import View

REFRESHED = 24  # in a moving picture, the gaps of at most this many requests are computed at a time


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """A request at one moment. Durations are in ms; None: not known, or not yet."""

    lane: Lane = field(compare=False)
    request: RequestView = field(compare=False)  # as it was at this moment; of a finished request, at its end
    state: str  # waits | preempted | prefill | decode; of a finished request, its finish reason
    live: bool
    queue_ms: float | None  # while the request waits: until now
    prefill_ms: float | None
    gaps: GapStats | None  # None: the tokens up to this moment are no longer known
    running: Gap | None  # the gap since the last token of a live request
    blocks: int | None  # of a finished request: when it finished
    recomputed_tokens: int | None  # tokens whose KV was computed again after a preemption
    reused_tokens: int | None  # tokens that came from the cache after a preemption
    after_evictions: int | None  # prompt tokens that were computed because their cached blocks had been evicted
    paused_ms: float = 0.0  # time in the queue while the engine was paused or slowed; not part of `queue_ms`
    waits_ms: float | None = None  # how long a live request has waited for its first token so far

    @property
    def id(self) -> int:
        return self.lane.id

    @property
    def longest(self) -> Gap | None:
        """The longest gap, also if it has not ended."""
        ended = self.gaps.longest if self.gaps is not None else None
        if self.running is None or (ended is not None and ended.ms >= self.running.ms):
            return ended
        return self.running

    @property
    def first_ms(self) -> float | None:
        """The time to first token."""
        return None if self.queue_ms is None or self.prefill_ms is None else self.queue_ms + self.prefill_ms

    @property
    def first_so_far_ms(self) -> float | None:
        """The time to first token; before the first token, the time until now."""
        return self.first_ms if self.first_ms is not None else self.waits_ms


def by_longest_gap(row: RequestFigures) -> tuple[float, int, int]:
    """Orders requests by their longest gaps. Of gaps that are equally long, to the microsecond, the earliest is the
    greatest, and of several in one step that of the oldest request."""
    gap = row.longest
    return (0.0, 0, -row.id) if gap is None else (exact(gap.ms), -gap.step, -row.id)


def by_longest_wait(row: RequestFigures) -> tuple[float, int]:
    """Orders requests by their waits for a first token; of several that waited as long, the oldest is the greatest."""
    return exact(row.first_so_far_ms or 0.0), -row.id


def longest(
    rows: Iterable[RequestFigures], rank: Callable[[RequestFigures], tuple[float, ...]]
) -> tuple[RequestFigures | None, list[int]]:
    """Returns (the request with the greatest `rank`, all requests whose durations are as long as its duration)."""
    rows = list(rows)
    worst = max(rows, key=rank, default=None)
    return worst, [row.id for row in rows if worst is not None and rank(row)[0] == rank(worst)[0]]


class Requests:
    """Computes the figures. Keeps the gaps of requests, because computing the gaps of hundreds takes milliseconds."""

    def __init__(self) -> None:
        self._lanes: Lanes | None = None
        self._gaps: dict[int, tuple[int, GapStats | None]] = {}  # request -> (horizon, its gaps up to there)

    def figures(self, view: View, first: Collection[int] = ()) -> list[RequestFigures]:
        """Returns the requests of the picture, the newest first. A still picture is exact. In a moving picture, the
        gaps of at most REFRESHED requests are computed at a time: first those of the requests `first`, then those that
        were computed the longest ago."""
        shown = view.moment.shown.state
        live = [view.history.lanes.lanes[id] for id in shown.requests if id in view.history.lanes.lanes]
        lanes = [*live, *islice(self._ended(view), FINISHED_KEPT)]
        if self._lanes is not view.history.lanes:
            self._lanes, self._gaps = view.history.lanes, {}
        elif len(self._gaps) > 2 * len(lanes):
            self._gaps = {lane.id: self._gaps[lane.id] for lane in lanes if lane.id in self._gaps}
        stale = [lane for lane in lanes if self._stale(view, lane)]
        if not view.moment.still:
            stale.sort(key=lambda lane: (lane.id not in first, self._gaps.get(lane.id, (-1,))[0]))
            del stale[REFRESHED:]
        for lane in stale:
            self._gaps[lane.id] = (view.moment.horizon, view.history.tokens.stats(lane, view.moment.horizon))
        return sorted((self._figures(view, lane) for lane in lanes), key=lambda row: -row.id)

    def of(self, view: View, lane: Lane) -> RequestFigures:
        """Returns the exact figures of one request."""
        if self._lanes is not view.history.lanes:
            self._lanes, self._gaps = view.history.lanes, {}
        self._gaps[lane.id] = (view.moment.horizon, view.history.tokens.stats(lane, view.moment.horizon))
        return self._figures(view, lane)

    def _stale(self, view: View, lane: Lane) -> bool:
        """True if tokens may have arrived, or left the picture, since the gaps were computed."""
        horizon, _ = self._gaps.get(lane.id, (-1, None))
        return horizon != view.moment.horizon and min(horizon, view.moment.horizon) <= lane.finish_step

    @staticmethod
    def _ended(view: View) -> Iterator[Lane]:
        """Yields the lanes of requests that had finished at the moment of the picture; the last to finish is first."""
        shown = view.moment.shown.state
        ended = (lane for lane in reversed(view.history.lanes.ended) if view.moment.begun(lane))
        return (lane for lane in ended if lane.id not in shown.requests)

    def _figures(self, view: View, lane: Lane) -> RequestFigures:
        shown = view.moment.shown.state
        request = shown.requests.get(lane.id)
        _, gaps = self._gaps.get(lane.id, (-1, None))
        queue, prefill = _first_token(view, lane, request, gaps)
        # The tokens of a step that has not ended are not computed yet.
        ended = min(view.moment.horizon, view.history.steps.committed)
        if request is None:
            doing, blocks = lane.finish_reason.partition(":")[0], lane.blocks
        else:
            doing = {"waiting": "waits", "preempted": "preempted"}.get(request.state, "")
            doing = doing or ("decode" if request.joined_at >= 0 else "prefill")
            blocks = len(request.table)
        return RequestFigures(
            lane, request or lane.request, doing, request is not None, queue, prefill, gaps,
            self._running(view, lane, request, gaps), blocks,
            None if lane.preempted_before else lane.recomputed(ended),
            None if lane.preempted_before else lane.taken_again(view.moment.horizon),
            None if lane.admitted_before or shown.waste is None else lane.after_evictions(ended), _paused(view, lane),
            _waits(view, lane) if request is not None and prefill is None else None,
        )

    @staticmethod
    def _running(view: View, lane: Lane, request: RequestView | None, gaps: GapStats | None) -> Gap | None:
        """Returns the gap that has not ended if the request stalls: the engine's step takes long, or the request was
        preempted and does not decode yet."""
        if request is None or gaps is None or not gaps.tokens:
            return None
        more = view.moment.since_result_ms
        if not more and (not request.preemptions or lane.code_at(view.moment.horizon, DECODING)):
            return None
        return view.history.tokens.running(lane, view.moment.horizon, more)


def _waits(view: View, lane: Lane) -> float | None:
    """Returns the time since the request was submitted; None if this was before the history began."""
    return None if lane.submitted is None else (view.moment.working_now - lane.submitted) * 1e3


def _paused(view: View, lane: Lane) -> float:
    """Returns the time in ms that the request waited for admission while the engine was paused or slowed."""
    request = view.moment.shown.state.requests.get(lane.id)
    if lane.submitted is None or request is None or request.admitted:
        return lane.paused_s * 1e3
    return max(0.0, view.moment.picture_now - lane.request.submitted - (view.moment.working_now - lane.submitted)) * 1e3


def _first_token(
    view: View, lane: Lane, request: RequestView | None, gaps: GapStats | None
) -> tuple[float | None, float | None]:
    """Returns (time in the queue, time of the prefill), as far as they are known at the moment of the picture."""
    if lane.ttft is not None and (gaps is None or gaps.tokens):
        return lane.ttft
    if request is not None and not request.admitted and (waits := _waits(view, lane)) is not None:
        return waits, None
    return lane.queued_ms, None


LEAST_GAIN = 1.5  # below it, the share of cached tokens tells more: other prompts of the step took the time


@dataclass(frozen=True, slots=True)
class Hit:
    """A request that took tokens from the cache and has its first token. Times are those of the prefill, in ms: from
    the admission to the first token, without the queue."""

    lane: Lane
    prefill_ms: float
    source: Lane | None  # the request that computed the last of the reused blocks; None: no longer known

    @property
    def source_ms(self) -> float | None:
        """The prefill of the other request; None: unknown."""
        return None if self.source is None or self.source.ttft is None else self.source.ttft[1]

    @property
    def times_faster(self) -> float | None:
        """The quotient of both times; None: unknown, or no gain."""
        if not self.source_ms or not self.prefill_ms:
            return None
        gain = self.source_ms / self.prefill_ms
        return gain if gain >= LEAST_GAIN else None


def last_hit(view: View) -> Hit | None:
    """Returns the hit whose first token was the last at the moment of the picture; None: there was none."""
    lanes, seq = view.history.lanes.lanes, view.moment.shown.state.seq
    for first in reversed(view.history.first_tokens.items):
        lane = lanes.get(first.request)
        if first.seq <= seq and lane is not None and lane.source >= 0 and lane.request.cached_tokens:
            return Hit(lane, first.prefill_ms, lanes.get(lane.source))
    return None
