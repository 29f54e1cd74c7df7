"""L10: a CUDA graph replaces many kernel launches."""

from __future__ import annotations

from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.lessons.recorded_timelines import LARGE, SMALL, gain, large_model, launch_ms, small_model
from minitui.teaching.recorded_steps import recorded_device
from minitui.teaching.stage import Stage
from minitui.text import count, ms

LARGEST_BATCH = 5  # requests
SIZES = (1, 2, 4, 8)  # the smallest graphs
GPU = recorded_device()
SMALL_MODEL, LARGE_MODEL = GPU.models[SMALL], GPU.models[LARGE]
SMALL_LAUNCHES = launch_ms(SMALL_MODEL.timeline("eager", 1))  # of a step
LARGE_LAUNCHES = launch_ms(LARGE_MODEL.timeline("eager", 1))
LAUNCH_US = SMALL_LAUNCHES / SMALL_MODEL.kernels[1][0] * 1e3  # of one kernel


async def host_share(stage: Stage) -> Seen:
    """Measures the host's share of a decode step."""
    await stage.write("What is a CUDA graph?", 30, 24, seconds=0.05)
    timings = stage.timings()
    gpu = "cpu" not in str(stage.source.info["device"]).lower()
    device_note = (
        "This engine runs on a GPU: a decode step replays a graph." if gpu
        else "This engine runs on a CPU: the CPU is both the host and the device. So the tracks never overlap, and "
        "there are no graphs. No kernels are launched: “launch” is here the host's work around the forward pass."
    )  # fmt: skip
    return Seen(
        f"In this run a decode step took {ms(timings.decode.p50)} ms (median). Plan, launch and commit took "
        f"{ms(timings.host_ms)} ms per step (mean). {device_note}"
    )


async def batch_sizes(stage: Stage) -> Seen:
    """Runs decode batches of 1 to LARGEST_BATCH requests, and names the graph for each batch size."""
    served = []
    for n in range(1, LARGEST_BATCH + 1):
        await stage.write("What is decode?", 40, 2, seconds=0.4, system="")
        assert stage.last_row().decodes == n
        served.append((n, next(size for size in SIZES if size >= n)))
    lines = [f"   {count(n, 'request'):<10}   graph for {size}, {size - n} of padding" for n, size in served]
    return Seen(
        "\n".join(lines)
        + "\n\nA batch uses the smallest graph that is large enough. The other places of the graph are padding: they "
        "belong to no request and point to the null block, and their results are ignored.",
        {4: 0, 5: 1, 8: 2}[served[-1][1]],
    )


async def close(stage: Stage) -> None:
    """Stops the engine while three requests decode."""
    for question in ("What is decode?", "What is prefill?", "What is a token?"):
        session = stage.chat("", max_tokens=40, whole=True)
        await stage.ask(session, question)
    await stage.step(5)


def _tenths(value: float) -> str:
    return f"{value:.1f}"


def _padding(stage: Stage) -> str:
    n = stage.last_row().decodes
    size = next(size for size in SIZES if size >= n)
    return f"{size - n}: {count(n, 'request')} and a graph for {size}"


def _prefills(stage: Stage) -> int:
    steps = stage.view.steps
    return sum(bool(steps.chunks(s)) for s in range(steps.last - stage.figures().steps + 1, steps.last + 1))


def _host(stage: Stage) -> str:
    return f"{ms(stage.timings().host_ms)} ms per step (mean)"


