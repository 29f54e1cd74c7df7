"""Measures the gain and the cost of speculation: the same replies with and without speculation.

Small models and models with random weights cannot edit code, so the replies are fixed: a step runs as usual, but on the
host the tokens of a fixed text replace the sampled tokens. There are two texts:

    edited code       the prompt is the beginning of engine/core/scheduler.py; the reply is the same text with one
                      name changed and every tenth line replaced
    nothing repeats   prompt and reply are random, so there are no drafts: this measures the cost
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from engine.core import scheduler
from engine.core.engine import Launched
from engine.core.request import Grammar
from engine.core.step import StepPlan, StepResult
from engine.llm import LLM
from engine.params import SamplingParams
from engine.trace.kind import kind_of, named
from minitui.bench.rows import Row, seconds

PROMPT = 600  # tokens
LINES_BETWEEN_EDITS = 10
REPEATS = 3
STREAMS, REPLY = (1, 8), 512  # on a GPU
CPU_STREAMS, CPU_REPLY = (1,), 256
RENAMED, NEW_NAME = "request", "job"


@dataclass(frozen=True)
class Text:
    """A prompt and its fixed reply."""

    name: str
    prompt: list[int]
    reply: list[int]


@dataclass(frozen=True)
class Timed:
    """The measured times and drafts of the replies to one text."""

    streams: int
    ms_per_token: float  # of each stream
    tokens_per_step: float
    drafted: int
    accepted: int


def texts(vocab_size: int, reply: int, seed: int) -> list[Text]:
    """Returns both texts, with replies of `reply` tokens. Another seed gives other ids, which are not cached."""
    rng = random.Random(seed)
    ids = rng.sample(range(vocab_size), min(vocab_size, 4096))
    known: dict[str, int] = {}
    lines = inspect.getsource(scheduler).splitlines(keepends=True)
    edited = [
        re.sub(rf"\b{RENAMED}\b", NEW_NAME, line) if i % LINES_BETWEEN_EDITS else f"    # {rng.random():.6f} is new\n"
        for i, line in enumerate(lines)
    ]
    old, new = (
        [ids[known.setdefault(word, len(known) % len(ids))] for word in re.findall(r"\w+|\s+|[^\w\s]", "".join(part))]
        for part in (lines, edited)
    )
    noise = [rng.randrange(vocab_size) for _ in range(PROMPT + reply)]
    return [Text("edited code", old[:PROMPT], new[:reply]), Text("nothing repeats", noise[:PROMPT], noise[PROMPT:])]


class FixedReplies:
    """A runner that replaces the sampled tokens: a request with seed i gets the reply of text i."""

    def __init__(self, runner: Any, fixed: list[Text]) -> None:
        self._runner = runner
        self._texts = [text.prompt + text.reply for text in fixed]
        self._text_of_row: dict[int, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> Launched:
        for settings in plan.joins:
            self._text_of_row[settings.row] = self._texts[settings.params.seed or 0]
        texts = [self._text_of_row[row] for row in plan.rows.tolist()]
        return _Step(self._runner.launch(plan, grammars), plan, texts)


class _Step:
    def __init__(self, launched: Launched, plan: StepPlan, texts: list[list[int]]) -> None:
        self._launched, self._plan, self._texts = launched, plan, texts

    def wait(self) -> StepResult:
        result, plan = self._launched.wait(), self._plan
        for i, (text, start, count) in enumerate(zip(self._texts, plan.starts, plan.q_lens, strict=True)):
            end = int(start) + int(count)
            if i in result.checked:
                drawn = text[start + 1 : end + 1]
                result.checked[i] = drawn + [0] * (count - len(drawn))  # drafts may extend beyond the reply
            elif plan.samples[i]:
                result.ids[i] = text[end]
        return result


def timed(llm: LLM, streams: int, reply: int) -> dict[str, Timed]:
    """Runs each text as `streams` requests at once, with different ids.

    Returns, by the name of the text, the median speeds of REPEATS runs and the total of their drafts.
    """
    vocab = int(llm.info.vocab_size)
    found: dict[str, list[Timed]] = {}
    for repeat in range(REPEATS + 1):
        sets = [texts(vocab, reply, 1 + stream + streams * repeat) for stream in range(streams)]
        for fixed in zip(*sets, strict=True):
            measured = _run(llm, list(fixed))
            if repeat:  # the first run only warms up
                found.setdefault(fixed[0].name, []).append(measured)
    return {
        name: Timed(
            streams, median(run.ms_per_token for run in runs), median(run.tokens_per_step for run in runs),
            sum(run.drafted for run in runs), sum(run.accepted for run in runs),
        )
        for name, runs in found.items()
    }  # fmt: skip


def speculation_rows(plain: dict[str, Timed], drafting: dict[str, Timed]) -> Iterator[Row]:
    """Yields the rows with drafts. Their notes compare them with the runs without drafts."""
    for name, run in drafting.items():
        before = plain[name].ms_per_token
        right = f", {run.accepted / run.drafted:.0%} of {run.drafted:,} accepted" if run.drafted else ", no drafts"
        gain = before / run.ms_per_token
        note = f"{before:.2f} without drafts: {gain:.2f} x; {run.tokens_per_step:.2f} tokens a step"
        yield Row(f"{name}, {run.streams} with drafts", run.ms_per_token, "ms/token", note=note + right)


def _run(llm: LLM, fixed: list[Text]) -> Timed:
    """Measures the replies without the time of the prompts."""
    engine, runner = llm.engine, llm.engine.runner

    def run(tokens: int) -> float:
        params = [
            SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=i) for i in range(len(fixed))
        ]
        engine.log.drain()
        return seconds(llm, [text.prompt for text in fixed], params)

    engine.runner = FixedReplies(runner, fixed)
    tokens = len(fixed[0].reply)
    try:
        run(1)  # caches the prompts
        first = run(1)
        took = run(tokens) - first
    finally:
        engine.runner = runner
    records = engine.log.drain()
    steps = sum(1 for record in records if kind_of(record) == "step")
    drafts = [draft for record in records if kind_of(record) == "accept" for draft in named(record).drafts]
    return Timed(
        len(fixed), took / (tokens - 1) * 1e3, (tokens - 1) / (steps - 1), sum(drafted for _, drafted, _ in drafts),
        sum(accepted for *_, accepted in drafts),
    )  # fmt: skip
