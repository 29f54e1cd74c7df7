"""Experiments: what a step costs with 1, 4, 16 … rows or prompt tokens, here and on the recorded GPU."""

from __future__ import annotations

import asyncio
from random import Random
from statistics import median
from typing import NamedTuple

from engine.params import SamplingParams
from minitui.sources.base import Stream
from minitui.teaching.lessons.page import Seen
from minitui.teaching.recorded_steps import BYTES, recorded_device
from minitui.teaching.stage import Stage
from minitui.text import count, ms
from minitui.viewmodel.board import Curve, Curves
from minitui.viewmodel.history.steps import StepRow

ROWS = (1, 4, 16, 64, 256)
PROMPTS = (*ROWS, 1024)  # tokens
PROMPT = 4  # tokens of a prompt whose reply is decoded
TOKENS = 8  # of each of these replies
REPEATS = 3  # measurements of each size
MANY = 64  # rows of the prediction
HERE = "here"
GPU = recorded_device()
MODEL = GPU.models["8B"]
LOOKED_UP = 151_936 * 4_096  # parameters of the model's embedding table: a token reads one line of it
MODEL_READS = MODEL.weights_gb * 1e9 - LOOKED_UP * BYTES["bfloat16"]  # bytes of weights, for a step
DIGITS = 2  # after the point, in the table of costs: the numbers shown add up
TOLD = (1, 4, MANY, ROWS[-1])  # rows in the table of costs


class Costs(NamedTuple):
    """The costs of a decode step of the recorded model, in ms. All but `measured` are calculated from the speeds of the
    device."""

    weights: float  # read once for all rows
    texts: float  # the keys and values of all rows, read
    arithmetic: float  # two operations for each weight and row
    measured: float

    @property
    def bound(self) -> float:
        """The roofline: reading and arithmetic go on at the same time."""
        return max(self.weights + self.texts, self.arithmetic)

    @property
    def together(self) -> float:
        """If the device never did both at the same time."""
        return self.weights + self.texts + self.arithmetic


def costs(n: int) -> Costs:
    """Returns the costs of a decode step with `n` rows."""
    sizes = MODEL_READS, n * MODEL.context * MODEL.kv_bytes_per_token  # bytes
    weights, texts = (round(size / GPU.read_bytes_per_s * 1e3, DIGITS) for size in sizes)
    operations = 2 * n * MODEL_READS / BYTES["bfloat16"]
    return Costs(weights, texts, round(operations / GPU.operations_per_s * 1e3, DIGITS), MODEL.decode[n])


def costs_table() -> str:
    """Returns the costs of steps with different numbers of rows, as lines of a page, indented by two spaces."""
    found = [costs(n) for n in TOLD]
    lines = [f"{'calculated ms of a step with':<34}" + "".join(f"{count(n, 'row'):>9}" for n in TOLD)]
    for title, values in (
        (f"read the weights: {MODEL_READS / 1e9:.1f} GB, once", [one.weights for one in found]),
        ("read keys and values of all rows", [one.texts for one in found]),
        ("arithmetic", [one.arithmetic for one in found]),
        ("longer of reading and arithmetic", [one.bound for one in found]),
        ("sum of reading and arithmetic", [one.together for one in found]),
        ("measured ms of the step", [one.measured for one in found]),
    ):
        lines.append(f"{title:<34}" + "".join(f"{value:>9.{DIGITS}f}" for value in values))
    return "\n".join(f"  {line}" for line in lines)


async def rows(stage: Stage) -> Seen:
    """Measures decode steps with different numbers of rows."""
    title = "A decode step: ms by rows"
    recorded = _recorded("decode")
    here: dict[int, float] = {}
    await _run(stage, [_prompt(stage, PROMPT, 0)], TOKENS)  # not measured: the first steps are slow
    for n in ROWS:
        _draw(stage, title, "rows", here, recorded)
        done = []
        for again in range(REPEATS):
            first = (1 + again) * 2 * ROWS[-1]  # the seed of a prompt that no other request has
            done += await _run(stage, [_prompt(stage, PROMPT, first + n + i) for i in range(n)], TOKENS)
        here[n] = _median([row for row in done if not row.chunks and row.decodes == n])
        await stage.pause(0.6)
    _draw(stage, title, "rows", here, recorded)
    factor = _factor(recorded["8B"], MANY)
    table = _told(here, "decode", ("ms of a decode step", "1 row"), ROWS[-1])
    text = f"{table}\n\nThe next page says where the time goes."
    return Seen(text, 2 if factor < 2 else 1 if factor < MANY / 2 else 0)


