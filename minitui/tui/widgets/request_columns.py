"""The columns of the table of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minitui.text import ms
from minitui.viewmodel.requests import RequestFigures

Value = float | str | None


@dataclass(frozen=True, slots=True)
class Heading:
    """A column. `rank`: columns with the lowest rank get their place first. Numbers are aligned to the right."""

    name: str
    width: int
    rank: int
    value: Callable[[RequestFigures], Value]
    text: Callable[[Value], str] = lambda value: f"{value:,}"
    words: bool = False


def _ms(value: Value) -> str:
    return ms(float(value or 0.0))


COLUMNS = (
    Heading("request", 9, 0, lambda row: row.id, lambda value: f"r{value}", words=True),
    Heading("state", 10, 0, lambda row: row.state, str, words=True),
    Heading("chat", 14, 6, lambda row: row.group, words=True),  # the picture shows the name of the group
    Heading("prompt", 7, 1, lambda row: row.prompt_tokens),
    Heading("cached", 7, 1, lambda row: row.cached_tokens),
    Heading("queue", 8, 3, lambda row: row.queue_ms, _ms),
    Heading("prefill", 8, 3, lambda row: row.prefill_ms, _ms),
    Heading("first", 7, 1, lambda row: row.first_so_far_ms, _ms),
    Heading("tokens", 7, 5, lambda row: row.gaps.tokens if row.gaps is not None else None),
    Heading("p50", 7, 2, lambda row: row.gaps.p50 if row.gaps is not None else None, _ms),
    Heading("p99", 7, 1, lambda row: row.gaps.p99 if row.gaps is not None else None, _ms),
    Heading("longest", 8, 0, lambda row: row.longest.ms if row.longest is not None else None, _ms),
    Heading("tok/s", 7, 2, lambda row: row.gaps.tok_s if row.gaps is not None else None, lambda value: f"{value:,.0f}"),
    Heading("blocks", 7, 2, lambda row: row.blocks),
    Heading("preempt", 8, 3, lambda row: row.preemptions),
    Heading("twice", 7, 4, lambda row: row.recomputed_tokens),
    Heading("reused", 7, 4, lambda row: row.reused_tokens),
    Heading("evicted", 8, 6, lambda row: row.after_evictions),
)
