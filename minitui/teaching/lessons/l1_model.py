"""L1: the decoder, its weights, and the cost of reading them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.stage import Stage

PARTS = {"embeddings": ("embed_tokens", "lm_head"), "attention": ("self_attn",), "MLP": ("mlp",), "norms": ("norm",)}


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
    shapes = tensors(stage.source.info["model_dir"])
    totals = parameters_by_part(shapes)
    layers = 1 + max(int(name.split(".")[2]) for name in shapes if ".layers." in name)
    largest = max(totals, key=lambda part: totals[part])
    rows = [(part, float(n), f"{n:,}") for part, n in totals.items()]
    return Seen(
        f"{len(shapes)} tensors, {sum(totals.values()):,} parameters, {layers} layers:\n\n{stage.bars(rows)}",
        list(PARTS).index(largest),
    )


async def many_or_one(stage: Stage) -> Seen:
    """Computes a whole prompt in one step, then one token in each step."""
    stage.begin_count()
    await stage.write("What is prefill?", 8, 8, seconds=0.3)
    steps = stage.view.steps
    rows = [steps.get(s) for s in range(steps.last - stage.figures().steps + 1, steps.last + 1)]
    prompt = next(row for row in rows if row is not None and row.chunks)
    decodes = sorted(row.wall_ms or 0.0 for row in rows if row is not None and not row.chunks)
    one, many = decodes[len(decodes) // 2], prompt.wall_ms or 0.0
    ratio = one / (many / prompt.tokens)
    return Seen(
        f"{prompt.tokens} prompt tokens took {many:.1f} ms in one step, {many / prompt.tokens:.2f} ms each. A single "
        f"token took {one:.1f} ms (median): {ratio:.0f} times as long as one prompt token. The figures vary.",
        0 if ratio < 1.5 else 1 if ratio < 200 else 2,
    )


def _decode_ms(stage: Stage) -> str:
    p50 = stage.view.timings.decode.p50
    return f"about {p50:.1f} ms (median of the decode steps here)" if p50 else "the panel shows it after some steps"


def _prefill_ms(stage: Stage) -> str:
    row = next(
        (stage.view.steps.get(s) for s in range(stage.view.steps.last, -1, -1) if stage.view.steps.chunks(s)), None
    )
    assert row is not None
    return f"step {row.step}: {row.prefill_tokens} prompt tokens in {row.wall_ms or 0:.1f} ms"


def _host(stage: Stage) -> str:
    return f"{stage.view.timings.host_ms:.2f} ms on average"


LESSON = Lesson(
    1,
    "Model and weights",
    "What does a forward pass compute, and what must it read?",
    (
        Page(
            "One decoder",
            """
            The model represents each token by a vector. The token's id selects the vector from the embedding table.
            Then the vector passes through a stack of layers, which all have the same structure. Each layer adds two
            things to the vector: what attention collects from earlier tokens, and the output of a small network (the
            MLP). Before attention and before the MLP, the vector is normalised (RMSNorm). After the last layer, a
            matrix as wide as the vocabulary gives the logits: one score for each possible next token.

            Llama, Mistral, Qwen2 and Qwen3 differ only in configuration: with or without biases, with or without norms
            on queries and keys, how positions are scaled, whether the last matrix is the embedding table ("tied"). So
            one decoder file is enough.

            Tokens interact only in attention. Everything else is computed for each token alone. So tokens of different
            requests can pass through the model in one batch.
            """,
            code="engine.model.decoder:Decoder.forward",
        ),
        Page(
            "Weights on disk",
            """
            A checkpoint is a set of named tensors in safetensors files. A header says where each tensor begins. So
            every name and shape is checked before the first byte is copied. A missing tensor, an unexpected tensor or a
            wrong shape is an error that names the tensor; nothing is ignored. Then each tensor is copied directly to
            its place. The three matrices for queries, keys and values are copied into one matrix, so that one
            multiplication replaces three. The MLP's gate and up matrices are joined in the same way.
            """,
            code="engine.model.weights:load_weights",
            run=weigh,
            predict=Prediction(
                "Which part of this small model has most of its parameters?",
                ("embeddings", "attention", "MLP", "norms"),
            ),
        ),
        Page(
            "The cost of reading weights",
            """
            To compute one token, all weights must be read once. To compute a hundred tokens in one step, the weights
            are also read once: only the arithmetic grows. If reading takes longer than computing, more tokens in a step
            cost little. This is why a prompt is computed many tokens at a time, why many requests decode in one batch,
            and why one chat alone leaves most of a device idle.
            """,
            panel="timings",
            run=many_or_one,
            predict=Prediction(
                "One step computes a whole prompt, later steps one token each. A single token takes …",
                (
                    "as long as one token of the prompt",
                    "several times as long as one token of the prompt",
                    "hundreds of times as long",
                ),
            ),
        ),
        Page(
            "Positions and heads",
            """
            Attention alone ignores the order of tokens. So queries and keys are rotated by an angle that grows with the
            position (RoPE). Their product then depends on the distance between the two tokens. Keys are rotated before
            they are stored, so a cached key is valid for one position only. This is one reason why prompts can share a
            cached block only if they are equal from their first token on.

            Several query heads share one key/value head (grouped-query attention). Fewer key/value heads mean a smaller
            cache. The cache's size often limits how many requests run at once.
            """,
            code="engine.model.rope:rope_table",
        ),
    ),
    many_or_one,
    (
        Check(
            "How long does a step with one decoding request take?",
            "timings",
            "the timings panel: the row for decode steps; p50 is the median.",
            _decode_ms,
        ),
        Check(
            "How long did the prompt's step take?",
            "timings",
            "the timings panel: the row for prefill steps.",
            _prefill_ms,
        ),
        Check(
            "How long do plan, launch and commit take on the host?",
            "timings",
            "the timings panel: the tracks of host and device; on a CPU both use the same cores.",
            _host,
        ),
    ),
    {"kv_blocks": 64},
)
