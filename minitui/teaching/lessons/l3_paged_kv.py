"""L3: the KV cache in blocks."""

from __future__ import annotations

from engine.trace.views import ACTIVE, CACHED, FREE, SHARED
from minitui.chat.conversation import Session
from minitui.teaching.contrasts import LENGTHS, PIECE, PIECES
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.lessons.side_by_side import side_by_side, with_pieces_and_blocks
from minitui.teaching.stage import Stage

PROMPT = 14  # tokens of both prompts of `two_tables`
LISTED = 5  # steps in the table of `two_tables`


async def two_tables(stage: Stage) -> Seen:
    """Runs two chats without a shared prefix at the same time. The answer: in which step did the first chat take its
    second block, 0: the second, 1: the third, 2: the fourth?"""
    sessions = []
    seen: list[tuple[int, int]] = []  # of the first chat after each step: (its tokens, its blocks)
    for question, steps in (("What is prefill?", 1), ("What is decode?", 36)):
        sessions.append(await stage.write(question, 60, 0, system=""))
        for _ in range(steps):
            await stage.step(1, seconds=0.2)
            first = stage.request(sessions[0])
            seen.append((stage.state().computed(first), len(first.table)))
    stage.show(sessions[0])
    tables = [stage.request(session).table for session in sessions]
    size = stage.source.info["block_size"]
    computed = [stage.state().computed(stage.request(session)) for session in sessions]
    rows = (("step", range(1, LISTED + 1)), ("its tokens", [n for n, _ in seen]), ("its blocks", [n for _, n in seen]))
    first_steps = "\n".join(f"   {name:<12}" + "".join(f"{n:>4}" for n in values[:LISTED]) for name, values in rows)
    lines = [
        f"   {name}  {n} tokens in {len(table)} blocks: {' '.join(map(str, table))}"
        for name, n, table in zip(("first ", "second"), computed, tables, strict=True)
    ]
    waste = sum(len(table) * size - n for n, table in zip(computed, tables, strict=True))
    lines.append(f"   empty slots at the ends of the two last blocks: {waste}")
    return Seen(
        f"The first chat, step by step:\n\n{first_steps}\n\nBoth chats at the end:\n\n" + "\n".join(lines)
        + "\n\nEach chat took the next free block when it needed a block. So the blocks of a chat are not in order.",
        {2: 0, 3: 1, 4: 2}.get(next(step for step, (_, blocks) in enumerate(seen, 1) if blocks > 1)),
    )  # fmt: skip


async def _write(stage: Stage, steps: int) -> list[Session]:
    sessions = [stage.chat("", max_tokens=60, whole=True) for _ in range(2)]
    stage.show(sessions[0])
    for session, question in zip(sessions, ("What is the KV cache?", "What is a block table?"), strict=True):
        await stage.ask(session, question)
        await stage.step(2, seconds=0.4)
    await stage.step(steps, seconds=0.2)
    return sessions


async def cost(stage: Stage) -> Seen:
    """Computes the memory of a token, of a block, of the pool and of one chat."""
    info = stage.source.info
    size, token = info["block_size"], info["kv_bytes_per_token"]
    session = await stage.write("What is the KV cache?", 4, 1)
    prompt, blocks = stage.request(session).prompt_tokens, len(stage.request(session).table)
    rows = (
        ("a token", token), (f"a block of {size} tokens", token * size),
        (f"the pool of {info['num_blocks']} blocks", token * size * info["num_blocks"]),
        (f"a chat of {prompt} tokens, {blocks} blocks", blocks * size * token),
    )  # fmt: skip
    return Seen(
        "Bytes that are needed here:\n\n" + "\n".join(f"   {name:<36}{n:>12,}" for name, n in rows),
        {512: 0, 4096: 1}.get(token, 2),
    )


