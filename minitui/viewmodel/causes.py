"""Explains slow steps: a cost model gives the expected time of a step, and measured parts show what took longer.

The model is linear and its coefficients are not negative: a constant, and a cost for each decoding row, draft token,
prompt token, key that decodes read, and pair of query and key in prefill. It is fitted to recent steps by least squares
in which outliers count little (Huber 1964), so that stalls do not raise the expected time.

A cause is named only with evidence from the records: a pause that the engine measured, a part of the host's time that
took longer than usual, or a device time above the model's. A cause gets at most the time that it cost, and the rest of
the excess is called unexplained.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minitui.viewmodel.history import StepRow, Steps

FEATURES = ("steps", "rows", "draft tokens", "prefill tokens", "keys", "prefill pairs")
FIT_STEPS = 1_000  # the model is fitted to this many recent steps
LEAST_STEPS = 12  # with fewer steps there is no model
ROUNDS = 6  # number of times that the errors are weighted again
TOLERANCE = 0.25  # an excess up to this share of the expected time needs no explanation
NOISE = 4.0  # an excess up to this many typical deviations needs no explanation
WORTH = 0.1  # causes with a smaller share of the excess are not named
HOST = {  # part of the host's time -> its name on the screen
    "commit": "commit", "emit": "output and commands", "plan": "plan", "launch": "launch",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CostModel:
    """Gives the expected time of a step, in ms. `cost`: one value for each of FEATURES; `spread`: typical deviation."""

    cost: tuple[float, ...]
    spread: float
    device_cost: tuple[float, ...] | None  # the same for the device's time; None: not measured
    device_spread: float
    usual: dict[str, float]  # the median of each part of the host's time

    def expected(self, row: StepRow) -> float:
        """Returns the expected time of the step."""
        return float(np.dot(self.cost, _features(row)))


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that cost `ms` of a step."""

    name: str
    ms: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """A step's time compared with its expected time, in ms. `causes` and `unexplained` add up to the excess."""

    took: float
    expected: float
    prefill: float  # the part of `expected` that prompt tokens take
    causes: tuple[Cause, ...] = ()
    unexplained: float = 0.0

    @property
    def slow(self) -> bool:
        """True if the step took longer than expected, beyond the usual variation."""
        return bool(self.causes or self.unexplained)


def fit(steps: Steps, horizon: int) -> CostModel | None:
    """Returns the model of the steps up to `horizon`; None if too few of them have a time."""
    at = steps.indices(horizon - FIT_STEPS + 1, horizon)
    at = at[~np.isnan(steps.column("wall")[at])]
    if len(at) < LEAST_STEPS:
        return None
    decodes = steps.column("decodes")[at]
    columns = (
        np.ones(len(at)), decodes, steps.column("drafted")[at], steps.prefilled(at), steps.column("keys")[at],
        steps.column("pairs")[at],
    )  # fmt: skip
    work = np.column_stack(columns).astype(np.float64)
    parts = {name: steps.column(f"part:{name}")[at].astype(np.float64) for name in (*HOST, "wait")}
    took = np.sum(list(parts.values()), axis=0)
    measured = ~np.isnan(took)
    cost, spread = _robust(work, np.where(measured, took, steps.column("wall")[at]))
    device = steps.column("device")[at]
    known = ~np.isnan(device)
    device_cost, device_spread = None, 0.0
    if known.sum() >= LEAST_STEPS:
        device_cost, device_spread = _robust(work[known], device[known])
    usual = {name: float(np.median(values[measured])) if measured.any() else 0.0 for name, values in parts.items()}
    return CostModel(cost, spread, device_cost, device_spread, usual)


def explain(row: StepRow, model: CostModel) -> Explanation | None:
    """Returns the step's time compared with the time that the model expects; None if the step's time is unknown.

    Recordings of older versions have no parts, so their explanations have no causes.
    """
    parts, work = row.parts, _features(row)
    if row.wall_ms is None:
        return None
    took = row.wall_ms if parts is None else parts.took
    expected = model.expected(row)
    prefill = sum(model.cost[i] * work[i] for i in map(FEATURES.index, ("prefill tokens", "prefill pairs")))
    excess = took - expected
    if excess <= max(TOLERANCE * expected, NOISE * model.spread):
        return Explanation(took, expected, prefill)
    if parts is None:
        return Explanation(took, expected, prefill, (), excess)
    left, causes = excess, []

    def blame(name: str, ms: float) -> None:
        nonlocal left
        ms = min(ms, left)
        if ms > WORTH * excess:
            causes.append(Cause(name, ms))
            left -= ms

    beyond = {name: getattr(parts, name) - model.usual[name] for name in (*HOST, "wait")}
    largest = max(beyond.values())
    if parts.stops:
        blame("process stopped", largest)
    blame("garbage collection", parts.gc)
    blame("another program on the core", parts.delayed or 0.0)
    accounted = excess - left
    if row.comm_ms is not None and model.device_cost is not None:
        blame("exchange between ranks", row.comm_ms - float(np.dot(model.device_cost, work)))
    for name, words in HOST.items():
        # The pauses above may lie in any part: subtract their time from the part with the largest excess.
        blame(words, beyond[name] - (accounted if beyond[name] == largest else 0.0))
    if row.device_ms is not None and model.device_cost is not None:
        usual = float(np.dot(model.device_cost, work))
        own = row.device_ms - usual - accounted
        if own > NOISE * model.device_spread:
            blame("device", own)
    return Explanation(took, expected, prefill, tuple(causes), left)


def _features(row: StepRow) -> tuple[float, ...]:
    return (1.0, row.decodes, row.drafted, row.prefill_tokens, row.keys, row.pairs)


def _robust(work: np.ndarray, took: np.ndarray) -> tuple[tuple[float, ...], float]:
    """Returns non-negative coefficients by iteratively reweighted least squares, and the typical deviation."""
    scale = np.maximum(work.max(axis=0), 1.0)
    scaled = work / scale
    # Minimise relative errors: a prefill of 60 ms may deviate more than a decode step of 3 ms.
    weights = base = 1.0 / np.maximum(took, np.median(took))
    cost, spread = np.zeros(work.shape[1]), 0.0
    for _ in range(ROUNDS):
        cost = _non_negative(scaled * weights[:, None], took * weights)
        errors = np.abs(took - scaled @ cost)
        spread = 1.4826 * float(np.median(errors))
        limit = 1.5 * np.maximum(spread, 1e-6)
        weights = base * np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-12)))
    return tuple((cost / scale).tolist()), spread


def _non_negative(work: np.ndarray, took: np.ndarray) -> np.ndarray:
    """Returns least-squares coefficients, none negative: drops the lowest and solves again while any is negative."""
    active = list(np.flatnonzero(work.any(axis=0)))
    cost = np.zeros(work.shape[1])
    while active:
        solved = np.linalg.lstsq(work[:, active], took, rcond=None)[0]
        if (solved >= 0).all():
            cost[active] = solved
            break
        active.pop(int(np.argmin(solved)))
    return cost
