"""L1: the seven stages, and one step through them."""

from __future__ import annotations

from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
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
    seen = stage.figures()
    steps = stage.view.history.steps
    rows = [row for step in range(steps.last - seen.steps + 1, steps.last + 1) if (row := steps.get(step)) is not None]
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
        answers.get(seen.steps),
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


LESSON = Lesson(
    1,
    "Architecture",
    "What happens between a prompt and its reply?",
    (
        Page(
            "Seven stages",
            """
            This inference engine turns requests into replies, in seven stages:

              1 tokenize     engine/text/tokenizer.py   text becomes token ids
              2 schedule     engine/core/scheduler.py   chooses the requests of a step, and how many tokens of each
              3 allocate     engine/core/allocator.py   chooses the memory blocks for these tokens
              4 forward      engine/model/              the model computes these tokens
              5 sample       engine/worker/sampler.py   the next token of each request is chosen
              6 commit       engine/core/commit.py      adds ids to replies, ends replies
              7 detokenize   engine/text/output.py      ids become text for the user

            Stage 1 comes before the first step of a request. A step runs stages 2 to 6, for all of its requests
            together. Stage 7 comes after the step. A new request can start in any step that has room.
            If a prompt takes several steps, stages 5 and 7 come only with its last one.
            """,
        ),
        Page(
            "A step: plan, launch, commit",
            """
            A step has three parts:

              plan     stages 2 and 3, on the host: chooses requests and blocks
              launch   stages 4 and 5: the host starts them, the device computes
              commit   stage 6, on the host: adds ids, releases blocks of ended replies

            To plan a step, the host must know how many tokens each reply has, but usually not which tokens. A decode
            usually adds one token. So with a GPU, the host can plan step n+1 while step n still runs. The new tokens
            stay on the device: they are the input of step n+1. The host also knows when a reply reaches its largest
            length. An end token is different: step n samples it, but the host sees it only after it has launched step
            n+1. So step n+1 computes a token too many for this request. The engine throws its result away. vLLM and
            SGLang, two widely used engines, can also plan ahead.

            On a CPU, this engine by default runs the three parts one after the other.
            """,
            code="engine.core.engine:Engine.step",
        ),
        Page(
            "Two questions, step by step",
            f"""
            Two chats ask a question. Each reply has {REPLY} tokens. The first chat has run {HEAD_START} steps when the
            second question arrives. The engine runs one step at a time, and waits between two steps: the top line says
            PAUSED. The steps are numbered from 0. The requests are numbered, too: r2 is request 2. Watch the step bar:
            its width is the token budget, the largest number of tokens that a step may compute. Small parts are
            drawn wider, to have room for their labels.
            """,
            panel="step",
            code="engine.core.step:StepPlan",
            run=two_questions,
            predict=Prediction(
                "How many steps does the engine need for both replies together?",
                (f"{2 * REPLY}", f"{HEAD_START + REPLY}", f"{REPLY}"),
                (
                    "the second request would have to wait until the first reply has ended. But a step can compute "
                    "tokens of several requests.",
                    "",
                    "both requests would have to start in the same step. But the second arrives later.",
                ),
            ),
        ),
        Page(
            "A separate process, and a log",
            """
            Here, the engine runs in a process of its own, so it need not wait until a screen is drawn. If the
            application ends, this engine ends, too.

            The engine writes all changes of requests, blocks and the cache to one log, as records. A snapshot is the
            whole state at one moment. The panels begin with a snapshot and apply one record after the other, so they
            know the state after each record. You can stop the panels and move back in time, as far as they keep the
            records: key 2 opens the panels (as many as the screen has room for), and there ? lists the keys.

            The experiment runs one request. Most of its records say what a step computes, or how long it took: the
            panel does not show them. The panel shows the decisions, the newest first: the step, the event, and what was
            decided and why. (Its tree is the index of cached prefixes: L9 Radix cache.)
            """,
            panel="events",
            code="engine.trace.records",
            run=logged,
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