LESSON = Lesson(
    10,
    "CUDA graphs",
    "Why does a GPU wait for its host in a short step, and what helps?",
    (
        Page(
            "The cost of a launch",
            """
            If the device is a GPU, the host does not compute the forward pass. The host launches kernels: small
            programs, several for each layer, that run on the GPU. From Python and PyTorch, a launch takes the host 5 to
            50 microseconds; this depends on the host. Most kernels for a long prompt run much longer than a launch
            takes. A decode step of a few tokens has hundreds of launches, too, but each kernel has little work.

            A CUDA graph is a recording of such a sequence of launches, with all arguments. The engine records
            (captures) the graph once. Later, a single call replays the graph. A replay always reads and writes the same
            addresses. So the inputs of a step are copied into fixed buffers, and the KV pool never moves.
            """,
            code="engine.worker.cuda_graphs",
        ),
        Page(
            "Host and device",
            """
            The timings panel has two tracks below its table: one for the host and one for the device. Time runs to the
            right. A filled cell means work. If both tracks are filled, the host works while the device computes: for
            example, the host plans the next step. In a narrow panel, each track is replaced by a number: its mean time
            in a step.
            """,
            panel="timings",
            run=host_share,
        ),
        Page(
            "Eager, graphs, overlap",
            f"""
            Recorded decode steps of {SMALL_MODEL.name} on an {GPU.name}, one row, in three ways:

              eager    the host launches {SMALL_MODEL.kernels[1][0]:.0f} kernels, one after the other
              graphs   the host replays two graphs: of the model and of the sampler
              overlap  graphs; the host launches a step while the previous step runs

            An eager launch does not wait for earlier kernels. The device runs one kernel after the other. All kernels
            took {ms(SMALL_MODEL.kernels[1][1])} ms (by a profiler). A launch took {LAUNCH_US:.0f} microseconds (mean).
            “wait” in the panel: for the end of the step.
            """,
            panel="gpu",
            code="engine.worker.cuda_graphs:DecodeGraphs.launch",
            run=small_model,
            predict=Prediction(
                "About how long does an eager step of this model take?",
                (
                    f"{_tenths(SMALL_LAUNCHES)} ms",
                    f"{_tenths(SMALL_MODEL.kernels[1][1])} ms",
                    f"{_tenths(SMALL_LAUNCHES + SMALL_MODEL.kernels[1][1])} ms",
                ),
                (
                    "",
                    "the launches would take no time. But the host launches the kernels one after the other: multiply "
                    "the number of kernels by the time of a launch.",
                    "the host would wait for each kernel before the next launch. But the host launches the next kernel "
                    "while the device runs this kernel, so the two times overlap.",
                ),
            ),
        ),
        Page(
            "A larger model",
            f"""
            The same steps with a larger model. {LARGE_MODEL.name} has {LARGE_MODEL.weights_gb:.0f} GB of weights,
            {SMALL_MODEL.name} has {SMALL_MODEL.weights_gb:.1f} GB. A step reads nearly all weights of its model. An
            eager step of {LARGE_MODEL.name} has {LARGE_MODEL.kernels[1][0]:.0f} kernels, an eager step of
            {SMALL_MODEL.name} has {SMALL_MODEL.kernels[1][0]:.0f}. The graph made a step of {SMALL_MODEL.name}
            {gain(SMALL_MODEL):.0f} times as fast.

            If the panel is high enough, it has the steps with 64 rows below the steps with one row.
            """,
            panel="gpu",
            run=large_model,
            predict=Prediction(
                f"A graph makes a step of {LARGE_MODEL.name} faster, too. By which factor?",
                ("by a larger one", "by about the same one", "by a smaller one"),
                (
                    "the launches would have to grow more than the kernels. But all launches of a step grew from "
                    f"{ms(SMALL_LAUNCHES)} to {ms(LARGE_LAUNCHES)} ms ({LARGE_LAUNCHES / SMALL_LAUNCHES:.1f} times), "
                    f"and all kernels from {ms(SMALL_MODEL.kernels[1][1])} to {ms(LARGE_MODEL.kernels[1][1])} ms "
                    f"({LARGE_MODEL.kernels[1][1] / SMALL_MODEL.kernels[1][1]:.1f} times).",
                    "the time for launches and the time of the kernels would grow alike. But the "
                    "weights to read grew much more than the number of kernels: the text has these numbers.",
                    "",
                ),
            ),
        ),
        Page(
            "A ladder of sizes",
            """
            A graph is captured for a fixed number of requests, and a replay always computes this number. But a batch
            may have any number of requests. A graph for each number would need much time and memory. So this engine
            captures graphs for a ladder of sizes: 1, 2, 4, 8, 16, then in steps of 16 up to 128, then in steps of 32.

            Remember the cost of a step with few requests: with a large model, it is mainly the time to read all weights
            (L2 Model and weights).
            """,
            panel="step",
            code="engine.worker.cuda_graphs:ladder",
            run=batch_sizes,
            predict=Prediction(
                f"{LARGEST_BATCH} requests decode. Which graph is replayed?",
                (
                    "the graph for 4 requests, then the graph for 1", "none: this step launches kernel by kernel",
                    "the graph for 8 requests",
                ),
                (
                    "two replays would read all weights twice. A larger graph with empty places costs much less.",
                    "the host would launch hundreds of kernels. Empty places in a larger graph cost much less: the "
                    "weights are read once in any case.",
                    "",
                ),
            ),
        ),
        Page(
            "What is captured",
            """
            This engine has three kinds of graphs (speculation: four), of many sizes n:

              decode   of n requests: one token for each request
              extend   of n tokens in all: parts of a few prompts, alone or with decodes
              sample   of n requests: greedy, or with noise (also after top-k or top-p)

            Steps with many tokens have no graph: their kernels take longer than the launches. When it starts, the
            engine measures kernels and launches to find the largest useful graph. Sampling has its own graphs: its
            settings differ from step to step. Lengths and block tables change, so a graph reads them from its buffers.
            By default, vLLM has graphs for steps with prompts, too. They contain all layers but attention, and have a
            largest size.

            With graphs, a decode step of a large model with a small batch takes little longer than reading all weights,
            and the keys and values of the batch. `minitui bench` prints how close this engine comes to this limit.
            """,
            code="engine.worker.cuda_graphs:DecodeGraphs.launch",
        ),
    ),
    close,
    (
        Check(
            "On a GPU, how many places of the next decode step would be padding?",
            "step",
            "the step bar: D×n means n decoding requests. The ladder has the sizes 1, 2, 4 and 8.",
            _padding,
        ),
        Check(
            "On a GPU, which steps of these three requests could use no decode graph?",
            "lanes",
            "the batch lanes: the last column. A decode graph has one token for each request.",
            lambda stage: f"the steps with prefill: {_prefills(stage)} of {stage.figures().steps}",
        ),
        Check(
            "How long do plan, launch and commit take on the host?",
            "timings",
            "the timings: the line of the host.",
            _host,
        ),
    ),
    {"kv_blocks": 96},
)
