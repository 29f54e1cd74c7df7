"""L10: a CUDA graph replaces many kernel launches."""

from __future__ import annotations

from minitui.teaching.lessons.page import Check, Lesson, Page, Prediction, Seen
from minitui.teaching.lessons.recorded_timelines import (
    EAGER,
    LARGE,
    SMALL,
    eager_and_graphs,
    gain,
    gain_choices,
    larger_model,
    launch_ms,
    overlap,
    overlap_choices,
)
from minitui.teaching.lessons.step_costs import MODEL_READS
from minitui.teaching.recorded_steps import recorded_device
from minitui.teaching.stage import Stage
from minitui.text import count, ms

LARGEST_BATCH = 5  # requests
CLOSING_STEPS = 24  # enough: one slow step changes their mean little
SIZES = (1, 2, 4, 8)  # the smallest graphs
GPU = recorded_device()
SMALL_MODEL, LARGE_MODEL = GPU.models[SMALL], GPU.models[LARGE]
SMALL_LAUNCHES = launch_ms(SMALL_MODEL.timeline(EAGER, 1))  # of a step
LAUNCH_US = SMALL_LAUNCHES / SMALL_MODEL.kernels[1][0] * 1e3  # of one kernel
LARGE_LAUNCH_US = launch_ms(LARGE_MODEL.timeline(EAGER, 1)) / LARGE_MODEL.kernels[1][0] * 1e3
GAINS = gain_choices(SMALL_MODEL, LARGE_MODEL)
OVERLAP_MS = overlap_choices(SMALL_MODEL)


async def host_share(stage: Stage) -> Seen:
    """Measures the host's share of a decode step."""
    await stage.write("What is a CUDA graph?", 30, 24, seconds=0.05)
    timings = stage.timings()
    device_note = (
        "This engine runs on a GPU: a decode step replays a graph." if _on_gpu(stage)
        else "This engine runs on a CPU, which is both the host and the device. The engine does their work in turn. "
        "There are no graphs and no launches of kernels: “launch” is here the host's work around the forward pass."
    )
    return Seen(
        f"In this run a decode step took {ms(timings.decode.p50)} ms (median). Plan, launch and commit took "
        f"{ms(timings.host_ms)} ms per step (mean). {device_note}"
    )


def _on_gpu(stage: Stage) -> bool:
    return "cpu" not in str(stage.source.info.device).lower()


async def batch_sizes(stage: Stage) -> Seen:
    """Runs decode batches of 1 to LARGEST_BATCH requests, and names the graph for each batch size."""
    gpu, served = _on_gpu(stage), []
    for n in range(1, LARGEST_BATCH + 1):
        await stage.write("What is decode?", 40, 2, seconds=0.4, system="")
        assert stage.last_row().decodes == n
        served.append((n, next(size for size in SIZES if size >= n)))
    lines = [f"   {count(n, 'request'):<10}   graph for {size}, {size - n} of padding" for n, size in served]
    return Seen(
        f"{'These steps replayed' if gpu else 'On a GPU, these steps would replay'}:\n\n" + "\n".join(lines)
        + "\n\nA batch uses the smallest graph that is large enough. The other places of the graph are padding: they "
        "belong to no request and have length 0, and their results are ignored.",
        {4: 0, 5: 1, 8: 2}[served[-1][1]],
    )


async def close(stage: Stage) -> None:
    """Stops the engine while three requests decode."""
    for question in ("What is decode?", "What is prefill?", "What is a token?"):
        session = stage.chat("", max_tokens=40, whole=True)
        await stage.ask(session, question)
    await stage.step(CLOSING_STEPS)


def _tenths(value: float) -> str:
    return f"{value:.1f}"


def _padding(stage: Stage) -> str:
    n = stage.last_row().decodes
    size = next(size for size in SIZES if size >= n)
    return f"{size - n}: {count(n, 'request')} and a graph for {size}"


