"""L4: attention over blocks."""

from __future__ import annotations

from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen, fresh
from minitui.teaching.scenarios import QUESTIONS, paste
from minitui.teaching.stage import Stage
from minitui.viewmodel.board import KeyRead

TABLE = (8, 5)  # first blocks in the question of page 2
FIRST = 125  # tokens of the first prompt of page 3; `after_a_hit` compares these numbers with the engine's
CACHED, PROMPT = 112, 126  # tokens of the second: cached, and in all

READING_SECONDS = 12.0  # for all keys that a query reads


async def scramble(stage: Stage) -> None:
    """Lets chats take and release blocks, so that the free blocks are no longer in order. The pool is new before, so
    the order is the same in each run."""
    if stage.state().step >= 0:
        await stage.other_engine(**stage.home)
        await fresh(stage)
    await stage.answers(await stage.write_all(QUESTIONS[:3], [40] * 3, system=""))
    await fresh(stage)


async def find_slots(stage: Stage) -> Seen:
    """Reads the keys of one request one after the other, in blocks that are not in order. The answer: the slot of token
    16 is 16 (0), the first of its own block (1), or the slot after that of token 15 (2)."""
    await scramble(stage)
    request = stage.request(await stage.write(paste(2), 30, 6, system=""))
    size, n = stage.source.info.block_size, stage.state().computed(request)
    for key in range(n):
        stage.view.put(KeyRead(request.id, tuple(request.table), size, n - 1, key))
        await stage.pause(READING_SECONDS / n)
    lines = []
    for position in sorted({0, size - 1, size, 2 * size + 5, n - 1}):
        logical, offset = divmod(position, size)
        block = request.table[logical]
        slot = block * size + offset
        lines.append(f"   token {position:>3}  table[{logical}] = {block:>2}  slot {block}*{size} + {offset} = {slot}")
    return Seen(
        "\n".join(lines)
        + f"\nThe last step computed token {n - 1}. In each layer, each query of this token read the keys of tokens 0 "
        f"to {n - 1}. The block table gave the places of the keys.",
        {size: 0, request.table[1] * size: 1}.get(KeyRead(request.id, tuple(request.table), size, n - 1, size).slot, 2),
    )


async def after_a_hit(stage: Stage) -> Seen:
    """Computes a prompt in one piece, and then a prompt whose beginning is cached."""
    first = stage.request(await stage.write("What is paged attention?", 6, 1)).prompt_tokens
    assert first == FIRST, f"the first prompt has {first} tokens"
    await stage.pause(4)
    await stage.step(5)
    await stage.write("What is a block table?", 6, 1, seconds=0.6)
    request, start, n, _ = stage.last_row().chunks[0]
    assert (start, start + n) == (CACHED, PROMPT), f"{start} of {start + n} prompt tokens are cached"
    return Seen(
        f"r{request} had {start + n} prompt tokens. The step computed {n} of them; the keys of the other {start} were "
        f"cached. So the first query of the step was query {start}: it saw keys 0 to {start}. The last query was query "
        f"{start + n - 1}: it saw keys 0 to {start + n - 1}. Query i sees keys 0 to i. In the panel, the triangle has "
        "become a rectangle with a slanted end.",
        0 if not start else 1 if n > 1 else 2,
    )


async def close(stage: Stage) -> None:
    """Stops the engine in the middle of one reply, whose blocks are not in order."""
    await scramble(stage)
    await stage.write("What is a block table?", 60, 10)


def _keys(stage: Stage) -> str:
    n = stage.state().computed(stage.youngest())
    return f"{n + 1}: the {n} keys that are already in the cache, and the key of the query's own token"


def _next_slot(stage: Stage) -> str:
    request, state = stage.youngest(), stage.state()
    n, size = state.computed(request), state.block_size
    if n // size >= len(request.table):
        return "0 of the block that the next step will allocate"
    return f"{request.table[n // size] * size + n % size}"


