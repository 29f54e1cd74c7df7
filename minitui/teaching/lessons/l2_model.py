"""L2: the decoder, its weights, and the cost of reading them."""

from __future__ import annotations

import json
import struct
from math import log
from pathlib import Path
from typing import Any

from engine.params import SamplingParams
from minitui.teaching.lessons import step_costs
from minitui.teaching.lessons.page import Seen
from minitui.teaching.lessons.side_by_side import side_by_side
from minitui.teaching.lessons.step_costs import (
    GPU,
    MODEL,
    MODEL_READS,
    PROMPTS,
    ROWS,
)
from minitui.teaching.lessons.written import read_lesson
from minitui.teaching.recorded_steps import BYTES
from minitui.teaching.stage import Stage
from minitui.text import ms
from minitui.viewmodel.compare.comparison import Comparison

PARTS = {"embeddings": ("embed_tokens", "lm_head"), "attention": ("self_attn",), "MLP": ("mlp",), "norms": ("norm",)}

QUESTION = "What is prefill?"
TOKENS = 32  # of the reply whose steps are measured
LAYERS = 36  # of the model
STEP_MS = (0.1, 4, 300)  # the choices of the prediction on a step with a single token
HOST_GB = 50  # read in a second over a PCIe bus


def tensors(directory: str | Path) -> dict[str, list[int]]:
    """Returns the shape of every tensor of a checkpoint, by name, from the headers of its safetensors files."""
    found: dict[str, list[int]] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
        found |= {name: about["shape"] for name, about in header.items() if name != "__metadata__"}
    return found


def parameters_by_part(shapes: dict[str, list[int]]) -> dict[str, int]:
    """Returns the number of parameters of each part of the model."""
    totals = dict.fromkeys(PARTS, 0)
    for name, shape in shapes.items():
        size = 1
        for n in shape:
            size *= n
        part = next(part for part, marks in PARTS.items() if any(mark in name for mark in marks))
        totals[part] += size
    return totals


async def weigh(stage: Stage) -> Seen:
    """Counts the parameters of each part."""
    shapes = tensors(stage.source.info.model_dir)
    totals = parameters_by_part(shapes)
    layers = 1 + max(int(name.split(".")[2]) for name in shapes if ".layers." in name)
    largest = max(totals, key=lambda part: totals[part])
    rows = [(part, float(n), f"{n:,}") for part, n in totals.items()]
    return Seen(
        f"Parameters of each part:\n\n{stage.bars(rows)}\n   all {len(shapes)} tensors of {layers} layers: "
        f"{sum(totals.values()):,}",
        list(PARTS).index(largest),
    )


async def single(stage: Stage) -> Seen:
    """Computes single tokens here, beside the recorded device."""
    stage.begin_count()
    await stage.complete(stage.prompt(QUESTION), SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))
    numbers = sum(parameters_by_part(tensors(stage.source.info.model_dir)).values())
    info = stage.source.info  # "bf16": the matrices have 2 bytes a number; norms are small
    read = numbers * BYTES["bfloat16" if info.quantization == "bf16" else info.dtype]
    one, reading = MODEL.decode[1], MODEL_READS / GPU.read_bytes_per_s * 1e3
    rows_of_table = (
        ("", "here", f"{MODEL.name}, {GPU.name}"),
        ("weights read for a token", f"{read / 1e6:.0f} MB", f"{MODEL_READS / 1e9:.1f} GB"),
        ("ms of reading alone", "–", ms(reading)), ("ms of a step", ms(stage.timings().decode.p50), ms(one)),
    )
    return Seen(
        "\n".join(f"   {name:<24}{here:>9}{there:>18}" for name, here, there in rows_of_table)
        + f"\n\nThe {GPU.name} reads {MODEL_READS / 1e9:.1f} GB in {ms(reading)} ms. The whole step took {ms(one)} ms. "
        f"So the {GPU.name} reads weights for most of the step.",
        min(range(len(STEP_MS)), key=lambda i: abs(log(STEP_MS[i] / one))),
    )


async def close(stage: Stage) -> None:
    """Computes a whole prompt in one step, then one token in each step."""
    stage.begin_count()
    await stage.write(QUESTION, 8, 8, seconds=0.3)


def _decode_ms(stage: Stage) -> str:
    return f"{ms(stage.timings().decode.p50)} ms (the median of the decode steps here)"


def _prefill(stage: Stage) -> float:
    """Returns the ms of the prompt's step."""
    steps = stage.view.history.steps
    row = next((steps.get(step) for step in range(steps.last, -1, -1) if steps.chunks(step)), None)
    assert row is not None
    return row.took_ms or 0.0


def _decodes(stage: Stage) -> str:
    prefill, decode = (float(ms(time).replace(",", "")) for time in (_prefill(stage), stage.timings().decode.p50))
    return f"about {prefill / decode:.0f}"


def _with_drafts(comparison: Comparison) -> str:
    """Returns what both runs did, in steps: times vary."""
    before, now = (run.figures for run in comparison.runs)
    return f"With drafts, the run had {now.steps} steps instead of {before.steps}."


with_and_without_drafts = side_by_side(
    "speculation", told=_with_drafts, shown=("steps", "replies", "drafted", "accepted")
)

LESSON = read_lesson(globals(), step_costs, kv_blocks=288, max_num_seqs=ROWS[-1], max_num_batched_tokens=PROMPTS[-1])
