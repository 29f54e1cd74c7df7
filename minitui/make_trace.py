"""Record a run of many requests without a screen: to show a class, on a laptop, what a large GPU's schedule looks like.

    python -m minitui.make_trace --model Qwen/Qwen3-8B --dummy-weights --requests 64 --out h200.trace
    minitui replay h200.trace --speed 0.1

Needs the engine and nothing else of this package's dependencies. The prompts are random tokens, in conversations that
share one of a few beginnings, so that batches, chunks and hits are those of real traffic and the text means nothing:
the trace says so, and no reader shows it. The same seed gives the same arrivals and lengths.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.types import SamplingParams
from minitui.record import Recorder


@dataclass(frozen=True)
class Traffic:
    """How many ask, how much, and how fast. Lengths in tokens, drawn evenly between the two."""

    requests: int = 64
    arrivals_s: float = 2.0  # all have come after this long
    prefixes: int = 4  # different beginnings
    prefix: int = 256
    prompt: tuple[int, int] = (32, 512)  # beyond the prefix
    reply: tuple[int, int] = (32, 256)
    seed: int = 0


@dataclass(frozen=True)
class Arrival:
    """One request, due `at` seconds after the beginning."""

    at: float
    group: str
    ids: list[int]
    params: SamplingParams


def arrivals(traffic: Traffic, vocab_size: int, max_len: int) -> list[Arrival]:
    """The requests in the order in which they come; none is longer than `max_len`."""
    rng = random.Random(traffic.seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(n)]

    beginnings = [tokens(traffic.prefix) for _ in range(traffic.prefixes)]
    times = sorted(rng.random() * traffic.arrivals_s for _ in range(traffic.requests))
    made = []
    for i, at in enumerate(times):
        reply = rng.randint(*traffic.reply)
        ids = rng.choice(beginnings) + tokens(rng.randint(*traffic.prompt))
        params = SamplingParams(max_tokens=reply, temperature=1.0, seed=i, ignore_eos=True)
        made.append(Arrival(at, f"user {i + 1}", ids[: max(1, max_len - reply - 1)], params))
    return made


def record_run(engine: Engine, info: dict[str, Any], due: list[Arrival], path: Path) -> Recorder:
    """Let the requests come when they are due, run until all have ended, and write everything to `path`."""
    recorder = Recorder(path)
    recorder.begin({**info, "random_text": True}, engine.snapshot())
    waiting = list(reversed(due))
    began = engine.log.now()
    while waiting or engine.has_work:
        while waiting and (engine.log.now() - began >= waiting[-1].at or not engine.has_work):
            one = waiting.pop()
            engine.add_request(one.ids, one.params, group=one.group)
        engine.step()
        recorder.feed(engine.log.drain())
    engine.drain()
    recorder.feed(engine.log.drain())
    recorder.name({one.group: one.group for one in due})
    recorder.close()
    return recorder


def main(arguments: list[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m minitui.make_trace", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="as for minitui chat")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dummy-weights", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-blocks", type=int, default=None)
    parser.add_argument("--max-num-seqs", type=int, default=None)
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    parser.add_argument("--requests", type=int, default=Traffic.requests)
    parser.add_argument("--arrivals", type=float, default=Traffic.arrivals_s, help="seconds in which they come")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    config = EngineConfig(
        model=chosen.model, dummy_weights=chosen.dummy_weights, device=chosen.device, num_blocks=chosen.kv_blocks,
        max_num_seqs=chosen.max_num_seqs, max_num_batched_tokens=chosen.max_num_batched_tokens, load_tokenizer=False,
    )  # fmt: skip
    built = build_engine(config)
    # The first steps of a device compile and warm up: they are not part of the story.
    warm = arrivals(Traffic(requests=4, arrivals_s=0.0, seed=1), built.info["vocab_size"], built.info["max_model_len"])
    for one in warm:
        built.engine.add_request(one.ids, replace(one.params, max_tokens=4))
    while built.engine.has_work:
        built.engine.step()
    built.engine.clear_cache()
    built.engine.log.drain()
    traffic = Traffic(requests=chosen.requests, arrivals_s=chosen.arrivals, seed=chosen.seed)
    due = arrivals(traffic, built.info["vocab_size"], built.info["max_model_len"])
    recorder = record_run(built.engine, built.info, due, chosen.out)
    size = chosen.out.stat().st_size
    print(f"{chosen.out}: {recorder.records:,} records of {recorder.steps:,} steps, {size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
