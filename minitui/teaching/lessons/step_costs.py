"""Experiments: what a step costs with 1, 2, 4 … 128 rows or prompt tokens, here and on the recorded GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from statistics import median

from engine.params import SamplingParams
from minitui.sources.base import Stream
from minitui.teaching.lessons.page import Seen
from minitui.teaching.recorded_steps import RecordedModel, recorded_device
from minitui.teaching.stage import Stage
from minitui.text import ms
from minitui.viewmodel.board import Curve, Curves
from minitui.viewmodel.model import StepRow

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPT = 4  # tokens of a prompt whose reply is decoded
TOKENS = 8  # of each of these replies
REPEATS = 3  # prompts of each size
MANY = 64  # rows of the prediction
LONGER = (512, 1024)  # tokens of prompts that only the recorded device computes
HERE = "here"


async def rows(stage: Stage) -> Seen:
    """Measures decode steps with different numbers of rows."""
    title = "A decode step: ms by rows"
    recorded = _recorded("decode")
    here: dict[int, float] = {}
    await _run(stage, [_prompt(stage, PROMPT, 0)], TOKENS)  # not measured: the first steps are slow
    for n in SIZES:
        _draw(stage, title, "rows", here, recorded)
        done = await _run(stage, [_prompt(stage, PROMPT, 1 + n + i) for i in range(n)], TOKENS)
        here[n] = _median([row for row in done if not row.chunks and row.decodes == n])
        await stage.pause(0.6)
    _draw(stage, title, "rows", here, recorded)
    factor = _factor(recorded["8B"], MANY)
    device = recorded_device()
    model = device.models["8B"]
    read = MANY * model.context * model.kv_bytes_per_token
    table = _told(here, device.models, "decode", ("ms of a decode step", "1 row"), (1, MANY, SIZES[-1]), factor_of=MANY)
    why = (
        f"\n   {device.name} 8B, keys and values of {MANY} rows: {read / 1e9:.1f} GB, read in "
        f"{ms(read / device.read_bytes_per_s * 1e3)} ms\n\nOn the {device.name}, arithmetic takes longer "
        f"than reading the weights only from about {device.operations_per_byte:.0f} rows on. So one step with many "
        f"rows takes much less time than many steps.{_uneven(here)}"
    )
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
        "\n\nDo not compare these times with the page before: here, the engine waited before each prompt."
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