def _prefills(stage: Stage) -> int:
    steps = stage.view.history.steps
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
            programs, several for each layer, that run on the GPU. A launch and its Python code take the host some
            microseconds, or some tens of microseconds: this depends on the host and on the code. Many kernels for a
            long prompt run much longer than a launch takes. A decode step of a few tokens has nearly as many launches,
            but each kernel has little work.

            A CUDA graph is a recording of such a sequence of launches, with all arguments. The engine records
            (captures) the graph once. Later, a single call replays the graph. Here, a replay has the same arguments,
            addresses too. So the inputs of a step are copied into fixed buffers, and the KV pool never moves.
            """,
            code="engine.worker.graphs.cuda_graphs",
        ),
        Page(
            "Host and device",
            """
            The timings panel has two mean times per step: how long the host works, and how long the device works.

            The pictures of the next pages have two tracks, one for the host and one for the device. Time runs to the
            right, and a filled cell means work. If both tracks are filled, the host works while the device computes:
            for example, the host plans the next step.
            """,
            panel="timings",
            run=host_share,
        ),
        Page(
            "Eager and graphs",
            f"""
            Decode steps of {SMALL_MODEL.name} with one row, recorded on a GPU ({GPU.name}):

              eager    the host launches {SMALL_MODEL.kernels[1][0]:.0f} kernels, one after the other
              graphs   the host replays these kernels as two graphs (model, sampler)

            The host does not wait for the end of a kernel before the next launch. The device runs the kernels in this
            order. By a profiler, all kernels of a step together ran for {_tenths(SMALL_MODEL.kernels[1][1])} ms. An
            eager launch, with its Python code, took this host {LAUNCH_US:.1f} microseconds (mean). A launch of a simple
            PyTorch kernel took {GPU.launch_us:.0f}.

            In the picture, “wait” means that the host waits for the end of the step.
            """,
            panel="gpu",
            run=eager_and_graphs,
            predict=Prediction(
                "About how long does an eager step of this model take?",
                (
                    f"{_tenths(SMALL_LAUNCHES)} ms",
                    f"{_tenths(SMALL_MODEL.kernels[1][1])} ms",
                    f"{_tenths(SMALL_LAUNCHES + SMALL_MODEL.kernels[1][1])} ms",
                ),
                (
                    "",
                    f"the launches would take no time. But {SMALL_MODEL.kernels[1][0]:.0f} launches take "
                    f"{SMALL_MODEL.kernels[1][0]:.0f} × {LAUNCH_US:.1f} microseconds.",
                    "the host would wait for each kernel before the next launch. But it launches the next kernel while "
                    "this one runs.",
                ),
            ),
        ),
        Page(
            "A larger model",
            f"""
            On the same host, {SMALL_MODEL.name} and {LARGE_MODEL.name} decode one row. Their eager steps:

                                      {SMALL_MODEL.name:>10} {LARGE_MODEL.name:>9}
              weights read, GB        {SMALL_MODEL.weights_gb:>10.1f} {MODEL_READS / 1e9:>9.1f}
              kernels                 {SMALL_MODEL.kernels[1][0]:>10.0f} {LARGE_MODEL.kernels[1][0]:>9.0f}
              time of all kernels, ms {_tenths(SMALL_MODEL.kernels[1][1]):>10} {_tenths(LARGE_MODEL.kernels[1][1]):>9}
              microseconds a launch   {LAUNCH_US:>10.1f} {LARGE_LAUNCH_US:>9.1f}

            With graphs, a step of {SMALL_MODEL.name} was {_tenths(gain(SMALL_MODEL))} times as fast. With faster
            launches, this factor would be smaller. The picture shows steps of {LARGE_MODEL.name}.
            """,
            panel="gpu",
            run=larger_model,
            predict=Prediction(
                f"With graphs, how many times as fast is a step of {LARGE_MODEL.name}?",
                tuple(f"about {_tenths(choice)} times" for choice in GAINS),
                (
                    "a graph would save more time because it saves more launches. But the kernels of the large model "
                    "must still run, and they take longer.",
                    "launches and kernels would take longer by the same factor. But there are only "
                    f"{LARGE_MODEL.kernels[1][0] / SMALL_MODEL.kernels[1][0]:.1f} times as many launches, and the "
                    f"kernels together take {LARGE_MODEL.kernels[1][1] / SMALL_MODEL.kernels[1][1]:.1f} times as long.",
                    "",
                ),
            ),
        ),
        Page(
            "Overlap",
            f"""
            Without overlap, the device has no work while the host commits a step and plans the next one. With overlap,
            the host plans and launches the next step while the device computes this one. For this, the host usually
            needs the number of new tokens, not their ids (L1 Architecture). The next step reads the ids from the memory
            of the device.

            The recording has steps of {SMALL_MODEL.name} with graphs and one row. Without overlap, a step took
            {ms(OVERLAP_MS[2])} ms.
            """,
            panel="gpu",
            code="engine.core.engine:Engine.step",
            run=overlap,
            predict=Prediction(
                "About how long does a step take with overlap?",
                tuple(f"{_tenths(choice)} ms" for choice in OVERLAP_MS),
                (
                    "the device would compute two steps at the same time. But a step needs the tokens of the step "
                    "before.",
                    "",
                    "the host would need the new tokens before it can launch the next step. But it usually needs "
                    "only their number.",
                ),
            ),
        ),
        Page(
            "A ladder of sizes",
            """
            A graph is captured for a fixed number of requests. But a batch may have any number of requests. A graph for
            each number would need much time and memory. So this engine captures graphs for a ladder of sizes: 1, 2, 4,
            8, then multiples of 16 up to 128, then multiples of 32.
            """,
            panel="step",
            code="engine.worker.graphs.cuda_graphs:ladder",
            run=batch_sizes,
            predict=Prediction(
                f"{LARGEST_BATCH} requests decode. Which graph is replayed?",
                (
                    "the graph for 4 requests, then the graph for 1", "none: this step is launched kernel by kernel",
                    "the graph for 8 requests",
                ),
                (
                    "two replays would read the weights twice. A larger graph with empty places costs much less.",
                    "the host would launch hundreds of kernels. Empty places in a larger graph cost much less: the "
                    "weights are read once in any case (L2 Model and weights).",
                    "",
                ),
            ),
        ),
        Page(
            "What is captured",
            """
            This engine has three kinds of graphs (with speculation, four). Each kind has graphs of many sizes n:

              decode   computes one token for each of n requests
              extend   computes n tokens: of prompts, and of decodes in the same step
              sample   chooses the next tokens of n requests, greedily or with noise

            Steps with many tokens have no graph: their kernels take longer than the launches. At its start, the engine
            measures kernels and launches to find the largest useful graph. Lengths and block tables change, so a graph
            reads them from its buffers.

            vLLM captures layers, not logits or sampling. It captures all layers of a decode step, if its attention
            kernels allow this. In small steps with prompts, it does not capture attention.
            """,
            code="engine.worker.graphs.cuda_graphs:DecodeGraphs.launch",
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
            "the batch lanes: each column is a step. A decode graph has one token for each request.",
            lambda stage: f"the steps with prefill: {_prefills(stage)} of {stage.figures().steps}",
        ),
        Check(
            "How long do plan, launch and commit take on the host?",
            "timings",
            "the timings: the host's mean time per step.",
            _host,
        ),
    ),
    {"kv_blocks": 96},
)
