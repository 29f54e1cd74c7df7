"""Causes of slow steps: known stalls are put into simulated runs, and the explanation must name them and no others."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest

from minitui.dev.simulator import Stress
from minitui.text import ms
from minitui.trace.bundled import bundled, find_trace
from minitui.trace.reader import TraceReader
from minitui.viewmodel.compare.runs import recorded_view
from minitui.viewmodel.explain.causes import Explanation, explain
from minitui.viewmodel.explain.cost_model import fit
from minitui.viewmodel.explain.cost_models import REFIT_SOON, CostModels
from minitui.viewmodel.explain.timing import rows_of, step_times, usual_words, why_briefly, why_slow
from minitui.viewmodel.history.spans import parts_of
from minitui.viewmodel.history.steps import PARTS, Steps
from minitui.viewmodel.view import View
from minitui.viewmodel.words.story import tell
from tests.support.records.views import LONG, empty_view

NAMES = {  # the kind of a stall -> the cause
    "gc": "garbage collection", "program": "another program on the core", "stop": "process stopped", "plan": "plan",
    "launch": "launch", "emit": "output and commands", "commit": "commit of previous step {}", "device": "device",
}
BASE, ROW, TOKEN, KEY = 3.0, 0.05, 0.1, 0.0004  # ms of the simulated device


def run(seed: int, steps: int = 3_000, busy: float = 0.0) -> tuple[Steps, dict[int, float]]:
    """Returns the history of a random load without overlap, and by step, the ms that other programs took: `busy` is the
    share of the device's time that they take, as on a CPU whose cores are shared."""
    rng, history, t = random.Random(seed), Steps(), 0.0
    contexts: dict[int, int] = {}
    prompt: tuple[int, int] | None = None
    delays: dict[int, float] = {}
    for step in range(steps):
        left = [request for request in contexts if rng.random() < 0.01]
        for request in left:
            del contexts[request]
        joined = [] if prompt is None else [prompt[0]]
        if prompt is not None:
            contexts[prompt[0]] = prompt[1]
        new = rng.random() < 0.05 or not contexts
        prompt = (step + 1, rng.choice((30, 128, 500))) if new else None
        prefills = [(prompt[0], 0, prompt[1], True)] if prompt is not None else []
        rows, tokens = len(contexts), prompt[1] if prompt is not None else 0
        device = (BASE + ROW * rows + TOKEN * tokens + KEY * sum(contexts.values())) * rng.gauss(1, 0.03)
        for request in contexts:
            contexts[request] += 1
        parts = {"commit": 0.05 + 0.002 * rows, "emit": 0.1 + 0.003 * rows, "gate": 0.0, "plan": 0.06, "launch": 0.15}
        if busy and rng.random() < 0.7:
            delays[step] = device * busy * rng.expovariate(1.0)
            device += delays[step]
        parts = {name: ms * rng.uniform(0.9, 1.1) for name, ms in parts.items()} | {"wait": device}
        us = [round(parts[name] * 1e3) for name in PARTS]
        history.read((step, t, "step", step, prefills, joined, left, rows + tokens, 0))
        record: Any = (step, t, "parts", step, *us, 0.0, delays.get(step, 0.0) * 1e3, 0)
        history.read(record)
        wall = sum(parts.values())
        t += wall / 1e3
        history.read((step, t, "time", step, us[3], us[4], us[0], wall, device, "decode"))
    return history, delays


