"""The rows of a CPU: one stream and eight, with and without a cached prefix, compared with transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from engine.llm import LLM
from minitui.bench.limits import Limits
from minitui.bench.rows import Row, decode_steps, greedy, random_prompts, seconds
from minitui.bench.shapes import Work

PROMPT, REPLY, STREAMS, PREFIX, REPEATS = 32, 64, 8, 512, 5


def cpu_rows(llm: LLM, work: Work, limits: Limits, directory: Path, compare: bool) -> Iterator[Row]:
    """Yields the rows of this engine. `compare`: if transformers is installed, measure it, too."""
    vocab = int(llm.info["vocab_size"])
    seeds = iter(range(1, 10_000))

    def prompts(count: int, length: int) -> list[list[int]]:
        return random_prompts([length] * count, vocab, next(seeds))

    seconds(llm, prompts(STREAMS, PROMPT), greedy(8))
    other = _transformers(directory, llm.info["dtype"]) if compare else None
    # The engines take turns, so that a slowdown of the machine affects both.
    single, batched, theirs_single, theirs_batched = [], [], [], []
    for _ in range(REPEATS):
        single.append(seconds(llm, prompts(1, PROMPT), greedy(REPLY)))
        batched.append(seconds(llm, prompts(STREAMS, PROMPT), greedy(REPLY)))
        if other is not None:
            theirs_single.append(other(prompts(1, PROMPT), REPLY))
            theirs_batched.append(other(prompts(STREAMS, PROMPT), REPLY))
    least = work.replies(limits, [PROMPT], [REPLY])
    per_token = 1e3 / REPLY
    their = median(theirs_single) * per_token if theirs_single else None
    llm.engine.log.drain()
    seconds(llm, prompts(1, PROMPT), greedy(REPLY))
    yield Row("one stream", median(single) * per_token, "ms/token", least * per_token, their / 1.7 if their else None,
              their, _host(llm, 1))  # fmt: skip
    tokens = STREAMS * REPLY
    least = work.replies(limits, [PROMPT] * STREAMS, [REPLY] * STREAMS)
    their = tokens / median(theirs_batched) if theirs_batched else None
    note = ""
    if theirs_single:
        note = f"{median(theirs_single) * STREAMS / median(batched):.1f} x transformers in sequence (goal 8 x)"
    yield Row(f"{STREAMS} streams", tokens / median(batched), "tok/s", tokens / least, their * 1.6 if their else None,
              their, note)  # fmt: skip
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
    steps = decode_steps(llm)
    if steps is None:
        return ""
    return f"plan and commit {steps.plan_us + steps.commit_us:.0f} us per step of {rows} row{'s' if rows > 1 else ''}"


def _transformers(directory: Path, dtype: str) -> Callable[[list[list[int]], int], float] | None:
    """A function that times greedy replies of transformers' generate; None if it is not installed or the checkpoint is
    not one safetensors file."""
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