async def give_back(stage: Stage) -> Seen:
    """Ends a reply and counts its blocks."""
    request = stage.request(await stage.write("What is the KV cache?", 20, 10, seconds=0.2))
    await stage.run_until("finish")
    counts, lane, size = stage.state().counts, stage.view.lanes.lanes[request.id], stage.source.info["block_size"]
    written = lane.prompt_tokens + lane.output_tokens - 1  # keys and values of the last sampled token are not computed
    rows = (
        ("tokens that the request had written", written), ("its blocks", -(-written // size)),
        ("of these full, now cached", counts[CACHED]),
    )  # fmt: skip
    return Seen(
        "\n".join(f"   {name:<36}{n:>5}" for name, n in rows) + "\n\nNo request holds the blocks any more. The full "
        "blocks stay cached, because a later prompt may begin with the same tokens. The block that was not full is "
        f"free. In the whole pool, {counts[FREE]} blocks are free, {counts[CACHED]} cached, {counts[ACTIVE]} active, "
        f"{counts[SHARED]} shared.",
        {0: 0, written // size: 1}.get(counts[CACHED], 2),
    )


async def close(stage: Stage) -> None:
    """Starts two chats and stops the engine; shows the younger chat."""
    stage.show((await _write(stage, 21))[1])


def _last_block(stage: Stage) -> str:
    request, size = stage.youngest(), stage.state().block_size
    n = stage.state().computed(request)
    full = n - (len(request.table) - 1) * size
    return f"block {request.table[-1]}, {full} of {size} tokens (r{request.id}, {n} tokens in total)"


def _missing(stage: Stage) -> int:
    request, state = stage.youngest(), stage.state()
    return len(request.table) * state.block_size - state.computed(request)


LESSON = Lesson(
    3,
    "Paged KV cache",
    "Where are keys and values stored, and which request owns them?",
    (
        Page(
            "Why a cache, why blocks",
            """
            To compute the next token, attention needs the keys and values of all earlier tokens. These do not change
            any more, so they are stored in the KV cache. Without the cache, every step would compute the whole text
            again.

            The length of a reply is not known in advance. A request could get one piece of memory, large enough for
            the longest reply. But most of the piece would stay empty, and the gaps between pieces could be too small
            to use. So the memory is divided into blocks of equal size (16 tokens here). A request takes another block
            when a token no longer fits into its last block. This can be any free block of the pool. Only the empty end
            of each request's last block is wasted: at most 15 tokens. The idea comes from the pages of operating
            systems; vLLM brought it to inference.

            Each request has a block table. For each logical block 0, 1, 2 … of its text, the table has the number of
            the physical block.
            """,
            code="engine.attention.kv_pool:KVPool",
        ),
        Page(
            "One piece or blocks",
            f"""
            {len(LENGTHS)} requests want replies of {min(LENGTHS)} to {max(LENGTHS)} tokens. The memory has room for
            {PIECE * PIECES} tokens. In the first run, each request gets one piece for {PIECE} tokens, because its reply
            might be long. (The engine does this with blocks of {PIECE} tokens.) In the second run, a request gets a
            block of 16 tokens when a token no longer fits into its last block.

            The panel shows both runs on one clock, the first above the second. Each line is a request. Compare when the
            requests start; the longest reply decides how many steps there are.
            """,
            panel="runs",
            code="engine.core.allocator:BlockAllocator",
            run=side_by_side("allocation", with_pieces_and_blocks),
            predict=Prediction(
                f"How many of the {len(LENGTHS)} requests run at the same time, at most?",
                (
                    f"{PIECES} with one piece for each, {len(LENGTHS)} with blocks",
                    f"{len(LENGTHS)} in both runs",
                    f"{PIECES} in both runs",
                ),
                (
                    "",
                    "a piece could be used by two requests. But the whole piece is reserved for one reply, however "
                    "short.",
                    f"blocks would be reserved, too. But a short prompt and {max(LENGTHS)} tokens need a few blocks.",
                ),
            ),
        ),
        Page(
            "What a token costs",
            """
            Every layer stores one key and one value for each KV head (L0 Tokens):

              bytes per token = 2 x layers x KV heads x head size x bytes per number

            The 2 is for key and value; queries are not stored. For Qwen3-8B in 16 bits: 2 x 36 x 8 x 128 x 2 = 147,456
            bytes, 144 KiB. A chat of 8,192 tokens needs 1.2 GB. A GPU of 24 GB with 16 GB of weights has room for about
            six such chats. So memory often limits the number of running requests.
            """,
            code="engine.model.config:ModelConfig.kv_bytes_per_token",
            run=cost,
            predict=Prediction(
                "Here, with 4 layers, 2 KV heads of size 64 and 4 bytes per number (float32, the default on a CPU), a "
                "token needs …",
                ("512 bytes", "4,096 bytes: 4 KiB", "24,576 bytes: 24 KiB"),
                (
                    "only one KV head of one layer would store its key and value: 2 x 64 x 4 bytes.",
                    "",
                    "queries would be stored, or every query head would have its own key and value.",
                ),
            ),
        ),
        Page(
            "Two chats, one pool",
            f"""
            Two chats without a system prompt write at the same time. Each prompt has {PROMPT} tokens. The first step of
            a chat computes its prompt. Each later step computes one token: the token that the step before has sampled.

            The panel shows the block table of the first chat: each column is a logical block with its physical number.
            The last block is still being filled.
            """,
            panel="table",
            run=two_tables,
            predict=Prediction(
                "In which of its steps does the first chat take its second block?",
                ("step 2", "step 3", "step 4"),
                (
                    "the block with the prompt would be full. But a block has room for 16 tokens, not for "
                    f"{PROMPT}.",
                    "a block would be taken as soon as the last one is full. But the reply may end there, so the "
                    "engine takes a block only for a token that has no place.",
                    "",
                ),
            ),
        ),
        Page(
            "Four states",
            """
            A block's state says how many requests hold it, and whether it is in the tree of known prefixes (L9 Radix
            cache). The tree has only full blocks.

              free     no request, no tree
              active   one request, in the tree or not
              shared   several requests
              cached   no request, only the tree: it may be evicted

            The four counts together are always the pool, here 48.
            """,
            panel="map",
            code="engine.core.allocator:BlockAllocator",
            run=give_back,
            predict=Prediction(
                "A reply has ended. How many of its blocks become free?",
                ("all of them", "one: its last block, which was not full", "none"),
                (
                    "the tree would forget the text. The next question of the same chat would have to be computed from "
                    "its first token. Keeping full blocks costs nothing while others are free.",
                    "",
                    "the tree would also have the last block. But a block that is not full is not in the tree.",
                ),
            ),
        ),
        Page(
            "No reservation",
            """
            A request is admitted if its prompt fits and 1 % of the blocks (the watermark) stays free for running
            requests; rounded down, for 48 blocks it is 0. This engine reserves no blocks for the reply. Four requests
            that may each have 192 tokens, prompt and reply together, could fill this pool of 768 tokens. But if each of
            them ends after 20 tokens, they use two blocks each: 8 blocks of 48, a sixth of the pool.

            The price: all running requests together may need more blocks than the pool has. Then cached blocks are
            evicted, the least recently used first. If no cached block is left, a running request has to release its
            blocks and to wait (L6 Scheduler).
            """,
            panel="occupancy",
            code="engine.core.scheduler:Scheduler._obstacle",
        ),
    ),
    close,
    (
        Check(
            "How many blocks are free, and how many are active?",
            "map",
            "the bar above the block map: the counts add up to the pool.",
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
            "How many more tokens fit until the younger request needs another block?",
            "table",
            "the block table: the empty part of the last block.",
            lambda stage: f"{_missing(stage)}; the token after them needs another block",
        ),
    ),
    {"kv_blocks": 48},
)
