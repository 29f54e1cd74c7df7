"""Records a run of many requests without a screen, for example to show a large GPU's schedule on a laptop.

    python -m minitui.dev.make_trace --model Qwen/Qwen3-8B --dummy-weights --requests 64 --out h200.trace
    minitui replay h200.trace --speed 0.1

Needs only the engine's dependencies. The prompts are random tokens; each conversation shares one of a few beginnings.
So batches, chunks and hits are like those of real traffic, but the text means nothing. The trace says so, and readers
do not show the text. The same seed gives the same arrival times and lengths.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.params import SamplingParams
from engine.trace.records import Record
from minitui.trace.recorder import Recorder

FEW = 1000  # different tokens in the prompts: this halves the size of the file


@dataclass(frozen=True)
class Traffic:
    """The traffic. Lengths in tokens, uniformly distributed between the two numbers."""

    requests: int = 64
    arrivals_s: float = 2.0  # all requests arrive within this time
    prefixes: int = 4  # number of different beginnings
    prefix: int = 256
    prompt: tuple[int, int] = (32, 512)  # without the prefix
    reply: tuple[int, int] = (32, 256)
    seed: int = 0


@dataclass(frozen=True)
class Arrival:
    """A request that arrives `at` seconds after the start."""

    at: float
    group: str
    ids: list[int]
    params: SamplingParams


def arrivals(traffic: Traffic, vocab_size: int, max_len: int) -> list[Arrival]:
    """The requests in the order of arrival; none is longer than `max_len`."""
    rng = random.Random(traffic.seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(min(vocab_size, FEW)) for _ in range(n)]

    beginnings = [tokens(traffic.prefix) for _ in range(traffic.prefixes)]
    times = sorted(rng.random() * traffic.arrivals_s for _ in range(traffic.requests))
    made = []
    for i, at in enumerate(times):
        reply = rng.randint(*traffic.reply)
        ids = rng.choice(beginnings) + tokens(rng.randint(*traffic.prompt))
        params = SamplingParams(max_tokens=reply, temperature=1.0, seed=i, ignore_eos=True)
        made.append(Arrival(at, f"user {i + 1}", ids[: max(1, max_len - reply - 1)], params))
    return made


class Notable:
    """The bookmarks of a run: its extreme steps."""

    def __init__(self) -> None:
        self._most: dict[str, tuple[float, int]] = {}  # label -> (value, step)

    def look(self, records: list[Record]) -> None:
        """Keeps values that exceed all earlier ones."""
        for record in records:
            if record[2] == "step":
                _, _, _, step, prefills, _joined, _left, tokens, _waiting = record
                prompt = sum(chunk[2] for chunk in prefills)
                self._offer("the fullest batch, {:,.0f} requests in one step", len(prefills) + tokens - prompt, step)
                self._offer("most prompt tokens in one step, {:,.0f}", prompt, step)
            elif record[2] == "time":
                self._offer("the slowest step, {:,.1f} ms", record[7], record[3])

    def _offer(self, text: str, amount: float, step: int) -> None:
        if amount > self._most.get(text, (0, 0))[0]:
            self._most[text] = (amount, step)

    def marks(self) -> list[tuple[int, str]]:
        """The bookmarks: (step, label)."""
        return [(step, text.format(amount)) for text, (amount, step) in self._most.items()]


def record_run(engine: Engine, info: dict[str, Any], due: list[Arrival], path: Path) -> Recorder:
    """Submits the requests at their times, runs until all have ended, and records everything in `path`."""
    recorder = Recorder(path)
    recorder.begin({**info, "random_text": True}, engine.snapshot())
    notable = Notable()
    waiting = list(reversed(due))
    began = engine.log.now()
    while waiting or engine.has_work:
        while waiting and (engine.log.now() - began >= waiting[-1].at or not engine.has_work):
            one = waiting.pop()
            engine.add_request(one.ids, one.params, group=one.group)
        engine.step()
        records = engine.log.drain()
        notable.look(records)
        recorder.feed(records)
    engine.drain()
    recorder.feed(engine.log.drain())
    recorder.name({one.group: one.group for one in due})
    for step, text in notable.marks():
        recorder.bookmark(text, step)
    recorder.close()
    return recorder


def _span(text: str) -> tuple[int, int]:
    """ "32-512" as (32, 512); argparse turns the ValueError into its message."""
    low, _, high = text.partition("-")
    span = (int(low), int(high or low))
    if not 0 < span[0] <= span[1]:
        raise ValueError(text)
    return span


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m minitui.dev.make_trace", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="as for minitui chat")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dummy-weights", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-blocks", type=int, default=None)
    parser.add_argument("--max-num-seqs", type=int, default=None)
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    parser.add_argument("--requests", type=int, default=Traffic.requests)
    parser.add_argument("--arrivals", type=float, default=Traffic.arrivals_s, help="seconds in which they come")
    parser.add_argument("--prefix", type=int, default=Traffic.prefix, help="tokens of a shared beginning")
    parser.add_argument("--prompt", type=_span, default=Traffic.prompt, help="tokens beyond it, as in 32-512")
    parser.add_argument("--reply", type=_span, default=Traffic.reply, help="tokens of an answer, as in 32-256")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    config = EngineConfig(
        model=chosen.model, dummy_weights=chosen.dummy_weights, device=chosen.device, num_blocks=chosen.kv_blocks,
        max_num_seqs=chosen.max_num_seqs, max_num_batched_tokens=chosen.max_num_batched_tokens, load_tokenizer=False,
    )  # fmt: skip
    built = build_engine(config)
    # The first steps on a device compile and warm up: they are not recorded.
    warm = arrivals(Traffic(requests=4, arrivals_s=0.0, seed=1), built.info["vocab_size"], built.info["max_model_len"])
    for one in warm:
        built.engine.add_request(one.ids, replace(one.params, max_tokens=4))
    while built.engine.has_work:
        built.engine.step()
    built.engine.clear_cache()
    built.engine.log.drain()
    traffic = Traffic(
        requests=chosen.requests, arrivals_s=chosen.arrivals, prefix=chosen.prefix, prompt=chosen.prompt,
        reply=chosen.reply, seed=chosen.seed,
    )  # fmt: skip
    due = arrivals(traffic, built.info["vocab_size"], built.info["max_model_len"])
    recorder = record_run(built.engine, built.info, due, chosen.out)
    size = chosen.out.stat().st_size
    print(f"{chosen.out}: {recorder.records:,} records of {recorder.steps:,} steps, {size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
