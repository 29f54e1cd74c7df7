"""Records a run of many requests without a screen, for example to show a large GPU's schedule on a laptop.

    python -m minitui.dev.make_trace --model Qwen/Qwen3-8B --dummy-weights --requests 64 --out h200.trace
    minitui replay h200.trace --speed 0.1

The prompts are random tokens; each conversation begins with one of a few shared prefixes. So batches, chunks and hits
are like those of real traffic, but the text means nothing. The trace is marked as random text, so minitui does not
show the text. The same seed gives the same arrival times and lengths.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from engine.build import build_engine
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.info import EngineInfo
from engine.params import SamplingParams
from engine.trace.kind import Reader, Record
from minitui.trace.recorder import Recorder

FEW = 1000  # number of different tokens in the prompts: with so few, the file is half as large


@dataclass(frozen=True)
class Traffic:
    """The requests of a run. Lengths are in tokens; a pair of numbers is the range of a uniform distribution."""

    requests: int = 64
    arrivals_s: float = 2.0  # all requests arrive within this time
    prefixes: int = 4  # number of different shared prefixes
    prefix: int = 256  # length of a shared prefix
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
    """Returns the requests in order of arrival; none is longer than `max_len` with its reply."""
    rng = random.Random(traffic.seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(min(vocab_size, FEW)) for _ in range(n)]

    prefixes = [tokens(traffic.prefix) for _ in range(traffic.prefixes)]
    times = sorted(rng.random() * traffic.arrivals_s for _ in range(traffic.requests))
    made = []
    for i, at in enumerate(times):
        reply = rng.randint(*traffic.reply)
        ids = rng.choice(prefixes) + tokens(rng.randint(*traffic.prompt))
        params = SamplingParams(max_tokens=reply, temperature=1.0, seed=i, ignore_eos=True)
        made.append(Arrival(at, f"user {i + 1}", ids[: max(1, max_len - reply - 1)], params))
    return made


class Notable(Reader):
    """Finds the extreme steps of a run, which become its bookmarks."""

    def __init__(self) -> None:
        self._most: dict[str, tuple[float, int]] = {}  # template of the label -> (value, step)

    def look(self, records: list[Record]) -> None:
        """Notes the steps with a value larger than all earlier values."""
        for record in records:
            self.read(record)

    def on_step(self, step: int, prefills: list[tuple[int, int, int, bool]], tokens: int) -> None:
        prompt = sum(chunk[2] for chunk in prefills)
        self._offer("the fullest batch, {:,.0f} requests in one step", len(prefills) + tokens - prompt, step)
        self._offer("most prompt tokens in one step, {:,.0f}", prompt, step)

    def on_time(self, step: int, wall_ms: float) -> None:
        self._offer("the slowest step, {:,.1f} ms", wall_ms, step)

    def _offer(self, text: str, amount: float, step: int) -> None:
        if amount > self._most.get(text, (0, 0))[0]:
            self._most[text] = (amount, step)

    def marks(self) -> list[tuple[int, str]]:
        """Returns the bookmarks as (step, label)."""
        return [(step, text.format(amount)) for text, (amount, step) in self._most.items()]


def record_run(engine: Engine, info: EngineInfo, due: list[Arrival], path: Path) -> Recorder:
    """Submits each request when it is due, or earlier if the engine is idle; records the whole run in `path`."""
    recorder = Recorder(path)
    recorder.begin(replace(info, random_text=True), engine.snapshot())
    notable = Notable()
    waiting = list(reversed(due))
    began = engine.log.now()
    while waiting or engine.has_work:
        while waiting and (engine.log.now() - began >= waiting[-1].at or not engine.has_work):
            arrival = waiting.pop()
            engine.add_request(arrival.ids, arrival.params, group=arrival.group)
        engine.step()
        records = engine.log.drain()
        notable.look(records)
        recorder.feed(records)
    engine.drain()
    recorder.feed(engine.log.drain())
    recorder.name({arrival.group: arrival.group for arrival in due})
    for step, text in notable.marks():
        recorder.bookmark(text, step)
    recorder.close()
    return recorder


def _span(text: str) -> tuple[int, int]:
    """Returns (32, 512) for "32-512". Raises BadParameter."""
    low, _, high = text.partition("-")
    try:
        span = (int(low), int(high or low))
    except ValueError:
        span = (0, 0)
    if not 0 < span[0] <= span[1]:
        raise typer.BadParameter(f"{text!r} is not a range such as 32-512")
    return span


def main(
    model: Annotated[str, typer.Option(help="The model, as for minitui chat.")],
    out: Annotated[Path, typer.Option(help="The trace file to write.")],
    dummy_weights: Annotated[bool, typer.Option("--dummy-weights", help="Use random weights.")] = False,
    device: str = "auto",
    kv_blocks: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    requests: int = Traffic.requests,
    arrivals_s: Annotated[
        float, typer.Option("--arrivals", help="Seconds within which all requests arrive.")
    ] = Traffic.arrivals_s,
    prefix: Annotated[int, typer.Option(help="Tokens of a shared prefix.")] = Traffic.prefix,
    prompt: Annotated[str, typer.Option(help="Tokens of a prompt after the prefix.")] = "32-512",
    reply: Annotated[str, typer.Option(help="Tokens of an answer.")] = "32-256",
    seed: int = 0,
) -> None:
    """Record a run of many requests without a screen."""
    traffic = Traffic(requests, arrivals_s, prefix=prefix, prompt=_span(prompt), reply=_span(reply), seed=seed)
    config = EngineConfig(
        model=model, dummy_weights=dummy_weights, device=device, num_blocks=kv_blocks, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, load_tokenizer=False,
    )  # fmt: skip
    built = build_engine(config)
    # The first steps on a device compile and warm up: they are not recorded.
    warm = arrivals(Traffic(requests=4, arrivals_s=0.0, seed=1), built.info.vocab_size, built.info.max_model_len)
    for arrival in warm:
        built.engine.add_request(arrival.ids, replace(arrival.params, max_tokens=4))
    while built.engine.has_work:
        built.engine.step()
    built.engine.clear_cache()
    built.engine.log.drain()
    due = arrivals(traffic, built.info.vocab_size, built.info.max_model_len)
    recorder = record_run(built.engine, built.info, due, out)
    size = out.stat().st_size
    print(f"{out}: {recorder.records:,} records of {recorder.steps:,} steps, {size / 1e3:,.0f} kB")


if __name__ == "__main__":
    typer.run(main)
