"""L1: the seven stages, and one step through them."""

from __future__ import annotations

from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.stage import Stage

REPLY = 5


async def one_question(stage: Stage) -> Seen:
    """Runs a prompt and a reply of REPLY tokens, step by step."""
    session = await stage.write("What is prefill?", REPLY, REPLY - 1, seconds=0.8)
    prompt = stage.request(session).prompt_tokens
    await stage.step(4, seconds=0.8)  # runs what is left of the reply: nothing if every step sampled a token
    seen = stage.figures()
    first = stage.view.steps.get(stage.view.steps.last - seen.steps + 1)
    assert first is not None
    answers = {prompt + REPLY: 0, REPLY + 1: 1, REPLY: 2, 1: 3}
    stage.view.select("step", first.step)
    return Seen(
        f"{seen.steps} steps, with the numbers {first.step} to {stage.view.steps.last}. Step {first.step}, which the "
        f"step bar shows again, computed all {first.prefill_tokens} prompt tokens and sampled the first token of the "
        "reply. Each later step computed the token that the step before it sampled, and sampled the next token. "
        "The last token is never computed, because no token follows it.",
        answers.get(seen.steps),
    )


async def write_on(stage: Stage) -> None:
    """Starts two replies, one three steps before the other."""
    for question, steps in (("What is prefill?", 3), ("What is decode?", 2)):
        await stage.write(question, 40, steps, seconds=0.5)


def last_step(stage: Stage) -> str:
    """Returns a sentence about the last step: how many tokens it computed, and for how many requests."""
    row = stage.last_row()
    return f"step {row.step} computed {row.tokens} tokens, one for each of {row.decodes} decoding requests"


def _second(stage: Stage) -> str:
    id = max(stage.view.lanes.lanes)
    steps = stage.view.steps
    step = next(s for s in range(steps.last, -1, -1) if any(chunk[0] == id for chunk in steps.chunks(s)))
    return f"r{id}, in step {step}"


def _steps_in(stage: Stage) -> str:
    """Returns the number of steps of each running request, including the step of its prompt."""
    state = stage.state()
    return ", ".join(f"r{r.id}: {state.computed(r) - r.prompt_tokens + 1}" for r in state.requests.values())


LESSON = Lesson(
    1,
    "Architecture",
    "What happens between a question and its answer?",
    (
        Page(
            "Seven stages",
            """
            An inference engine turns requests into replies. Engines do seven things. Here is the code of each:

              1 tokenize     engine/text/tokenizer.py   text becomes token ids
              2 schedule     engine/core/scheduler.py   chooses the requests of a step, and how many tokens of each
              3 allocate     engine/core/allocator.py   chooses the memory blocks for these tokens
              4 forward      engine/model/              the model computes these tokens
              5 sample       engine/worker/sampler.py   the next token of each request is chosen
              6 detokenize   engine/text/tokenizer.py   ids become text again
              7 emit         engine/core/engine.py      ids are appended, ended replies are found, clients get text

            A request passes stage 1 once. The other stages follow in each of its steps. A new request can start in any
            step that has room for it: it does not wait until all other replies have ended.
            """,
        ),
        Page(
            "A step: plan, launch, commit",
            """
            A step has three parts. Plan, on the host: the scheduler chooses requests, the allocator chooses blocks,
            and the result is a few plain arrays. Launch, on the device: forward pass and sampling. Commit, on the
            host: ids are appended, and finished replies release their blocks. Other requests can share full blocks: a
            block of a prompt from the plan of the step that fills it, a block of a reply when its tokens are known.

            A plan needs the tokens of prompts, but of replies only how many tokens they have. So with a GPU the host
            plans step n+1 while the device runs step n. Step n+1 may then compute a token for a reply that has ended
            with step n: this token is thrown away. On a CPU the three parts run one after the other.

            Press v to read the code of a step.
            """,
            code="engine.core.engine:Engine.step",
        ),
        Page(
            "One question, step by step",
            f"""
            One chat asks a question; its reply is limited to {REPLY} tokens. The engine is stopped and runs one step
            at a time. Watch the step bar: its width is the token budget, the number of tokens that a step may compute.
            """,
            panel="step",
            code="engine.core.step:StepPlan",
            run=one_question,
            predict=Prediction(
                f"How many steps does a reply of {REPLY} tokens take?",
                (
                    "one for each prompt token and each reply token",
                    f"{REPLY + 1}: one for the prompt, one for each token",
                    f"{REPLY}: the prompt's step samples the first token",
                    "one: the whole reply is computed at once",
                ),
                (
                    "a step could compute only one token. But all tokens of a prompt are known at the start, so "
                    "one step can compute them together.",
                    "the prompt's step would sample nothing. But the forward pass of the prompt's last token "
                    "already gives the scores of the token that follows it.",
                    "",
                    "a token would not depend on the tokens before it. But the model needs the first token of the "
                    "reply as input before it can compute the second.",
                ),
            ),
        ),
        Page(
            "A separate process, and a log",
            """
            The engine runs in its own process, and this application only reads its records. So the engine never waits
            for the screen. If the application crashes, the engine ends, too.

            Every change to the scheduler, the blocks or the tree is written to one log, as a record with a number, a
            time and a reason: submitted, admitted, matched, allocated, evicted, finished. A snapshot and the records
            after it give the exact state.

            Panels, traces and this lesson's figures are computed from the log alone. So a panel can be stepped, frozen
            and moved back in time.
            """,
            panel="events",
            code="engine.trace.records",
        ),
    ),
    write_on,
    (
        Check(
            "How many tokens did the last step compute, and for how many requests?",
            "step",
            "the step bar: D×n means one token for each of n decoding requests.",
            last_step,
        ),
        Check(
            "Which request arrived later, and which step computed its prompt?",
            "lanes",
            "the batch lanes: one line for each request; prefill and decode look different.",
            _second,
        ),
        Check(
            "In how many steps has each request run so far?",
            "lanes",
            "the batch lanes: one column is one step; count the columns of each line.",
            _steps_in,
        ),
    ),
    {"kv_blocks": 64},
)
