"""What a step costs on the device of a recording: fitted to all its steps, with its error.

The fit is that of the timings panel (viewmodel/explain/cost_model.py): a constant, and a cost for each row, prompt
token, key and so on. Its deviations are drawn again at random, always in the same order: a step of the same work does
not always take the same time, and the 99th percentile is made of that.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from engine.core.step import StepPlan
from engine.errors import EngineError
from engine.trace.state import State
from minitui.text import count
from minitui.trace.reader import TraceReader
from minitui.viewmodel.explain.cost_model import FEATURES, LEAST_STEPS, SEVERAL, robust, windows
from minitui.viewmodel.history.steps import Steps

BEYOND = 1.1  # work of a step is extrapolated if it is larger than this multiple of the most in a recorded step
SEED = 0
NAMES = ("steps", "rows", "rows", "draft tokens", "prompts", "prompt tokens", "keys that decodes read",
         "pairs of query and key in prompts")  # fmt: skip
NEAR = 64  # steps: a deviation is drawn from so many steps of about the same time


@dataclass(slots=True)
class Costs:
    """Costs by feature, in ms. The time from the results of a step to those of the next one is `own` of the latter, and
    `launched` of the steps that the host launches in this time: with `overlap`, that is the step after it.

    `most`: the most of each feature in a recorded step. `steps`: of the fit. `error`: the median relative deviation of
    a step.
    """

    own: np.ndarray
    launched: np.ndarray
    overlap: bool
    most: np.ndarray
    steps: int
    error: float
    _fitted: list[float]  # the fitted times of the recorded steps, sorted
    _ratios: list[float]  # what these steps took, as multiples of the fit

    def work(self, plan: StepPlan) -> np.ndarray:
        """Returns the features [FEATURES] of a planned step."""
        n, prompts = plan.num_decoding, plan.q_lens[plan.num_decoding :]
        starts = plan.starts
        tokens = int(prompts.sum()) if len(prompts) else 0
        pairs = float((prompts * (starts[n:] + prompts // 2)).sum()) if tokens else 0.0
        keys = float(starts[:n].sum()) if n else 0.0
        drafted = plan.num_tokens - tokens - n
        return np.array((1.0, n + drafted > 1, n, drafted, tokens > 0, tokens, keys, pairs))

    def deviation(self, fitted: float, chance: random.Random) -> float:
        """Returns a factor for a step that should take `fitted` ms: that of a recorded step of about this time."""
        at = bisect_right(self._fitted, fitted)
        low = max(0, min(at - NEAR // 2, len(self._fitted) - NEAR))
        return self._ratios[low + int(chance.random() * min(NEAR, len(self._ratios)))]


def costs_of(reader: TraceReader) -> Costs:
    """Returns the costs of a recording's steps. Raises EngineError if too few of them have times."""
    steps = _steps(reader)
    at = steps.indices(steps.first, steps.last)
    at = at[~np.isnan(steps.column("took")[at])]
    if len(at) < LEAST_STEPS:
        raise EngineError(
            f"{reader.path} has {count(len(at), 'step')} with times; the cost of a step needs at least {LEAST_STEPS}: "
            "record a longer run"
        )
    seen = windows(steps, at)
    overlap = bool(seen.overlapped.any())
    launched = seen.ahead + seen.work * seen.here[:, None]
    work = np.hstack((seen.work, launched)) if overlap else seen.work
    costs = robust(work, seen.took).costs
    fitted = work @ costs
    order = np.argsort(fitted, kind="stable")
    ratios = seen.took / np.maximum(fitted, 1e-9)
    n = len(FEATURES)
    return Costs(
        costs[:n], costs[n:] if overlap else np.zeros(n), overlap, seen.work.max(axis=0), len(at),
        float(np.median(np.abs(ratios - 1))), fitted[order].tolist(), ratios[order].tolist(),
    )  # fmt: skip


def _steps(reader: TraceReader) -> Steps:
    """Returns the steps of a recording; of a long one, the last ones."""
    steps = Steps()
    for part, missing in reader.parts():
        if missing is not None:
            steps.adopt(State.from_snapshot(part.snapshot))
        for record in part.records:
            steps.read(record)
    return steps


def beyond(most: np.ndarray, seen: np.ndarray) -> list[str]:
    """Returns in words how a played run's largest steps exceed the recorded ones: "1,024 prompt tokens in a step (at
    most 512 were recorded)"."""
    return [
        f"{most[i]:,.0f} {name} in a step (at most {seen[i]:,.0f} were recorded)"
        for i, name in enumerate(NAMES) if i not in (0, SEVERAL) and most[i] > BEYOND * seen[i]
    ]  # fmt: skip
