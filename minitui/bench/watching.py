"""What it costs to be watched: microseconds per record, and whole runs with records off and on, interleaved."""

from __future__ import annotations

import pickle
import statistics
import time
from typing import Any

from engine.llm import LLM
from engine.records import RecordLog
from minitui.bench.rows import greedy, random_prompts, seconds

COUNT = 20_000


def record_cost() -> dict[str, float]:
    """Microseconds to append a typical record, and to pickle it on its way to the screen."""
    log = RecordLog(limit=COUNT)
    started = time.perf_counter()
    for step in range(COUNT):
        log.append("step", step, [], [], [], 64, 0)
    appended = time.perf_counter() - started
    records = log.drain()
    started = time.perf_counter()
    pickle.dumps(records)
    return {"append_us": appended / COUNT * 1e6, "pickle_us": (time.perf_counter() - started) / COUNT * 1e6}


def watched_runs(llm: LLM, rows: int, tokens: int, pairs: int) -> dict[str, Any]:
    """Runs of `rows` replies of `tokens`, alternating records off and on; the slowdown with its 95 % interval."""
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
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    return {
        "rows": rows, "pairs": pairs, "slowdown": statistics.mean(ratios), "interval": 2.1 * spread,
        "records_per_step": statistics.mean(per_step),
    }  # fmt: skip


def watching(llm: LLM, rows: int, tokens: int = 128, pairs: int = 8) -> tuple[dict[str, Any], list[str]]:
    """Both measurements, as data and as lines."""
    cost, runs = record_cost(), watched_runs(llm, rows, tokens, pairs)
    lines = [
        f"a record costs {cost['append_us']:.2f} us to make and {cost['pickle_us']:.2f} us to send; "
        f"a decode step of {rows} rows makes {runs['records_per_step']:.1f}",
        f"records on against off, {pairs} pairs of runs with {rows} rows: {runs['slowdown']:+.2%} "
        f"(95 % interval {runs['slowdown'] - runs['interval']:+.2%} to {runs['slowdown'] + runs['interval']:+.2%})",
    ]
    return {**cost, **runs}, lines
