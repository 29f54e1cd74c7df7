"""L1: the seven stages, and one step through them."""

from __future__ import annotations

from minitui.teaching.lessons.page import Seen
from minitui.teaching.lessons.written import read_lesson
from minitui.teaching.stage import Stage
from minitui.text import count

REPLY = 5
HEAD_START = 2  # steps of the first request before the second arrives


async def two_questions(stage: Stage) -> Seen:
    """Runs two requests step by step; the second arrives HEAD_START steps after the first."""
    await stage.write("What is prefill?", REPLY, HEAD_START, seconds=0.8, system="")
    await stage.write("What is decode?", REPLY, 0, system="")
    while stage.state().requests:
        await stage.step(1, seconds=0.8)
    rows = stage.rows()
    _, second = (row for row in rows if row.chunks)
    answers = {2 * REPLY: 0, HEAD_START + REPLY: 1, REPLY: 2}
    stage.view.select("step", second.step)
    other, _, prompt, _ = second.chunks[0]
    lines = [f"   {'step':<18}" + "".join(f"{row.step:>5}" for row in rows)]
    lines += [f"   {'tokens computed':<18}" + "".join(f"{row.tokens:>5}" for row in rows)]
    return Seen(
        "\n".join(lines) + "\n\nThe first step computed the whole prompt of the first request, and sampled the first "
        "token of its reply. Each later step of this request computed its newest token, and sampled the next one. The "
        "last token of a reply is not computed: no token follows.\n\n"
        "One forward pass can do both, prefill and decode. The step bar shows step "
        f"{second.step} again: {count(second.decodes, 'token')} of the first request, and all "
        f"{prompt} prompt tokens of the second request, r{other}.",
        answers.get(len(rows)),
    )


async def logged(stage: Stage) -> Seen:
    """Runs one request, and counts its records and its events."""
    records, events = stage.state().seq, stage.view.history.events.count
    await stage.write("What is prefill?", REPLY, 0, system="")
    while stage.state().requests:
        await stage.step(1, seconds=0.5)
    rows = (
        ("records of this run in the log", stage.state().seq - records),
        ("those that are decisions: the panel", stage.view.history.events.count - events),
    )
    return Seen("\n".join(f"   {name:<40}{n:>5}" for name, n in rows))


async def write_on(stage: Stage) -> None:
    """Starts two replies, one three steps before the other."""
    for question, steps in (("What is prefill?", 3), ("What is decode?", 2)):
        await stage.write(question, 40, steps, seconds=0.5)


def last_step(stage: Stage) -> str:
    """Returns a sentence about the last step: how many tokens it computed, and for how many requests."""
    row = stage.last_row()
    return f"step {row.step} computed {row.tokens} tokens, one for each of {row.decodes} decoding requests"


def _second(stage: Stage) -> str:
    id = max(stage.view.history.lanes.lanes)
    steps = stage.view.history.steps
    step = next(s for s in range(steps.last, -1, -1) if any(chunk[0] == id for chunk in steps.chunks(s)))
    return f"r{id}, in step {step}"


def _steps_in(stage: Stage) -> str:
    """Returns the number of steps of each running request, including the step of its prompt."""
    state = stage.state()
    return ", ".join(f"r{r.id}: {state.computed(r) - r.prompt_tokens + 1}" for r in state.requests.values())


close = write_on

LESSON = read_lesson(globals(), kv_blocks=64)
