"""Experiments: the decode steps of a GPU, run eager, with graphs and with overlap, drawn from the recording."""

from __future__ import annotations

from minitui.teaching.lessons.page import Seen
from minitui.teaching.recorded_steps import RecordedModel, RecordedTimeline, recorded_device
from minitui.teaching.stage import Stage
from minitui.text import count, ms
from minitui.viewmodel.board import RecordedRun, RecordedRuns

MODES = ("eager", "graphs", "overlap")
ROWS = (1, 64)
SHOWN = 2.2  # eager steps in the picture
FRAMES = 24  # in which the picture grows
SMALL, LARGE = "0.6B", "8B"


async def small_model(stage: Stage) -> Seen:
    """Draws the steps of the small model. The answer: how long the eager step takes, 0 as its launches, 1 as its
    kernels, 2 as both together."""
    model = await _play(stage, SMALL)
    eager, graphs, (kernels, busy) = model.timeline("eager", 1), model.timeline("graphs", 1), model.kernels[1]
    launches = launch_ms(eager)
    expected = (launches, busy, launches + busy)
    return Seen(
        f"{_steps(model)}\n   launches of an eager step: {ms(launches)}; of a graph: {ms(launch_ms(graphs))}\n\n"
        f"The launches of the {kernels:.0f} kernels take nearly the whole eager step. Most of this time, the device "
        f"waits. A step with a graph takes even less than the {ms(busy)} ms of the eager kernels: probably because the "
        "profiler slows kernels, and because graphs have fewer, larger kernels. (The host's speed varied: a step of "
        "the picture can be longer than the mean, and an eager step with more rows can be shorter.)",
        min(range(3), key=lambda i: abs(expected[i] - eager.step_ms)),
    )


async def large_model(stage: Stage) -> Seen:
    """Draws the steps of the large model. The answer: is the gain of a graph larger (0) than that of the small model,
    about the same (1), or smaller (2)?"""
    model = await _play(stage, LARGE)
    eager, graphs = (model.timeline(mode, 1).step_ms for mode in MODES[:2])
    small = recorded_device().models[SMALL]
    factors = gain(model) / gain(small)
    launches = [launch_ms(one.timeline("eager", 1)) / one.kernels[1][0] * 1e3 for one in (small, model)]
    return Seen(
        f"{_steps(model)}\n   eager / graphs, 1 row: {ms(eager)} / {ms(graphs)} = {gain(model):.1f}\n"
        f"   microseconds of a launch: {launches[1]:.0f}; with {small.name}: {launches[0]:.0f}\n\nA launch "
        "takes about as long with both models, but a kernel takes longer with the large one. The graph removes the "
        "pauses between kernels; reading the weights takes as long as before. Without overlap, the device waits for "
        "the host after each step: for the commit, and for the next plan. With overlap, the host does this work while "
        "the device computes. (The host's speed varied in this recording, too.)",
        0 if factors > 1.25 else 2 if factors < 0.8 else 1,
    )


def gain(model: RecordedModel) -> float:
    """Returns how many times as long an eager step takes as one with graphs."""
    return model.timeline("eager", 1).step_ms / model.timeline("graphs", 1).step_ms


def launch_ms(timeline: RecordedTimeline) -> float:
    """Returns the mean time of the launches of a step, of the same steps as `step_ms`: the first only begins."""
    rows = [timeline.steps.get(step) for step in timeline.steps_kept[1:]]
    known = [row.launch_ms for row in rows if row is not None and row.launch_ms is not None]
    return sum(known) / len(known)


async def _play(stage: Stage, size: str) -> RecordedModel:
    """Lets the picture grow from left to right; returns the model."""
    device = recorded_device()
    model = device.models[size]
    groups = tuple((count(rows, "row"), *_group(model, rows)) for rows in ROWS)
    for frame in range(1, FRAMES + 1):
        stage.view.put(RecordedRuns(f"{model.name} on an {device.name}", groups, frame / FRAMES))
        await stage.pause(0.15)
    return model


def _group(model: RecordedModel, rows: int) -> tuple[float, tuple[RecordedRun, ...]]:
    timelines = [model.timeline(mode, rows) for mode in MODES]
    span = min(SHOWN * timelines[0].step_ms, *(one.step_ms * (len(one.steps_kept) - 1) for one in timelines))
    runs = []
    for timeline in timelines:
        line = f"{ms(timeline.step_ms)} ms a step"  # as wide as the narrowest panel
        if timeline.mode == "eager":
            line += f", kernels {ms(model.kernels[rows][1])} by profiler"
        runs.append(RecordedRun(timeline.mode, timeline.steps, line, timeline.mode == "eager"))
    return span, tuple(runs)


def _steps(model: RecordedModel) -> str:
    """Returns a line for each number of rows: the mean time of a step in each mode."""
    lines = [
        f"   {count(rows, 'row'):<8}" + ", ".join(f"{mode} {ms(model.timeline(mode, rows).step_ms)}" for mode in MODES)
        for rows in ROWS
    ]
    return "Milliseconds of a step (mean):\n" + "\n".join(lines)
