"""L2: the decoder, its weights, and the cost of reading them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.lessons.side_by_side import side_by_side
from minitui.teaching.lessons.step_costs import MANY, SIZES, prompt_tokens, rows
from minitui.teaching.recorded_steps import recorded_device
from minitui.teaching.stage import Stage
from minitui.text import ms

PARTS = {"embeddings": ("embed_tokens", "lm_head"), "attention": ("self_attn",), "MLP": ("mlp",), "norms": ("norm",)}


GPU = recorded_device()
PROMPT = SIZES[-1]  # tokens of a recorded prompt


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
        f"Parameters of each part:\n\n{stage.bars(rows)}\n   all {len(shapes)} tensors of {layers} layers: "
        f"{sum(totals.values()):,}",
        list(PARTS).index(largest),
    )


async def many_or_one(stage: Stage) -> Seen:
    """Computes a whole prompt in one step, then one token in each step."""
    stage.begin_count()
    await stage.write("What is prefill?", 8, 8, seconds=0.3)
    steps = stage.view.steps
    rows = [steps.get(s) for s in range(steps.last - stage.figures().steps + 1, steps.last + 1)]
    prompt = next(row for row in rows if row is not None and row.chunks)
    one, many = stage.timings().decode.p50, prompt.wall_ms or 0.0
    model = GPU.models["8B"]
    one_there, many_there = model.decode[1], model.prefill[PROMPT]
    ratio = one_there / (many_there / PROMPT)
    each, each_there = many / prompt.tokens, many_there / PROMPT
    rows_of_table = (
        ("", f"here, {prompt.tokens} tokens", f"{model.name}, {PROMPT} tokens"),
        ("ms of the prompt", ms(many), ms(many_there)), ("ms of a prompt token", ms(each), f"{each_there:.3f}"),
        ("ms of a single token", ms(one), ms(one_there)), ("times as long", f"{one / each:.1f}", f"{ratio:.0f}"),
    )  # fmt: skip
    return Seen(
        "\n".join(f"   {name:<20}{here:>16}{there:>21}" for name, here, there in rows_of_table)
        + f"\n\nQwen3 ran on the {GPU.name}. There, a step with a single token reads as many weights as the step of "
        "the prompt. The next two pages show such steps.",
        0 if ratio < 2 else 1 if ratio < 50 else 2,
    )


def _decode_ms(stage: Stage) -> str:
    return f"{ms(stage.timings().decode.p50)} ms (the median of the decode steps here)"


def _prefill(stage: Stage) -> float:
    """Returns the ms of the prompt's step."""
    row = next(
        (stage.view.steps.get(s) for s in range(stage.view.steps.last, -1, -1) if stage.view.steps.chunks(s)), None
    )
    assert row is not None
    return row.wall_ms or 0.0


def _decodes(stage: Stage) -> str:
    prefill, decode = (float(ms(time).replace(",", "")) for time in (_prefill(stage), stage.timings().decode.p50))
    return f"about {prefill / decode:.0f}, and each of them computes only one token"


