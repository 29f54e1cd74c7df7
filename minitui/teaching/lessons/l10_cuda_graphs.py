"""L10: a CUDA graph replaces many kernel launches."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from minitui.teaching.lessons import step_costs
from minitui.teaching.lessons.page import Seen
from minitui.teaching.lessons.written import read_lesson
from minitui.teaching.recorded_steps import RecordedModel, RecordedTimeline, recorded_device
from minitui.teaching.stage import Stage
from minitui.text import count, ms
from minitui.viewmodel.board import RecordedRun, RecordedRuns

EAGER, GRAPHS, OVERLAP = "eager", "graphs", "overlap"
MANY = 64  # rows of the second group of the picture of overlap
EAGER_SHOWN, GRAPHS_SHOWN = 2.2, 4.2  # steps of a picture's first mode
FRAMES = 24  # in which the picture grows
SMALL, LARGE = "0.6B", "8B"
NAME = 22  # cells of the first column of a table

Group = tuple[str, float, tuple[RecordedRun, ...]]  # see RecordedRuns


async def eager_and_graphs(stage: Stage) -> Seen:
    """Draws steps of the small model. The answer: how long the eager step takes, 0 as its launches, 1 as its kernels, 2
    as both together."""
    model = recorded_device().models[SMALL]
    await _play(stage, model.name, [_group(model, 1, (EAGER, GRAPHS), EAGER_SHOWN)])
    eager, graphs, (kernels, busy) = model.timeline(EAGER, 1), model.timeline(GRAPHS, 1), model.kernels[1]
    device = device_ms(graphs)
    launches = launch_ms(eager)
    expected = (launches, busy, launches + busy)
    return Seen(
        _table(
            (EAGER, GRAPHS),
            ("a step", [eager.step_ms, graphs.step_ms]), ("launches of a step", [launches, launch_ms(graphs)]),
        )
        + f"\n\nThe picture shows: the launches of the {kernels:.0f} kernels take nearly the whole eager step, and the "
        "device has pauses between the kernels. The graphs have the same kernels, but the host launches them with two "
        f"calls. Then the host mostly waits for the device, which works at most {ms(device)} ms in a step.",
        min(range(3), key=lambda i: abs(expected[i] - eager.step_ms)),
    )


async def larger_model(stage: Stage) -> Seen:
    """Draws steps of the large model, then of the small one. The answer: which of `gain_choices` is nearest."""
    models = [recorded_device().models[size] for size in (LARGE, SMALL)]
    large = models[0]
    groups = [_group(model, 1, (EAGER, GRAPHS), EAGER_SHOWN, model.name) for model in models]
    await _play(stage, "1 row", groups)
    rows = []
    for model in models:
        eager, graphs = (model.timeline(mode, 1).step_ms for mode in (EAGER, GRAPHS))
        rows.append(f"   {model.name:<12}{ms(eager):>7}{ms(graphs):>8}{gain(model):>16.2f}")
    choices = gain_choices(models[1], large)
    return Seen(
        f"   {'ms of a step':<12}{EAGER:>7}{GRAPHS:>8}{'eager / graphs':>16}\n" + "\n".join(rows)
        + f"\n\nWithout graphs, the {large.kernels[1][0]:.0f} launches take nearly the whole step of {large.name}. "
        "With graphs, its kernels take nearly the whole step, because they must still read all weights: the device "
        f"works at most {ms(device_ms(large.timeline(GRAPHS, 1)))} ms in a step. The small model has fewer weights to "
        "read, so a graph saves a larger share of its step.",
        min(range(len(choices)), key=lambda i: abs(choices[i] - gain(large))),
    )


async def overlap(stage: Stage) -> Seen:
    """Draws steps with graphs, without and with overlap. The answer: which of `overlap_choices` is nearest."""
    small, large = (recorded_device().models[size] for size in (SMALL, LARGE))
    modes = (GRAPHS, OVERLAP)
    await _play(stage, small.name, [_group(small, rows, modes, GRAPHS_SHOWN) for rows in (1, MANY)])
    one = [small.timeline(mode, 1) for mode in modes]
    choices = overlap_choices(small)
    return Seen(
        _table(
            modes,
            (f"{small.name}, {count(1, 'row')}", [line.step_ms for line in one]),
            ("  device, at most", [device_ms(line) for line in one]),
            (f"{small.name}, {count(MANY, 'row')}", [small.timeline(mode, MANY).step_ms for mode in modes]),
            (f"{large.name}, {count(1, 'row')}", [large.timeline(mode, 1).step_ms for mode in modes]),
        )
        + "\n\nThe picture shows: without overlap, the device waits for the host after each step. With overlap, the "
        "next step is launched before the device needs it. Here, the host needs less time than the device: so a "
        "step takes only as long as the device works. The steps in L2 Model and weights are with overlap.",
        min(range(len(choices)), key=lambda i: abs(choices[i] - one[1].step_ms)),
    )


def overlap_choices(model: RecordedModel) -> tuple[float, float, float]:
    """Returns times, in ms, that a step with overlap could take: half a step with graphs, the device's part of it, and
    all of it."""
    graphs = model.timeline(GRAPHS, 1)
    return graphs.step_ms / 2, device_ms(graphs), graphs.step_ms


def gain(model: RecordedModel) -> float:
    """Returns how many times as long an eager step takes as one with graphs."""
    return model.timeline(EAGER, 1).step_ms / model.timeline(GRAPHS, 1).step_ms


def gain_choices(small: RecordedModel, large: RecordedModel) -> tuple[float, float, float]:
    """Returns factors that a graph could gain with the large model: as many times the small model's as there are more
    launches, the same, and the launches of an eager step divided by its kernels."""
    gained = gain(small)
    return (
        gained * large.kernels[1][0] / small.kernels[1][0], gained,
        launch_ms(large.timeline(EAGER, 1)) / large.kernels[1][1],
    )


def launch_ms(timeline: RecordedTimeline) -> float:
    """Returns the mean time of the launches of a step, of the same steps as `step_ms`: the first only begins."""
    rows = [timeline.steps.get(step) for step in timeline.steps_kept[1:]]
    return mean(row.launch_ms for row in rows if row is not None and row.launch_ms is not None)


def device_ms(timeline: RecordedTimeline) -> float:
    """Returns the mean time of the device in a step, of the same steps as `step_ms`. If the device was idle before, it
    contains the time from the begin of the launch to the first kernel."""
    rows = [timeline.steps.get(step) for step in timeline.steps_kept[1:]]
    return mean(row.device_ms for row in rows if row is not None and row.device_ms is not None)


async def _play(stage: Stage, title: str, groups: Sequence[Group]) -> None:
    """Lets the picture grow from left to right."""
    for frame in range(1, FRAMES + 1):
        stage.view.put(RecordedRuns(f"{title} on an {recorded_device().name}", tuple(groups), frame / FRAMES))
        await stage.pause(0.15)


def _group(model: RecordedModel, rows: int, modes: Sequence[str], steps: float, name: str = "") -> Group:
    """Returns the tracks of some modes; there is room for `steps` steps of the first. `name`: default: the rows."""
    timelines = [model.timeline(mode, rows) for mode in modes]
    span = min(steps * timelines[0].step_ms, *(one.step_ms * (len(one.steps_kept) - 1) for one in timelines))
    runs = []
    for timeline in timelines:
        eager = timeline.mode == EAGER
        device = f"kernels {model.kernels[rows][1]:.1f} by profiler" if eager else f"device {ms(device_ms(timeline))}"
        line = f"{ms(timeline.step_ms)} ms a step, {device}"  # as wide as the narrowest panel
        runs.append(RecordedRun(timeline.mode, timeline.steps, line, eager, _typical(timeline, span)))
    return name or count(rows, "row"), span, tuple(runs)


def _typical(timeline: RecordedTimeline, span: float) -> int:
    """Returns the step whose end begins a picture of `span` ms with the most typical steps: the host's speed varies."""
    ends = {step: row.ended * 1e3 for step in timeline.steps_kept if (row := timeline.steps.get(step)) and row.ended}
    distance: dict[int, float] = {}
    for step, begin in ends.items():
        last = next((one for one in ends if ends[one] >= begin + span), None)
        if last is not None:
            distance[step] = abs((ends[last] - begin) / (last - step) - timeline.step_ms)
    return min(distance, key=distance.__getitem__, default=timeline.steps.first)


def _table(modes: Sequence[str], *rows: tuple[str, Sequence[float]]) -> str:
    """Returns a line for each row: its name, and a mean time for each mode."""
    lines = [f"   {'ms (mean)':<{NAME}}" + "".join(f"{mode:>9}" for mode in modes)]
    lines += [f"   {name:<{NAME}}" + "".join(f"{ms(value):>9}" for value in values) for name, values in rows]
    return "\n".join(lines)


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
    return sum(bool(row.chunks) for row in stage.rows())


def _host(stage: Stage) -> str:
    return f"{ms(stage.timings().host_ms)} ms per step (mean)"


LESSON = read_lesson(globals(), step_costs, kv_blocks=96)
