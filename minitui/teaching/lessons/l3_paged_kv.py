"""L3: the KV cache in blocks."""

from __future__ import annotations

from engine.trace.views import ACTIVE, CACHED, FREE, SHARED
from minitui.chat.conversation import Session
from minitui.teaching import contrasts
from minitui.teaching.contrasts import LENGTHS
from minitui.teaching.lessons.page import Seen
from minitui.teaching.lessons.side_by_side import (
    most_running,
    side_by_side,
    step_of_last_first_token,
    with_pieces_and_blocks,
)
from minitui.teaching.lessons.written import read_lesson
from minitui.teaching.stage import Stage
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


one_piece_or_blocks = side_by_side(
    "allocation", with_pieces_and_blocks, told=_pieces_and_blocks, shown=("steps",), counted=_at_once
)

LESSON = read_lesson(globals(), contrasts, kv_blocks=48, device="cpu")
