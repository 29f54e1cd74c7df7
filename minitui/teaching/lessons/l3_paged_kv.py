"""L3: the KV cache in blocks."""

from __future__ import annotations

from engine.trace.views import ACTIVE, CACHED, FREE, SHARED
from minitui.chat.conversation import Session
from minitui.teaching.contrasts import LENGTHS, PIECE, PIECES
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.lessons.side_by_side import (
    most_running,
    side_by_side,
    step_of_last_first_token,
    with_pieces_and_blocks,
)
from minitui.teaching.stage import Stage
from minitui.text import listed
from minitui.viewmodel.compare.comparison import Comparison
from minitui.viewmodel.compare.runs import Run

PROMPT = 14  # tokens of both prompts of `two_tables`
STATES = {FREE: "free", ACTIVE: "active", SHARED: "shared", CACHED: "cached"}
LISTED = 5  # steps in the table of `two_tables`


async def two_tables(stage: Stage) -> Seen:
    """Runs two chats without a shared prefix at the same time. The answer: in which step did the first chat take its
    second block, 0: the second, 1: the third, 2: the fourth?"""
    sessions = []
    seen: list[tuple[int, int]] = []  # of the first chat after each step: (its tokens, its blocks)
    for name, question, steps in (("first", "What is prefill?", 1), ("second", "What is decode?", 36)):
        sessions.append(stage.chat("", name, max_tokens=60, whole=True))
        stage.show(sessions[0])
        await stage.ask(sessions[-1], question)
        for _ in range(steps):
            await stage.step(1, seconds=0.2)
            first = stage.request(sessions[0])
            seen.append((stage.state().computed(first), len(first.table)))
    tables = [stage.request(session).table for session in sessions]
    size = stage.source.info.block_size
    computed = [stage.state().computed(stage.request(session)) for session in sessions]
    rows = (("step", range(1, LISTED + 1)), ("its tokens", [n for n, _ in seen]), ("its blocks", [n for _, n in seen]))
    first_steps = "\n".join(f"   {name:<12}" + "".join(f"{n:>4}" for n in values[:LISTED]) for name, values in rows)
    lines = [
        f"   {name}  {n} tokens in {len(table)} blocks: {' '.join(map(str, table))}"
        for name, n, table in zip(("first ", "second"), computed, tables, strict=True)
    ]
    waste = sum(len(table) * size - n for n, table in zip(computed, tables, strict=True))
    lines.append(f"      unused slots (places for tokens) in the two last blocks: {waste}")
    return Seen(
        "The steps of the first chat, counted from 1:\n"
        + f"{first_steps}\nBoth chats at the end:\n" + "\n".join(lines)
        + "\nBoth chats take their blocks from one pool. So neighbours in a block table need not be neighbours in the "
        "pool.",
        {2: 0, 3: 1, 4: 2}.get(next(step for step, (_, blocks) in enumerate(seen, 1) if blocks > 1)),
    )


def _pieces_and_blocks(comparison: Comparison) -> str:
    """Returns what both runs did, in steps: times vary."""
    steps = [run.figures.steps for run in comparison.runs]
    first = [step_of_last_first_token(run) for run in comparison.runs]
    sooner = "With blocks, no reply had to wait. " if first[1] == 1 < first[0] else ""
    equal = "Both runs end with the longest reply, which began in their first step."
    return sooner + equal * (steps[0] == steps[1] == max(LENGTHS))


def _at_once(run: Run) -> list[tuple[str, int]]:
    return [
        ("requests at once, at most", most_running(run.view)),
        ("last reply begins in step (from 1)", step_of_last_first_token(run)),
    ]


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
    size, token = info.block_size, info.kv_bytes_per_token
    session = await stage.write("What is the KV cache?", 4, 1)
    prompt, blocks = stage.request(session).prompt_tokens, len(stage.request(session).table)
    rows = (
        ("a token", token), (f"a block of {size} tokens", token * size),
        (f"the pool of {info.num_blocks} blocks", token * size * info.num_blocks),
        (f"a chat of {prompt} tokens, {blocks} blocks", blocks * size * token),
    )
    return Seen(
        "Bytes that are needed here:\n" + "\n".join(f"   {name:<36}{n:>12,}" for name, n in rows)
        + "\n\nThe prompt of this chat contains a system prompt and the question “What is the KV cache?”. (A system "
        "prompt is a text that an application puts at the beginning of a chat.)",
        {512: 0, 4096: 1}.get(token, 2),
    )


