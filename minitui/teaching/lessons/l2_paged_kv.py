"""L2: the KV cache in blocks."""

from __future__ import annotations

from itertools import pairwise

from engine.trace.state import ACTIVE, CACHED, FREE, SHARED
from minitui.chat.conversation import Session
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.stage import Stage


async def two_tables(stage: Stage) -> Seen:
    """Two chats that share nothing write at the same time."""
    sessions = await _write(stage, 36)
    tables = [stage.request(session).table for session in sessions]
    size = stage.source.info["block_size"]
    computed = [stage.state().computed(stage.request(session)) for session in sessions]
    lines = [
        f"   {name}  {n} tokens in {len(table)} blocks: {' '.join(map(str, table))}"
        for name, n, table in zip(("first ", "second"), computed, tables, strict=True)
    ]
    lie_together = all(b - a == 1 for table in tables for a, b in pairwise(table))
    waste = sum(len(table) * size - n for n, table in zip(computed, tables, strict=True))
    return Seen(
        "\n".join(lines) + f"\n\nBoth grow by a block whenever they pass a multiple of {size}, from whatever is free. "
        f"{waste} token slots are reserved and not yet used, {waste / 2:.1f} for each chat.",
        1 if not lie_together else 0,
    )


async def _write(stage: Stage, steps: int) -> list[Session]:
    sessions = [stage.chat("", max_tokens=60, whole=True) for _ in range(2)]
    stage.show(sessions[0])
    for session, question in zip(sessions, ("What is the KV cache?", "What is a block table?"), strict=True):
        await stage.ask(session, question)
        await stage.step(2, seconds=0.4)
    await stage.step(steps, seconds=0.2)
    return sessions


async def cost(stage: Stage) -> Seen:
    """What the pool of this engine is made of, and what one chat takes of it."""
    info = stage.source.info
    size, token = info["block_size"], info["kv_bytes_per_token"]
    session = stage.chat(max_tokens=4, whole=True)
    stage.show(session)
    await stage.ask(session, "What is the KV cache?")
    await stage.step(1)
    blocks = len(stage.request(session).table)
    return Seen(
        f"A token needs {token:,} bytes here, a block of {size} tokens {token * size:,}, and the pool of "
        f"{info['num_blocks']} blocks {token * size * info['num_blocks']:,}. The chat that has just begun, with a "
        f"prompt of {stage.request(session).prompt_tokens} tokens, holds {blocks} blocks: "
        f"{blocks * size * token:,} bytes.",
        {512: 0, 4096: 1}.get(token, 2),
    )


async def give_back(stage: Stage) -> Seen:
    """A reply ends: what becomes of its blocks?"""
    session = stage.chat(max_tokens=20, whole=True)
    stage.show(session)
    request = await stage.ask(session, "What is the KV cache?")
    await stage.step(10, seconds=0.2)
    await stage.run_until("finish")
    counts, lane, size = stage.state().counts, stage.view.lanes.lanes[request], stage.source.info["block_size"]
    written = lane.prompt_tokens + lane.output_tokens - 1  # the last token drawn has no KV
    return Seen(
        f"It had written {written} tokens into {-(-written // size)} blocks. Now nobody holds them: {counts[CACHED]} "
        "full "
        f"blocks are cached, since a later prompt may begin alike, and the one that was not full is free. In all "
        f"{counts[FREE]} are free, {counts[CACHED]} cached, {counts[ACTIVE]} active, {counts[SHARED]} shared.",
        2 if counts[CACHED] and not counts[ACTIVE] else 0,
    )


async def close(stage: Stage) -> None:
    """Two chats, standing; the younger one's blocks are shown."""
    stage.show((await _write(stage, 21))[1])


def _last_block(stage: Stage) -> str:
    request = stage.state().requests[max(stage.state().requests)]
    size = stage.state().block_size
    n = stage.state().computed(request)
    full = n - (len(request.table) - 1) * size
    return f"block {request.table[-1]}, {full} of {size} tokens (r{request.id}, {n} tokens in all)"


def _missing(stage: Stage) -> int:
    state = stage.state()
    request = state.requests[max(state.requests)]
    return len(request.table) * state.block_size - state.computed(request)


