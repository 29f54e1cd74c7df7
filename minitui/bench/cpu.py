"""The report's rows for a CPU: one stream, eight streams, and the first token without and with a cached prefix."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from engine.llm import LLM
from minitui.bench.limits import Limits
from minitui.bench.rows import Row, decode_steps, greedy, random_prompts, recorded, seconds, waste_rows
from minitui.bench.shapes import Work

PROMPT, REPLY, PREFIX = 32, 64, 512  # tokens
STREAMS, REPEATS = 8, 5


def cpu_rows(llm: LLM, work: Work, limits: Limits, directory: Path, compare: bool) -> Iterator[Row]:
    """Yields the rows of the report. `compare`: also measure transformers, if it is installed."""
    vocab = int(llm.info["vocab_size"])
    seeds = iter(range(1, 10_000))

    def prompts(count: int, length: int) -> list[list[int]]:
        return random_prompts([length] * count, vocab, next(seeds))

    seconds(llm, prompts(STREAMS, PROMPT), greedy(8))
    run_transformers = _transformers(directory, llm.info["dtype"]) if compare else None
    # The engines take turns, so that a slowdown of the machine affects both.
    single, batched, other_single, other_batched = [], [], [], []
    for _ in range(REPEATS):
        single.append(seconds(llm, prompts(1, PROMPT), greedy(REPLY)))
        batched.append(seconds(llm, prompts(STREAMS, PROMPT), greedy(REPLY)))
        if run_transformers is not None:
            other_single.append(run_transformers(prompts(1, PROMPT), REPLY))
            other_batched.append(run_transformers(prompts(STREAMS, PROMPT), REPLY))
    least = work.replies(limits, [PROMPT], [REPLY])
    per_token = 1e3 / REPLY
    other = median(other_single) * per_token if other_single else None
    llm.engine.log.drain()
    seconds(llm, prompts(1, PROMPT), greedy(REPLY))
    yield Row("one stream", median(single) * per_token, "ms/token", least * per_token, other / 1.7 if other else None,
              other, _host(llm, 1))  # fmt: skip
    tokens = STREAMS * REPLY
    least = work.replies(limits, [PROMPT] * STREAMS, [REPLY] * STREAMS)
    other = tokens / median(other_batched) if other_batched else None
    note = ""
    if other_single:
        ratio = median(other_single) * STREAMS / median(batched)
        note = f"{ratio:.1f} x the speed of transformers with one stream (goal 8 x)"
    yield Row(f"{STREAMS} streams", tokens / median(batched), "tok/s", tokens / least, other * 1.6 if other else None,
              other, note)  # fmt: skip
    _, state, records = recorded(llm, lambda: seconds(llm, prompts(STREAMS, PROMPT), greedy(REPLY)))
    yield from waste_rows(f"{STREAMS} streams", state, records)
    cold, cached = [], []
    for _ in range(REPEATS):
        (start,), (rest,) = prompts(1, PREFIX), prompts(1, 16)
        cold.append(seconds(llm, [start + rest], greedy(1)))
        cached.append(seconds(llm, [start + prompts(1, 16)[0]], greedy(1)))
    least = work.prefill(limits, [PREFIX + 16])
    yield Row(f"first token, {PREFIX + 16} cold", median(cold) * 1e3, "ms", least * 1e3)
    least = work.prefill(limits, [PREFIX + 16], cached=PREFIX)
    yield Row(f"first token, {PREFIX} cached + 16", median(cached) * 1e3, "ms", least * 1e3, median(cold) * 1e3 / 8,
              note=f"{median(cold) / median(cached):.1f} x faster than cold")  # fmt: skip


def _host(llm: LLM, rows: int) -> str:
    steps = decode_steps(llm.engine.log.drain())
    if steps is None:
        return ""
    return f"plan and commit {steps.plan_us + steps.commit_us:.0f} us per step of {rows} row{'s' if rows > 1 else ''}"


def _transformers(directory: Path, dtype: str) -> Callable[[list[list[int]], int], float] | None:
    """Returns a function that runs transformers' `generate` greedily and returns the seconds that it took.

    Returns None if transformers is not installed, or if the checkpoint is not one safetensors file.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    if not (directory / "model.safetensors").exists():
        return None
    model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=getattr(torch, dtype)).eval()

    def run(prompts: list[list[int]], tokens: int) -> float:
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
        took = time.perf_counter() - started
        assert out.shape[1] == ids.shape[1] + tokens, "generate stopped early: its time is not comparable"
        return took

    run([[1, 2, 3]], 4)
    return run
