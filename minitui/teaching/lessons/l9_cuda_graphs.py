"""L9: launching less."""

from __future__ import annotations

from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.stage import Stage

MORE = 5


async def host_share(stage: Stage) -> Seen:
    """What the host does in a step, and what the device does."""
    session = stage.chat(max_tokens=30, whole=True)
    stage.show(session)
    await stage.ask(session, "What is a CUDA graph?")
    await stage.step(24, seconds=0.05)
    rows = [stage.view.steps.get(s) for s in range(stage.view.steps.last - 20, stage.view.steps.last + 1)]
    decodes = [row for row in rows if row is not None and not row.chunks and row.wall_ms]
    wall = sorted(row.wall_ms or 0.0 for row in decodes)[len(decodes) // 2]
    plan = sorted((row.plan_ms or 0.0) + (row.commit_ms or 0.0) for row in decodes)[len(decodes) // 2]
    gpu = "cpu" not in str(stage.source.info["device"]).lower()
    about = (
        "This engine runs on a GPU: the launch is a graph's." if gpu
        else "This engine runs on a CPU: there is nothing to launch, the host itself computes; no graphs are captured."
    )  # fmt: skip
    return Seen(
        f"In this run a decode step took {wall:.1f} ms (median), {plan:.2f} ms of it planning and committing. {about}"
    )


async def batch_sizes(stage: Stage) -> Seen:
    """Decode batches that grow, and the graph that would serve each."""
    sizes = (1, 2, 4, 8)
    served = []
    for n in range(1, MORE + 1):
        session = stage.chat("", max_tokens=40, whole=True)
        stage.show(session)
        await stage.ask(session, "What is decode?")
        await stage.step(2, seconds=0.4)
        row = stage.view.steps.get(stage.view.steps.last)
        assert row is not None and row.decodes == n
        served.append((n, next(size for size in sizes if size >= n)))
    lines = [f"   {n} decode   graph of {size}, {size - n} rows of padding" for n, size in served]
    return Seen("\n".join(lines), {4: 0, 5: 1, 8: 2}[served[-1][1]])


async def close(stage: Stage) -> None:
    """Three requests decode, standing."""
    for question in ("What is decode?", "What is prefill?", "What is a token?"):
        session = stage.chat("", max_tokens=40, whole=True)
        await stage.ask(session, question)
    await stage.step(5)


def _decodes(stage: Stage) -> int:
    row = stage.view.steps.get(stage.view.steps.last)
    return row.decodes if row is not None else 0


def _prefills(stage: Stage) -> int:
    steps = stage.view.steps
    return sum(bool(steps.chunks(s)) for s in range(steps.last - stage.figures().steps + 1, steps.last + 1))


def _host(stage: Stage) -> str:
    return f"{stage.view.timings.host_ms:.2f} ms on average"


LESSON = Lesson(
    9,
    "CUDA graphs",
    "Why does a GPU wait for its host in a short step, and what helps?",
    (
        Page(
            "The price of a launch",
            """
            On a GPU the host does not compute. It launches kernels: small programs, several for each layer. A
            launch costs the host some microseconds. A large prompt keeps the GPU busy far longer than that. But a
            decode step of a few tokens is so short that the GPU would wait for the host: hundreds of launches, and
            next to nothing to do in each.

            A CUDA graph is a recording of such a sequence of launches. It is captured once, with all its arguments,
            and then replayed with a single call. What it reads and writes must lie at the same addresses each time.
            So the inputs of a step are copied into fixed buffers, and the KV pool never moves.
            """,
            code="engine.worker.cuda_graphs",
        ),
        Page(
            "Host and device",
            """
            The timings panel draws host and device as two tracks. Where they overlap, the host plans the next step
            while the device works on this one.
            """,
            panel="timings",
            run=host_share,
        ),
        Page(
            "A ladder of sizes",
            """
            A graph is captured for a fixed number of rows, and a batch may have any number. To capture one for each
            would take long and much memory. So there is a ladder: 1, 2, 4, 8, 16, then 32, 48 and so on by 16, and
            above 128 by 32. A batch uses the next size that is large enough, and the rows too many are padding:
            they belong to no request and point at the null block.
            """,
            panel="step",
            code="engine.worker.cuda_graphs:ladder",
            run=batch_sizes,
            predict=Prediction(
                f"{MORE} requests decode. Which graph is replayed?",
                ("the one of 4, twice", f"one of exactly {MORE}", "the one of 8"),
            ),
        ),
        Page(
            "What is captured",
            """
            Three kinds of graphs, each on a ladder of its own:

              decode   one token for each request, by the number of requests
              extend   short chunks of few requests, by the number of tokens: cached prompts live here
              sample   the draw, by the number of rows: greedy, with noise, with noise and top-k or top-p

            Long prompts need none: they are launched kernel by kernel. Sampling is a graph apart, since its
            settings differ from step to step. Which lengths, which blocks, which settings: all that is data in the
            buffers, not part of the recording.

            Graphs and overlap together hide the host. The limit that is left is the memory's speed: a decode step
            cannot be faster than reading all weights, and all keys of the batch, once. `minitui bench` shows how
            near it comes.
            """,
            code="engine.worker.cuda_graphs:GraphRunner.launch",
        ),
    ),
    close,
    (
        Check(
            "How many rows would be padding in the next decode step on a GPU?",
            "step",
            "the step bar: D×n; the ladder has 1, 2, 4, 8.",
            lambda stage: (
                f"{next(s for s in (1, 2, 4, 8) if s >= _decodes(stage)) - _decodes(stage)} (n is {_decodes(stage)})"
            ),
        ),
        Check(
            "Which steps here would not have used a decode graph?",
            "lanes",
            "the batch lanes: columns in which somebody prefills.",
            lambda stage: f"those with prefill: {_prefills(stage)} of {stage.figures().steps}",
        ),
        Check(
            "How long does the host plan, launch and commit for a step?",
            "timings",
            "the timings: the host's track.",
            _host,
        ),
    ),
    {"kv_blocks": 96},
)
