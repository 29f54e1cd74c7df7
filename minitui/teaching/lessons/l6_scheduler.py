"""L6: which requests run in a step."""

from __future__ import annotations

from minitui.chat.conversation import Session
from minitui.teaching.lessons.beside_vllm import same_load
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.lessons.preemption import too_small
from minitui.teaching.lessons.side_by_side import side_by_side, steps_and_time
from minitui.teaching.scenarios import paste
from minitui.teaching.stage import Stage
from minitui.text import count

BLOCKS = 48  # of the pool
LENGTHS = (5, 20, 25, 40, 30, 30)  # lengths of the replies in tokens
WRITERS = ("What is prefill?", "What is decode?", "What is a token budget?")


async def _writers(stage: Stage, tokens: int = 60) -> list[Session]:
    sessions = await stage.write_all(WRITERS, [tokens] * len(WRITERS), system="")
    await stage.step(3, seconds=0.4)
    return sessions


async def long_paste(stage: Stage) -> Seen:
    """Sends a long prompt while three requests decode."""
    await _writers(stage)
    await stage.step(4, seconds=0.2)
    budget = stage.source.info["max_num_batched_tokens"]
    pasted = stage.chat("", "paste", max_tokens=5, whole=True)
    request = await stage.ask(pasted, paste(12))
    chunks: list[tuple[int, int, int]] = []
    while True:
        await stage.step(1, seconds=1.0)
        row = stage.last_row()
        mine = [n for id, _, n, _ in row.chunks if id == request]
        if not mine:
            break
        chunks.append((row.step, row.decodes, mine[0]))
    first, decodes, tokens = chunks[0]
    stage.view.select("step", first)
    lines = [f"   {'step':<8}{'decoding requests':>18}{'prompt':>8}{'together':>10}"]
    lines += [f"   {step:<8}{n:>18}{chunk:>8}{n + chunk:>10}" for step, n, chunk in chunks]
    return Seen(
        "Tokens computed in the steps of the pasted prompt:\n\n" + "\n".join(lines) + "\n\n"
        f"The step bar shows step {first} again: {decodes} + {tokens} tokens, the whole budget. The decoding requests "
        "got a token in each of these steps. But they waited longer for the token: a step with a chunk takes longer "
        "than a decode step.",
        {budget: 0, budget - decodes: 1, 0: 3}.get(tokens, 2),
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
    rows, tokens = stage.source.info["max_num_seqs"], sum(LENGTHS)
    static = static_steps(rows)
    lines = [f"   {'request':<10}{'tokens':>6}{'first step':>12}{'last step':>11}"]
    for id, length in zip(ids, LENGTHS, strict=True):
        lines.append(f"   {f'r{id}':<10}{length:>6}{began[id] - first + 1:>12}{ended[id] - first + 1:>11}")
    lines += ["", f"   {'batching':<24}{'steps':>5}{'rows in use':>12}"]
    for name, steps in (("continuous", figures.steps), ("static (calculated)", static)):
        lines.append(f"   {name:<24}{steps:>5}{f'{tokens / steps / rows:.0%}':>12}")
    return Seen(
        "The steps, counted from 1:\n\n" + "\n".join(lines) + "\n\nEach waiting request took the next row "
        "that became free. The next page runs static batches.",
        {max(LENGTHS): 0, static: 2, tokens: 3}.get(figures.steps, 1),
    )


async def fifth_waits(stage: Stage) -> Seen:
    """Sends more requests than there are rows."""
    await _writers(stage, 12)
    more = [stage.chat("", max_tokens=12, whole=True) for _ in range(2)]
    ids = [await stage.ask(session, "What is the KV cache?") for session in more]
    await stage.step(1, seconds=1.0)
    row, event = stage.last_row(), stage.events("wait")[-1]
    await stage.run_until("finish")
    ended = stage.events("finish")
    await stage.step(1)
    admitted = next(e for e in stage.view.events.since(0) if e.kind == "admit" and e.request == ids[1])
    reason = str(event.record[4])
    return Seen(
        f"   step {row.step:<6}r{ids[0]} gets the fourth row; the step computes {row.decodes} + {row.prefill_tokens} "
        "tokens\n"
        f"   {'':<11}r{event.request} waits for {reason}\n"
        f"   step {ended[0].step:<6}{count(len(ended), 'running request')} finished\n"
        f"   step {admitted.step:<6}r{ids[1]} is admitted\n\n"
        "The step had budget left. But all rows were used.",
        next((i for i, start in enumerate(("budget", "rows", "blocks")) if reason.startswith(start)), None),
    )  # fmt: skip


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
    event = next((e for e in stage.view.events.newest_first() if e.kind == "wait"), None)
    return f"r{event.request}: {event.record[4]}" if event is not None else "none"


LESSON = Lesson(
    6,
    "Scheduler",
    "Which requests run in the next step, and how many tokens of each?",
    (
        Page(
            "A budget of tokens",
            """
            A step may compute only a limited number of tokens: its budget. All running requests wait for the end of the
            step, and the budget limits this wait. This engine's scheduler spends the budget in this order:

              1 decoding requests   one token each, the oldest first
              2 started prompts     the next part (chunk) of each
              3 the queue           first come, first served; interrupted requests first

            One forward pass computes all these tokens. A prompt that is longer than the rest of the budget is computed
            in chunks, in several steps. vLLM mixes prompts and decodes in a step, too. SGLang does this only with
            --enable-mixed-chunk.

            For the replies, the scheduler needs the number of tokens, not the tokens. (A grammar and speculation need
            the tokens.) So it can plan a step before the tokens of the previous step are known (L1 Architecture).
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
            tokens start together. Two more replies of {LENGTHS[4]} tokens each wait. A reply of n tokens takes n steps.
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
                    f"all six replies would have a row from the start. But the sixth reply gets the second row that "
                    f"becomes free, after {LENGTHS[1]} steps. It takes {LENGTHS[5]} more steps.",
                    "",
                    f"the two waiting replies would start when the reply of {max(LENGTHS)} tokens has ended: "
                    f"{max(LENGTHS)} + {LENGTHS[4]} steps. This is static batching.",
                    "a step would compute one request only. But this engine has four rows, and a step computes "
                    "one token for each row.",
                ),
            ),
        ),
        Page(
            "Static and continuous",
            """
            Eight replies of different lengths run in four rows: first in static batches, then with continuous
            batching. Each run has an engine of its own. The panel shows both runs on one clock, the first above the
            second. Each line is a request.

            In the static run, look for requests that wait although a row is empty. Compare the steps, the time of the
            run, and the times to the first token. (p99: 99 % of the times are not longer.)

            Fewer steps take less time only if each step does not take longer. Two things make steps longer here. On a
            CPU, a step with four rows takes longer than a step with one row; on a GPU, hardly longer (L2 Model and
            weights). And all rows wait while a step computes a prompt (“stalled”). Static batches compute several
            prompts in one step, so they wait less often. The result says how long the steps took.
            """,
            panel="runs",
            run=side_by_side("batching", told=steps_and_time),
        ),
        Page(
            "A long prompt",
            """
            Three requests decode. Then a user pastes a long text. The budget of this engine is 64 tokens a step. The
            part of the prompt that does not fit into a step waits for the next step.
            """,
            panel="step",
            code="engine.core.scheduler:Scheduler._chunk",
            run=long_paste,
            predict=Prediction(
                "How many tokens of the pasted prompt does its first step compute?",
                ("64", "61", "all of them", "none: it waits until the other requests have ended"),
                (
                    "the decoding requests would get no token in this step, or their tokens would not count. But "
                    "the scheduler plans decoding requests first, one token each.",
                    "",
                    "the step would compute more tokens than its budget, and the decoding requests would wait for the "
                    "whole prompt.",
                    "the prompt would wait as long as the others write, although the step has room for more tokens.",
                ),
            ),
        ),
        Page(
            "In one step and in chunks",
            """
            Three requests write, and a user pastes a long text. The first engine computes the whole prompt in one
            step. The second engine computes at most 64 tokens in a step.

            Chunks have a price. Each chunk shares its step with the other requests, and reads the keys and values of
            the earlier chunks again. So the first token of the pasted prompt usually comes later, and the run may take
            longer. Compare two figures: the longest gap between two tokens, and the longest time to a first token
            (first token p99).
            """,
            panel="runs",
            run=side_by_side("chunked-prefill"),
        ),
        Page(
            "Waiting, with a reason",
            """
            A new request waits until the scheduler admits the request to the batch. The log of this engine names the
            first reason for waiting, in this order:

              budget   the budget of the step is used up
              rows     no row is free
              blocks   too few blocks are available

            This engine has four rows and a budget of 64 tokens. Three requests decode, and two more arrive. Each of the
            two has a prompt of 16 tokens.
            """,
            panel="lanes",
            code="engine.core.scheduler:Scheduler._obstacle",
            run=fifth_waits,
            predict=Prediction(
                "Which reason does the record of the last request give?",
                ("the budget is used up", "no row is free", "too few blocks are available"),
                (
                    "the step would compute more than 64 tokens. But three decodes and two prompts are "
                    "3 + 16 + 16 = 35 tokens.",
                    "",
                    f"the pool would be almost full. But five short requests need only a few of its {BLOCKS} blocks.",
                ),
            ),
        ),
        Page(
            "A pool that is too small",
            f"""
            Three requests arrive, one after the other. Their prompts fill most of the pool of {BLOCKS} blocks. The
            second prompt is by far the longest. Then all three decode, and each takes another block for every 16
            tokens. Soon a request needs a block, and no block is free or cached.

            So one of the three has to wait: it releases its row and its blocks. This is preemption. The other two
            continue, and may overwrite the released blocks. When the preempted request continues, its lost keys and
            values must be computed again.
            """,
            panel="lanes",
            code="engine.core.scheduler:Scheduler._preempt",
            run=too_small,
            predict=Prediction(
                "Which request does this engine preempt?",
                ("the oldest", "the one with the most blocks", "the youngest"),
                (
                    "new requests could push out an old request again and again. Its reply might never end.",
                    "the most blocks would become free. But the most tokens would be lost, and the same long request "
                    "could be preempted again and again.",
                    "",
                ),
            ),
        ),
        Page(
            "When memory runs out",
            """
            A decode step may need a new block. If no block is free, this engine evicts cached blocks. If no cached
            block is left, it preempts the youngest running request. vLLM does the same by default; SGLang
            usually preempts the request with the shortest reply so far.

            A preempted request moves to the head of the queue. Its full blocks stay in the tree as cached blocks. The
            other requests continue to write, and evict these blocks one by one. When a request finishes, the preempted
            request can resume. It uses its blocks that are still cached. Its other tokens are computed again, those of
            the prompt and those of the reply, like one prompt. Then the reply continues where it stopped.

            A prompt that can never fit is refused when it arrives, so that it does not block the queue. The error names
            the prompt's length and the limit. If a reply needs more blocks than the pool has, the reply ends with the
            reason `length`.
            """,
            panel="events",
            code="engine.core.scheduler:Scheduler._plan_decodes",
        ),
        Page(
            "The same requests on vLLM",
            """
            vLLM's scheduler solves the same problem: it has a budget of tokens, a number of rows, and a pool of blocks.
            Here both schedulers have the same budget, rows and pool. They get the same three requests at the same time;
            the prompts fill most of the pool.

            vLLM's run is a recording of its real scheduler. It had no model: the tokens of the replies were those of
            this engine. So vLLM's steps have no times, and the clock of the picture counts steps. The picture shows
            vLLM's run above and this engine's run below. `minitui inspect --connect` shows a running vLLM.
            """,
            panel="runs-steps",
            code="minitui.vllm.recorder:Recorder.scheduled",
            run=same_load,
        ),
    ),
    close,
    (
        Check("How was the budget of the last step divided?", "step", "the step bar and the line under it.", _last),
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
            lambda stage: ", ".join(f"r{c[0]}" for c in stage.view.steps.chunks(stage.view.steps.last)),
        ),
    ),
    {"kv_blocks": BLOCKS, "max_num_batched_tokens": 64, "max_num_seqs": 4},
)
