"""L6: which requests run in a step."""

from __future__ import annotations

from minitui.chat.conversation import Session
from minitui.teaching.lessons.beside_vllm import same_load
from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.lessons.preemption import too_small
from minitui.teaching.lessons.side_by_side import side_by_side
from minitui.teaching.scenarios import paste
from minitui.teaching.stage import Stage

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
        "got a token in each of these steps, but later: a step with a chunk takes longer than a decode step.",
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
        "The steps, counted from 1:\n\n" + "\n".join(lines) + "\n\nEach waiting request took the next free row. "
        "The next page runs static batches.",
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
    ended = stage.events("finish")[0]
    await stage.step(1)
    admitted = next(e for e in stage.view.events.since(0) if e.kind == "admit" and e.request == ids[1])
    reason = str(event.record[4])
    return Seen(
        f"   step {row.step:<6}r{ids[0]} gets the fourth row; the step computes {row.decodes} + {row.prefill_tokens} "
        "tokens\n"
        f"   {'':<11}r{event.request} waits for {reason}\n"
        f"   step {ended.step:<6}a running request finishes\n"
        f"   step {admitted.step:<6}r{ids[1]} is admitted\n\n"
        "The step still had budget left. So the first reason that the engine found was the missing row.",
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
            A step may compute only a limited number of tokens: its budget. The budget limits the tokens of a step, and
            so, roughly, the waiting time for each token. The scheduler spends the budget in this order:

              1 decoding requests   one token each, the oldest first
              2 started prompts     the next chunk of each
              3 the queue           first come, first served; preempted requests first

            One forward pass computes all these tokens. A prompt that is longer than the rest of the budget is computed
            in chunks. So a long prompt makes the steps of the decoding requests longer, but no step computes more than
            the budget. vLLM mixes prompts and decodes, too; SGLang only with --enable-mixed-chunk.

            Without grammar and speculation, the scheduler needs only the lengths of replies. So it can plan a step
            before the tokens of the previous step are known (see L1 Architecture).
            """,
            code="engine.core.scheduler:Scheduler.plan",
        ),
        Page(
            "Joining and leaving",
            f"""
            Static batching fills a batch, computes it until its longest reply has ended, and then starts the next
            batch. A row is a place in the batch. When a short reply has ended, its row stays empty, and new requests
            wait for the end of the whole batch. Continuous batching fills free rows in every step.

            This engine has four rows and batches continuously. Four replies of {", ".join(map(str, LENGTHS[:4]))}
            tokens start. Two more replies, of {LENGTHS[4]} tokens each, wait. A reply of n tokens takes n steps.
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
                    f"there would have to be more rows. But the sixth reply can only start when a second row is free: "
                    f"after {LENGTHS[1]} steps. It needs {LENGTHS[5]} more.",
                    "",
                    f"the two waiting replies could not start before the reply of {max(LENGTHS)} tokens has "
                    f"ended: {max(LENGTHS)} + {LENGTHS[4]} steps. This is static batching.",
                    "a step could compute only one request. But this engine has four rows, and a step computes "
                    "one token for each of them.",
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
            run, and the times to the first token.

            Fewer steps need not mean less time, for two reasons. All rows wait while a step computes a prompt
            ("stalled"). Static batches compute several prompts in one such step, so they wait less often. And on a CPU,
            a step with four rows takes longer than a step with one row; on a GPU, hardly longer (L2 Model and weights).
            """,
            panel="runs",
            run=side_by_side("batching"),
        ),
        Page(
            "A long prompt",
            """
            Three requests decode. A user pastes a long text. The budget of this engine is 64 tokens a step. A prompt
            may be split into chunks: a part that does not fit into the budget waits for the next step.
            """,
            panel="step",
            code="engine.core.scheduler:Scheduler._chunk",
            run=long_paste,
            predict=Prediction(
                "How many tokens of the pasted prompt does its first step compute?",
                ("64", "61", "all of them", "none: it waits until the other requests have ended"),
                (
                    "the decoding requests would get no token, or their tokens would not count. But "
                    "they are planned first, one token each.",
                    "",
                    "the step would be as long as the prompt, and the decoding requests would wait for all of it. "
                    "The budget prevents this.",
                    "a new request could wait for as long as others write, although the step has room.",
                ),
            ),
        ),
        Page(
            "In one step and in chunks",
            """
            Three requests write, and a user pastes a long text: first into an engine that computes a prompt in one
            step, then into one that computes at most 64 tokens in a step.

            Chunks have a price, too. The pasted prompt shares its steps with the other requests, and each chunk reads
            the keys and values of the earlier chunks again. So its first token usually comes later, and the whole run
            can take longer. Compare the longest gap between two tokens with the longest time to a first token (p99).
            """,
            panel="runs",
            run=side_by_side("chunked-prefill"),
        ),
        Page(
            "Waiting, with a reason",
            """
            A request that is not admitted waits. A record gives the first reason found:

              budget   the budget of the step is used up
              rows     no row is free
              blocks   too few blocks are available

            This engine has four rows and a budget of 64 tokens. Three requests decode, and two more arrive. Their
            prompts have 16 tokens each.
            """,
            panel="lanes",
            code="engine.core.scheduler:Scheduler._obstacle",
            run=fifth_waits,
            predict=Prediction(
                "Which reason does the record of the last request give?",
                ("the budget is used up", "no row is free", "too few blocks are available"),
                (
                    "the step would have to compute more tokens: three of decoding requests and 16 of the first new "
                    "prompt leave enough for another 16.",
                    "",
                    f"the pool would have to be almost full. But five short requests use a few of its {BLOCKS} blocks.",
                ),
            ),
        ),
        Page(
            "A pool that is too small",
            f"""
            Three requests arrive, one after the other. Their prompts fill most of the pool of {BLOCKS} blocks. The
            second has by far the longest prompt. Then all three decode, and each takes another block for every 16
            tokens. Soon no block is free or cached, and a request needs one more.

            A request cannot go on without its keys and values. So one of the three has to release its row and its
            blocks, and wait. This is preemption. What is evicted then has to be computed again. The other two should be
            able to go on.
            """,
            panel="lanes",
            code="engine.core.scheduler:Scheduler._preempt",
            run=too_small,
            predict=Prediction(
                "Which request does this engine preempt?",
                ("the oldest", "the one with the most blocks", "the youngest"),
                (
                    "new requests could push out old ones again and again, and a long reply might never end.",
                    "it would free the most blocks, but the most tokens would be computed again. And a long request "
                    "could be preempted each time when it comes back.",
                    "",
                ),
            ),
        ),
        Page(
            "When memory runs out",
            """
            A decode step may need a new block. If no block is free, cached blocks are evicted. If no cached blocks are
            left, the youngest running request is preempted: it releases its row and its blocks and moves to the head
            of the queue. Its full blocks stay in the tree as cached blocks. The other requests need a new block for
            every 16 tokens that they write. So these cached blocks are evicted one by one, the last block first, until
            a request finishes. Then the preempted request resumes with those of its blocks that are still cached. The
            engine computes its other tokens again, prompt and reply together, like one prompt. The reply continues
            where it stopped.

            A prompt that can never fit is refused at submission, so it never blocks the queue. The error names the
            prompt's length and the limit. If a reply needs more blocks than the whole pool has, it ends with the reason
            `length`.
            """,
            panel="events",
            code="engine.core.scheduler:Scheduler._plan_decodes",
        ),
        Page(
            "The same requests on vLLM",
            """
            vLLM's scheduler solves the same problem: a budget of tokens, a number of rows, a pool of blocks. Three
            prompts that fill most of the pool are sent at the same time, first to vLLM's scheduler and then to this
            engine. vLLM's part is a recording of its real scheduler, without a model: the tokens come from this
            engine's replies. Both have the same pool, rows and budget.

            The picture shows both runs, one below the other. The clock counts steps, because vLLM's steps computed
            nothing. `minitui inspect --connect` shows a running vLLM.
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
            "the events: the line with `waits` gives the request and the first reason.",
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
