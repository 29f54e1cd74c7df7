"""An experiment: requests that do not fit the pool, on this engine and on vLLM's scheduler.

The decisions of vLLM's scheduler for the same requests are a recording (minitui/teaching/vllm.trace), which
`python -m tests.support.vllm_lesson` writes.
"""

from __future__ import annotations

from pathlib import Path

from minitui.chat.conversation import Session
from minitui.teaching.lessons.page import Seen
from minitui.teaching.scenarios import VOICES, paste_of
from minitui.teaching.stage import Stage
from minitui.text import count
from minitui.trace.reader import TraceReader
from minitui.viewmodel.model import View
from minitui.viewmodel.recorded import recorded_view
from minitui.viewmodel.runs import Run

FILE = Path(__file__).parents[1] / "vllm.trace"
SHARES = (0.27, 0.42, 0.17)  # of the pool, for the prompts
REPLY = 60  # tokens


async def submit(stage: Stage) -> list[Session]:
    """Pauses the engine and sends three requests; their prompts fill most of the pool."""
    await stage.gate()
    pool = stage.source.info["num_blocks"]
    chats = [stage.chat(voice, max_tokens=REPLY, whole=True) for voice in VOICES[: len(SHARES)]]
    for session, share in zip(chats, SHARES, strict=True):
        await stage.ask(session, paste_of(stage, session.system, int(share * pool)))
    return chats


async def same_load(stage: Stage) -> Seen:
    """Runs the requests to their end, above the recording of vLLM."""
    reader = TraceReader(FILE)
    await stage.begin_run("minitui", first=True)
    stage.view.earlier = vllm = recorded_view(reader, str(reader.info["engine"]))
    chats = await submit(stage)
    await stage.slow(0.12)
    await stage.answers(chats)
    await stage.gate()
    await stage.settle()
    (name, theirs), (_, ours) = ((view.run_name, _summary(view)) for view in (vllm, stage.view))
    alike = sum(a == b for a, b in zip(_plans(vllm), _plans(stage.view), strict=False))
    return Seen(
        f"This engine: {ours}.\n\n{name}: {theirs}.\n\n"
        f"In {count(alike, 'step')} both planned the same: as many decodes, and prompt tokens of the same requests. "
        "Both preempt the youngest request, release all its blocks, and find some of them in the cache when it "
        "resumes.\n\n"
        "The two differ in what this load does not show. This engine evicts the end of the least recently used branch "
        "of its tree; vLLM has no tree and takes the block that became free first. If two requests compute "
        "the same text at the same time, before it is in the cache, this engine keeps one copy of its blocks, and vLLM "
        "keeps both until a request releases one."
    )


def _plans(view: View) -> list[tuple[int, list[tuple[int, int]]]]:
    """Returns of each step the number of decodes, and (request, tokens) of its prompts."""
    ids = sorted(view.lanes.lanes)
    rows = [view.steps.get(step) for step in range(view.steps.first, view.steps.last + 1)]
    return [(row.decodes, [(ids.index(id), n) for id, _, n, _ in row.chunks]) for row in rows if row is not None]


def _summary(view: View) -> str:
    run = Run(view)
    figures = run.figures
    ids = sorted(view.lanes.lanes)
    victims = [
        f"request {ids.index(event.request) + 1} in its step {event.step - view.steps.first + 1}"
        for event in view.events.since(0) if event.kind == "preempt"
    ]  # fmt: skip
    preempted = f"preempted {', '.join(victims)}" if victims else "preempted none"
    return (
        f"{count(figures.steps, 'step')}; {preempted}; {figures.computed:,} prompt tokens computed, "
        f"{count(figures.evicted or 0, 'block')} evicted"
    )
