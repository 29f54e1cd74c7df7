"""L4: attention over blocks."""

from __future__ import annotations

from minitui.teaching.lessons.page import Seen, fresh
from minitui.teaching.lessons.written import read_lesson
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


LESSON = read_lesson(globals(), kv_blocks=64)