async def prompt_tokens(stage: Stage) -> Seen:
    """Measures steps that compute prompts of different lengths."""
    title = "A prefill step: ms by prompt tokens"
    recorded = _recorded("prefill")
    here: dict[int, float] = {}
    await _run(stage, [_prompt(stage, PROMPT, 0)], TOKENS)
    for n in PROMPTS:
        _draw(stage, title, "tokens", here, recorded)
        done = [row for i in range(REPEATS) for row in await _run(stage, [_prompt(stage, n, 1 + n + i)], 1)]
        here[n] = _median([row for row in done if row.prefill_tokens == n])
        await stage.pause(0.6)
    _draw(stage, title, "tokens", here, recorded)
    table = _told(here, "prefill", ("ms of a prompt's step", "1 token"), PROMPTS[-1])
    flat = f"On the {GPU.name}, {MANY} prompt tokens take about as long as one, and {PROMPTS[-1]:,} take much longer."
    one = (
        "There, one prompt token takes longer than one row of a decode step. One reason: a prompt's step runs other "
        "kernels."
    )
    return Seen(f"{table}\n\n{flat} {one}")


def _prompt(stage: Stage, tokens: int, seed: int) -> list[int]:
    """Returns random token ids: no two prompts begin with the same block, so nothing comes from the cache."""
    random = Random(seed * 1000 + tokens)
    return [random.randrange(stage.source.info.vocab_size) for _ in range(tokens)]


async def _run(stage: Stage, prompts: list[list[int]], tokens: int) -> list[StepRow]:
    """Runs requests that start in the same step; returns the steps. Pauses the engine again."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    last = stage.state().step
    streams = [stage.source.submit(ids, params, group="lesson") for ids in prompts]
    await stage.until("the requests to be queued", lambda: len(stage.state().queue) == len(prompts))
    await stage.open()

    async def read(stream: Stream) -> None:
        async for _ in stream:
            pass

    await asyncio.gather(*map(read, streams))
    await stage.gate()
    found = [stage.view.history.steps.get(step) for step in range(last + 1, stage.state().step + 1)]
    return [row for row in found if row is not None]


def _median(steps: list[StepRow]) -> float:
    return median(row.took_ms or 0.0 for row in steps)


def _recorded(kind: str) -> dict[str, dict[int, float]]:
    """Returns {size of the model: {n: ms}} of the recorded GPU."""
    return {size: getattr(model, kind) for size, model in GPU.models.items()}


def _draw(stage: Stage, title: str, unit: str, here: dict[int, float], recorded: dict[str, dict[int, float]]) -> None:
    sizes = ROWS if unit == "rows" else PROMPTS
    shown = {size: {n: points[n] for n in sizes} for size, points in recorded.items()}
    curves = [Curve(HERE, here), *(Curve(f"{GPU.name} {size}", points) for size, points in shown.items())]
    stage.view.put(Curves(title, unit, sizes, tuple(curves)))


def _factor(points: dict[int, float], n: int) -> float:
    return points[n] / points[1]


def _told(here: dict[int, float], kind: str, head: tuple[str, str], last: int) -> str:
    """Returns a table with a line for this machine and for each recorded model. The columns: 1, MANY, `last`, and MANY
    compared with 1. `head`: the title of the lines and of the first column."""
    title, one = head
    columns = [one, f"{MANY}", f"{last:,}", f"{MANY} : 1"]
    lines = [f"   {title:<22}" + "".join(f"{column:>8}" for column in columns)]
    recorded = {f"{GPU.name} {size}": points for size, points in _recorded(kind).items()}
    for name, points in {HERE: here, **recorded}.items():
        shown = [*(ms(points[n]) for n in (1, MANY, last)), f"{_factor(points, MANY):.2f}"]
        lines.append(f"   {name:<22}" + "".join(f"{value:>8}" for value in shown))
    return "\n".join(lines)