LESSON = Lesson(
    2,
    "Model and weights",
    "What does a forward pass compute, and what must it read?",
    (
        Page(
            "One decoder",
            """
            The model represents each token by a vector. The token's id selects the vector from the embedding table.
            Then the vector passes through a stack of layers, which all have the same structure. Each layer adds two
            things to the vector: what attention collects from earlier tokens, and the output of a small network (the
            MLP). In most models, the vector is normalised (RMSNorm) before attention and before the MLP. After the last
            layer, a matrix as wide as the vocabulary gives the logits: one score for each possible next token.

            Llama 3, Mistral, Qwen2, Qwen3 and others differ only in details: some add numbers (biases) after a matrix,
            some normalise queries and keys, some use the embedding table as the last matrix, too. So one decoder file
            is enough.

            Tokens interact only in attention. Everything else is computed for each token alone. So tokens of different
            requests can pass through the model in one batch.
            """,
            code="engine.model.decoder:Decoder.forward",
        ),
        Page(
            "Weights on disk",
            """
            A checkpoint is a set of named tensors in safetensors files. Every name and shape is checked before the
            first byte is copied. A missing tensor, an unknown tensor or a wrong shape is an error that names the
            tensor. Known tensors without an effect are skipped. Then each tensor is copied directly to its place.

            The matrices for queries, keys and values become one matrix, so that one multiplication replaces three. So
            do the MLP's gate and up matrices.
            """,
            code="engine.model.weights:load_weights",
        ),
        Page(
            "Where the parameters are",
            """
            A parameter is one number of a tensor. The bundled model has 4 layers and these tensors:

              embeddings  2560 x 384, as the first and as the last matrix
              attention   each layer: 384 x 384 twice, 128 x 384 twice,
                          64 twice (its norms)
              MLP         each layer: 1024 x 384 twice, 384 x 1024
              norms       each layer: 384 twice; at the end 384
            """,
            code="engine.model.decoder:Decoder",
            run=weigh,
            predict=Prediction(
                "Which part of this model has most of its parameters?",
                ("embeddings", "attention", "MLP", "norms"),
                (
                    "the vocabulary would need more than 12,288 tokens: 12 MLP matrices of 1024 x 384 outweigh a "
                    "table of 2560 x 384. In Gemma 3 270M, with a vocabulary of 262,144 tokens, this is so.",
                    "the MLP would have to be narrower: here each of its three matrices has as many numbers as "
                    "the four matrices of attention together.",
                    "",
                    "norms would have to be matrices. But a norm has only one number for each number of a vector.",
                ),
            ),
        ),
        Page(
            "The cost of reading weights",
            """
            To compute one token, nearly all weights must be read once. There are two exceptions. Only one line of the
            embedding table is read (unless the table is also the last matrix). And a model with experts reads only the
            experts that were chosen for the token.

            Without experts, a step of a hundred tokens reads each weight only once, too; the arithmetic grows. If
            reading takes longer than computing, more tokens in a step cost little. So many tokens of a prompt are
            computed in one step, and many requests decode in one batch.
            """,
            panel="timings",
            run=many_or_one,
            predict=Prediction(
                f"Qwen3-8B on an {GPU.name}, a GPU: one step computes a prompt of {PROMPT} tokens, another step a "
                "single token. The single token takes …",
                (
                    "as long as one token of the prompt",
                    "about 5 times as long as one token of the prompt",
                    "more than 50 times as long as one token of the prompt",
                ),
                (
                    "twice the tokens would take twice the time, and reading the weights would cost "
                    "nothing. But a step with one token reads as many weights as the prompt's step.",
                    "arithmetic would take most of the prompt's step. But reading the weights takes longer than "
                    f"computing {PROMPT} tokens.",
                    "",
                ),
            ),
        ),
        Page(
            "A decode step of many rows",
            f"""
            A decode step computes one token for each row and reads every weight once, for all rows. On the {GPU.name}
            of the recording we measured {GPU.read_bytes_per_s / 1e12:.1f} TB read and {GPU.operations_per_s / 1e12:.0f}
            trillion bfloat16 operations in a second. So it computes {GPU.operations_per_byte:.0f} operations in the
            time in which it reads one byte. In bfloat16, a weight has 2 bytes and needs 2 operations for each row.

            The experiment measures steps with {SIZES[0]} to {SIZES[-1]} rows here, beside those of the {GPU.name}. The
            scale of the time is logarithmic.
            """,
            panel="costs",
            code="minitui.teaching.lessons.step_costs:rows",
            run=rows,
            predict=Prediction(
                f"How much longer does a step of Qwen3-8B on the {GPU.name} take with {MANY} rows of 128 tokens than "
                "with one?",
                (f"{MANY} times as long", f"about {MANY // 4} times as long", "less than twice as long"),
                (
                    "every row would read all weights for itself.",
                    "arithmetic would take most of the time. But the device can compute "
                    f"{GPU.operations_per_byte:.0f} operations while it reads a byte, and {MANY} rows need {MANY}.",
                    "",
                ),
            ),
        ),
        Page(
            "A prompt of many tokens",
            f"""
            A step that computes a prompt reads the weights once, too. More prompt tokens add arithmetic, as more rows
            do. So on the {GPU.name}, {SIZES[-1]} prompt tokens cost little more than one. From some length on,
            arithmetic takes most of the time: then, twice the length takes about twice the time, or more.

            On a CPU, this length is short. Compare where the curves begin to rise.
            """,
            panel="costs",
            code="minitui.teaching.lessons.step_costs:prompt_tokens",
            run=prompt_tokens,
        ),
        Page(
            "Guesses, checked in one step",
            """
            With a large model on a GPU, a few more tokens in a step cost little. Speculation uses this for a single
            reply: the engine guesses the next tokens (drafts), and one step computes them together with the last token.
            At each position, the step samples as usual. A guess is accepted if it equals the sampled token, so, apart
            from rounding, the reply stays the same.

            Here the guesses are copied from the text. The engine looks for the last three tokens earlier in the text.
            The tokens after them are the guesses. The panel shows two runs on one clock: without guesses, and with
            guesses. In each run, a chat asks the same question twice. On a CPU, a guess costs more than on a GPU, so
            fewer steps may even take longer.
            """,
            panel="runs",
            code="engine.core.speculation:PromptLookup",
            run=side_by_side("speculation"),
        ),
        Page(
            "Positions and heads",
            """
            Attention alone ignores the order of tokens. So queries and keys are rotated by an angle that grows with the
            position (RoPE). The product of a query and a key then depends on the distance of their tokens. Keys are
            rotated before they are stored.

            Prompts can share a cached block only if they are equal from their first token on. Positions are not the
            reason: a key could be rotated again. The reason is attention. From the second layer on, a token's vector
            contains what attention has collected from all tokens before. The key and the value are computed from this
            vector.

            Query heads and KV heads are explained in L0 Tokens. If several query heads share one KV head, this is
            grouped-query attention. Only keys and values are kept, so fewer KV heads mean a smaller cache. The cache's
            size often limits how many requests run at once.
            """,
            code="engine.model.rope:rope_table",
        ),
    ),
    many_or_one,
    (
        Check(
            "How long does a step with one decoding request take?",
            "timings",
            "the timings panel: the line for decode steps; p50 is the median.",
            _decode_ms,
        ),
        Check(
            "How long did the prompt's step take?",
            "timings",
            "the timings panel: the line for prefill steps.",
            lambda stage: f"{ms(_prefill(stage))} ms",
        ),
        Check(
            "How many decode steps take as long as the prompt's step?",
            "timings",
            "the timings panel: divide p50 of the prefill steps by p50 of the decode steps.",
            _decodes,
        ),
    ),
    {"kv_blocks": 192, "max_num_seqs": SIZES[-1]},
)
