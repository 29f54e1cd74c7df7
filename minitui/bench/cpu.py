"""The report's rows for a CPU: decode steps of 1 to 8 rows, a prompt, and the first token with a cached prompt.
llama.cpp is measured beside the engine where it is installed. The two take turns, so that a slowdown of the machine
affects both, and the order changes from pair to pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Protocol

from engine.llm import LLM
from minitui.bench.limits import Limits, Work
from minitui.bench.rows import Row, decode_steps, greedy, random_prompts, recorded, seconds, waste_rows

ROWS = (1, 2, 4, 8)
PROMPT, REPLY = 32, 32  # tokens of each row
Pair = tuple[tuple[float, ...], tuple[float, ...]]
PREFIX, REST = 512, 16  # tokens of a long prompt; tokens after it when it is cached


class Other(Protocol):
    """Another engine with the same shape (minitui/bench/llama.py)."""

    def decode(self, rows: int, prompt: int, steps: int) -> float:
        """Returns the median milliseconds of a greedy decode step."""

    def first_tokens(self, prompt: int, rest: int) -> tuple[float, float]:
        """Returns the milliseconds until the first token of a prompt, and of one with this prompt cached."""


def cpu_rows(llm: LLM, work: Work, limits: Limits, pairs: int, other: Other | None) -> Iterator[Row]:
    """Yields the rows of the report: medians of `pairs` runs of the engine, and of as many of `other`."""
    ours = _Ours(llm)
    ours.decode(max(ROWS), PROMPT, REPLY)  # warms up
    ours.first_tokens(PREFIX, REST)
    for rows in ROWS:
        steps = _in_turn(pairs, ours, other, partial(_decode, rows=rows))
        least = work.decode(limits, [PROMPT + REPLY // 2] * rows) * 1e3
        yield _row(f"decode step, {rows} row{'s' if rows > 1 else ''}", steps, 0, least, rows)
    firsts = _in_turn(pairs, ours, other, lambda engine: engine.first_tokens(PREFIX, REST))
    yield _row(f"prompt of {PREFIX}", firsts, 0, work.prefill(limits, [PREFIX]) * 1e3, PREFIX)
    least = work.prefill(limits, [PREFIX + REST], cached=PREFIX) * 1e3
    yield _row(f"first token, {PREFIX} cached + {REST}", firsts, 1, least, None)
    streams = max(ROWS)
    _, state, records = recorded(llm, lambda: seconds(llm, ours.prompts(streams, PROMPT), greedy(REPLY)))
    yield from waste_rows(f"{streams} streams", state, records)


def _decode(engine: Other, rows: int) -> tuple[float]:
    return (engine.decode(rows, PROMPT, REPLY),)


class _Ours:
    """The engine, measured as the other one is. A step is measured from its plan to the end of its commit."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._vocab, self._seed = llm, int(llm.info.vocab_size), 0

    def prompts(self, count: int, length: int) -> list[list[int]]:
        self._seed += 1  # always new prompts: repeated prompts would be cached
        return random_prompts([length] * count, self._vocab, self._seed)

    def decode(self, rows: int, prompt: int, steps: int) -> float:
        self._llm.engine.log.drain()
        seconds(self._llm, self.prompts(rows, prompt), greedy(steps + 1))
        found = decode_steps(self._llm.engine.log.drain())
        assert found is not None, "a reply has too few steps"
        return found.wall_ms + found.commit_us / 1e3

    def first_tokens(self, prompt: int, rest: int) -> tuple[float, float]:
        (start,), (end,) = self.prompts(1, prompt), self.prompts(1, rest)
        cold, cached = (seconds(self._llm, [tokens], greedy(1)) * 1e3 for tokens in (start, start + end))
        return cold, cached


def _in_turn(pairs: int, ours: Other, other: Other | None, run: Callable[[Other], tuple[float, ...]]) -> list[Pair]:
    """Runs both engines `pairs` times; returns (figures of ours, figures of the other or ()) of each pair."""
    found = []
    for pair in range(pairs):
        if other is not None and pair % 2:
            theirs = run(other)
            found.append((run(ours), theirs))
        else:
            found.append((run(ours), () if other is None else run(other)))
    return found


def _row(name: str, runs: list[Pair], which: int, least: float, tokens: int | None) -> Row:
    """Returns the row of figure `which`, in milliseconds. `tokens`: computed in this time; None: no rate is given."""
    value = median(ours[which] for ours, _ in runs)
    rate = None if tokens is None else tokens / value * 1e3
    if not runs[0][1]:
        return Row(name, value, "ms", least, tokens_per_s=rate)
    other, ratio = median(theirs[which] for _, theirs in runs), median(a[which] / b[which] for a, b in runs)
    return Row(name, value, "ms", least, other=other, other_name="llama.cpp", ratio=ratio, tokens_per_s=rate)