@dataclass
class Gpu:
    """How long a GPU and its host need, in ms: decodes as CUDA graphs, steps with prefill kernel by kernel."""

    graph: float  # launch of a decode step
    eager: tuple[float, float]  # range of the launch of a step with prefill
    decode: float  # the device's time of a decode step
    token: float  # the device's time of a prompt token

    def run(self, seed: int, steps: int = 1_800) -> tuple[Steps, dict[int, tuple[str, float]]]:
        """Returns the history of an engine with overlap, and its stalls: by step, the kind and the milliseconds. The
        prompts of a chat are short. A prompt of 500 tokens is a stall of the kind "prompt" of the step in whose time
        the host launches the prompt, or if the device needs longer, of the step that computes the prompt."""
        rng, history, stalls = random.Random(seed), Steps(), {}
        rows, request, joined = 4, 9, list(range(4))
        host = device_ends = 0.0  # ms
        computed = dict.fromkeys(("plan", "launch", "commit"), 0.0)  # of the step in flight
        flight: tuple[int, int, dict[str, float], float, float] | None = None
        before = 0.0  # time of the last commit
        for step in range(steps):
            parts = {"commit": before, "emit": 0.05 * rng.uniform(0.9, 1.3), "gate": 0.0, "wait": 0.0}
            pauses = {"gc": 0.0, "program": 0.0, "stop": 0}
            begun, late = host, dict.fromkeys(("commit", "emit", "plan", "launch", "device"), 0.0)
            long = step > 200 and step % 60 == 0
            if step > 200 and step % 60 == 30 and flight is not None:
                kind, ms = rng.choice(list(NAMES)), rng.uniform(40.0, 90.0)
                stalls[step - 1] = kind, ms
                where = kind if kind in late else rng.choice(("plan", "launch", "emit"))
                late[where] = ms
                if kind in pauses:
                    pauses[kind] = 1 if kind == "stop" else ms
            parts["commit"] += late["commit"]
            device_ends += late["device"]
            tokens = 500 if long else rng.choice((8, 24, 48)) if rng.random() < 0.02 and not late["launch"] else 0
            prefills = [(request, 0, tokens, True)] if tokens else []
            plan = (0.04 + 0.002 * tokens) * rng.uniform(0.9, 1.1) + late["plan"]
            launch = (rng.uniform(*self.eager) if tokens else self.graph * rng.uniform(0.9, 1.1)) + late["launch"]
            host += parts["commit"] + parts["emit"] + late["emit"] + plan
            parts["emit"] += late["emit"]
            history.read((step, host / 1e3, "step", step, prefills, joined, [], rows + tokens, 0))
            joined, request = [], request + bool(tokens)
            starts = max(device_ends, host + (0.0 if tokens else launch))
            host += launch
            work = (self.decode + self.token * tokens) * rng.uniform(0.98, 1.02)
            ends = max(starts + work, host) if tokens else starts + work
            device_ends, device = ends, ends - starts
            if flight is not None:
                number, _, own, ended, took = flight
                ended, took = ended + late["device"], took + late["device"]
                parts |= {"plan": plan, "launch": launch, "wait": max(0.02, ended - host)}
                host += parts["wait"]
                wall = host - begun
                before = 0.03 * rng.uniform(0.9, 1.1)
                us = [round(parts[name] * 1e3) for name in PARTS]
                record: Any = (0, host / 1e3, "parts", number, *us, pauses["gc"] * 1e3, pauses["program"] * 1e3)
                history.read((*record, pauses["stop"]))
                t = (host + before) / 1e3
                mine = [round(own[name] * 1e3) for name in ("plan", "launch")]
                history.read((1, t, "time", number, *mine, round(before * 1e3), wall, took, ""))
                if long:
                    stalls[number] = "prompt", launch
            flight = step, tokens, computed | {"plan": plan, "launch": launch}, ends, device
        return history, stalls


SMALL_GPU = Gpu(graph=0.25, eager=(4.0, 7.0), decode=0.15, token=0.004)
HOST_BOUND = Gpu(graph=0.4, eager=(17.0, 30.0), decode=4.0, token=0.006)
DEVICE_BOUND = Gpu(graph=0.4, eager=(5.0, 6.0), decode=4.0, token=0.1)


@pytest.mark.parametrize("gpu", [SMALL_GPU, HOST_BOUND, DEVICE_BOUND], ids=["small", "host-bound", "device-bound"])
def test_a_prompt_and_the_stalls_of_a_gpu_whose_steps_overlap_are_named(gpu: Gpu) -> None:
    history, stalls = gpu.run(0)
    model = fit(history, history.last)
    assert model is not None
    named = prompts = 0
    for step in range(201, history.last - 1):
        told = explained(history, step, model)
        kind, ms = stalls.get(step, ("", 0.0))
        worst = max(told.causes, key=lambda cause: cause.ms, default=None)
        if not kind:
            assert not told.slow, (step, told)
        elif kind == "prompt":  # the longer of the two gaps that the prompt delays
            told = max(told, explained(history, step + 1, model), key=lambda told: told.took)
            assert not told.slow and told.expected == pytest.approx(told.took, rel=0.4), (step, told)
            cost = max(told.prefills, key=lambda prefill: prefill.ms)
            assert cost.step == step + 1 and cost.ms > 0.9 * told.prefill and told.prefill > told.took / 3
            prompts += cost.parts[0].name == ("device" if gpu is DEVICE_BOUND else "launch")
        else:
            name = NAMES[kind].format(f"{step - 1:,}") + f" of next step {step + 1:,}" * (kind in ("plan", "launch"))
            named += worst is not None and worst.name.startswith(name) and worst.ms <= ms * 1.05 + 1.0
    others = [kind for kind, _ in stalls.values() if kind != "prompt"]
    assert len(others) > 20 and named >= 0.95 * len(others)
    assert prompts == len(stalls) - len(others) > 20