async def two_endings(stage: Stage) -> Seen:
    """Ends two chats that share a system prompt, one after the other. The answer: what the first block of the system
    prompt is when the first chat has ended, 0: cached, 1: active, 2: shared."""
    first = await stage.write("What is the KV cache?", 8, 3, seconds=0.3)
    await stage.write("What is a block table?", 14, 4, seconds=0.3)
    block = stage.request(first).table[0]
    names = ("both chats run", "the first has ended", "both have ended")
    rows, states = [], []
    for name in names:
        counts = stage.state().counts
        rows.append(f"   {name:<22}" + "".join(f"{counts[state]:>8}" for state in STATES))
        states.append(int(stage.view.history.live.codes[block]))
        if name != names[-1]:
            await stage.pause(3)
            await stage.run_until("finish")
    head = f"   {'blocks':<22}" + "".join(f"{name:>8}" for name in STATES.values())
    was = ", then ".join(STATES[state] for state in states)
    return Seen(
        "\n".join([head, *rows]) + f"\nThe blocks of the system prompt were {was}. When a chat ended, full blocks that "
        "no other chat held became cached: a later prompt may begin with the same tokens. The two last blocks were not "
        "full: they became free. (vLLM counts cached blocks as free, too.)",
        (CACHED, ACTIVE, SHARED).index(states[1]),
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
            Attention needs the keys and values of earlier tokens: the KV cache keeps them. Without the cache, each step
            would compute the whole text again.

            The length of a reply is usually not known in advance. Each request could get one piece of memory, large
            enough for its longest possible reply. If the reply is shorter, a part of the piece stays empty. vLLM took
            an idea from operating systems: the memory (the pool) is divided into blocks of equal size. A block has room
            for 16 tokens here and often in vLLM. When the last block of a request is full, the next token needs another
            block: any free block of the pool. Only the empty end of a last block is wasted: here at most 15 tokens of a
            request. Larger blocks can waste more. Smaller blocks are more blocks to keep track of.

            The text of a request is divided into logical blocks: 0, 1, 2 … A block of the pool is a physical block. The
            block table of the request names the physical block of each logical block.
            """,
            code="engine.attention.kv_pool:KVPool",
        ),
        Page(
            "One piece or blocks",
            f"""
            {len(LENGTHS)} requests want replies of {listed(list(map(str, LENGTHS)))} tokens. Each prompt has {PROMPT}
            tokens. The memory has room for {PIECE * PIECES} tokens. In the first run, each request gets one piece for
            {PIECE} tokens, because its reply might be long. (This engine always has blocks: in the first run, a block
            has {PIECE} tokens.) In the second run, a block has 16 tokens. A request takes another block only when a
            token has no place in its last block.

            The panel shows both runs, the first run above or on the left. Each line is a request. A column is the same
            number of steps in both runs.
            """,
            panel="runs-steps",
            code="engine.core.allocator:BlockAllocator",
            run=side_by_side(
                "allocation", with_pieces_and_blocks, told=_pieces_and_blocks, shown=("steps",), counted=_at_once
            ),
            predict=Prediction(
                f"How many of the {len(LENGTHS)} requests run at the same time, at most?",
                (
                    f"{PIECES} with one piece for each, {len(LENGTHS)} with blocks",
                    f"{len(LENGTHS)} in both runs",
                    f"{PIECES} in both runs",
                ),
                (
                    "",
                    "two requests could use one piece. But a piece is reserved for one request.",
                    f"the tokens would need more than {PIECE * PIECES} places. But there are "
                    f"{sum(LENGTHS)} + {len(LENGTHS)} × {PROMPT} = {sum(LENGTHS) + len(LENGTHS) * PROMPT} tokens.",
                ),
            ),
        ),
        Page(
            "What a token costs",
            """
            For each token, many models store a key and a value in each KV head:

              bytes per token = 2 x layers x KV heads x head size x bytes per number

            The 2 is for key and value; queries are not stored. For Qwen3-8B in 16 bits: 2 x 36 x 8 x 128 x 2 = 147,456
            bytes, and a block of 16 tokens has 2.36 MB. A chat of 8,192 tokens needs 1.2 GB. If 8 GB are left beside
            the weights, six such chats fit. So memory can limit the number of running requests.
            """,
            code="engine.model.config:ModelConfig.kv_bytes_per_token",
            run=cost,
            predict=Prediction(
                "In keys and values, a number has 4 bytes here. (The top line is about weights.) 4 layers "
                "have 2 KV heads of size 64. A token needs …",
                ("512 bytes", "4,096 bytes", "12,288 bytes"),
                (
                    "only one KV head of one layer would store its key and value: 2 x 64 x 4 bytes.",
                    "",
                    "each of the 6 query heads would have its own key and value. But 3 query heads share one KV "
                    "head.",
                ),
            ),
        ),
        Page(
            "Two chats, one pool",
            f"""
            Two chats get replies at the same time. They have no system prompt. Each prompt has {PROMPT} tokens. The
            first step of a chat computes its prompt. Each later step computes one token: the token that the step before
            has sampled.

            The panel shows the block table of the first chat. The first line names the request and the chat. Below,
            each column is a logical block: 0, 1, 2 … The number under it is the physical block. The last block is not
            full yet.
            """,
            panel="table",
            run=two_tables,
            predict=Prediction(
                "Counted from 1, in which of its steps does the first chat take its second block?",
                ("step 2", "step 3", "step 4"),
                (
                    "the block with the prompt would be full. But a block has room for 16 tokens, not for "
                    f"{PROMPT}.",
                    "a full block would be enough to take the next one. But the engine waits for a token that has no "
                    "place.",
                    "",
                ),
            ),
        ),
        Page(
            "Four states",
            """
            The engine keeps an index of full blocks: later prompts find blocks there by their tokens. The index is a
            tree (L9 Radix cache). The state of a block says how many requests hold it, and whether it is in the tree.

              free     no request, not in the tree
              active   one request, in the tree or not
              shared   several requests
              cached   no request, but in the tree: it may be evicted (used for others)

            The four counts add up to the pool, here 48.
            """,
            panel="map",
            run=two_endings,
            predict=Prediction(
                "Two chats with the same system prompt get replies. The first reply ends. Now the blocks of the system "
                "prompt are …",
                ("cached", "active", "shared"),
                (
                    "no request would hold the blocks any more. But the second chat still does.",
                    "",
                    "several requests would hold the blocks. But a request releases its blocks when it ends, and one "
                    "is left.",
                ),
            ),
        ),
        Page(
            "No reservation",
            """
            In this pool, a request may start if there are enough free or cached blocks for its prompt (and room in the
            step: L6 Scheduler). This engine and vLLM reserve no blocks for its reply. SGLang reserves an estimate.

            Example: four requests may have 192 tokens each, prompt and reply together. With a reservation, they would
            fill this pool of 768 tokens. But if each request ends with only 20 tokens, they use two blocks each:
            8 blocks of 48.

            If no block is free, cached blocks are evicted, the least recently used first. The price of starting without
            a reservation: the running requests together may need more blocks than the pool has. Then one of them has to
            release its blocks and to wait: it is preempted. This engine and vLLM compute what is lost again. To copy
            the blocks to the host's memory and back instead is called swapping.
            """,
            code="engine.core.scheduler:Scheduler._admissible",
        ),
    ),
    close,
    (
        Check(
            "How many blocks are free, and how many are active?",
            "map",
            "the line under the block map: its counts add up to the pool.",
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
    {"kv_blocks": 48, "device": "cpu"},  # on a GPU, a number of the KV cache would have 2 bytes
)