LESSON = Lesson(
    4,
    "Paged attention",
    "How does a query find its keys if blocks can be anywhere?",
    (
        Page(
            "Slots",
            """
            In each layer, the pool is two tensors: one for keys, one for values. Their shape here is [blocks, 16, KV
            heads, head size]. A slot is the place of one token. Slots are numbered from the first block to the last.
            The slot of token p of a request:

              slot  =  table[p // 16] * 16  +  p % 16

            The division without its rest, p\xa0//\xa016, is the logical block. The rest, p\xa0%\xa016, is the place
            in the block. On a CPU, each layer first stores all keys and values of the step. Then attention reads them.

            Attention finds the slots with the block table. The simplest code here usually first copies the keys and
            values of each request into one tensor. Then PyTorch computes the attention. A GPU kernel is a program on
            the GPU. minitui's GPU kernels read the pool through the table, without a copy. Tests compare both ways.
            """,
            code="engine.attention.torch_backend:TorchAttention._slots",
        ),
        Page(
            "From position to slot",
            f"""
            One chat writes a reply. Each of its decode steps computes one token, with one query in each query head.
            Other chats have used and released blocks before, so the free blocks are no longer in order. The block table
            of this chat begins with the blocks {TABLE[0]} and {TABLE[1]}.

            The panels show one query of the last step. Query 5 is the query of token 5. The panels show the keys that
            this query reads, one after the other, each with its slot and its block. (A kernel reads many keys at the
            same time.) The panel begins with block 1; block 0 is for padding (page 4).
            """,
            panel="slot",
            run=find_slots,
            predict=Prediction(
                "In which slot is the key of token 16?",
                ("16", f"{TABLE[1] * 16}", f"{TABLE[0] * 16 + 16}"),
                (
                    "each request would have slots of its own. But the slots are numbered through the whole pool.",
                    "",
                    f"block {TABLE[0] + 1} would have to follow block {TABLE[0]} in the table. But the second block of "
                    f"the table is block {TABLE[1]}.",
                ),
            ),
        ),
        Page(
            "Causal attention after a cache hit",
            f"""
            Here, a token sees itself and earlier tokens, never later tokens: attention is causal. A query and a key
            have the number of their token, from 0. The panel has a line for each query, with a mark for each key that
            the query sees. If a step computes a whole prompt, the marks are a triangle.

            If the beginning of a prompt is cached, the step computes only the other tokens. The panel first shows a
            prompt of {FIRST} tokens, of which none is cached, and then a longer prompt.
            """,
            panel="attention",
            code="engine.attention.base:ForwardMeta",
            run=after_a_hit,
            predict=Prediction(
                f"A prompt has {PROMPT} tokens, and the first {CACHED} are cached. Which shape do the marks of this "
                "step have?",
                ("a smaller triangle", "a rectangle with a slanted end", "a rectangle"),
                (
                    f"the first query would see one key. But it is query {CACHED}, and sees the cached keys, too.",
                    "",
                    "the first query would see later tokens. But attention is causal.",
                ),
            ),
        ),
        Page(
            "Padding and the null block",
            """
            The block tables of all requests in a batch get the same width here. The unused entries are padding. Block 0
            is the null block: no request ever gets it. minitui's GPU kernels know the length of each request, and skip
            the padding. The simplest code (page 1) reads values of the null block as padding, and adds them with the
            weight 0. So these values must be finite: 0 times NaN ("not a number") is NaN. The other blocks may contain
            any numbers while they are free. A test fills free blocks with NaN and checks that no result is NaN. vLLM
            has a null block, too, and SGLang a slot for padding.

            In a decode step, a request usually has one new token, but attention reads the keys and values of all its
            tokens. In the prefill of a long prompt, many new tokens use each key that is read: so there is more
            arithmetic for each key. This engine has one GPU kernel of its own for decode and another for prefill. vLLM
            can use one kernel for both: FlashAttention takes any number of queries for each request.
            """,
            code="engine.attention.torch_backend:TorchAttention._plan_decodes",
        ),
    ),
    close,
    (
        Check(
            "How many keys will the next query of this request read, in one head of one layer?",
            "table",
            "the block table: the number of written tokens. Page 3 says which keys a query sees.",
            _keys,
        ),
        Check(
            "In which slot will the key of this query be written?",
            "table",
            "the block table: the last block, and the number of its tokens. Page 1 has the formula.",
            lambda stage: f"slot {_next_slot(stage)}",
        ),
        Check(
            "How many queries did the last step have, in one head of one layer?",
            "step",
            "the step bar: D×1 is one decoding request. Page 2 says how many queries a token has.",
            lambda stage: f"{stage.last_row().tokens}: the step computed one token",
        ),
    ),
    {"kv_blocks": 64},
)
