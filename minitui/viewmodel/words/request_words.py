"""The figures of a request in words, and as plain data for JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minitui.text import count, exact, ms
from minitui.viewmodel.explain.stalls import Reason, explain_first_token, explain_gap, in_words
from minitui.viewmodel.history.events import paused_words
from minitui.viewmodel.history.lane import Gap, Lane
from minitui.viewmodel.requests import RequestFigures, Requests

if TYPE_CHECKING:
    from minitui.viewmodel.view import View


def request_text(row: RequestFigures, name: str, why: str, first: Reason | None = None) -> str:
    """Returns the figures as one line. `name`: of its chat. `why`: the longest gap in words, empty without a gap.
    `first`: the reason of the time to first token."""
    tokens = "" if row.gaps is None else f" after {count(row.gaps.tokens, 'token')}"
    end = "not finished" if row.live else "finished"
    parts = [f"r{row.id}{f' of {name}' if name else ''} {end} ({row.state}){tokens}", *figures_in_words(row, first)]
    if why:
        parts.append(f"longest gap {why}")
    return " · ".join(parts)


def figures_in_words(row: RequestFigures, first: Reason | None = None) -> list[str]:
    """Returns one part of a sentence for each figure that is known. `first`: as in `first_token_words`."""
    gaps = row.gaps
    parts = [f"prompt {count(row.request.prompt_tokens, 'token')}, {row.request.cached_tokens:,} cached"]
    if row.first_so_far_ms is not None:
        parts.append(f"first token: {first_token_words(row, first)}")
    elif row.queue_ms is not None:
        parts.append(f"queue {ms(row.queue_ms)} ms")
    if gaps is not None and gaps.tok_s:
        parts.append(f"{gaps.tok_s:,.0f} tok/s")
    if row.blocks is not None:
        parts.append(count(row.blocks, "block"))
    if row.request.preemptions:
        parts.append(f"preempted {count(row.request.preemptions, 'time')}, {_again(row)}")
    if row.after_evictions:
        parts.append(f"{count(row.after_evictions, 'prompt token')} computed again: evicted from the cache")
    if gaps is not None and gaps.p50 is not None and gaps.p99 is not None:
        parts.append(f"{count(gaps.count, 'gap')}: p50 {ms(gaps.p50)}, p99 {ms(gaps.p99)} ms")
    return parts


def _again(row: RequestFigures) -> str:
    """Returns how many tokens a preempted request computed twice and took from the cache again."""
    if row.recomputed_tokens is None or row.reused_tokens is None:
        return "the first before these records began; tokens computed twice: unknown"
    return f"{count(row.recomputed_tokens, 'token')} computed twice, {row.reused_tokens:,} from the cache again"


def first_token_words(row: RequestFigures, reason: Reason | None = None) -> str:
    """Returns the wait for the first token: "21.1 ms = queue 1.18 + prefill 19.9", or "1,204 ms so far"; and, beside
    it, the time in the queue while the engine was paused, which does not count. `reason`: adds what took the time."""
    paused = paused_words(row.paused_ms)
    if row.first_ms is None:
        so_far = f"{ms(row.first_so_far_ms or 0.0)} ms so far"
        if row.state == "waits":
            return f"{so_far}, in the queue{paused}"
        return (so_far if row.queue_ms is None else f"{so_far}, queue {ms(row.queue_ms)} of it") + paused
    why = ""
    if reason is not None:  # the queue's time is in the sum already, but not what pauses in it leave
        why = f": {replace(reason, causes=tuple(cause for cause in reason.causes if cause.name != 'queue'))}"
    parts = f"queue {ms(row.queue_ms or 0.0)} + prefill {ms(row.prefill_ms or 0.0)}"
    if paused:
        paused = f" (not counted:{paused.removeprefix(' and')})"
    return f"{ms(row.first_ms)} ms = {parts}{paused}{why}"


def why_first(view: View, row: RequestFigures) -> Reason | None:
    """Returns what took the time to first token of a request; None if this is not known, or not yet."""
    if row.queue_ms is None or row.prefill_ms is None:
        return None
    return explain_first_token(view, row.lane, row.queue_ms, row.prefill_ms)


def as_long(others: int) -> str:
    """Returns " (as long as those of 3 others)", for the longest of several; empty without others."""
    if not others:
        return ""
    return f" (as long as {'that of another' if others == 1 else f'those of {others:,} others'})"


def request_data(view: View, lane: Lane) -> dict[str, Any]:
    """Returns the figures of a request as plain data, with the causes of its longest gap."""
    row = Requests().of(view, lane)
    reason = explain_gap(view, lane, row.longest) if row.longest is not None else None
    return request_json(row, view.texts.group_name(lane.request.group), reason, why_first(view, row))


def request_json(row: RequestFigures, name: str, reason: Reason | None, first: Reason | None = None) -> dict[str, Any]:
    """Returns the figures as plain data; durations in milliseconds, null for what is unknown. `reason`: of the longest
    gap, if there is one. `first`: of the time to first token, if it is known."""
    gaps = row.gaps
    return {
        "request": row.id, "chat": name, "state": row.state, "finished": not row.live,
        "prompt_tokens": row.request.prompt_tokens, "cached_tokens": row.request.cached_tokens,
        "output_tokens": gaps.tokens if gaps is not None else None, "queue_ms": _exact(row.queue_ms),
        "queue_paused_ms": None if row.queue_ms is None else exact(row.paused_ms),
        "prefill_ms": _exact(row.prefill_ms), "first_token_ms": _exact(row.first_ms),
        "first_token_causes_ms": None if first is None else {key: exact(ms) for key, ms in first.by_key.items()},
        "first_token_text": None if row.first_so_far_ms is None else first_token_words(row, first),
        "gaps": gaps.count if gaps is not None else None,
        "gap_p50_ms": _exact(gaps.p50) if gaps is not None else None,
        "gap_p99_ms": _exact(gaps.p99) if gaps is not None else None,
        "longest_gap": _gap(row.longest, reason) if row.longest is not None and reason is not None else None,
        "tokens_per_second": _exact(gaps.tok_s) if gaps is not None else None, "blocks": row.blocks,
        "preemptions": row.request.preemptions, "tokens_computed_twice": row.recomputed_tokens,
        "tokens_cached_after_preemption": row.reused_tokens,
        "tokens_computed_after_eviction": row.after_evictions,
    }


def stall_json(ms: float, step: int | None, prefills: list[int], waiting: list[int], why: str) -> dict[str, Any]:
    """Returns a stall that has not ended as plain data. `prefills`: the requests whose prompts the step computes."""
    return {
        "stall_ms": exact(ms), "so_far": True, "step": step, "prefill_of": prefills, "waiting": waiting, "text": why,
    }


def _gap(gap: Gap, reason: Reason) -> dict[str, Any]:
    return {
        "ms": exact(gap.ms), "token": gap.token, "step": gap.step, "paused_ms": exact(gap.paused_ms),
        "causes_ms": {key: exact(took) for key, took in reason.by_key.items()}, "so_far": gap.so_far,
        "text": in_words(gap, reason),
    }


def _exact(value: float | None) -> float | None:
    return None if value is None else exact(value)
