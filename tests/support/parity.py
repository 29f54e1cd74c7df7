"""Compares logits: ours with those of transformers, and those of one executor with those of another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.core.step import StepPlan
from engine.llm import LLM
from engine.params import SamplingParams
from engine.worker.cpu.compiled_decoder import KERNELS, CompiledDecoder
from engine.worker.cpu.executor import CPUSteps
from tests.support.models import Driver, eager, make_request, make_runner, prompt, reference, save

PROMPT = 37  # tokens

Checkpoints = Callable[[str], tuple[Any, Path]]


def checkpoints_of(models: dict[str, tuple[str, dict[str, Any]]], factory: pytest.TempPathFactory) -> Checkpoints:
    """name -> (transformers model, directory), each made once. `models`: by name, its kind and its fields."""
    made: dict[str, tuple[Any, Path]] = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in made:
            kind, overrides = models[name]
            model = reference(kind, **overrides)
            made[name] = model, save(model, factory.mktemp(kind))
        return made[name]

    return get


def last_logits(runner: Any) -> torch.Tensor:
    """Log-probabilities after the last token of a prompt, from all ranks."""
    found: list[torch.Tensor] = []
    sampler = runner.loaded.batch.sampler
    sample = sampler.sample
    sampler.sample = lambda rows, *rest: (found.append(rows.clone()), sample(rows, *rest))[1]
    Driver(runner).run([(make_request(prompt(0, PROMPT), 0), PROMPT, True)])
    return found[0][0].log_softmax(-1)


def their_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def our_logits(driver: Driver, request: Any, chunks: list[int]) -> torch.Tensor:
    """Logits of every position, the prompt computed in chunks."""
    rows = []
    for count in chunks:
        plan = driver.plan([(request, count, True)])
        runner = driver.runner
        with torch.inference_mode():
            runner.loaded.batch.apply(plan)
            inputs = eager(runner).build_inputs(plan)
            inputs.meta.logit_rows = inputs.meta.live_rows = None
            inputs.draws.entries = np.arange(count)  # the logits of all tokens are returned
            rows.append(eager(runner).forward(plan, inputs)[0])
    return torch.cat(rows)


def exact_logits(directory: Path) -> torch.Tensor:
    """Log-probabilities after each token of a prompt, in float64."""
    driver = Driver(make_runner(directory, "float64"))
    return our_logits(driver, make_request(prompt(0, PROMPT), 0), [PROMPT]).log_softmax(-1)


def step_logits(runner: Any, plan: StepPlan) -> torch.Tensor:
    """The logits that a step draws from, by the executor for any step."""
    steps = eager(runner)
    with torch.inference_mode():
        runner.loaded.batch.apply(plan)
        return steps.forward(plan, steps.build_inputs(plan))[0]


PROCESSORS = ["this", "vnni", "avx512", "avxvnni", "avx2", "none", "without llvmlite", "without GNU OpenMP"]


def needs_kernels(kind: str = "none") -> None:
    """Skip the test if this machine has no compiled kernels for this kind of weights."""
    pytest.importorskip("llvmlite")
    from engine.kernels.cpu.library import lacks

    if why_not := lacks(KERNELS[kind]):
        pytest.skip(why_not)


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run on each kind of processor that this one can be, and on machines without one of the kernels' libraries. Other
    processors than x86, and macOS, run what "none" and the last two run, or the kernels that "this" compiles."""
    name = request.param
    if name == "without llvmlite":
        monkeypatch.setitem(sys.modules, "llvmlite", None)
        return name
    llvm = pytest.importorskip("llvmlite.binding")
    from engine.kernels.cpu import library

    if name == "without GNU OpenMP":
        monkeypatch.setattr(library, "OPENMP", ("GOMP_that_no_library_has",))
    elif name != "this":
        needed = {"vnni": "avx512vnni", "avx512": "avx512bw", "avxvnni": "avxvnni", "avx2": "avx2", "none": None}[name]
        if needed and not llvm.get_host_cpu_features().get(needed):
            pytest.skip(f"this processor has no {needed}")
        monkeypatch.setenv("MINITUI_CPU", name)
    return name


@pytest.fixture(params=["compiled", "by torch"])
def compiled_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps on a CPU by compiled kernels, or without them."""
    if request.param == "compiled":
        needs_kernels()
    else:
        monkeypatch.setattr(CompiledDecoder, "why_not", lambda *_: "switched off")


def decodes_on_a_cpu(
    directory: Path, count: int, chunks: Sequence[tuple[int, int]] = (), **options: Any
) -> list[tuple[torch.Tensor, ...]]:
    """(logits, keys, values) after a decode step of `count` requests: by CPUSteps, then by Eager. `chunks`: of prompts
    in the same step, as (tokens computed before, tokens). The last one does not end its prompt."""
    found = []
    for plain in (False, True):
        driver = Driver(make_runner(directory, **options))
        runner = driver.runner
        fast = runner.executors[0]
        assert isinstance(fast, CPUSteps)
        requests = [make_request(prompt(row, 5 + 9 * row), row) for row in range(count)]
        for request in requests:
            driver.run([(request, len(request.ids), True)])
        prompts = [make_request(prompt(9 + i, sum(chunk)), count + i) for i, chunk in enumerate(chunks)]
        for request, (before, _) in zip(prompts, chunks, strict=True):
            if before:
                driver.run([(request, before, False)])
        ends = [True] * (len(chunks) - 1) + [False]
        added = [(request, chunk[1], end) for request, chunk, end in zip(prompts, chunks, ends, strict=False)]
        plan = driver.plan([(request, 1, True) for request in requests] + added)
        with torch.inference_mode():
            runner.loaded.batch.apply(plan)
            if plain:
                logits = step_logits(runner, plan)
            elif chunks:
                logits = fast._prompts.forward(plan, fast._prompts.build_inputs(plan))[0]
            else:
                assert fast.compiled is not None
                logits = fast.decode(plan, fast.compiled)[0]
        found.append((logits, torch.stack(runner.loaded.pool.keys), torch.stack(runner.loaded.pool.values)))
    return found


def below_best(reference: LLM, prompts: list[list[int]], replies: list[list[int]]) -> list[float]:
    """How far the log-probability of each token of the replies is below the best one's. Teacher forcing: the reference
    model reads each reply as a part of its prompt."""
    asked = [ids + reply for ids, reply in zip(prompts, replies, strict=True)]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    found = []
    outputs = reference.generate(asked, params, use_tqdm=False)
    for ids, reply, output in zip(prompts, replies, outputs, strict=True):
        for token, listed in zip(reply, output.prompt_logprobs[len(ids) :], strict=True):
            found.append(max(each.logprob for each in listed.values()) - listed[token].logprob)
    return found


def assert_parity(model: Any, driver: Driver) -> None:
    """The logits equal those of transformers, whether a prompt is computed whole or in chunks."""
    ids = prompt(0, PROMPT)
    theirs = their_logits(model, ids)
    assert_close(our_logits(driver, make_request(ids, 0), [PROMPT]), theirs)
    assert_close(our_logits(driver, make_request(ids, 1), [1, 9, 4, 17, 5, 1]), theirs)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
