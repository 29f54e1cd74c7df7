"""L8: from HTTP to the engine and back."""

from __future__ import annotations

from engine.trace.views import CACHED
from minitui.teaching import contrasts
from minitui.teaching.contrasts import ROWS
from minitui.teaching.lessons import curl
from minitui.teaching.lessons.page import Seen, fresh
from minitui.teaching.lessons.side_by_side import side_by_side, waits_and_gaps
from minitui.teaching.lessons.written import read_lesson
from minitui.teaching.recorded_steps import recorded_device
from minitui.teaching.scenarios import paste
from minitui.teaching.stage import Stage

GPU = recorded_device()
LARGE = GPU.models["8B"]


async def disconnect(stage: Stage) -> Seen:
    """Cancels one of two requests in the middle of its reply, and sends its prompt again. The answer: which tokens are
    computed, 0: all, 1: those after the shared blocks, 2: those after the prompt's last full block."""

    if stage.state().step >= 0:  # the panel's counts are of the whole life of an engine
        await stage.other_engine(**stage.home)
        await fresh(stage)
    sessions = await stage.write_all(("What is the KV cache?", paste(1)), [80] * 2)
    await stage.step(12, seconds=0.15)
    other, cancelled = (stage.request(session) for session in sessions)
    held, size = len(cancelled.table), stage.source.info.block_size
    shared = len(set(cancelled.table) & set(other.table))
    own = stage.state().computed(cancelled) // size - shared
    await stage.pause(1)
    stage.chats.cancel(sessions[1])
    await stage.until("the end of the request", lambda: cancelled.id not in stage.state().requests)
    kept = stage.state().counts[CACHED]
    await stage.pause(2)
    again = await stage.ask(stage.chat(max_tokens=80, whole=True), paste(1))
    await stage.step(1, seconds=1.0)
    lane = stage.view.history.lanes.lanes[again]
    prompt, cached = lane.request.prompt_tokens, lane.request.cached_tokens
    rows = (
        ("blocks of the aborted request", held), ("  shared with the other request", shared),
        ("  its own, full", own), ("cached blocks after the abort", kept),
        ("tokens of the prompt, sent again", prompt), ("  from the cache", cached), ("  computed", prompt - cached),
    )
    return Seen(
        "\n".join(f"   {name:<36}{n:>4}" for name, n in rows) + "\n\nThe full blocks of the aborted request stayed in "
        "the cache. Only the block that it was filling became free. The other request also holds the shared blocks, "
        f"with the system prompt, and went on. The {prompt - cached} computed tokens are the end of the prompt: "
        "they do not fill a block, and only full blocks are found.",
        {prompt: 0, prompt - shared * size: 1, prompt - prompt // size * size: 2}.get(prompt - cached),
    )


async def crowd(stage: Stage) -> Seen:
    """Sends eight requests at once to four rows."""
    sessions = await stage.write_all(["What is a token?"] * 8, [6] * 8)
    await stage.step(1, seconds=1.0)
    running = sum(r.state == "running" for r in stage.state().requests.values())
    waiting = len(stage.state().queue)
    metrics = await stage.answers(sessions)
    await stage.gate()
    figures = stage.figures()
    rows = (
        ("requests running after one step", running), ("requests waiting after one step", waiting),
        ("steps until all replies had ended", figures.steps),
    )
    return Seen(
        "\n".join(f"   {name:<36}{n:>6,}" for name, n in rows) + f"\n\nEach of the {len(metrics)} chats sent one "
        "request and read one reply. No chat had to know of the others.",
    )


async def close(stage: Stage) -> None:
    """Sends six requests to four rows and stops the engine."""
    for _ in range(6):
        session = stage.chat("", max_tokens=30, whole=True)
        await stage.ask(session, "What is a token?")
    await stage.step(3)


two_rows_or_eight = side_by_side(ROWS, told=waits_and_gaps, shown=("time", "first_p99", "gap_p50"))

LESSON = read_lesson(globals(), contrasts, curl, kv_blocks=64, max_num_seqs=4)
