"""L6: which requests run in a step."""

from __future__ import annotations

from functools import partial
from statistics import median

from minitui.chat.conversation import Session
from minitui.teaching import contrasts
from minitui.teaching.lessons.beside_vllm import same_load
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.lessons.side_by_side import side_by_side, steps_and_time
from minitui.teaching.scenarios import VOICES, paste, paste_of
from minitui.teaching.stage import Stage
from minitui.text import count, ms

SHARES = (0.27, 0.42, 0.17)  # of the pool, for the prompts of three requests; the rest is soon full of replies
REPLY = 60  # tokens


async def too_small(stage: Stage) -> Seen:
    """Fills the pool. The answer: which request was preempted, 0 the oldest, 1 the largest, 2 the youngest."""
    pool = stage.source.info.num_blocks
    chats = [stage.chat(voice, max_tokens=REPLY, whole=True) for voice in VOICES[: len(SHARES)]]
    stage.show(chats[-1])
    ids = []
    for session, share in zip(chats, SHARES, strict=True):
        ids.append(await stage.ask(session, paste_of(stage, session.system, int(share * pool))))
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


LESSON = Lesson(
    6,
    "Scheduler",
    "Which requests run in the next step, and how many tokens of each?",
    (
        Page(
            "A budget of tokens",
            """
            A step may compute only a limited number of tokens: its budget. A step with fewer tokens is often shorter.
            Then each decoding request gets its next token sooner. This engine's scheduler spends the budget in this
            order:

              1 decoding requests   one token each, in the order of their start
              2 started prompts     the next part (chunk) of each
              3 the queue           waiting requests, from the front

            One forward pass computes all these tokens. A prompt that is longer than the rest of the budget is computed
            in chunks, in several steps. vLLM mixes prompts and decodes in a step, too. But it does not put decodes
            first: started requests come in the order of their start, then the queue. SGLang mixes prompts and
            decodes only with --enable-mixed-chunk.

            To plan, the scheduler usually needs only the number of a reply's tokens. So it can plan the next step while
            a step still runs (L1 Architecture).
            """,
            code="engine.core.scheduler:Scheduler.plan",
        ),
        Page(
            "Joining and leaving",
            f"""
            A row is a place in the batch. Static batching fills all rows and computes until the longest reply has
            ended. The row of a shorter reply stays empty until then, although other requests wait. Continuous batching
            fills free rows before each step.

            This engine batches continuously, here with four rows. Four replies of {", ".join(map(str, LENGTHS[:4]))}
            tokens start together. Two more replies of {LENGTHS[4]} tokens each wait. Here, a reply of n tokens takes n
            steps: the first also computes the prompt.
            """,
            panel="lanes",
            code="engine.core.scheduler:Scheduler._admit",
            run=join_and_leave,
            predict=Prediction(
                "After how many steps have all six replies ended?",
                (
                    f"{max(LENGTHS)}",
                    f"{LENGTHS[1] + LENGTHS[5]}",
                    f"{static_steps(4)}",
                    f"{sum(LENGTHS)}",
                ),
                (
                    f"all six replies would start at once. But the sixth gets its row after {LENGTHS[1]} steps, and "
                    f"takes {LENGTHS[5]} more.",
                    "",
                    f"the last two replies would start after the longest: {max(LENGTHS)} + {LENGTHS[4]} steps. This is "
                    "static batching.",
                    "a step would compute one request only. But it computes a token for each row in use.",
                ),
            ),
        ),
        Page(
            "Static and continuous",
            """
            Eight replies of different lengths run in four rows: first in static batches, then with continuous batching.
            Each run has an engine of its own. The panel shows both runs, the static run above or on the left. Each line
            is a request. A column is the same number of steps in both runs. The row “steps” marks each column in which
            a prompt is computed.

            Here, one reply of each static batch is long: the other three rows are soon empty. With replies of equal
            length, static batching would need no more steps. But the lengths are usually not known in advance. In the
            static run, look for requests that wait although a row is empty.

            Compare the steps, the time of the run, and the times to the first token. (p99: nearly the longest.) Both
            runs compute the same tokens. With continuous batching, they are computed in fewer steps, so an average step
            computes more tokens. How much longer such a step takes depends on the device (L2 Model and weights). Times
            vary from run to run.
            """,
            panel="runs-steps",
            run=side_by_side("batching", told=steps_and_time, shown=("steps", "time", "first_p99")),
        ),
        Page(
            "A long prompt",
            f"""
            Three requests decode. Then a user pastes a long text. Its prompt has {PASTED} tokens. The budget of this
            engine is {BUDGET} tokens a step. The part of the prompt that does not fit into a step waits for the next
            step.
            """,
            panel="step",
            code="engine.core.scheduler:Scheduler._chunk",
            run=long_paste,
            predict=Prediction(
                "In how many steps is the pasted prompt computed?",
                tuple(map(str, PASTE_STEPS)),
                (
                    "the step would compute more tokens than its budget, and the decoding requests would wait for the "
                    "whole prompt.",
                    f"the prompt would have the whole budget: 3 × {BUDGET} = {3 * BUDGET} tokens. But each of the "
                    f"three decoding requests takes one token of each step: 3 × {BUDGET - 3} = "
                    f"{3 * (BUDGET - 3)} tokens.",
                    "",
                ),
            ),
        ),
        Page(
            "In one step and in chunks",
            f"""
            Three requests decode, and a user pastes a long text. Its prompt has {contrasts.PASTED} tokens. The first
            engine computes the whole prompt in one step. The second engine computes at most 64 tokens in a step.

            Chunks have a price. The prompt takes several steps. Each of them reads the weights, and the keys and values
            of the earlier chunks. So the first token of the pasted prompt usually comes later, and the run may take
            longer. Compare two figures: the longest gap between two tokens, and first token p99, which is nearly the
            time to the first token of the pasted prompt.

            So a smaller budget is often better for running replies, a larger one for new prompts. One way to choose:
            the largest budget whose steps are not longer than the longest gap that users accept.
            """,
            panel="runs",
            run=side_by_side("chunked-prefill", shown=("time", "first_p99", "gap_longest")),
        ),
        Page(
            "Waiting, with a reason",
            f"""
            A new request waits until the scheduler gives it a row (admits it). In this lesson, it can wait for three
            reasons: the budget of the step is used up, no row is free, or too few blocks are available. The log (L1
            Architecture) has the reason of the first request in the queue: if several are true, the one that comes
            first in this list. A changed reason is a new line.

            This engine has four rows and a budget of {BUDGET} tokens. Three requests decode, and two more arrive. Each
            of the two has a prompt of {WAITING} tokens.
            """,
            panel="lanes",
            code="engine.core.scheduler:Scheduler._admissible",
            run=fifth_waits,
            predict=Prediction(
                "Which reasons does the log name for the last of these requests?",
                ("first budget, then rows", "first rows, then budget", "only rows", "only budget"),
                (
                    "",
                    "only the second step would use up its budget. But the first computes more prompt tokens.",
                    f"the first step would have budget left. But it computes 3 decodes and {BUDGET - 3} prompt tokens.",
                    f"the second step would use up its budget. But it computes 3 decodes and {WAITING - BUDGET + 3} "
                    "prompt tokens.",
                ),
            ),
        ),
        Page(
            "A pool that is too small",
            f"""
            Three requests arrive, one after the other. Their prompts fill most of the pool of {BLOCKS} blocks. The
            second prompt is the longest. Then all three decode, and each takes another block for every 16
            tokens. Soon a request needs a block, and no block is free or cached.

            In this engine, one of the three now waits: it releases its row and its blocks. This is preemption. The
            other two may overwrite the released blocks. Then the lost keys and values are computed again later. The
            choice should let each request end, even if new requests arrive again and again.
            """,
            panel="lanes",
            code="engine.core.scheduler:Scheduler._preempt",
            run=too_small,
            predict=Prediction(
                "Which request does this engine preempt?",
                ("the oldest", "the one with the most blocks", "the youngest"),
                (
                    "new requests could push out an old request again and again, and it might never end.",
                    "short requests could push out a long one again and again. If the youngest waits, the oldest "
                    "always continues.",
                    "",
                ),
            ),
        ),
        Page(
            "When memory runs out",
            """
            A decode step may need a new block. If no block is free, this engine evicts a cached block. If no block is
            cached, this engine preempts the running request that was admitted last: by default, the youngest. vLLM, by
            default, also preempts the request that was admitted last. SGLang usually preempts the one with the shortest
            reply so far.

            A preempted request moves to the front of the queue. Its full blocks stay in the tree as cached blocks. The
            other requests need more blocks, so some of these may be evicted. When enough blocks are available again,
            the preempted request resumes. It takes those of its blocks that are still cached. Its other tokens, of the
            prompt and of the reply, are computed like one prompt. Then the reply continues where it stopped.

            A prompt that can never fit is refused when it arrives: the error names its length and the limit. If a reply
            needs more blocks than the pool has, its reply ends with the reason `length`.
            """,
            code="engine.core.scheduler:Scheduler._plan_decodes",
        ),
        Page(
            "The same requests on vLLM",
            """
            vLLM's scheduler also has a budget of tokens, a number of rows, and a pool of blocks. Here both schedulers
            have the same budget, rows and pool. Each gets the same three requests before its first step.

            vLLM's run is above: a recording of its real scheduler. No model ran: the tokens of the replies were taken
            from this engine. The picture counts steps, not ms. `minitui inspect --connect` shows a running vLLM.

            Some differences cannot be seen here, such as the order of page 1. This engine chooses the blocks to evict
            by its tree of prefixes. vLLM has no tree: it evicts the cached block that was released first, and a request
            releases its last block first. So both keep the beginning of a text longest. And two requests may compute
            the same text at the same time, for example equal replies. This engine then keeps one copy of the full
            blocks, vLLM two.
            """,
            panel="runs-steps",
            code="minitui.vllm.recorder:Recorder.scheduled",
            run=same_load,
        ),
    ),
    close,
    (
        Check("How was the budget of the last step divided?", "step", "the step bar and its numbers.", _last),
        Check(
            "Which request waits, and for what?",
            "events",
            "the events: a line with `waits` has the request and the reason.",
            _waits,
        ),
        Check(
            "Which request is computing its prompt?",
            "lanes",
            "the batch lanes: one line has prefill in the last column.",
            lambda stage: ", ".join(f"r{c[0]}" for c in stage.view.history.steps.chunks(stage.view.history.steps.last)),
        ),
    ),
    {"kv_blocks": BLOCKS, "max_num_batched_tokens": BUDGET, "max_num_seqs": 4},
)
