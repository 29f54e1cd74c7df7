"""L10: a CUDA graph replaces many kernel launches."""

from __future__ import annotations

from minitui.teaching.lessons import recorded_timelines, step_costs
from minitui.teaching.lessons.page import Seen
from minitui.teaching.lessons.recorded_timelines import (
    EAGER,
    LARGE,
    SMALL,
    gain_choices,
    launch_ms,
    overlap_choices,
)
from minitui.teaching.lessons.written import read_lesson
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


def _padding(stage: Stage) -> str:
    n = stage.last_row().decodes
    size = next(size for size in SIZES if size >= n)
    return f"{size - n}: {count(n, 'request')} and a graph for {size}"


def _prefills(stage: Stage) -> int:
    steps = stage.view.history.steps
    return sum(bool(steps.chunks(s)) for s in range(steps.last - stage.figures().steps + 1, steps.last + 1))


def _host(stage: Stage) -> str:
    return f"{ms(stage.timings().host_ms)} ms per step (mean)"


LESSON = read_lesson(globals(), recorded_timelines, step_costs, kv_blocks=96)
