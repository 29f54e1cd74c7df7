"""The figures of `minitui bench --url`: one run, the search for the highest rate, two results side by side."""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import InvalidRequest
from minitui.goals import goal_words, keeps
from minitui.text import count

PERCENTILES = (50, 90, 99)
LATE_MS = 20.0  # requests are sent later than planned: from here on, the client is too slow
TIMES = {
    "ttft_ms": "first token", "gap_ms": "gap between chunks", "tpot_ms": "per output token", "e2e_ms": "end to end",
}
RATES = {
    "requests_per_s": "requests/s", "goodput_per_s": "requests/s within the goals",
    "output_tokens_per_s": "output tokens/s",
}


@dataclass
class Outcome:
    """The result of a request.

    `sent`: seconds after the start; `late`: seconds after its planned time. `first` and `total`: seconds after `sent`.
    `gaps`: seconds between two chunks with text. `error`: empty for an answered request.
    """

    sent: float
    first: float = 0.0
    total: float = 0.0
    late: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    chunks: int = 0
    cached_tokens: int | None = None  # None: the server does not report it
    error: str = ""
    detail: str = ""
    gaps: array[float] = field(default_factory=lambda: array("d"))

    @property
    def per_token(self) -> float | None:
        """Average seconds between two tokens; None for answers of one token."""
        return (self.total - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def within(self, goals: Mapping[str, float]) -> bool:
        """Returns True if the request was answered within the goals."""
        times = {"first": self.first, "gap": self.per_token or 0.0, "total": self.total}
        return not self.error and keeps(goals, **{name: seconds * 1e3 for name, seconds in times.items()})


def summarise(outcomes: Sequence[Outcome], goals: Mapping[str, float]) -> dict[str, Any]:
    """Returns the figures of a run; latencies are in milliseconds."""
    answered = [outcome for outcome in outcomes if not outcome.error]
    seconds = max((outcome.sent + outcome.total for outcome in outcomes), default=0.0)
    good = sum(outcome.within(goals) for outcome in outcomes)
    cached = [outcome.cached_tokens for outcome in answered if outcome.cached_tokens is not None]
    tokens = sum(outcome.output_tokens for outcome in answered)
    return {
        "requests": len(outcomes),
        "answered": len(answered),
        "not_answered": dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        "example_of_an_error": next((outcome.detail for outcome in outcomes if outcome.detail), ""),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(answered) / seconds, 3) if seconds else 0.0,
        "goodput_per_s": round(good / seconds, 3) if seconds else 0.0,
        "goals_ms": dict(goals),
        "within_limits": good,
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in answered),
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": tokens,
        "output_tokens_per_s": round(tokens / seconds, 1) if seconds else 0.0,
        "chunks_per_token": round(sum(o.chunks for o in answered) / tokens, 3) if tokens else None,
        "ttft_ms": spread([outcome.first for outcome in answered]),
        "gap_ms": spread([gap for outcome in answered for gap in outcome.gaps]),
        "tpot_ms": spread([value for outcome in answered if (value := outcome.per_token) is not None]),
        "e2e_ms": spread([outcome.total for outcome in answered]),
        "sent_late_ms": spread([outcome.late for outcome in outcomes]),
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Returns mean, percentiles and maximum in milliseconds; None if there are no values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    levels = {f"p{p}": ordered[min(len(ordered) - 1, math.ceil(len(ordered) * p / 100) - 1)] for p in PERCENTILES}
    values = {"mean": sum(ordered) / len(ordered), **levels, "max": ordered[-1]}
    return {name: round(value * 1e3, 3) for name, value in values.items()}


def report(figures: Mapping[str, Any]) -> list[str]:
    """Returns the figures as lines of text."""
    goals = figures["goals_ms"]
    good = f"{figures['goodput_per_s']:.2f} within the goals ({goal_words(goals)}), " if goals else ""
    missed = ", ".join(f"{count} {error}" for error, count in figures["not_answered"].items())
    found, prompt = figures["cached_tokens"], figures["prompt_tokens"]
    cached = "cache use unknown" if found is None else f"{found / max(1, prompt):.0%} of prompt tokens from the cache"
    chunks = figures["chunks_per_token"]
    lines = [
        f"{figures['answered']} of {figures['requests']} requests answered in {figures['seconds']:.1f} s"
        + (f"; {missed}" if missed else ""),
        f"{figures['requests_per_s']:.2f} requests/s, {good}"
        f"{figures['output_tokens_per_s']:,.0f} output tokens/s, {cached}"
        + (f", {chunks:.2f} chunks per token" if chunks is not None else ""),
    ]
    if figures["example_of_an_error"]:
        lines.append(f"example of an error: {figures['example_of_an_error']}")
    lines.append(f"{'ms':24}{'mean':>10}" + "".join(f"{f'p{p}':>10}" for p in PERCENTILES) + f"{'max':>10}")
    for key, name in TIMES.items():
        values = figures[key]
        lines.append(f"{name:24}" + ("".join(f"{v:10,.1f}" for v in values.values()) if values else f"{'unknown':>10}"))
    return lines + late_words([figures])


