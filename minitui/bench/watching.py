"""Measures the cost of engine records: microseconds per record, and the slowdown of runs that write records."""

from __future__ import annotations

import statistics
import time
from typing import Any

from engine.llm import LLM
from engine.trace.records import RecordLog, packets
from minitui.bench.rows import greedy, random_prompts, seconds

COUNT = 20_000


def record_cost() -> dict[str, float]:
    """Returns the microseconds to append a typical record, and to pack it for sending."""
    log = RecordLog(limit=COUNT)
    started = time.perf_counter()
    for step in range(COUNT):
        log.append("step", step, [], [], [], 64, 0)
    appended = time.perf_counter() - started
    records = log.drain()
    started = time.perf_counter()
    packets(records)
    return {"append_us": appended / COUNT * 1e6, "pack_us": (time.perf_counter() - started) / COUNT * 1e6}


def watched_runs(llm: LLM, rows: int, tokens: int, pairs: int) -> dict[str, Any]:
    """Runs `rows` replies of `tokens` tokens each, `pairs` times with and without records; returns the slowdown and
    the half width of its 95 % interval."""
    log = llm.engine.log
    vocab, ratios, per_step = int(llm.info["vocab_size"]), [], []
    params = greedy(tokens)
    seconds(llm, random_prompts([32] * rows, vocab, 10_000), params)
    try:
        for pair in range(pairs):
            times = {}
            for enabled in (False, True) if pair % 2 else (True, False):
                log.drain()
                log.enabled = enabled
                before = log.seq
                prompts = random_prompts([32] * rows, vocab, 20_000 + 2 * pair + enabled)
                times[enabled] = seconds(llm, prompts, params)
                if enabled:
                    per_step.append((log.seq - before) / tokens)
            ratios.append(times[True] / times[False] - 1.0)
    finally:
        log.enabled = True
        log.drain()
    slowdown, interval = mean_interval(ratios)
    return {
        "rows": rows, "pairs": pairs, "slowdown": slowdown, "interval": interval,
        "records_per_step": statistics.mean(per_step),
    }  # fmt: skip


def mean_interval(values: list[float]) -> tuple[float, float]:
    """Returns the mean and the half width of its 95 % confidence interval (nan for one value).

    The quantile of Student's t is computed as the normal quantile plus three terms of an expansion; for five or more
    values its error is below 0.3 %.
    """
    n, z = len(values), 1.959964
    if n < 2:
        return statistics.mean(values), float("nan")
    t = z + (z**3 + z) / (4 * (n - 1)) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * (n - 1) ** 2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * (n - 1) ** 3)
    return statistics.mean(values), t * statistics.stdev(values) / n**0.5


def interval_text(mean: float, half: float) -> str:
    """Returns the mean and its interval as text, in percent."""
    return f"{mean:+.2%} (95 % interval {mean - half:+.2%} to {mean + half:+.2%})"


def watching(llm: LLM, rows: int, tokens: int = 128, pairs: int = 8) -> tuple[dict[str, Any], list[str]]:
    """Measures the cost of a record and the slowdown of runs; returns the data and lines of text."""
    cost, runs = record_cost(), watched_runs(llm, rows, tokens, pairs)
    lines = [
        f"a record takes {cost['append_us']:.2f} us to write and {cost['pack_us']:.2f} us to pack; "
        f"a decode step of {rows} rows writes {runs['records_per_step']:.1f} records",
        f"records slow a run down by {interval_text(runs['slowdown'], runs['interval'])}: {pairs} pairs of runs "
        f"with {rows} rows, with and without records",
    ]
    return {**cost, **runs}, lines
