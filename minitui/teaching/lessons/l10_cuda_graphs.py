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
LAUNCH_US = SMALL_LAUNCHES / SMALL_MODEL.kernels[1][0] * 1e3  # of one kernel


async def host_share(stage: Stage) -> Seen:
    """Measures the host's share of a decode step."""
    await stage.write("What is a CUDA graph?", 30, 24, seconds=0.05)
    timings = stage.timings()
    gpu = "cpu" not in str(stage.source.info["device"]).lower()
    device_note = (
        "This engine runs on a GPU: a decode step replays a graph." if gpu
        else "This engine runs on a CPU: the host itself computes. So the tracks never overlap, and there are no "
        "launches and no graphs."
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
        + "\n\nA batch uses the smallest graph that is large enough. Its other places are padding: they belong to no "
        "request and point to the null block, and their results are ignored.",
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
            On a GPU the host does not compute. It launches kernels: small programs, several for each layer. A launch
            costs the host some microseconds; through Python and PyTorch, 5 to 50, depending on the host. The kernels of
            a large prompt keep the GPU busy for much longer. A decode step of a few tokens has hundreds of launches
            too, but each kernel has little work.

            A CUDA graph is a recording of such a sequence of launches. It is captured once, with all arguments, and
            then replayed with a single call. A replay always reads and writes the same addresses. So the inputs of a
            step are copied into fixed buffers, and the KV pool never moves.
            """,
            code="engine.worker.cuda_graphs",
        ),
        Page(
            "Host and device",
            """
            The timings panel has two tracks, below its table: one of the host and one of the device. Time runs to the
            right. Where both tracks are filled, the host plans the next step while the device computes the current
            step.
            """,
            panel="timings",
            run=host_share,
        ),
        Page(
            "Eager, graphs, overlap",
            f"""
            Recorded decode steps of {SMALL_MODEL.name} on an {GPU.name}, one row, in three ways:

              eager    the host launches {SMALL_MODEL.kernels[1][0]:.0f} kernels, one after the other
              graphs   the host replays one graph
              overlap  graphs; the host launches a step while the previous step runs

            The host does not wait. A kernel starts when it is launched and the kernel before it has ended. On this
            host, a launch took {LAUNCH_US:.0f} microseconds. A profiler, which can prolong kernels, measured
            {ms(SMALL_MODEL.kernels[1][1])} ms for all of them.
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
                    "all kernels would have to be launched at once. But the host launches one after the other: "
                    "multiply the number of kernels by the time of a launch.",
                    "the host would wait for each kernel. But while the device runs a kernel, the host launches the "
                    "next one: the two times overlap.",
                ),
            ),
        ),
        Page(
            "A larger model",
            f"""
            The same steps, with a larger model. {LARGE_MODEL.name} has {LARGE_MODEL.weights_gb:.0f} GB of weights,
            {SMALL_MODEL.name} has {SMALL_MODEL.weights_gb:.1f} GB. A step reads nearly all of them. An eager step of
            {LARGE_MODEL.name} has {LARGE_MODEL.kernels[1][0]:.0f} kernels; an eager step of {SMALL_MODEL.name} has
            {SMALL_MODEL.kernels[1][0]:.0f}. The graph made a step of {SMALL_MODEL.name} {gain(SMALL_MODEL):.0f} times
            as fast.

            In a tall window, the same steps with 64 rows are below.
            """,
            panel="gpu",
            run=large_model,
            predict=Prediction(
                f"A graph makes a step of {LARGE_MODEL.name} faster, too. By which factor?",
                ("by a larger one", "by about the same one", "by a smaller one"),
                (
                    "the launches would have to grow more than the kernels. There are more of them, but each kernel "
                    "also reads more weights, and a graph does not make reading faster.",
                    "kernels and launches would have to grow alike. Compare how much more there is to read, and how "
                    "many more kernels there are.",
                    "",
                ),
            ),
        ),
        Page(
            "A ladder of sizes",
            """
            A graph is captured for a fixed number of requests, and always computes this number. But a batch may have
            any number. Capturing a graph for each number would need much time and memory. So there is a ladder of
            sizes: 1, 2, 4, 8, 16, then in steps of 16 up to 128, and then in steps of 32.
            """,
            panel="step",
            code="engine.worker.cuda_graphs:ladder",
            run=batch_sizes,
            predict=Prediction(
                f"{LARGEST_BATCH} requests decode. Which graph is replayed?",
                ("the graph for 4 requests, twice", f"a graph for exactly {LARGEST_BATCH}", "the graph for 8 requests"),
                (
                    "all weights would be read twice. Three places of padding cost much less.",
                    "there would have to be a graph for every batch size up to the largest: more memory, and "
                    "a longer start.",
                    "",
                ),
            ),
        ),
        Page(
            "What is captured",
            """
            There are three kinds of graphs (speculation adds a fourth). The word in brackets is the unit of the sizes:

              decode (requests)  one token for each request
              extend (tokens)    chunks of a few prompts, also beside decodes
              sample (requests)  greedy, with noise, or with noise and top-k or top-p

            Longer steps have no graph. At the start, the engine measures from how many tokens on the kernels should
            take longer than the launches. (vLLM captures short prompts in pieces, from attention to attention.)
            Sampling has graphs of its own because its settings differ from step to step. Lengths and block numbers are
            data in the buffers.

            For large models and small batches, the limit that remains is the speed of the memory: a decode step must
            read the weights, and the keys and values of the batch, once. `minitui bench` prints how close this engine
            gets.
            """,
            code="engine.worker.cuda_graphs:DecodeGraphs.launch",
        ),
    ),
    close,
    (
        Check(
            "How many places would be padding in the next decode step on a GPU?",
            "step",
            "the step bar: D×n means n decoding requests. The ladder has the sizes 1, 2, 4 and 8.",
            _padding,
        ),
        Check(
            "Which steps of these three requests could not use a decode graph on a GPU?",
            "lanes",
            "the batch lanes: columns with prefill.",
            lambda stage: f"the steps with prefill: {_prefills(stage)} of {stage.figures().steps}",
        ),
        Check(
            "How long do plan, launch and commit take on the host?",
            "timings",
            "the timings: the host's track.",
            _host,
        ),
    ),
    {"kv_blocks": 96},
)