def explained(history: Steps, step: int, model: Any) -> Explanation:
    row = history.get(step)
    told = explain(row, model) if row is not None else None
    assert told is not None
    return told


def test_on_a_busy_core_the_other_program_is_named_and_prompts_are_not_blamed_for_its_time() -> None:
    history, delays = run(2, busy=2.0)
    model, before = fit(history, history.last), fit(history, history.last - 1_000)
    assert model is not None and before is not None
    for step in range(2_001, history.last + 1):
        told = explained(history, step, model)
        row, ms = history.get(step), delays.get(step, 0.0)
        assert row is not None and told.expected == pytest.approx(told.took - ms, rel=0.3), (step, told)
        if ms > told.expected:
            assert [cause.name for cause in told.causes] == [NAMES["program"]], (step, told)
            assert told.causes[0].ms == pytest.approx(ms, rel=0.1) and told.unexplained < 0.1 * told.took
            earlier = explained(history, step, before)  # whichever steps the model was fitted to, the cause is the same
            assert [(cause.name, pytest.approx(cause.ms, rel=0.1)) for cause in earlier.causes] == [
                (cause.name, cause.ms) for cause in told.causes
            ]
        elif ms < 0.1:
            assert not told.slow, (step, told)


def test_the_model_finds_what_rows_tokens_and_keys_cost() -> None:
    history, _ = run(2)
    model = fit(history, history.last)
    assert model is not None and model.device is not None
    base, several, row, _, _, token, key, _ = model.device.costs
    assert base + several == pytest.approx(BASE, rel=0.1) and token == pytest.approx(TOKEN, rel=0.05)
    rows, keys = 5, 5 * 200
    assert row * rows + key * keys == pytest.approx(ROW * rows + KEY * keys, abs=0.15)


def test_without_measured_parts_nothing_is_blamed() -> None:
    """Recordings of older versions have no parts."""
    history = Steps()
    for step in range(60):
        wall = 90.0 if step == 50 else 5.0
        history.read((step, 0.1 * step, "step", step, [], [], [], 4, 0))
        history.read((step, 0.1 * step, "time", step, 100, 100, 100, wall, None, "decode"))
    model = CostModels(history).of(50)
    row = history.get(50)
    assert row is not None and row.parts is None
    assert why_slow(row, model) == "expected 5.00 ms, +85.0: unexplained 85.0"
    usual = history.get(49)
    assert usual is not None and why_slow(usual, model) == "expected 5.00 ms"
    assert why_slow(usual, model, always=True) == "expected 5.00 ms, +0.00: within the usual variation"


def recordings() -> dict[str, View]:
    return {name: recorded_view(TraceReader(path)) for name, path in bundled().items()}


def test_parts_and_causes_are_never_more_than_the_duration_and_the_slowest_is_first() -> None:
    """In every bundled recording, and in a simulated live run."""
    stress, live = Stress(LONG), empty_view(LONG)
    stress.run_steps(400)
    live.fold(stress.drain())
    for name, view in (*recordings().items(), ("live", live)):
        steps, seen = view.history.steps, 0
        for row in filter(None, map(steps.get, range(steps.first, steps.last + 1))):
            if row.took_ms is None:
                continue
            parts = [part.ms or 0.0 for part in parts_of(steps, row)]
            assert sum(parts) == pytest.approx(row.took_ms, abs=1e-9) and min(parts) >= 0, (name, row)
            if row.parts is not None:
                assert row.parts.gc + (row.parts.delayed or 0.0) <= row.took_ms
            told = explain(row, model) if (model := view.models.of(row.step)) is not None else None
            if told is None:
                continue
            seen += 1
            excess = max(0.0, told.took - told.expected)
            assert told.took == row.took_ms and told.prefill <= told.expected + 1e-9
            assert sum(cause.ms for cause in (*told.causes, *told.varied)) + told.unexplained <= excess + 1e-9
            if found := re.search(r"\+([\d.,]+): (.+?)(?: \(this|$)", why_slow(row, model)):
                causes = [float(part.rpartition(" ")[2].replace(",", "")) for part in re.split(r", (?=\D)", found[2])]
                assert causes == sorted(causes, reverse=True), found[0]
                assert sum(causes) == pytest.approx(float(found[1].replace(",", "")), rel=0.02, abs=0.05), found[0]
        assert seen > 140
        view.frame(0.0)
        listed = [row.took_ms for row in rows_of(steps, step_times(steps, view.moment.horizon, 32_768).slowest(10))]
        assert listed == sorted(listed, reverse=True, key=lambda took: took or 0.0)
        assert view.timings.slowest is not None
        if view.timings.steps == seen:
            assert view.timings.slowest.took_ms == listed[0]


