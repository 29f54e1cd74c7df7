"""Lane: the phases of a request over steps: waiting, prefilling, decoding, preempted, finished. A lane is a list of
spans `(code, first step, last step)`; the last step of the current span is OPEN. On screen, a column of `k` steps shows
the code with the highest priority: preempted, finished, prefill, decode, waiting."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, takewhile

from engine.trace.views import RequestView


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between two arrivals of tokens of a request, in ms, without pauses and slow motion."""

    ms: float
    token: int  # the number of the first token that arrived after the gap; the reply's first token has number 1
    step: int  # the step of this token
    since: int  # the step of the arrival before
    paused_ms: float  # time of pauses and slow motion in the gap; not part of `ms`
    so_far: bool = False  # the gap has not ended: `step` is the last step whose results arrived


@dataclass(frozen=True, slots=True)
class GapStats:
    """The gaps of a request's tokens, in ms. The percentiles are those of recent gaps; None: there is no gap."""

    tokens: int = 0  # tokens of the reply that arrived
    begin: tuple[int, float] | None = None  # (number, time) of the first token whose arrival is known
    tok_s: float | None = None  # tokens per second since `begin` (engine/trace/speed.py)
    count: int = 0  # number of gaps
    p50: float | None = None
    p99: float | None = None
    longest: Gap | None = None


@dataclass(frozen=True, slots=True)
class Earlier:
    """The tokens of a request whose arrivals are not kept: old ones, and those from before the history began."""

    stats: GapStats
    end: tuple[int, float, float] | None = None  # the last arrival: step, time, pauses before it; None: unknown


NOTHING, QUEUED, DECODING, GAINING, PREFILLING, FINISHED, PREEMPTED = range(7)  # lowest priority first;
#   GAINING: a decode step in which drafts were accepted
OPEN = 1 << 60  # the last step of a span that has not ended
SLACK = 1_024  # steps that a span may be kept too long, so that old spans are dropped in batches


@dataclass(slots=True)
class Lane:
    """The known history of a request, running or finished. `request` has its newest values; of a finished one, the last
    ones."""

    id: int
    request: RequestView = field(compare=False)
    submitted: float | None  # working time (see Rates), as in admitted and first_token
    submitted_step: int  # the first step that the request could have joined
    spans: list[list[int]] = field(default_factory=list)  # [code, first, last]
    paused_s: float = 0.0  # time in the queue while the engine was paused or slowed; not part of `waited_ms`
    admitted: float | None = None
    first_token: float | None = None
    cached_before: int = 0  # the part of `request.cached_tokens` from before the history began
    computed_tokens: int = 0  # prompt tokens prefilled
    missed_tokens: int = 0  # the same, without those computed again after a preemption
    preemptions: int = 0  # up to the last folded record: `request` may be ahead
    preempted_before: bool = False  # before the history began: how many tokens it computed again is unknown
    admitted_before: bool = False  # before the history began
    finished_t: float = 0.0  # engine time of the finish
    running: bool = False  # admitted and not preempted since
    finish_reason: str = ""
    finish_step: int = OPEN
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    source: int = -1  # the request that computed the last of its cached blocks
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

    def steady(self, first: int, last: int) -> bool:
        """Returns True if the request decodes in all steps from `first` to `last`: its lane shows no change."""
        code, begin, end = self.spans[-1] if self.spans else (NOTHING, 0, 0)
        return code == DECODING and begin <= first and end >= last

    def preempted_in(self, since: int, step: int) -> bool:
        """Returns True if the request was preempted after step `since`, and at `step` at the latest."""
        return any(code == PREEMPTED and since < first <= step for code, first, _ in self.spans)

    def prefill_of(self, step: int, end: int, samples: bool) -> int | None:
        """Returns how many tokens the prefill has of which the chunk in `step` ends at token `end`: those of the
        prompt and, after a preemption, of the reply so far. None: unknown. `samples`: the chunk is the last one."""
        if samples:
            return end
        return None if self.preempted_in(-1, step) else self.request.prompt_tokens

    def pieces(self, first_step: int, k: int, n: int, until: int) -> Iterator[tuple[int, range]]:
        """Yields (code, columns) for its phases up to step `until`, in any order. A column is `k` steps; the first of
        the `n` columns begins at `first_step`. In a column with several codes, the highest has priority. The steps
        after its finish, whose tokens are dropped, have no column."""
        end = min(until, first_step + k * n - 1, self.finish_step)
        gains = takewhile(lambda gain: gain[1] >= first_step, reversed(self.gains))
        for code, first, last in chain(self.spans, ((GAINING, *gain) for gain in gains)):
            if last < first_step or first > end:
                continue
            yield code, range(max(0, (first - first_step) // k), min(n, (min(last, end) - first_step) // k + 1))

    def recomputed(self, step: int) -> int:
        """Returns how many of its tokens were computed a second time, up to this step."""
        return _up_to(self.again, step)

    def taken_again(self, step: int) -> int:
        """Returns how many of its tokens came from the tree after a preemption, up to this step."""
        return _up_to(self.reused, step)

    def after_evictions(self, step: int) -> int:
        """Returns how many of its prompt's tokens were computed because their blocks had been evicted, up to this
        step."""
        return _up_to(self.evicted, step)

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


def _up_to(tokens: tuple[tuple[int, int], ...], step: int) -> int:
    """Returns the sum of (step, tokens) pairs up to a step."""
    return sum(n for at, n in tokens if at <= step)


def _summed(tokens: tuple[tuple[int, int], ...], step: int) -> tuple[tuple[int, int], ...]:
    """Returns (step, tokens) pairs with all steps before `step` added up."""
    old = [n for at, n in tokens if at < step]
    return ((step - 1, sum(old)), *tokens[len(old) :]) if len(old) > 1 else tokens
