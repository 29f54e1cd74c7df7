"""L2: the decoder, its weights, and the cost of reading them."""

from __future__ import annotations

import json
import struct
from math import log
from pathlib import Path
from typing import Any

from engine.params import SamplingParams
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.lessons.side_by_side import side_by_side
from minitui.teaching.lessons.step_costs import (
    GPU,
    LOOKED_UP,
    MANY,
    MODEL,
    MODEL_READS,
    PROMPTS,
    ROWS,
    costs_table,
    prompt_tokens,
    rows,
)
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
    assert stage.chats.codec is not None
    stage.begin_count()
    ids = stage.chats.codec.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True)
    await stage.complete(ids, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))
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


LESSON = Lesson(
    2,
    "Model and weights",
    "What does a forward pass compute, and what must it read?",
    (
        Page(
            "One decoder",
            """
            The model represents each token by a vector: a list of numbers. The token id selects the vector from the
            embedding table. Then the vector passes through the layers. Each layer has two parts: first attention, then
            the MLP, a few large matrices with a simple function between them. Each part adds its output to the vector.
            In most models, each part begins with a norm (RMSNorm), which scales the numbers of each vector to a similar
            size. After the layers, another norm and a matrix compute the logits.

            Llama 3, Mistral, Qwen2, Qwen3 and other families of models differ only in details. For example, some add
            numbers (biases) after a matrix, some have norms for queries and keys, some use the embedding table as the
            last matrix, too. So this engine has one file for all of them.

            In these models, a token uses numbers of other tokens only in attention. Everything else is computed for
            each token alone. So tokens of different requests can be computed in one forward pass.
            """,
            code="engine.model.decoder:Decoder.forward",
        ),
        Page(
            "Weights on disk",
            """
            A model comes as a checkpoint: files with named tensors. A tensor is a list of numbers, a matrix, or a stack
            of matrices. This engine checks every name and shape before it copies the first number. A missing tensor, an
            unknown tensor or a wrong shape is an error that names the tensor. The engine skips the tensors that it
            does not need. Most others are copied directly to their places.

            A layer computes queries, keys and values with three matrices. The engine joins them to one matrix, because
            one large multiplication is usually faster than three smaller ones. It joins the first two matrices of the
            MLP, too. vLLM and SGLang do the same.
            """,
            code="engine.model.weights:load_weights",
        ),
        Page(
            "Where the parameters are",
            """
            The weights are also called parameters. The model of the lessons has 4 layers and these tensors:

              embeddings  2560 x 384, once: this table is also the last matrix
              attention   each layer: 384 x 384 twice, 128 x 384 twice,
                          64 for the norm of queries, 64 for the norm of keys
              MLP         each layer: 1024 x 384 twice, 384 x 1024
              norms       each layer: 384 twice; at the end 384
            """,
            code="engine.model.decoder:Decoder",
            run=weigh,
            predict=Prediction(
                "Which part of this model has most of its parameters?",
                ("embeddings", "attention", "MLP", "norms"),
                (
                    "the vocabulary would need more than 12,288 tokens: the 12 matrices of all MLPs have 12 x 1024 = "
                    "12,288 lines of 384 numbers, and the table has 2,560. In Gemma 3 270M, with a vocabulary of "
                    "262,144 tokens, the embeddings are the largest part.",
                    "the MLP would have to be narrower: here each of its three matrices has as many numbers as "
                    "the four matrices of attention together.",
                    "",
                    "norms would have to be matrices. But a norm has only one number for each number of a vector.",
                ),
            ),
        ),
        Page(
            "The cost of reading weights",
            f"""
            To compute a token with a model of this kind, the device reads all matrices of all layers and the last
            matrix, once. Attention also reads the keys and values of all earlier tokens. With short
            texts, these are few.

            The {GPU.name} is a GPU. `minitui bench` measured the bandwidth of its memory: it read
            {GPU.read_bytes_per_s / 1e12:.1f} TB in a second. {MODEL.name} has {LAYERS} layers and, with 2 bytes a
            weight, {MODEL.weights_gb:.1f} GB. A token needs only one line of the embedding table
            ({LOOKED_UP * 2 / 1e9:.1f} GB), which is not the last matrix here: so it needs {MODEL_READS / 1e9:.1f} GB of
            weights.
            In the panel, p50 is the median time. Of 100 steps, 99 are not longer than p99.
            """,
            panel="timings",
            run=single,
            predict=Prediction(
                f"Compute how long a step with a single token of {MODEL.name} takes on the {GPU.name}.",
                tuple(f"about {choice} ms" for choice in STEP_MS),
                (
                    f"the token would need only one of the {LAYERS} layers. But it passes through all layers.",
                    "",
                    f"the weights would come over a bus from the host, {HOST_GB} GB in a second. But they are in the "
                    "memory of the GPU.",
                ),
            ),
        ),
        Page(
            "A decode step of many rows",
            f"""
            A decode step computes one token for each row. It reads the weights once for all rows, and the keys and
            values of each row's own text: {MODEL.kv_bytes_per_token / 1e6:.2f} MB for each token of the text.

            Each row needs two operations for each weight: a product and a sum. A weight in bfloat16 has 2 bytes.
            `minitui bench` measured {GPU.operations_per_s / 1e12:.0f} trillion operations in a second (in a short burst
            {GPU.burst_operations_per_s / 1e12:.0f}): {GPU.operations_per_byte:.0f} in the time of reading one byte.

            The experiment measures {ROWS[0]} to {ROWS[-1]} rows here. The panel also has the {GPU.name}. Both scales
            are logarithmic: equal distances, equal factors.
            """,
            panel="costs",
            run=rows,
            predict=Prediction(
                f"Qwen3-8B runs on the {GPU.name}; each row's text has about {MODEL.context} tokens. Compared with one "
                f"row, a step of {MANY} rows takes …",
                (f"{MANY} times as long", f"about {MANY // 4} times as long", "less than twice as long"),
                (
                    "the device would read all weights again for each row. But it reads them once for all rows.",
                    f"arithmetic would take most of the time. But {MANY} rows need only 2 x {MANY} operations for a "
                    f"weight, not 2 x {GPU.operations_per_byte:.0f}.",
                    "",
                ),
            ),
        ),
        Page(
            "What a step must read and compute",
            f"""
            Decode steps of {MODEL.name} on the {GPU.name}; each row's text has about {MODEL.context} tokens:

              {costs_table(" " * 14)}

            At best, a device reads and computes at the same time, and a step takes as long as the longer of the two:
            the roofline. Each row needs one operation for each byte of weights. So up to about
            {GPU.operations_per_byte:.0f} rows, it is memory-bound, then compute-bound.

            Measured steps take longer. One reason: a step runs many programs (kernels) one after the other, and many
            only read or only compute. One row has faster kernels of its own. Why {ROWS[-1]} rows take so much longer
            was not measured.
            """,
        ),
        Page(
            "A prompt of many tokens",
            f"""
            A step that computes a prompt reads each weight once, too. More prompt tokens add arithmetic, as more rows
            do. So about the same limit holds for prompt tokens on the {GPU.name} as for rows. With fewer tokens,
            reading the weights takes longer than arithmetic, and a token more costs little. With many more tokens, most
            of the time is arithmetic: twice the tokens take about twice as long, or longer.

            The limit depends on the device. It is smaller if a device computes fewer operations while it reads a byte.
            Then the time begins to rise at fewer prompt tokens.

            The experiment measures prompts of {PROMPTS[0]} to {PROMPTS[-1]:,} tokens here. Compare where the curves
            begin to rise.
            """,
            panel="costs",
            code="minitui.teaching.lessons.step_costs:prompt_tokens",
            run=prompt_tokens,
        ),
        Page(
            "Drafts, checked in one step",
            """
            With a large model on a GPU, a few more tokens in a step cost little. Speculation uses this: the engine
            guesses the next tokens of a reply (drafts). One step computes the last token and the drafts, and samples a
            token after each of them. Example: the drafts are “a b c”, and the samples at the same places are “a x …”.
            The draft “a” is accepted, “x” takes the place of “b”, and “c” is thrown away. So the reply has only sampled
            tokens, as without drafts. vLLM and SGLang also check drafts in one step. For random
            sampling (L5 Sampler), they have another rule.

            Here, drafts are copied from the text (prompt lookup). The engine takes the last three tokens, and searches
            the earlier text for the same three tokens. The tokens after them are the drafts. In each run, a
            chat asks the same question twice. The panel shows a run without drafts, and below it a run with drafts. It
            counts steps, not time: a step with drafts may take longer.
            """,
            panel="runs-steps",
            code="engine.core.speculation:PromptLookup",
            run=side_by_side("speculation", told=_with_drafts, shown=("steps", "replies", "drafted", "accepted")),
        ),
        Page(
            "Positions and heads",
            """
            The vector from the embedding table does not contain the position of its token. Most models put it into the
            queries and keys (RoPE): they take the numbers of a query or a key in pairs. Each pair is a point, which
            turns around the origin by an angle that grows with the position. How well a key fits a query then depends
            also on the distance of their tokens. The pool has the turned keys.

            Two prompts can share a cached block only if they are equal from their first token to the end of the block.
            Otherwise the result could change: from the second layer on, keys and values are computed from vectors that
            depend on all earlier tokens.

            L0 Tokens explains query heads and KV heads. If several query heads share one KV head, this is grouped-query
            attention. The pool has only keys and values, no queries. So with fewer KV heads, a token needs less memory,
            and the pool has room for more tokens.
            """,
            code="engine.model.rope:rope_table",
        ),
    ),
    close,
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
            "How many times as long as a decode step did the prompt's step take?",
            "timings",
            "the timings panel: divide p50 of the prefill steps by p50 of the decode steps.",
            _decodes,
        ),
    ),
    {"kv_blocks": 288, "max_num_seqs": ROWS[-1], "max_num_batched_tokens": PROMPTS[-1]},
)
