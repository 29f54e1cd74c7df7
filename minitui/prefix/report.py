"""The doctor's report on a session: text, Markdown or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minitui.prefix.diagnose import ALIKE, CAUSES, ROUNDING, Finding
from minitui.text import count, duration
from minitui.visible import visible_line

MOST_CAUSES = 3
WELL = ("none", "first", "too short for a block")  # nothing was lost


@dataclass(frozen=True, slots=True)
class Costly:
    """What one cause cost in a session. `seconds`: None if unknown."""

    cause: str
    requests: int
    tokens: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Shares of all prompt tokens; `cached`, `kept` (of what could have been cached): None if the server does not tell.
    `causes`: the costliest first."""

    requests: int
    tokens: int
    could: float
    cached: float | None
    kept: float | None
    causes: list[Costly]
    estimated: bool


def summarise(findings: Sequence[Finding]) -> Summary:
    """Returns the summary of a session. What could have been cached includes what the found causes cost."""
    told = [one for one in findings if one.cached is not None]
    tokens, told_tokens = (sum(one.prompt for one in each) for each in (findings, told))
    could, told_could = (sum(map(_could, each)) for each in (findings, told))
    cached = sum(one.cached or 0 for one in told)
    causes = []
    for cause in {one.cause for one in findings} - set(WELL):
        mine = [one for one in findings if one.cause == cause]
        known = [one.seconds for one in mine if one.seconds is not None]
        lost, seconds = sum(one.lost for one in mine), sum(known) if len(known) == len(mine) else None
        causes.append(Costly(cause, len(mine), lost, seconds))
    causes.sort(key=lambda one: (-one.tokens, one.cause))
    return Summary(
        len(findings), tokens, could / tokens if tokens else 0.0, cached / told_tokens if told_tokens else None,
        min(1.0, cached / told_could) if told_could else None, causes, any(one.estimated for one in findings),
    )


def _could(one: Finding) -> int:
    """Returns the tokens that the cache would have had without the request's fault."""
    missing = one.lost - max(0, one.could - (one.could if one.cached is None else one.cached))
    return min(one.prompt, max(one.could + max(0, missing), one.cached or 0))


def heading(summary: Summary) -> str:
    """Returns "could have been cached: 78%    was cached: 68%"."""
    cached = "unknown: the server does not tell" if summary.cached is None else f"{summary.cached:.0%}"
    return f"could have been cached: {summary.could:.0%}    was cached: {cached}"


def what_costs(summary: Summary) -> list[str]:
    """Returns what cost most, and what to change."""
    out = []
    for costly in summary.causes[:MOST_CAUSES]:
        seconds = "" if costly.seconds is None else f", {duration(costly.seconds * 1e3)}"
        out.append(
            f"{costly.cause}: {count(costly.tokens, 'token')}{seconds} in {count(costly.requests, 'request')}. "
            f"Change: {CAUSES[costly.cause][1]}."
        )
    if not out and summary.kept is not None and summary.kept < 1.0:
        return [
            f"No request lost more of its prefix than what may fill no block: {ROUNDING} tokens, or {ALIKE:.0%} of it."
        ]
    return out or ["No request lost its prefix."]


def lines(findings: Sequence[Finding], source: str) -> list[str]:
    """Returns the report as lines of text."""
    summary = summarise(findings)
    out = [
        f"{source}: {count(summary.requests, 'request')}, {count(summary.tokens, 'prompt token')}"
        + (" (estimated from characters)" if summary.estimated else ""), heading(summary), "",
    ]
    for one in (each for each in findings if each.cause not in WELL):
        fault, seconds = CAUSES[one.cause][0], "" if one.seconds is None else f", {duration(one.seconds * 1e3)}"
        out.append(f"r{one.number}: {one.cause} ({fault}): {count(one.lost, 'token')} lost{seconds}")
        if one.ancestor is not None:
            where = f"; {one.where}" if one.where else ""
            out.append(f"    {one.could:,} of {one.prompt:,} tokens as in r{one.ancestor}{where}")
        if one.before or one.after:
            out += [f"    - {visible_line(one.before)}", f"    + {visible_line(one.after)}"]
    if not summary.causes:
        return [*out, *what_costs(summary)]
    return [*out, "", "What cost most:", *(f"  {line}" for line in what_costs(summary))]


def markdown(findings: Sequence[Finding], source: str) -> str:
    """Returns the report as Markdown."""
    summary = summarise(findings)
    cached = "unknown" if summary.cached is None else f"{summary.cached:.0%}"
    did = f"{count(summary.requests, 'request')}, {count(summary.tokens, 'prompt token')}"
    out = [
        f"# Prefix cache of {visible_line(source)}", "",
        f"{did}: {summary.could:.0%} could have been cached, {cached} was.", "",
        "| cause | fault of | requests | tokens | seconds | what to change |", "|---|---|---:|---:|---:|---|",
    ]
    for costly in summary.causes:
        fault, repair = CAUSES[costly.cause]
        seconds = "unknown" if costly.seconds is None else f"{costly.seconds:.2f}"
        out.append(f"| {costly.cause} | {fault} | {costly.requests:,} | {costly.tokens:,} | {seconds} | {repair} |")
    for one in findings:
        if one.before or one.after:
            out += ["", f"r{one.number}, {one.cause}, {one.where}:", "", "```diff",
                    f"- {visible_line(one.before)}", f"+ {visible_line(one.after)}", "```"]
    return "\n".join(out) + "\n"


def as_data(findings: Sequence[Finding], source: str) -> dict[str, Any]:
    """Returns the report as data; null: unknown."""
    summary = asdict(summarise(findings))
    for costly in summary["causes"]:
        costly["fault"], costly["change"] = CAUSES[costly["cause"]]
    every = [asdict(one) | {"fault": CAUSES[one.cause][0]} for one in findings]
    return {"source": source, "summary": summary, "requests": every}