def late_words(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a warning if requests were sent later than planned: then the client, and not the server, is measured."""
    late = max((run["sent_late_ms"]["p99"] for run in runs if run["sent_late_ms"]), default=0.0)
    words = f"requests were sent up to {late:,.0f} ms late (p99): this client is too slow; use more --processes"
    return [words] if late > LATE_MS else []


def trial_line(figures: Mapping[str, Any], holds: bool) -> str:
    """Returns one line about a trial of the search for a rate."""
    first, gap = ((figures[key] or {}).get("p99", math.nan) for key in ("ttft_ms", "gap_ms"))
    return (
        f"{figures['rate']:8.2f} requests/s: {'kept' if holds else 'missed'}, {figures['within_limits']} of "
        f"{count(figures['requests'], 'request')} within the goals; p99 of first tokens {first:,.0f} ms, of gaps "
        f"{gap:,.1f} ms; {figures['output_tokens_per_s']:,.0f} output tokens/s"
    )


def found_rate(figures: Mapping[str, Any], requests: int) -> str:
    """Returns the result of the search in a sentence."""
    goals, rate = goal_words(figures["goals_ms"]), figures["highest_rate"]
    if rate is None:
        words = f"No rate was found at which {figures['share']:.0%} of the requests keep the goals: {goals}. The "
        words += f"lowest rate that was tried is {figures['trials'][0]['rate']:.2g} a second."
    elif rate > requests:
        words = f"Even with all {count(requests, 'request')} within a second, {goals}: use more --requests."
    else:
        words = f"Highest rate at which {figures['share']:.0%} of the requests keep the goals: {rate:.2f} a second "
        words += f"({goals}); at {figures['lowest_rate_missed']:.2f} they do not."
    return "\n".join([words, *late_words(figures["trials"])])


def write(base: Path, data: str, figures: Mapping[str, Any]) -> None:
    """Writes `data` to base.json and a chart to base.png: over the rates of a search, or over the percentiles of a run.
    Raises EngineError if a file cannot be written; TraceError without a browser that makes the picture."""
    from minitui.export.charts import write_beside, write_charts
    from minitui.text import ms

    write_beside(base, ".json", data)
    runs = figures.get("trials", [figures])
    if "trials" in figures:
        values = [f"{run['rate']:.2f}" for run in runs]
        picks = [(f"{name}, p99 (ms)", [(run[key] or {}).get("p99") for run in runs]) for key, name in TIMES.items()]
        picks += [(name, [run[key] for run in runs]) for key, name in RATES.items()]
    else:
        values = [f"p{p}" for p in PERCENTILES] + ["max"]
        picks = [(f"{name} (ms)", [(figures[key] or {}).get(v) for v in values]) for key, name in TIMES.items()]
    curves = [(name, lambda value: "unknown" if value is None else ms(value), found) for name, found in picks]
    title = f"{figures['model']} at {figures['url']}" + (", over requests a second" if "trials" in figures else "")
    write_charts(base, title, values, curves, [False] * len(values))


def read_result(path: Path) -> dict[str, Any]:
    """Returns the figures of one run that --out or --json wrote; of --find-rate, those at the rate that it found.
    Raises InvalidRequest."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if "trials" in data:
            data = next((run for run in data["trials"] if run["rate"] == data["highest_rate"]), {})
        for key in (*RATES, *TIMES):
            values = data[key]
            for value in values.values() if isinstance(values, dict) else [values or 0]:
                float(value)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} is no result of one run of `minitui bench --url --out` ({error})") from None
    return dict(data)


def side_by_side(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each figure of two runs: "name", "first", "second", and "change_share" of the first."""
    rows = [(name, first[key], second[key]) for key, name in RATES.items()]
    for (key, name), level in itertools.product(TIMES.items(), ("p50", "p99", "max")):
        rows.append((f"{name}, {level} (ms)", (first[key] or {}).get(level), (second[key] or {}).get(level)))
    return [
        {"name": name, "first": a, "second": b, "change_share": b / a - 1 if a and b is not None else None}
        for name, a, b in rows
    ]


def compare_results(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns two results side by side as lines of text."""
    lines = [f"{'':36}{names[0][-16:]:>16} {names[1][-16:]:>16}"]
    for row in rows:
        cells = ["unknown" if row[key] is None else f"{row[key]:,.2f}" for key in ("first", "second")]
        change = "" if row["change_share"] is None else f"{row['change_share']:+9.1%}"
        lines.append(f"{row['name']:36}{cells[0]:>16} {cells[1]:>16} {change}")
    return lines