LESSON = Lesson(
    2,
    "Paged KV cache",
    "Where do keys and values live, and who owns them?",
    (
        Page(
            "Why a cache, why blocks",
            """
            To draw the next token, attention needs the keys and values of all tokens before it. They do not change
            any more, so they are kept: that is the KV cache. Without it every step would compute the whole text
            again.

            How long a reply will be nobody knows. If each request got one piece of memory, long enough for the
            longest reply, most of it would stay empty, and what is left between the pieces would fit nobody. So the
            memory is cut into blocks of equal size (16 tokens here), and a request takes one block more whenever
            its last one is full. They may lie anywhere: any free block is as good as any other, no gap is too
            small. What is wasted is the empty end of each request's last block, 15 tokens at most. The idea is that
            of pages in an operating system; vLLM brought it to inference.

            Each request has a block table: logical block 0, 1, 2 … of its text, and the physical block in which
            each lies.
            """,
            code="engine.attention.kv_pool:KVPool",
        ),
        Page(
            "What a token costs",
            """
            Every layer keeps one key and one value for each key head:

              bytes per token = 2 x layers x key heads x head size x bytes per number

            The 2 is for key and value; query heads are not kept. For Qwen3-8B in 16 bits:
            2 x 36 x 8 x 128 x 2 = 147,456 bytes, 144 KiB. A chat of 8,192 tokens needs 1.2 GB; a GPU of 24 GB that
            holds 16 GB of weights has room for six. So memory, more than computing, decides how many run at once.
            """,
            code="engine.model.config:ModelConfig.kv_bytes_per_token",
            run=cost,
            predict=Prediction(
                "Here, with 4 layers, 2 key heads of 64 and 4 bytes, a token needs …",
                ("512 bytes", "4,096 bytes: 4 KiB", "24,576 bytes: 24 KiB"),
            ),
        ),
        Page(
            "Two tables",
            """
            Two chats without a system prompt write at the same time. The block table shows that of the first: each
            column is a logical block with its physical number; the last is being filled.
            """,
            panel="table",
            run=two_tables,
            predict=Prediction(
                "Two chats take turns at growing. Where do the blocks of each lie in the pool?",
                ("side by side, in order", "mixed: each took what was free when it needed one"),
            ),
        ),
        Page(
            "Four states",
            """
            Who owns a block follows from two facts: how many requests hold it, and whether the tree of known
            prefixes refers to it.

              free     nobody            active   one request, with the tree or without
              shared   two or more       cached   the tree alone: it may be evicted

            The allocator keeps the counts: free + active + shared + cached is always the whole pool, here 48. Block
            0 is not one of the 48: it is the null block, always finite, and padding points at it.
            """,
            panel="map",
            code="engine.core.allocator:BlockAllocator",
            run=give_back,
            predict=Prediction(
                "A reply has ended. What becomes of its blocks?",
                (
                    "they stay reserved for the chat",
                    "all of them are free at once",
                    "the full ones stay as cache, until somebody needs room",
                ),
            ),
        ),
        Page(
            "No reservation",
            """
            A request is admitted if its prompt fits, with a little left for those who run (a watermark of one block
            in a hundred; of these 48, none). What it might still write is not reserved: four requests that may
            write 192 tokens each would fill this pool of 768, and with replies of 20 use a tenth of it.

            The price: all running requests together may outgrow the pool. Then cached blocks are evicted, the least
            recently used first. If there are none left, the youngest request gives back its blocks and waits at the
            head of the queue: it is preempted, and goes on later where it stood. The demos `eviction` and
            `preemption` show both.
            """,
            panel="occupancy",
            code="engine.core.scheduler:Scheduler._obstacle",
        ),
    ),
    close,
    (
        Check(
            "How many blocks are free, how many are active?",
            "map",
            "the bar above the block map: the counts sum to the pool.",
            lambda stage: (
                f"{stage.state().counts[FREE]} free, {stage.state().counts[ACTIVE]} active, "
                f"{stage.state().counts[SHARED]} shared, {stage.state().counts[CACHED]} cached"
            ),
        ),
        Check(
            "Which block is the younger request writing now, and how full is it?",
            "table",
            "the block table: the last column.",
            _last_block,
        ),
        Check(
            "How many more tokens fit until that request needs another block?",
            "table",
            "the block table: what is missing to a full last block.",
            lambda stage: f"{_missing(stage)}; the next one needs another block",
        ),
    ),
    {"kv_blocks": 48},
)
