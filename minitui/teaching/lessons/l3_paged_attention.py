"""L3: attention over blocks."""

from __future__ import annotations

from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.stage import Stage


async def find_slots(stage: Stage) -> Seen:
    """Finds the slots of one request's keys."""
    request = stage.request(await stage.write("What is paged attention?", 30, 6, seconds=0.4))
    size, n = stage.source.info["block_size"], stage.state().computed(request)
    lines = []
    for position in sorted({0, size - 1, size, 2 * size + 5, n - 1}):
        block = request.table[position // size]
        lines.append(
            f"   token {position:>4}  logical block {position // size:>2}, offset {position % size:>2}  ->  "
            f"block {block:>3}, slot {block * size + position % size}"
        )
    return Seen(
        "\n".join(lines)
        + f"\n\nThe last step had one query, for token {n - 1}. In every layer this query read the {n} keys "
        f"of tokens 0 to {n - 1}, including its own, through {len(request.table)} entries of the block table.",
        2,
    )


async def after_a_hit(stage: Stage) -> Seen:
    """Computes a prompt whose beginning is cached."""
    await stage.write("What is paged attention?", 6, 6)
    await stage.write("What is a block table?", 6, 1, seconds=0.6)
    request, start, n, _ = stage.last_row().chunks[0]
    await stage.step(2, seconds=0.4)
    return Seen(
        f"r{request} had {start + n} prompt tokens, {start} of them cached. The step had {n} queries: tokens {start} "
        f"to {start + n - 1}. The first query read {start + 1} keys, the last query {start + n} keys: cached tokens "
        "count as earlier tokens, and no query sees a later token.",
        1,
    )


async def close(stage: Stage) -> None:
    """Stops the engine in the middle of one reply."""
    await stage.write("What is a block table?", 60, 10)


def _keys(stage: Stage) -> str:
    n = stage.state().computed(stage.youngest())
    return f"{n + 1}: {n} keys are already in the cache, and the step writes the query's own key before it reads"


def _next_slot(stage: Stage) -> str:
    request, state = stage.youngest(), stage.state()
    n, size = state.computed(request), state.block_size
    if n // size >= len(request.table):
        return "0 of the block that the next step will allocate"
    return f"{request.table[n // size] * size + n % size}"


LESSON = Lesson(
    3,
    "Paged attention",
    "How does a query find its keys if blocks can be anywhere?",
    (
        Page(
            "Slots",
            """
            The pool of one layer is two tensors, keys and values, of shape [blocks, 16, key heads, head size]. A slot
            is the place of one token. Slots are numbered through all blocks. The slot of token p of a request is

              slot  =  table[p // 16] * 16  +  p % 16

            Every layer first stores the keys and values of all tokens of the step in their slots. Then attention reads.
            So a request can use keys that another request's chunk writes in the same step.

            Reading uses the block table. This engine's simplest backend copies the slots of each sequence into one
            tensor and passes it to torch. A GPU kernel reads block by block through the table, without a copy. Both
            must pass the same tests; the simple backend is the specification of the GPU kernel.
            """,
            code="engine.attention.torch_backend:TorchAttention",
        ),
        Page(
            "From position to slot",
            """
            One chat writes a reply. Each of its decode steps has one new token, and so one query for each head. The
            keys of all earlier tokens are already in the cache.
            """,
            panel="table",
            run=find_slots,
            predict=Prediction(
                "How many keys does this one query read in a layer?",
                ("one: its own", "the keys of its last block", "the keys of all tokens so far", "the whole pool"),
            ),
        ),
        Page(
            "Causal attention after a cache hit",
            """
            A token may attend to itself and to earlier tokens, never to later ones. If a prompt is computed in one
            piece, the mask is a triangle. If the beginning of the prompt is cached, only the rest has queries, and the
            triangle becomes a wide rectangle with a slanted end.

            A chunk has Q queries and K keys; the K keys include the keys of the chunk. Query i, counted from 0, sees
            keys 0 to K - Q + i. A common mistake is to forget the offset K - Q. The reply then looks almost right.
            """,
            panel="step",
            code="engine.attention.base:ForwardMeta",
            run=after_a_hit,
            predict=Prediction(
                "Most of a prompt is cached. Which tokens does the first query of the rest see?",
                (
                    "only the tokens of its own chunk",
                    "all cached tokens, and itself",
                    "the whole prompt, later tokens included",
                ),
            ),
        ),
        Page(
            "Padding and the null block",
            """
            The sequences of a batch have different lengths, and block tables of different widths. Padding points to
            block 0, the null block. The null block belongs to no request, and its numbers are always finite, so reading
            it is harmless; a mask gives these keys no weight. A free block may contain any old data; a test fills free
            blocks with NaN and checks that no output changes.

            Decode reads much and computes little: it reads every key once, for one query. Prefill computes much: many
            queries share the keys that they read. So the two use different kernels for the same formula.
            """,
            code="engine.attention.torch_backend:TorchAttention._plan_decodes",
        ),
    ),
    close,
    (
        Check(
            "How many keys will the next query of this request read in a layer?",
            "table",
            "the block table: the number of written tokens, plus one.",
            _keys,
        ),
        Check(
            "In which slot will the key of this query be written?",
            "table",
            "the block table: the physical number of the last block times 16, plus the number of tokens in that block.",
            lambda stage: f"slot {_next_slot(stage)}",
        ),
        Check(
            "How many queries did the last step have?",
            "step",
            "the step bar: D×1 is one decoding request, with one query for each head.",
            lambda stage: f"{stage.last_row().tokens} (one token)",
        ),
    ),
    {"kv_blocks": 64},
)
