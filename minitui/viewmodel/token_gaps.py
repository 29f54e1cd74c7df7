"""The data of a request's token gaps. minitui/viewmodel/tokens.py computes these."""

from __future__ import annotations

from dataclasses import dataclass


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
