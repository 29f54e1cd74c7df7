"""Experiments: what a step costs with 1, 2, 4 … 128 rows or prompt tokens, here and on the recorded GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from statistics import median
from typing import NamedTuple

from engine.params import SamplingParams
from minitui.sources.base import Stream
from minitui.teaching.lessons.page import Seen
from minitui.teaching.recorded_steps import BYTES, RecordedModel, recorded_device
from minitui.teaching.stage import Stage
from minitui.text import count, ms
from minitui.viewmodel.board import Curve, Curves
from minitui.viewmodel.model import StepRow

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPT = 4  # tokens of a prompt whose reply is decoded
TOKENS = 8  # of each of these replies
REPEATS = 3  # measurements of each size
MANY = 64  # rows of the prediction
LONGER = (512, 1024)  # tokens of prompts that only the recorded device computes
HERE = "here"
GPU = recorded_device()
MODEL = GPU.models["8B"]
LOOKED_UP = 151_936 * 4_096  # parameters of the model's embedding table: a token reads one line of it
MODEL_READS = MODEL.weights_gb * 1e9 - LOOKED_UP * BYTES["bfloat16"]  # bytes of weights, for a step
TOLD = (1, MANY, SIZES[-1], 256)  # rows in the table of costs


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


def costs(n: int) -> Costs:
    """Returns the costs of a decode step with `n` rows."""
    texts = n * MODEL.context * MODEL.kv_bytes_per_token
    operations = 2 * n * MODEL_READS / BYTES["bfloat16"]
    return Costs(
        MODEL_READS / GPU.read_bytes_per_s * 1e3, texts / GPU.read_bytes_per_s * 1e3,
        operations / GPU.operations_per_s * 1e3, MODEL.decode[n],
    )  # fmt: skip


def costs_table(indent: str) -> str:
    """Returns the costs of steps with different numbers of rows, as lines of a page; all but the first are indented."""
    found = [costs(n) for n in TOLD]
    lines = [f"{'calculated ms of a step with':<34}" + "".join(f"{count(n, 'row'):>9}" for n in TOLD)]
    for title, values in (
        (f"read the weights: {MODEL_READS / 1e9:.1f} GB, once", [one.weights for one in found]),
        ("read keys and values of all rows", [one.texts for one in found]),
        ("arithmetic", [one.arithmetic for one in found]),
        ("longer of reading and arithmetic", [one.bound for one in found]),
        ("measured ms of the step", [one.measured for one in found]),
    ):
        lines.append(f"{title:<34}" + "".join(f"{value:>9.2f}" for value in values))
    return f"\n{indent}".join(lines)


def equal_context(n: int) -> int:
    """Returns the tokens of each of `n` texts whose keys and values are together as large as the weights."""
    return int(round(MODEL_READS / MODEL.kv_bytes_per_token / n, -2))


async def rows(stage: Stage) -> Seen:
    """Measures decode steps with different numbers of rows."""
    title = "A decode step: ms by rows"
    recorded = _recorded("decode")
    here: dict[int, float] = {}
    await _run(stage, [_prompt(stage, PROMPT, 0)], TOKENS)  # not measured: the first steps are slow
    for n in SIZES:
        _draw(stage, title, "rows", here, recorded)
        done = []
        for again in range(REPEATS):
            first = (1 + again) * 2 * SIZES[-1]  # the seed of a prompt that no other request has
            done += await _run(stage, [_prompt(stage, PROMPT, first + n + i) for i in range(n)], TOKENS)
        here[n] = _median([row for row in done if not row.chunks and row.decodes == n])
        await stage.pause(0.6)
    _draw(stage, title, "rows", here, recorded)
    factor = _factor(recorded["8B"], MANY)
    one, many = costs(1), costs(MANY)
    table = _told(here, GPU.models, "decode", ("ms of a decode step", "1 row"), (1, MANY, SIZES[-1]), factor_of=MANY)
    more = ms(many.measured - one.measured)
    line = f"\n   {GPU.name} 8B, {MANY} rows: {more} ms longer; keys and values: {ms(many.texts)} ms"
    why = f"{line}\n\nThe next page says where the time goes.{_here(here)}"
    return Seen(table + why, 2 if factor < 2 else 1 if factor < MANY / 2 else 0)


async def prompt_tokens(stage: Stage) -> Seen:
    """Measures steps that compute prompts of different lengths."""
    title = "A prefill step: ms by prompt tokens"
    recorded = _recorded("prefill")
    here: dict[int, float] = {}
    await _run(stage, [_prompt(stage, PROMPT, 0)], TOKENS)
    for n in SIZES:
        _draw(stage, title, "tokens", here, recorded)
        done = [row for i in range(REPEATS) for row in await _run(stage, [_prompt(stage, n, 1 + n + i)], 1)]
        here[n] = _median([row for row in done if row.prefill_tokens == n])
        await stage.pause(0.6)
    _draw(stage, title, "tokens", here, recorded)
    decode = _recorded("decode")
    graphs = (
        f"\n\nOn the {recorded_device().name}, a prompt of one token takes longer than a decode step of one row: steps "
        "with prompts run other programs on the GPU (kernels, L4 Paged attention)."
    ) if all(points[1] > decode[name][1] for name, points in recorded.items()) else ""
    apart = (
        "\n\nDo not compare these times with those of decode steps: here, the engine waited before each prompt."
    )
    head, sizes = ("ms of a prompt's step", "1 token"), (1, SIZES[-1], *LONGER)
    return Seen(_told(here, recorded_device().models, "prefill", head, sizes) + graphs + apart + _uneven(here))


def _prompt(stage: Stage, tokens: int, seed: int) -> list[int]:
    """Returns random token ids: no two prompts begin with the same block, so nothing comes from the cache."""
    random = Random(seed * 1000 + tokens)
    return [random.randrange(stage.source.info["vocab_size"]) for _ in range(tokens)]


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
    found = [stage.view.steps.get(step) for step in range(last + 1, stage.state().step + 1)]
    return [row for row in found if row is not None]


def _median(steps: list[StepRow]) -> float:
    return median(row.took_ms or 0.0 for row in steps)


def _recorded(kind: str) -> dict[str, dict[int, float]]:
    """Returns {size of the model: {n: ms}} of the recorded GPU."""
    models = recorded_device().models
    return {size: {n: getattr(model, kind)[n] for n in SIZES} for size, model in models.items()}


def _draw(stage: Stage, title: str, unit: str, here: dict[int, float], recorded: dict[str, dict[int, float]]) -> None:
    device = recorded_device().name
    curves = [Curve(HERE, here), *(Curve(f"{device} {size}", points) for size, points in recorded.items())]
    stage.view.put(Curves(title, unit, SIZES, tuple(curves)))


def _uneven(here: dict[int, float]) -> str:
    """Returns a sentence if a larger step was measured shorter than a smaller one."""
    if all(here[few] <= here[many] for few, many in pairwise(SIZES)):
        return ""
    return " (Times vary: a larger step was measured shorter.)"


def _here(here: dict[int, float]) -> str:
    """Returns what is to be said about the curve of this machine."""
    sooner = _factor(here, MANY) > _factor(GPU.models["8B"].decode, MANY)
    early = " Here, the time rises with fewer rows: this machine computes fewer operations while it reads a byte."
    return early * sooner + " (Times vary, and for other numbers of rows, other programs multiply the matrices.)"


def _factor(points: dict[int, float], n: int) -> float:
    return points[n] / points[1]


def _told(
    here: dict[int, float], models: dict[str, RecordedModel], kind: str, head: tuple[str, str], sizes: Sequence[int],
    factor_of: int = 0,
) -> str:
    """Returns a table with a line for this machine and for each recorded model, and a column for each size. `head`: the
    title of the lines and of the first column. `factor_of`: a size that a last column compares with one; 0: none."""
    title, one = head
    columns = [one, *(f"{n:,}" for n in sizes[1:]), *([f"{factor_of} : 1"] if factor_of else [])]
    lines = [f"   {title:<22}" + "".join(f"{column:>8}" for column in columns)]
    recorded = {f"{recorded_device().name} {size}": getattr(model, kind) for size, model in models.items()}
    for name, points in {HERE: here, **recorded}.items():
        shown = [ms(points[n]) if n in points else "–" for n in sizes]
        shown += [f"{_factor(points, factor_of):.2f}"] if factor_of else []
        lines.append(f"   {name:<22}" + "".join(f"{value:>8}" for value in shown))
    return "\n".join(lines)
