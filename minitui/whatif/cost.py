"""What a step costs on the device of a recording: fitted to all its steps, with its error.

The fit is that of the timings panel (viewmodel/explain/cost_model.py): a constant, and a cost for each row, prompt
token, key and so on. A played step takes the fitted time, and deviates from it as a recorded step of the same kind and
of about the same time did: kernels have steps and corners that no line has, a step of the same work does not always
take the same time, and the 99th percentile is made of that. Recorded deviations are used equally often, so that their
sum is right.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np

from engine.core.step import StepPlan
from engine.errors import EngineError
from minitui.text import count
from minitui.viewmodel.explain.cost_model import FEATURES, LEAST_STEPS, PREFILL_STEPS, SEVERAL, robust, windows
from minitui.viewmodel.history.steps import Steps

BEYOND = 1.1  # multiple of the most work in a recorded step
NAMES = ("steps", "rows", "rows", "draft tokens", "prompts", "prompt tokens", "keys that decodes read",
         "pairs of query and key in prompts")  # fmt: skip
NEAR = 16  # steps: a deviation is one of so many steps of about the same time
KINDS = 3  # of steps: with one row, with several, with prompts


@dataclass(slots=True)
class Costs:
    """Costs by feature, in ms. The time from the results of a step to those of the next one is `own` of the latter, and
    `launched` of the steps that the host launches in this time: with `overlap`, that is the step after it.

    `most`: the most of each feature in a recorded step. `steps`: of the fit. `error`: the median relative deviation of
    a step.
    """

    own: list[float]
    launched: list[float]
    overlap: bool
    most: list[float]
    steps: int
    error: float
    recorded: list[tuple[list[float], list[float]]]  # by kind: fitted times, sorted, and what these steps took of them

    @property
    def limits(self) -> list[float]:
        """Work of a step is extrapolated if it is larger."""
        return [BEYOND * most for most in self.most]

    def of(self, work: Sequence[float]) -> tuple[float, float]:
        """Returns what work [FEATURES] costs: (own, launched)."""
        return sum(map(mul, work, self.own)), sum(map(mul, work, self.launched))


def work_of(plan: StepPlan) -> tuple[float, ...]:
    """Returns the features [FEATURES] of a planned step. In Python: a step has few prompts, and numpy's calls cost
    more."""
    n = plan.num_decoding
    tokens = pairs = 0
    if len(plan.rows) > n:
        for start, length in zip(plan.starts[n:].tolist(), plan.q_lens[n:].tolist(), strict=True):
            tokens += length
            pairs += length * (start + length // 2)
    drafted = plan.num_tokens - tokens - n
    return 1, n + drafted > 1, n, drafted, tokens > 0, tokens, int(plan.starts[:n].sum()), pairs


class Deviations:
    """Draws the deviations of a played run's steps."""

    def __init__(self, costs: Costs) -> None:
        self._recorded = costs.recorded
        self._used = [[0] * len(fitted) for fitted, _ in costs.recorded]

    def of(self, kind: int, ms: float) -> float:
        """Returns a factor for a step that should take `ms`: that of the nearest recorded step of those used least."""
        (fitted, ratios), used = self._recorded[kind], self._used[kind]
        low = max(0, min(bisect_left(fitted, ms) - NEAR // 2, len(fitted) - NEAR))
        at = min(range(low, min(low + NEAR, len(fitted))), key=lambda i: (used[i], abs(fitted[i] - ms)))
        used[at] += 1
        return ratios[at]


def kind_of_step(work: Sequence[float]) -> int:
    """Returns the kind of a step with this work [FEATURES]."""
    return 2 if work[PREFILL_STEPS] else int(work[SEVERAL])


def costs_of(steps: Steps, where: str) -> Costs:
    """Returns the costs of recorded steps. Raises EngineError if too few of them have times; `where` they are from."""
    at = steps.indices(steps.first, steps.last)
    at = at[~np.isnan(steps.column("took")[at])]
    if len(at) < LEAST_STEPS:
        raise EngineError(
            f"{where} has {count(len(at), 'step')} with times; the cost of a step needs at least {LEAST_STEPS}: "
            "record a longer run"
        )
    seen = windows(steps, at)
    overlap = bool(seen.overlapped.any())
    launched = seen.ahead + seen.work * seen.here[:, None]
    work = np.hstack((seen.work, launched)) if overlap else seen.work
    costs = robust(*_with_prior(work, seen.took)).costs
    fitted = work @ costs
    ratios = seen.took / np.maximum(fitted, 1e-9)
    kinds, n = np.array(list(map(kind_of_step, seen.work))), len(FEATURES)
    recorded = []
    for kind in range(KINDS):
        of = np.flatnonzero(kinds == kind) if (kinds == kind).sum() >= NEAR // 2 else np.arange(len(kinds))
        of = of[np.argsort(fitted[of], kind="stable")]
        recorded.append((fitted[of].tolist(), ratios[of].tolist()))
    return Costs(
        costs[:n].tolist(), costs[n:].tolist() if overlap else [0.0] * n, overlap, seen.work.max(axis=0).tolist(),
        len(at), float(np.median(np.abs(ratios - 1))), recorded,
    )  # fmt: skip


def _with_prior(work: np.ndarray, took: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the work and the times with one step more, which says that a step with prompts costs nothing but its
    tokens. If all prompts fill the budget, the recorded steps do not tell these two costs apart."""
    prior = np.zeros(work.shape[1])
    prior[PREFILL_STEPS :: len(FEATURES)] = 1.0
    return np.vstack((work, prior)), np.append(took, 0.0)


def beyond(most: Sequence[float], seen: Sequence[float]) -> list[str]:
    """Returns in words how a played run's largest steps exceed the recorded ones: "1,024 prompt tokens in a step (at
    most 512 were recorded)"."""
    return [
        f"{most[i]:,.0f} {name} in a step (at most {seen[i]:,.0f} were recorded)"
        for i, name in enumerate(NAMES) if i not in (0, SEVERAL) and most[i] > BEYOND * seen[i]
    ]  # fmt: skip
