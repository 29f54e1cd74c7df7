"""An experiment: requests that do not fit the pool, on this engine and on vLLM's scheduler. The decisions of vLLM's
scheduler for the same requests are a recording (minitui/teaching/vllm.trace), which `python -m
tests.support.vllm_lesson` writes."""

from __future__ import annotations

from pathlib import Path

from minitui.chat.conversation import Session
from minitui.teaching.lessons.page import Seen
from minitui.teaching.scenarios import VOICES, paste_of
from minitui.teaching.stage import Stage
from minitui.text import count
from minitui.trace.reader import TraceReader
from minitui.viewmodel.compare.runs import Run, recorded_view
from minitui.viewmodel.view import View

FILE = Path(__file__).parents[1] / "vllm.trace"
SHARES = (0.27, 0.42, 0.17)  # of the pool, for the prompts
REPLY = 60  # tokens
FIGURES = ("preempted in step (from 1)", "its computed tokens", "still cached when it resumed", "computed again")


async def submit(stage: Stage) -> list[Session]:
    """Pauses the engine and sends three requests; their prompts fill most of the pool."""
    await stage.gate()
    pool = stage.source.info.num_blocks
    chats = [stage.chat(voice, max_tokens=REPLY, whole=True) for voice in VOICES[: len(SHARES)]]
    for session, share in zip(chats, SHARES, strict=True):
        await stage.ask(session, paste_of(stage, session.system, int(share * pool)))
    return chats


async def same_load(stage: Stage) -> Seen:
    """Runs the requests to their end, above the recording of vLLM."""
    reader = TraceReader(FILE)
    await stage.begin_run("minitui", first=True)
    stage.view.earlier = vllm = recorded_view(reader, str(reader.info.engine))
    chats = await submit(stage)
    await stage.slow(0.12)
    await stage.answers(chats)
    await stage.gate()
    await stage.settle()
    lines = [f"   {'':<28}{vllm.run_name:>14}{stage.view.run_name:>10}"]
    for title, theirs, ours in zip(FIGURES, _figures(vllm), _figures(stage.view), strict=True):
        lines.append(f"   {title:<28}{theirs:>14}{ours:>10}")
    plans = _plans(vllm), _plans(stage.view)
    alike = sum(a == b for a, b in zip(*plans, strict=False))
    youngest = all(_preempted(view) == [max(view.history.lanes.lanes)] for view in (vllm, stage.view))
    return Seen(
        f"In {alike} of {count(max(map(len, plans)), 'step')}, both schedulers planned the same decodes and prompt "
        "tokens. "
        + "Both preempted the youngest request." * youngest + "\n" + "\n".join(lines)
    )


def _plans(view: View) -> list[tuple[int, list[tuple[int, int]]]]:
    """Returns of each step the number of decodes, and (request, tokens) of its prompts."""
    ids = sorted(view.history.lanes.lanes)
    rows = [view.history.steps.get(step) for step in range(view.history.steps.first, view.history.steps.last + 1)]
    return [(row.decodes, [(ids.index(id), n) for id, _, n, _ in row.chunks]) for row in rows if row is not None]


def _figures(view: View) -> tuple[str, ...]:
    """Returns the values of FIGURES for a run."""
    events = view.history.events.since(0)
    preempted = next((event for event in events if event.kind == "preempt"), None)
    if preempted is None:
        return ("-",) * len(FIGURES)
    after = (event for event in events if event.request == preempted.request and event.seq > preempted.seq)
    cached = next((event.record.tokens for event in after if event.kind in ("hit", "miss")), 0)
    again = Run(view).figures.twice or 0
    steps = preempted.step - view.history.steps.first + 1
    return tuple(f"{number:,}" for number in (steps, cached + again, cached, again))


def _preempted(view: View) -> list[int]:
    """Returns the preempted requests of a run, in order."""
    return [event.request for event in view.history.events.since(0) if event.kind == "preempt"]
