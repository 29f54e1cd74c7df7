"""Measures the report's rows for a GPU: one request, batches, prefill only, a mix, and time to the first token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

import numpy as np

from engine.llm import LLM
from engine.params import SamplingParams
from engine.trace.records import Record
from minitui.bench.limits import Limits, Work
from minitui.bench.rows import Row, decode_steps, greedy, random_prompts, recorded, seconds, waste_rows

# The value of the best other engine (vLLM 0.25.1, mini-sglang, nano-vllm) on one H200 with random weights. Batches:
# decode rates, without the prompts, as here.
H200 = {
    "8B": {
        "batch 1": 5.14, "batch 64": 10_223, "batch 256": 22_262,
        "prefill 16 x 4,096": 41_162, "mixed 256": 10_059,
        "first token, 2,112 cold": 51.9, "first token, 2,048 cached + 64": 8.4,
    },
    "0.6B": {
        "batch 1": 1.64, "batch 64": 28_470, "batch 256": 53_524,
        "prefill 16 x 4,096": 344_578, "mixed 256": 24_616,
        "first token, 2,112 cold": 8.9, "first token, 2,048 cached + 64": 6.6,
    },
}

REPLY = 256  # tokens of a reply in the batch rows


class GpuRows:
    """Measures one model. `references`: row name -> the value of the best other engine on this GPU."""

    def __init__(self, llm: LLM, work: Work, limits: Limits, references: dict[str, float]) -> None:
        self._llm, self._work, self._limits, self._references = llm, work, limits, references
        self._vocab = int(llm.info.vocab_size)
        self._seed = 0

    def all(self) -> Iterator[Row]:
        """Measures all rows; yields each row as soon as it is measured."""
        self._warm_up()
        yield self.single()
        for batch in (64, 256):
            if batch <= self._llm.info.max_num_seqs:
                yield from self.batch(batch)
        yield self.prefill()
        yield from self.mixed()
        yield self.first_token_cold()
        yield self.first_token_cached()

    def single(self) -> Row:
        """Measures one request with 128 prompt tokens: (time for 513 tokens - time for 1 token) / 512."""
        prompts, work = self._prompts, self._work
        one = median(seconds(self._llm, prompts([128]), greedy(1)) for _ in range(3))
        self._llm.engine.log.drain()
        took = (seconds(self._llm, prompts([128]), greedy(513)) - one) / 512 * 1e3

        def least(limits: Limits) -> float:
            return sum(work.decode(limits, [128 + step]) for step in range(1, 513)) / 512 * 1e3

        return self._row("batch 1", took, "ms/token", least, self._host(1))

    def batch(self, n: int) -> Iterator[Row]:
        """Measures two rows for n requests with 128 prompt tokens and replies of 256 tokens. The first row measures
        only decoding: 255 tokens of each reply / (time for 256 tokens - time for 1 token). The second row includes the
        prompts: all tokens of the replies / whole time."""
        prompts, work, decoded = [128] * n, self._work, n * (REPLY - 1)
        one = self._median(lambda: seconds(self._llm, self._prompts(prompts), greedy(1)))
        self._llm.engine.log.drain()
        whole = self._median(lambda: seconds(self._llm, self._prompts(prompts), greedy(REPLY)))

        def decoding(limits: Limits) -> float:
            return decoded / sum(work.decode(limits, [128 + step] * n) for step in range(1, REPLY))

        def with_prompts(limits: Limits) -> float:
            return n * REPLY / work.replies(limits, prompts, [REPLY] * n)

        yield self._row(f"batch {n}", decoded / (whole - one), "tok/s", decoding, self._host(n))
        yield self._row(f"batch {n} with its prompts", n * REPLY / whole, "tok/s", with_prompts)

    def prefill(self) -> Row:
        """Measures prompt tokens / time, for 16 prompts of 4,096 tokens with replies of one token."""
        lengths = [4096] * 16
        took = self._median(lambda: seconds(self._llm, self._prompts(lengths), greedy(1)))

        def most(limits: Limits) -> float:
            return sum(lengths) / self._work.prefill(limits, lengths)

        return self._row("prefill 16 x 4,096", sum(lengths) / took, "tok/s", most)

    def mixed(self) -> Iterator[Row]:
        """Measures reply tokens / time, and the waste, for 256 requests at once. The lengths of prompts and replies are
        uniformly distributed from 100 to 1,024 tokens."""
        rng = np.random.default_rng(0)
        lengths, outputs = (rng.integers(100, 1025, 256).tolist() for _ in range(2))
        params: list[SamplingParams] = [greedy(n) for n in outputs]
        took, state, records = recorded(self._llm, lambda: seconds(self._llm, self._prompts(lengths), params))

        def most(limits: Limits) -> float:
            return sum(outputs) / self._work.replies(limits, lengths, outputs)

        yield self._row("mixed 256", sum(outputs) / took, "tok/s", most, self._host(256, records))
        yield from waste_rows("mixed 256", state, records)

    def first_token_cold(self) -> Row:
        """Measures the time to the first token of a new prompt."""
        took = median(seconds(self._llm, self._prompts([2112]), greedy(1)) for _ in range(5)) * 1e3
        return self._row("first token, 2,112 cold", took, "ms", lambda limits: self._work.prefill(limits, [2112]) * 1e3)

    def first_token_cached(self) -> Row:
        """Measures the time to the first token of a prompt with 2,048 cached tokens."""
        times = []
        for _ in range(5):
            (start,), (rest,) = self._prompts([2048]), self._prompts([64])
            seconds(self._llm, [start], greedy(1))
            times.append(seconds(self._llm, [start + rest], greedy(1)))
        return self._row(
            "first token, 2,048 cached + 64", median(times) * 1e3, "ms",
            lambda limits: self._work.prefill(limits, [2112], cached=2048) * 1e3,
        )

    def _warm_up(self) -> None:
        seconds(self._llm, self._prompts([128] * 8), greedy(8))
        seconds(self._llm, self._prompts([4096] * 2), greedy(2))

    def _median(self, run: Callable[[], float]) -> float:
        return median(run() for _ in range(3))

    def _prompts(self, lengths: list[int]) -> list[list[int]]:
        self._seed += 1  # always new prompts: repeated prompts would be cached
        return random_prompts(lengths, self._vocab, self._seed)

    def _host(self, rows: int, records: list[Record] | None = None) -> str:
        steps = decode_steps(self._llm.engine.log.drain() if records is None else records)
        if steps is None:
            return ""
        per_row = f", {steps.host_us / rows:.2f} us per row" if rows > 1 else ""
        return f"host {steps.host_us:.0f} us per step{per_row}; device {steps.device_ms:.2f} ms"

    def _row(self, name: str, value: float, unit: str, limit: Callable[[Limits], float], note: str = "") -> Row:
        """Returns a row. `limit` returns the best value that the given limits of the machine allow."""
        limits = self._limits
        steady = limit(replace(limits, matmul=limits.sustained)) if limits.sustained else None
        return Row(name, value, unit, limit(limits), self._references.get(name), note, steady)
