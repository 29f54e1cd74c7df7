"""The results of requests, and the figures of a run as data and as text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PERCENTILES = (50, 90, 99)


@dataclass
class Outcome:
    """The result of a request.

    `sent`: seconds after the start. `first` and `total`: seconds after `sent`. `error`: empty for an answered request.
    """

    sent: float
    first: float = 0.0
    total: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not report it
    error: str = ""
    detail: str = ""

    @property
    def per_token(self) -> float | None:
        """Average seconds between two tokens; None for answers of one token."""
        return (self.total - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass
class Limits:
    """Latency limits in milliseconds; None: no limit. A request within all limits counts for goodput."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def kept(self, outcome: Outcome) -> bool:
        """Returns True if the request was answered within the limits."""
        pairs = ((self.ttft_ms, outcome.first), (self.tpot_ms, outcome.per_token or 0.0), (self.e2e_ms, outcome.total))
        return not outcome.error and all(limit is None or value * 1e3 <= limit for limit, value in pairs)


def summarise(outcomes: Sequence[Outcome], limits: Limits) -> dict[str, Any]:
    """Returns the figures of a run; latencies are in milliseconds."""
    answered = [outcome for outcome in outcomes if not outcome.error]
    seconds = max((outcome.sent + outcome.total for outcome in outcomes), default=0.0)
    good = sum(limits.kept(outcome) for outcome in outcomes)
    per_token = [value for outcome in answered if (value := outcome.per_token) is not None]
    prompt = sum(outcome.prompt_tokens for outcome in answered)
    cached = [outcome.cached_tokens for outcome in answered if outcome.cached_tokens is not None]
    return {
        "requests": len(outcomes),
        "answered": len(answered),
        "not_answered": dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        "example_of_an_error": next((outcome.detail for outcome in outcomes if outcome.detail), ""),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(answered) / seconds, 3) if seconds else 0.0,
        "goodput_per_s": round(good / seconds, 3) if seconds else 0.0,
        "limits": {name: limit for name, limit in vars(limits).items() if limit is not None},
        "within_limits": good,
        "prompt_tokens": prompt,
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": sum(outcome.output_tokens for outcome in answered),
        "output_tokens_per_s": round(sum(o.output_tokens for o in answered) / seconds, 1) if seconds else 0.0,
        "ttft_ms": spread([outcome.first for outcome in answered]),
        "tpot_ms": spread(per_token),
        "e2e_ms": spread([outcome.total for outcome in answered]),
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Returns mean, percentiles and maximum in milliseconds; None if there are no values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    levels = {f"p{p}": ordered[min(len(ordered) - 1, math.ceil(len(ordered) * p / 100) - 1)] for p in PERCENTILES}
    values = {"mean": sum(ordered) / len(ordered), **levels, "max": ordered[-1]}
    return {name: round(value * 1e3, 3) for name, value in values.items()}


def report(figures: dict[str, Any]) -> list[str]:
    """Returns the figures as lines of text."""
    limits = ", ".join(f"{name.removesuffix('_ms')} {limit:g} ms" for name, limit in figures["limits"].items())
    good = f"{figures['goodput_per_s']:.2f} within the limits ({limits}), " if limits else ""
    missed = ", ".join(f"{count} {error}" for error, count in figures["not_answered"].items())
    found, prompt = figures["cached_tokens"], figures["prompt_tokens"]
    cached = "cache use unknown" if found is None else f"{found / max(1, prompt):.0%} of prompt tokens from the cache"
    lines = [
        f"{figures['answered']} of {figures['requests']} requests answered in {figures['seconds']:.1f} s"
        + (f"; {missed}" if missed else ""),
        f"{figures['requests_per_s']:.2f} requests/s, {good}"
        f"{figures['output_tokens_per_s']:,.0f} output tokens/s, {cached}",
    ]
    if figures["example_of_an_error"]:
        lines.append(f"example of an error: {figures['example_of_an_error']}")
    lines.append(f"{'ms':24}{'mean':>10}" + "".join(f"{f'p{p}':>10}" for p in PERCENTILES) + f"{'max':>10}")
    for key, name in (("ttft_ms", "first token"), ("tpot_ms", "per output token"), ("e2e_ms", "end to end")):
        values = figures[key]
        lines.append(f"{name:24}" + ("".join(f"{v:10,.1f}" for v in values.values()) if values else f"{'unknown':>10}"))
    return lines