def test_a_step_does_not_explain_itself() -> None:
    history = Steps()
    for step in range(60):
        prefills = [(9, 0, 64, False)] if step == 30 else []
        wall = 25.0 if prefills else 5.0
        history.read((step, 0.1 * step, "step", step, prefills, [], [], 68 if prefills else 4, 0))
        history.read((step, 0.1 * step, "time", step, 100, 100, 100, wall, None, "mixed" if prefills else "decode"))
    models = CostModels(history)
    told = explained(history, 30, models.of(30))
    assert (told.expected, told.unexplained, told.prefills) == (pytest.approx(5.0), pytest.approx(20.0), ())
    assert [explained(history, step, models.of(step)).expected for step in (29, 31)] == [pytest.approx(5.0)] * 2
    view = recordings()["small-pool"]  # two of its steps have prompts
    prompts = [
        row for row in map(view.history.steps.get, range(view.history.steps.last + 1)) if row is not None and row.chunks
    ]
    for row in prompts:
        told = explained(view.history.steps, row.step, view.models.of(row.step))
        assert told.expected < told.took / 3 and not told.prefills
        assert told.causes[0].name.startswith("device in the prefill of ") and told.unexplained < 1.0
    assert len(prompts) == 2


def test_a_step_of_which_nothing_is_known_has_no_expected_time() -> None:
    """The time of a decode step is in proportion to its rows: of one with a prompt alone, no part is known."""
    history = Steps()
    for step in range(60):
        tokens = {20: 64, 40: 250}.get(step, 0)
        rows = 0 if tokens else 1 + step % 3
        wall = 0.3 * tokens + 5.0 * rows
        history.read((step, 0.1 * step, "step", step, [(9, 0, tokens, False)] * bool(tokens), [], [], tokens + rows, 0))
        history.read((step, 0.1 * step, "time", step, 100, 100, 100, wall, None, "prefill" if tokens else "decode"))
    row, model = history.get(40), CostModels(history).of(40)
    assert row is not None and explained(history, 40, model).expected == 0
    told = "the usual time of its 250 prefill tokens is unknown: 1 prompt of 250 tokens (too few such steps yet to"
    assert why_slow(row, model).startswith(told)


def test_an_expected_time_that_lacks_the_prompt_says_so() -> None:
    """Two prompts of different lengths among decode steps: no other step tells what they cost."""
    history = Steps()
    for step in range(60):
        tokens = {20: 64, 40: 250}.get(step, 0)
        wall = 5.0 + 0.3 * tokens
        history.read((step, 0.1 * step, "step", step, [(9, 0, tokens, False)] * bool(tokens), [], [], 4 + tokens, 0))
        history.read((step, 0.1 * step, "time", step, 100, 100, 100, wall, None, "mixed" if tokens else "decode"))
    models = CostModels(history)
    for step, tokens in ((20, 64), (40, 250)):
        row, model = history.get(step), models.of(step)
        assert row is not None and explained(history, step, model).untold
        lacking = f"expected 5.00 ms without its {tokens} prefill tokens, whose time is unknown, +"
        assert why_slow(row, model).startswith(lacking)
        few = f": 1 prompt of {tokens} tokens (too few such steps yet to say more) {ms(0.3 * tokens)}"
        assert few in why_slow(row, model)
        assert why_briefly(row, model) == f"1 prompt +{ms(0.3 * tokens)}, usual 5.00"
        assert usual_words(row, model) == ""
    decode = history.get(30)
    assert decode is not None and why_slow(decode, models.of(30)) == "expected 5.00 ms"


def test_a_step_with_fewer_rows_than_all_before_has_no_expected_time_until_such_steps_are_fitted() -> None:
    """A CPU's run: steps of two to four rows take 11 ms, and the last 32 steps, of one row, take 5 ms."""
    view = recorded_view(TraceReader(find_trace("small-pool")))
    rows = [
        row
        for row in map(view.history.steps.get, range(view.history.steps.last + 1))
        if row is not None and row.took_ms
    ]
    took: dict[int, list[float]] = {}
    for row in rows:
        took.setdefault(row.decodes, []).append(row.took_ms or 0.0)
    unknown = Counter[int]()
    for row in rows:
        model = view.models.of(row.step)
        found = explain(row, model) if model is not None else None
        if found is None:
            unknown[row.decodes] += 1
            told = [text for label, text in tell(view, "step", row.step).lines if label == "took"]
            assert told[0].endswith("; expected time unknown: too few such steps have a time")
        elif row.decodes:
            assert abs(found.expected / median(took[row.decodes]) - 1) < 0.2, row
    assert not unknown[4] and 0 < unknown[3] < REFIT_SOON and 0 < unknown[1] < 2 * REFIT_SOON
