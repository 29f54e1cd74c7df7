"""L0: the seven stages, and one step through them."""

from __future__ import annotations

from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.stage import Stage

REPLY = 5


async def one_question(stage: Stage) -> Seen:
    """A prompt and a reply of REPLY tokens, step by step."""
    session = stage.chat(max_tokens=REPLY, whole=True)
    stage.show(session)
    stage.begin_count()
    request = await stage.ask(session, "What is prefill?")
    await stage.step(REPLY - 1, seconds=0.8)
    prompt = stage.view.lanes.lanes[request].prompt_tokens
    await stage.step(4, seconds=0.8)  # as many as are left: none if a token came with every step
    seen = stage.figures()
    first = stage.view.steps.get(stage.view.steps.last - seen.steps + 1)
    assert first is not None
    answers = {prompt + REPLY: 0, REPLY + 1: 1, REPLY: 2, 1: 3}
    return Seen(
        f"{seen.steps} steps. The first computed all {first.prefill_tokens} prompt tokens at once and drew the first "
        "token of the "
        f"reply; each of the other {seen.steps - 1} computed the one token drawn before and drew the next. The last "
        "token "
        "drawn needs no step of its own: nothing is to follow it.",
        answers.get(seen.steps),
    )


async def write_on(stage: Stage) -> None:
    """Two replies, one three steps ahead of the other."""
    for question, steps in (("What is prefill?", 3), ("What is decode?", 2)):
        session = stage.chat(max_tokens=40, whole=True)
        stage.show(session)
        await stage.ask(session, question)
        await stage.step(steps, seconds=0.5)


def last_step(stage: Stage) -> str:
    """What the last step held, in words."""
    row = stage.view.steps.get(stage.view.steps.last)
    assert row is not None
    return f"step {row.step} computed {row.tokens} tokens, one for each of {row.decodes} requests that decode"


def _second(stage: Stage) -> str:
    id = max(stage.view.lanes.lanes)
    steps = stage.view.steps
    step = next(s for s in range(steps.last, -1, -1) if any(chunk[0] == id for chunk in steps.chunks(s)))
    return f"r{id}, in step {step}"


def _steps_in(stage: Stage) -> str:
    """Of each request that runs, its prompt's step included."""
    state = stage.state()
    return ", ".join(f"r{r.id}: {state.computed(r) - r.prompt_tokens + 1}" for r in state.requests.values())


LESSON = Lesson(
    0,
    "Architecture",
    "What happens between a question and its answer?",
    (
        Page(
            "Seven stages",
            """
            An inference engine turns requests into tokens. Every engine, this one too, does seven things, and each
            has its own room:

              1 tokenize     engine/text/tokenizer.py   text becomes token ids
              2 schedule     engine/core/scheduler.py   who runs in this step, how many tokens of each
              3 allocate     engine/kv/            which blocks of memory they are written to
              4 forward      engine/model/         the model computes over those tokens
              5 sample       engine/worker/sampler.py    one token is drawn from each row of logits
              6 detokenize   engine/text/tokenizer.py   ids become text again
              7 emit         engine/core/engine.py      ids are appended, ends found, listeners told

            A request passes 1 once. Then 2 to 7 are done in every step, for all requests that run. Nothing waits
            for a whole answer: a step is a fraction of a second, and any step may begin with other requests.
            """,
        ),
        Page(
            "A step: plan, launch, commit",
            """
            A step has three parts. It is planned on the host: the scheduler chooses, the allocator gives blocks,
            and the result is a few plain arrays. It is launched on the device: forward pass and sampling. It is
            committed on the host: ids are appended, ended replies give back their blocks. Full blocks are published
            for others: a prompt's when planned, a reply's when committed.

            A plan needs the ids of prompts, but of replies only the length. So a GPU's host plans step n+1 while
            the device runs n; what n+1 draws for a reply that ended with n is thrown away. On a CPU the three come
            one after the other.

            Press v to read the step itself: it is about twenty lines.
            """,
            panel="timings",
            code="engine.core.engine:Engine.step",
        ),
        Page(
            "One question, step by step",
            f"""
            One chat asks something, and its reply is limited to {REPLY} tokens. The engine is held between steps
            and let go one step at a time. Watch the step bar: its width is the budget of tokens that a step may
            compute.
            """,
            panel="step",
            code="engine.core.step:StepPlan",
            run=one_question,
            predict=Prediction(
                f"How many steps does it take to write {REPLY} tokens?",
                (
                    "one for each prompt token and each reply token",
                    f"{REPLY + 1}: one for the prompt, one for each token",
                    f"{REPLY}: the prompt's step draws the first token",
                    "one: a reply is computed as a whole",
                ),
            ),
        ),
        Page(
            "A process of its own, and a log",
            """
            The engine runs in its own process, and this application only listens. So drawing the screen never holds
            up a step; and if the application dies, for whatever reason, the engine ends with it.

            Everything that changes the scheduler, the blocks or the tree is written to one log as a record with a
            number, a time and a reason: submitted, admitted, matched, allocated, evicted, finished. Panels, traces
            and this lesson's figures are all counted from these records. A snapshot plus the records after it is
            the state, exactly.

            So every panel can be stepped, frozen and taken back in time: it is only a fold over the log.
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
            "the step bar: the segment D×n is one token for each of n requests that decode.",
            last_step,
        ),
        Check(
            "Which request came later, and in which step was its prompt computed?",
            "lanes",
            "the batch lanes: a row for each request; prefill is drawn otherwise than decode.",
            _second,
        ),
        Check(
            "How many steps has each request been in so far?",
            "lanes",
            "the batch lanes: count the columns of each row; one column is one step.",
            _steps_in,
        ),
    ),
    {"kv_blocks": 64},
)
