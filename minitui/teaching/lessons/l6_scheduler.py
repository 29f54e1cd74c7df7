"""L6: which requests run in a step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median

from minitui.chat.conversation import Session
from minitui.teaching import contrasts
from minitui.teaching.lessons.page import Seen
from minitui.teaching.lessons.side_by_side import side_by_side, steps_and_time
from minitui.teaching.lessons.written import read_lesson
from minitui.teaching.scenarios import VOICES, paste, paste_of
from minitui.teaching.stage import Stage
from minitui.text import count, ms
from minitui.trace.reader import TraceReader
from minitui.viewmodel.compare.runs import Run, recorded_view
from minitui.viewmodel.view import View

SHARES = (0.27, 0.42, 0.17)  # of the pool, for the prompts of three requests; the rest is soon full of replies
REPLY = 60  # tokens


async def too_small(stage: Stage) -> Seen:
    """Fills the pool. The answer: which request was preempted, 0 the oldest, 1 the largest, 2 the youngest."""
    chats, ids = await submit(stage)
    stage.show(chats[-1])
    lanes = stage.view.history.lanes.lanes
    await stage.step_until("the end of the prompts", lambda: all(lanes[id].first_token for id in ids), seconds=0.15)
    await stage.step_until("a preemption", lambda: stage.events("preempt"), seconds=0.15)
    event = stage.events("preempt")[0]
    victim, reason, blocks = event.request, event.record.reason, event.record.blocks
    lane, written = lanes[victim], lanes[victim].highest
    await stage.pause(3)
    await stage.step_until("the resumption", partial(_resumed, stage, victim, event.seq), seconds=0.1)
    events = stage.view.history.events.newest_first()
    match = next(event for event in events if event.request == victim and event.kind in ("hit", "miss"))
    kept, resumed = match.record.tokens, match.step
    lost = written - kept
    await stage.step_until("the lost tokens", lambda: sum(n for _, n in lane.again) >= lost, seconds=0.3)
    steps = len({step for step, _ in lane.again})
    size = stage.source.info.block_size
    return Seen(
        f"   step {event.step:<6}{reason}: r{victim} is preempted\n"
        f"   {'':<11}r{victim} releases {blocks} blocks; {written // size} are full and stay cached\n"
        f"   {'then':<11}{written // size - kept // size} of the cached blocks are evicted for other requests\n"
        f"   step {resumed:<6}r{victim} resumes: {kept} of its {written} computed tokens are still cached\n"
        f"   {'':<11}the other {lost} are computed again, in {count(steps, 'step')}\n"
        f"   {'':<11}token {written + 1}, sampled before the preemption, is computed now\n"
        "No token of the reply was lost: the reply continues with its next token.",
        ids.index(victim) if victim == max(ids) or victim == min(ids) else 1,
    )


def _resumed(stage: Stage, request: int, since: int) -> bool:
    return any(event.request == request and event.seq > since for event in stage.events("admit"))


BLOCKS = 48  # of the pool
LENGTHS = (5, 20, 25, 40, 30, 30)  # lengths of the replies in tokens
BUDGET = 64  # tokens
PASTED_LINES, PASTED = 11, 188  # of the pasted text: its lines, and the tokens of its prompt
PASTE_STEPS = (1, 3, 4)  # steps, choices of the question
WAITING_LINES, WAITING = 4, 80  # of the text of the last two requests: its lines, and the tokens of a prompt
REASONS = (("budget", "rows"), ("rows", "budget"), ("rows",), ("budget",))  # choices of the question
WRITERS = ("What is prefill?", "What is decode?", "What is a token budget?")


async def _writers(stage: Stage, tokens: int = 60) -> list[Session]:
    sessions = await stage.write_all(WRITERS, [tokens] * len(WRITERS), system="")
    await stage.step(3, seconds=0.4)
    return sessions


async def long_paste(stage: Stage) -> Seen:
    """Sends a long prompt while three requests decode."""
    await _writers(stage)
    before = stage.state().step
    await stage.step(4, seconds=0.2)
    pasted = stage.chat("", "paste", max_tokens=5, whole=True)
    request = await stage.ask(pasted, paste(PASTED_LINES))
    chunks: list[tuple[int, int, int, float]] = []
    while True:
        await stage.step(1, seconds=1.0)
        row = stage.last_row()
        mine = [n for id, _, n, _ in row.chunks if id == request]
        if not mine:
            break
        chunks.append((row.step, row.decodes, mine[0], row.took_ms or 0.0))
    first, decodes, tokens, _ = chunks[0]
    stage.view.select("step", first)
    rows = [stage.view.history.steps.get(step) for step in range(before + 1, first)]
    alone = median(row.took_ms or 0.0 for row in rows if row is not None)
    lines = [f"   {'step':<8}{'decoding requests':>18}{'prompt':>8}{'together':>10}{'ms':>7}"]
    lines += [f"   {f'{before + 1}-{first - 1}':<8}{decodes:>18}{0:>8}{decodes:>10}{ms(alone):>7}"]
    lines += [f"   {step:<8}{n:>18}{chunk:>8}{n + chunk:>10}{ms(took):>7}" for step, n, chunk, took in chunks]
    return Seen(
        "Tokens and time of a step (first line: the median of the steps with decodes only):\n" + "\n".join(lines) + "\n"
        f"The step bar shows step {first} again: {decodes} + {tokens} tokens, the whole budget. Each decoding request "
        "got a token in each step. But a step with a large chunk takes longer here, so the token came later.",
        PASTE_STEPS.index(len(chunks)) if len(chunks) in PASTE_STEPS else None,
    )


def static_steps(rows: int) -> int:
    """Returns the number of steps that replies of LENGTHS tokens would take in static batches of `rows` replies."""
    return sum(max(LENGTHS[i : i + rows]) for i in range(0, len(LENGTHS), rows))


async def join_and_leave(stage: Stage) -> Seen:
    """Runs six replies of different lengths on four rows."""
    sessions = await stage.write_all(["What is decode?"] * len(LENGTHS), LENGTHS, system="")
    ids = [stage.request(session).id for session in sessions]
    await stage.step(max(LENGTHS) + 10, seconds=0.12)
    await stage.until("the end of the last reply", lambda: not stage.state().requests)
    figures = stage.figures()
    began = {event.request: event.step for event in stage.events("admit")}
    ended = {event.request: event.step for event in stage.events("finish")}
    first = min(began.values())
    rows, tokens = stage.source.info.max_num_seqs, sum(LENGTHS)
    static = static_steps(rows)
    lines = [f"   {'waited':<10}{'tokens':>6}{'first step':>12}{'last step':>11}"]
    for id, length in zip(ids, LENGTHS, strict=True):
        if began[id] > first:
            lines.append(f"   {f'r{id}':<10}{length:>6}{began[id] - first + 1:>12}{ended[id] - first + 1:>11}")
    lines += [f"   {'batching':<24}{'steps':>5}{'rows in use':>12}"]
    for name, steps in (("continuous", figures.steps), ("static (calculated)", static)):
        lines.append(f"   {name:<24}{steps:>5}{f'{tokens / steps / rows:.0%}':>12}")
    return Seen(
        "The steps, counted from 1:\n" + "\n".join(lines) + "\nEach waiting request took the next row that became "
        "free.",
        {max(LENGTHS): 0, static: 2, tokens: 3}.get(figures.steps, 1),
    )


async def fifth_waits(stage: Stage) -> Seen:
    """Sends more requests than there are rows, with prompts that are longer than the budget. The answer: the index of
    the reasons in REASONS."""
    await _writers(stage, 12)
    more = [stage.chat("", max_tokens=12, whole=True) for _ in range(2)]
    ids = [await stage.ask(session, paste(WAITING_LINES)) for session in more]
    lines, reasons = [], []
    for _ in range(2):
        await stage.step(1, seconds=1.0)
        row, event = stage.last_row(), stage.events("wait")[-1]
        reason = str(event.record.reason)
        reasons.append(reason.partition(":")[0])
        lines += [
            f"   step {row.step:<6}{row.decodes} decodes + {row.prefill_tokens} tokens of r{ids[0]}",
            f"   {'':<11}r{event.request} waits for {reason}",
        ]
    await stage.run_until("finish")
    ended = stage.events("finish")
    await stage.step(1)
    admitted = next(e for e in stage.view.history.events.since(0) if e.kind == "admit" and e.request == ids[1])
    return Seen(
        "\n".join(lines) + "\n"
        f"   step {ended[0].step:<6}{count(len(ended), 'running request')} finished\n"
        f"   step {admitted.step:<6}r{ids[1]} is admitted\n"
        "First, budget and rows were used up: the log named the budget. Then budget was left, but "
        f"r{ids[0]} had the last row.",
        REASONS.index(tuple(reasons)) if tuple(reasons) in REASONS else None,
    )


async def close(stage: Stage) -> None:
    """Stops the engine while three requests decode, one prompt is partly computed and one request waits."""
    await _writers(stage)
    for name, text in (("paste", paste(12)), ("late", "What is decode?")):
        session = stage.chat("", name, max_tokens=20, whole=True)
        await stage.ask(session, text)
    await stage.step(1)


def _last(stage: Stage) -> str:
    row = stage.last_row()
    budget = stage.state().budget
    return (
        f"{row.decodes} tokens for decoding requests, {row.prefill_tokens} for a prompt: {row.tokens} of a budget of "
        f"{budget}"
    )


def _waits(stage: Stage) -> str:
    event = next((e for e in stage.view.history.events.newest_first() if e.kind == "wait"), None)
    return f"r{event.request}: {event.record.reason}" if event is not None else "none"


FILE = Path(__file__).parents[1] / "vllm.trace"  # tests/support/vllm_lesson.py of commit c9c7637c wrote it
FIGURES = ("preempted in step (from 1)", "its computed tokens", "still cached when it resumed", "computed again")


async def submit(stage: Stage) -> tuple[list[Session], list[int]]:
    """Pauses the engine and sends three requests, whose prompts fill most of the pool; returns chats and requests."""
    await stage.gate()
    pool = stage.source.info.num_blocks
    chats = [stage.chat(voice, max_tokens=REPLY, whole=True) for voice in VOICES[: len(SHARES)]]
    pasted = (paste_of(stage, chat.system, int(share * pool)) for chat, share in zip(chats, SHARES, strict=True))
    return chats, [await stage.ask(chat, text) for chat, text in zip(chats, pasted, strict=True)]


async def same_load(stage: Stage) -> Seen:
    """Runs the requests to their end, above the recording of vLLM."""
    reader = TraceReader(FILE)
    await stage.begin_run("minitui", first=True)
    stage.view.earlier = vllm = recorded_view(reader, str(reader.info.engine))
    chats, _ = await submit(stage)
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


static_and_continuous = side_by_side("batching", told=steps_and_time, shown=("steps", "time", "first_p99"))
one_step_or_chunks = side_by_side("chunked-prefill", shown=("time", "first_p99", "gap_longest"))

LESSON = read_lesson(globals(), contrasts, kv_blocks=BLOCKS, max_num_batched_tokens=BUDGET, max_num_seqs=4)
