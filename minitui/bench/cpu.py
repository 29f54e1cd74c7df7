"""The report's rows for a CPU: decode steps of 1 to 8 rows, a prompt, and the first token with a cached prompt."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from engine.llm import LLM
from minitui.bench.limits import Limits, Work
from minitui.bench.rows import Row, decode_steps, greedy, random_prompts, recorded, seconds, waste_rows

ROWS = (1, 2, 4, 8)
PROMPT, REPLY = 32, 32  # tokens of each row
PREFIX, REST = 512, 16  # tokens of a long prompt; tokens after it when it is cached


class CpuRows:
    """Measures one model; each row is the median of `repeats` runs."""

    def __init__(self, llm: LLM, work: Work, limits: Limits, repeats: int) -> None:
        self._llm, self._work, self._limits, self._repeats = llm, work, limits, repeats
        self._vocab, self._seed = int(llm.info.vocab_size), 0

    def all(self) -> Iterator[Row]:
        """Measures all rows; yields each row as soon as it is measured."""
        self._decode(max(ROWS))  # warms up
        self._first_tokens()
        for rows in ROWS:
            value = median(self._decode(rows) for _ in range(self._repeats))
            least = self._work.decode(self._limits, [PROMPT + REPLY // 2] * rows) * 1e3
            name = f"decode step, {rows} row{'s' if rows > 1 else ''}"
            yield Row(name, value, "ms", least, tokens_per_s=rows / value * 1e3)
        firsts = [self._first_tokens() for _ in range(self._repeats)]
        cold, cached = (median(times) for times in zip(*firsts, strict=True))
        least = self._work.prefill(self._limits, [PREFIX]) * 1e3
        yield Row(f"prompt of {PREFIX}", cold, "ms", least, tokens_per_s=PREFIX / cold * 1e3)
        least = self._work.prefill(self._limits, [PREFIX + REST], cached=PREFIX) * 1e3
        yield Row(f"first token, {PREFIX} cached + {REST}", cached, "ms", least)
        streams = max(ROWS)
        _, state, records = recorded(
            self._llm, lambda: seconds(self._llm, self._prompts(streams, PROMPT), greedy(REPLY))
        )
        yield from waste_rows(f"{streams} streams", state, records)

    def _decode(self, rows: int) -> float:
        """Returns the median milliseconds of a decode step, from its plan to the end of its commit."""
        self._llm.engine.log.drain()
        seconds(self._llm, self._prompts(rows, PROMPT), greedy(REPLY + 1))
        found = decode_steps(self._llm.engine.log.drain())
        assert found is not None, "a reply has too few steps"
        return found.wall_ms + found.commit_us / 1e3

    def _first_tokens(self) -> tuple[float, float]:
        """Returns the milliseconds until the first token of a prompt, and of one with this prompt cached."""
        (start,), (end,) = self._prompts(1, PREFIX), self._prompts(1, REST)
        cold, cached = (seconds(self._llm, [tokens], greedy(1)) * 1e3 for tokens in (start, start + end))
        return cold, cached

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        self._seed += 1  # always new prompts: repeated prompts would be cached
        return random_prompts([length] * count, self._vocab, self._seed)
