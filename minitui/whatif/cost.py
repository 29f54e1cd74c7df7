"""What a step costs on the device of a recording: fitted to all its steps, with its error.

The fit is that of the timings panel (viewmodel/explain/cost_model.py): a constant, and a cost for each row, prompt
token, key and so on. Beside the keys that each row reads, the keys that all rows hold have a cost: a device reads a
shared block from its memory once. Where the recording has the device's time, and steps overlap, a step takes the longer
of the device's time and the host's.

A played step takes the fitted time, and deviates from it as a recorded step of the same kind and about the same time
did, or if it only decodes, one with about as many rows: kernels have steps and corners that no line has (a GPU pads
steps, a CPU changes its kernels at 48 tokens), a step of the same work does not always take the same time, and the 99th
percentile is made of that. Recorded deviations are used equally often, so that their sum is right. Stalls are rare, and
come as often as in the recording, in steps of any kind.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np

from engine.core.step import StepPlan
from engine.errors import EngineError
from minitui.text import count
from minitui.viewmodel.explain import cost_model
from minitui.viewmodel.explain.cost_model import LEAST_STEPS, PREFILL_STEPS, ROWS, SEVERAL, robust
from minitui.viewmodel.history.steps import Steps

FEATURES = (*cost_model.FEATURES, "held keys")
KEYS, HELD = FEATURES.index("keys"), FEATURES.index("held keys")
BEYOND = 1.1  # multiple of the most work in a recorded step
NAMES = ("steps", "rows", "rows", "draft tokens", "prompts", "prompt tokens", "keys that decodes read",
         "pairs of query and key in prompts", "tokens in the blocks that requests hold")
NEAR = 16  # steps: a deviation is one of so many recorded steps
FEW = 4  # with fewer recorded steps of the same size, those of other sizes tell the deviation
ALIKE = 1.25  # without recorded steps of the same size, up to this factor, a step is extrapolated
STALL, RARE = 1.5, 0.03  # multiple of the usual time of such steps; the most stalls, as a share of the steps of a kind
KINDS = 3  # of steps: with one row, with several, with prompts
# If the recorded steps do not tell costs apart: rows cost nothing beside their keys, and a key costs as much for each
# row that reads it as for being held. And one step says that prompts cost nothing but their tokens: if all prompts fill
# the budget, no step tells. The numbers are the certainty of this, relative to that of the recorded steps.
ROWS_FREE, KEYS_ALIKE, PROMPTS_FREE = 3.0, 1.0, 30.0


@dataclass(slots=True)
class Costs:
    """Costs by feature, in ms. The time from the results of a step to those of the next one depends on `own` of the
    latter, and on `launched` of the steps that the host launches in this time: with `overlap`, that is the step after
    it. With `parallel` the time is the longer of both (device and host), else their sum.

    `most`: the most of each feature in a recorded step. `steps`: of the fit. `error`: the median relative deviation of
    a step. `stalls`: ms of the recorded stalls, beyond the usual time.
    """

    own: list[float]
    launched: list[float]
    overlap: bool
    parallel: bool
    most: list[float]
    steps: int
    error: float
    stalls: list[float]
    recorded: list[tuple[list[int], list[float], list[float]]]  # by kind, sorted: size, fitted time and its multiple

    @property
    def limits(self) -> list[float]:
        """Work of a step is extrapolated if it is larger."""
        return [BEYOND * most for most in self.most]

    def of(self, work: Sequence[float]) -> tuple[float, float]:
        """Returns what work [FEATURES] costs: (own, launched)."""
        return sum(map(mul, work, self.own)), sum(map(mul, work, self.launched))

    def together(self, own: float, launched: float) -> float:
        """Returns the time of a step."""
        return max(own, launched) if self.parallel else own + launched


def work_of(plan: StepPlan, held: int) -> tuple[float, ...]:
    """Returns the features [FEATURES] of a planned step; `held`: tokens in the blocks that requests hold. In Python: a
    step has few prompts, and numpy's calls cost more."""
    n = plan.num_decoding
    tokens = pairs = 0
    if len(plan.rows) > n:
        for start, length in zip(plan.starts[n:].tolist(), plan.q_lens[n:].tolist(), strict=True):
            tokens += length
            pairs += length * (start + length // 2)
    drafted = plan.num_tokens - tokens - n
    return 1, n + drafted > 1, n, drafted, tokens > 0, tokens, int(plan.starts[:n].sum()), pairs, held


def size_of(work: Sequence[float]) -> int:
    """Returns the size to which a device pads a step with this work [FEATURES], about: steps of one size take the same
    path. 1 with prompts: their times are those of their tokens."""
    n = int(work[ROWS[0]] + work[ROWS[1]]) if not work[PREFILL_STEPS] else 1
    if n <= 8:
        return 1 << (n - 1).bit_length() if n else 0
    step = max(8, 1 << n.bit_length() - 6 if n >= 64 else 8)
    return -(-n // step) * step


class Deviations:
    """Draws the times of a played run's steps."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._used = [[0] * len(sizes) for sizes, _, _ in costs.recorded]
        self._steps = self._stalled = 0
        self.extrapolated = False  # no recorded step had about as many rows as the last one

    def took(self, work: Sequence[float], fitted: float) -> float:
        """Returns the time of a step: its fitted time with the deviation of a recorded step of the same kind and size,
        and about the same fitted time, one of those used least. Adds a stall where one is due."""
        costs, kind = self._costs, kind_of_step(work)
        (sizes, times, multiples), used, size = costs.recorded[kind], self._used[kind], size_of(work)
        self.extrapolated = bisect_right(sizes, size * ALIKE) == bisect_left(sizes, size / ALIKE)
        first, end = bisect_left(sizes, size), bisect_right(sizes, size)
        if end - first < FEW:
            middle, first, end = first, 0, len(sizes)
        else:
            middle = bisect_left(times, fitted, first, end)
        first = max(first, min(middle - NEAR // 2, end - NEAR))
        at = min(range(first, min(first + NEAR, end)), key=lambda i: (used[i], abs(times[i] - fitted)))
        used[at] += 1
        self._steps += 1
        stall = 0.0
        if self._steps * len(costs.stalls) > (self._stalled + 0.5) * costs.steps:
            stall = costs.stalls[self._stalled % len(costs.stalls)]
            self._stalled += 1
        return fitted * multiples[at] + stall


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
    seen, n = cost_model.windows(steps, at), len(FEATURES)
    overlap, took = bool(seen.overlapped.any()), seen.took
    work = np.column_stack((seen.work, steps.column("in_use")[at]))
    launched = np.column_stack((seen.ahead + seen.work * seen.here[:, None], np.zeros(len(at))))
    host = sum((seen.parts[name] for name in ("commit", "emit", "plan", "launch")), np.zeros(len(at)))
    known = ~np.isnan(seen.device) & ~np.isnan(host)
    parallel = overlap and known.sum() >= LEAST_STEPS
    if parallel:
        own = robust(work[known], np.minimum(seen.device, took)[known], _prior(work, took)).costs
        of_host = robust(launched[known], host[known]).costs
        fitted = np.maximum(work @ own, launched @ of_host)
    else:
        every = np.hstack((work, launched)) if overlap else work
        costs = robust(every, took, _prior(every, took)).costs
        own, of_host, fitted = costs[:n], costs[n:] if overlap else np.zeros(n), every @ costs
    multiples = took / np.maximum(fitted, 1e-9)
    stalls, recorded, kinds = np.zeros(len(at)), [], np.array(list(map(kind_of_step, seen.work)))
    sizes = np.array(list(map(size_of, work.tolist())))
    for kind in range(KINDS):
        of = np.flatnonzero(kinds == kind) if (kinds == kind).sum() >= NEAR // 2 else np.arange(len(kinds))
        of = of[np.lexsort((fitted[of], sizes[of]))]
        usual = _usual(multiples[of])
        stalled = multiples[of] > STALL * usual
        stalled &= stalled.mean() <= RARE  # else such steps are slow for a reason that the fit does not have
        stalls[of] = (multiples[of] - usual) * fitted[of] * stalled
        used = np.where(stalled, usual, multiples[of])
        recorded.append((sizes[of].tolist(), fitted[of].tolist(), used.tolist()))
    return Costs(
        own.tolist(), of_host.tolist(), overlap, parallel, work.max(axis=0).tolist(), len(at),
        float(np.median(np.abs(multiples - 1))), stalls[stalls > 0].tolist(), recorded,
    )


def _usual(multiples: np.ndarray) -> np.ndarray:
    """Returns for each of these steps, in their order, the median of the steps beside it."""
    beside = np.pad(multiples, FEW, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(beside, 2 * FEW + 1), axis=1)


def _prior(work: np.ndarray, took: np.ndarray) -> np.ndarray:
    """Returns what the fit assumes of costs that the recorded steps do not tell apart, for `robust`."""
    n, most, prior = len(FEATURES), work.max(axis=0), np.zeros((3, work.shape[1]))
    prior[0, ROWS[0]] = ROWS_FREE * most[ROWS[0]]
    prior[1, KEYS], prior[1, HELD] = KEYS_ALIKE * most[KEYS], -KEYS_ALIKE * most[KEYS]
    prior[:2] *= np.sqrt(len(work))
    prior[2, PREFILL_STEPS::n] = PROMPTS_FREE
    return prior / max(float(np.median(took)), 1e-6)


def beyond(most: Sequence[float], seen: Sequence[float]) -> list[str]:
    """Returns in words how a played run's largest steps exceed the recorded ones: "1,024 prompt tokens in a step (at
    most 512 were recorded)"."""
    return [
        f"{most[i]:,.0f} {name} in a step (at most {seen[i]:,.0f} were recorded)"
        for i, name in enumerate(NAMES) if i not in (0, SEVERAL) and most[i] > BEYOND * seen[i]
    ]
