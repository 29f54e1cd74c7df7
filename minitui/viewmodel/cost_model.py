"""A cost model of steps: what each step should take, fitted to the recent steps of the run.

The model is linear and its coefficients are not negative: a constant, and a cost for each decoding row, draft token,
step with prefill, prompt token, key that decodes read, and pair of query and key in prefill. It is fitted by least
squares in which outliers count little (Huber 1964), so that stalls do not raise the expected time.

Where steps overlap, the time between the results of two steps is no cost of one step. From the results of step k-1 to
the results of step k, the host commits step k-1, then plans and launches step k+1, while the device computes step k.
The time is the longer of both. So the device's time and each part of the host's time are fitted by themselves, and
`expected` puts these together. A prefill that is launched kernel by kernel costs its launch this way, in the time of
the step before. An engine that measures neither (vLLM) still shows this cost: the prompts of the next step are then
further features of a step's time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from minitui.viewmodel.steps import Steps

FEATURES = ("steps", "rows", "draft tokens", "prefill steps", "prefill tokens", "keys", "prefill pairs")
Costs = tuple[float, ...]
WITHOUT_PREFILL = np.array([not name.startswith("prefill") for name in FEATURES])
FIT_STEPS = 1_000  # the model is fitted to this many recent steps
LEAST_STEPS = 12  # with fewer steps there is no model
LEAST_PREFILLS = 5  # with fewer steps with prefill, the deviation of such steps is unknown
ROUNDS = 6  # number of times that the errors are weighted again
CONSIDERABLE = 0.1  # share of a time
SINGULAR = 1e-12  # smaller singular values of the products of features, relative to the largest, are zero
WAITED = 0.1  # ms: a host that waits longer than this was faster than the device
PLANNED = ("plan", "launch")


@dataclass(frozen=True, slots=True)
class Windows:
    """What host and device did in some steps; the arrays have a row for each step, and times in ms.

    The window of step k is the time from the results of step k-1 to the results of step k.
    """

    number: np.ndarray  # of the step
    work: np.ndarray  # [n, FEATURES] of the step
    ahead: np.ndarray  # the same of the next step if it was planned and launched in this window, else 0
    before: np.ndarray  # the same of the step before, which was committed in this window
    here: np.ndarray  # bool: the step itself was planned and launched in this window, not in the window before
    head: np.ndarray  # how long the device had worked on the step when the window began
    parts: dict[str, np.ndarray]  # the host's parts; NaN: unknown
    own: dict[str, np.ndarray]  # plan, launch and commit of the step itself
    took: np.ndarray  # without a paused engine and slow motion
    paused: np.ndarray  # measured garbage collection and time of other programs on the core, in `took`
    device: np.ndarray  # NaN: unknown

    @property
    def overlapped(self) -> np.ndarray:
        """Bool: the next step was planned in this window."""
        return self.ahead[:, 0] > 0

    @property
    def with_prompts(self) -> np.ndarray:
        """Bool: the host launched a step with prompts."""
        prefills = FEATURES.index("prefill steps")
        return (self.ahead[:, prefills] > 0) | (self.here & (self.work[:, prefills] > 0))


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected times of windows, in ms. `prefill`: what prompts cost: {-1: those of the step before, 0: of the step,
    1: of the next step} -> the part of `total`."""

    total: np.ndarray
    prefill: dict[int, np.ndarray]

    @property
    def with_prefill(self) -> np.ndarray:
        """Bool: prompts take a considerable part of the time."""
        return sum(self.prefill.values(), np.zeros(len(self.total))) > CONSIDERABLE * self.total


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs have one value for each of FEATURES, in ms."""

    steps: Steps = field(repr=False, compare=False)  # the history to which the model was fitted
    whole: Costs | None  # the time of a step; None: steps overlap, and `device` and `host` give the time
    meanwhile: Costs  # with `whole`: what the work of the next step costs if it is planned in the time of this step
    device: Costs | None  # the device's time; None: not measured
    host: dict[str, Costs]  # plan, launch and commit
    emit: float  # the usual time between two steps
    spreads: tuple[float, float]  # typical deviation (without prefill, with prefill)
    device_spreads: tuple[float, float]

    def expected(self, windows: Windows) -> Expected:
        """Returns the expected times of these windows."""
        if self.whole is not None:
            whole, ahead = np.array(self.whole), windows.ahead @ np.array(self.meanwhile)
            return Expected(windows.work @ whole + ahead, {0: windows.work @ (whole * ~WITHOUT_PREFILL), 1: ahead})
        assert self.device is not None
        costs = {name: np.array(cost) for name, cost in (*self.host.items(), ("device", self.device))}
        before, own, ahead = (
            {name: work @ (cost * ~WITHOUT_PREFILL) for name, cost in costs.items()}  # what the prompts cost
            for work in (windows.before, windows.work, windows.ahead)
        )
        zero = np.zeros(len(windows.number))
        commit = windows.before @ costs["commit"]
        planned = _planned(costs)
        host = commit + self.emit + (windows.work @ planned) * windows.here + windows.ahead @ planned
        # The device begins with a step when its launch begins, but not before the step before has ended.
        offset = np.where(windows.here, commit + self.emit + windows.work @ costs["plan"], -windows.head)
        device = offset + windows.work @ costs["device"]
        total = np.maximum(host, device)
        # Without the prompts, the host and the device would need this much less.
        host_less = {-1: before["commit"], 0: _planned(own) * windows.here, 1: _planned(ahead)}
        all_less = sum(host_less.values(), zero)
        device_less = own["device"] - np.where(own["device"] > 0, windows.head, 0.0)
        cost = np.maximum(total - np.maximum(host - all_less, device - device_less), 0.0)
        # The prompts of the longer path caused the cost.
        of_host = {i: ms / np.maximum(all_less, 1e-9) for i, ms in host_less.items()}
        return Expected(total, {i: cost * np.where(host >= device, share, i == 0) for i, share in of_host.items()})


def _planned(parts: dict[str, np.ndarray]) -> np.ndarray:
    return parts["plan"] + parts["launch"]


def windows(steps: Steps, at: np.ndarray) -> Windows:
    """Returns the windows of the timed steps at these indices of columns."""
    column, capacity = steps.column, steps.capacity
    number, t = column("step")[at], column("t")
    following, previous = (number + 1) % capacity, (number - 1) % capacity
    ahead = (column("step")[following] == number + 1) & (t[following] < column("ended")[at])
    before = (column("step")[previous] == number - 1) & ~np.isnan(column("wall")[previous])
    here = ~(before & (t[at] < column("ended")[previous]))
    parts = {name: column(f"part:{name}")[at].astype(np.float64) for name in ("commit", "emit", *PLANNED, "wait")}
    own = {name: np.nan_to_num(column(name)[at]) for name in (*PLANNED, "commit")}
    took, device = np.sum(list(parts.values()), axis=0), column("device")[at]
    took = np.where(np.isnan(took), column("wall")[at], took)
    paused = np.nan_to_num(column("part:gc")[at].astype(np.float64)) + np.nan_to_num(column("part:delayed")[at])
    # If the host waited, it saw the step end on the device. Otherwise the step began at the earliest with its launch.
    waited = column("part:wait")[previous].astype(np.float64)
    head = np.where(parts["wait"] > WAITED, np.fmax(device - took, 0.0), own["launch"] + waited)
    return Windows(
        number, _work(steps, at), _work(steps, following) * ahead[:, None], _work(steps, previous) * before[:, None],
        here, np.where(~here & (waited < WAITED), head, 0.0), parts, own, took, np.minimum(paused, took), device,
    )  # fmt: skip


def _work(steps: Steps, at: np.ndarray) -> np.ndarray:
    column, tokens = steps.column, steps.prefilled(at)
    columns = (
        np.ones(len(at)), column("decodes")[at], column("drafted")[at], tokens > 0, tokens, column("keys")[at],
        column("pairs")[at],
    )  # fmt: skip
    return np.column_stack(columns).astype(np.float64)


def fit(steps: Steps, horizon: int) -> CostModel | None:
    """Returns the model of the steps up to `horizon`; None if too few of them have a time."""
    at = steps.indices(horizon - FIT_STEPS + 1, horizon)
    at = at[~np.isnan(steps.column("wall")[at])]
    if len(at) < LEAST_STEPS:
        return None
    seen = windows(steps, at)
    prefilling = seen.work @ ~WITHOUT_PREFILL > 0
    measured = ~np.isnan(seen.parts["wait"])
    device, device_spreads = None, (0.0, 0.0)
    known = ~np.isnan(seen.device)
    overlap = bool((seen.overlapped & measured & known).any())
    # With overlap, the host's pauses do not delay the device, and most end while the host would wait for the device.
    took = seen.took - (0.0 if overlap else seen.paused)
    if known.sum() >= LEAST_STEPS:
        computed = (seen.device if overlap else np.minimum(seen.device, took))[known]
        device = _robust(seen.work[known], computed)
        device_spreads = _spreads(computed - seen.work[known] @ device, prefilling[known])
    host = {name: _robust(seen.work, values) for name, values in seen.own.items()}
    emit = float(np.median(seen.parts["emit"][measured])) if measured.any() else 0.0
    whole, meanwhile = None, (0.0,) * len(FEATURES)
    if device is None or not overlap:
        both = _robust(np.hstack((seen.work, seen.ahead * ~WITHOUT_PREFILL)), took)
        whole, meanwhile = both[: len(FEATURES)], both[len(FEATURES) :]
    model = CostModel(steps, whole, meanwhile, device, host, emit, (0.0, 0.0), device_spreads)
    expected = model.expected(seen)
    spreads = _spreads(took - expected.total, expected.with_prefill)
    return CostModel(steps, whole, meanwhile, device, host, emit, spreads, device_spreads)


def _spreads(errors: np.ndarray, prefills: np.ndarray) -> tuple[float, float]:
    """Returns the typical deviation of the steps without prefill and of those with prefill."""
    every = 1.4826 * float(np.median(np.abs(errors)))
    found = [
        1.4826 * float(np.median(np.abs(errors[of]))) if of.sum() >= LEAST_PREFILLS else every
        for of in (~prefills, prefills)
    ]
    return found[0], found[1]


def _robust(work: np.ndarray, took: np.ndarray) -> Costs:
    """Returns non-negative coefficients by iteratively reweighted least squares."""
    scale = np.maximum(work.max(axis=0), 1.0)
    scaled = work / scale
    # Minimise relative errors: a prefill of 60 ms may deviate more than a decode step of 3 ms.
    weights = base = 1.0 / np.maximum(took, max(float(np.median(took)), 1e-6))
    cost = np.zeros(work.shape[1])
    for _ in range(ROUNDS):
        cost = _non_negative(scaled * weights[:, None], took * weights)
        errors = np.abs(took - scaled @ cost)
        limit = 1.5 * max(1.4826 * float(np.median(errors)), 1e-6)
        weights = base * np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-12)))
    return tuple((cost / scale).tolist())


def _non_negative(work: np.ndarray, took: np.ndarray) -> np.ndarray:
    """Returns least-squares coefficients, none negative: drops the lowest and solves again while any is negative.

    Solves the normal equations: with a thousand steps and seven features, this takes a tenth of the time.
    """
    active = np.flatnonzero(work.any(axis=0))
    products, sums = work.T @ work, work.T @ took
    cost = np.zeros(work.shape[1])
    while len(active):
        solved = np.linalg.lstsq(products[np.ix_(active, active)], sums[active], rcond=SINGULAR)[0]
        if (solved >= 0).all():
            cost[active] = solved
            break
        active = np.delete(active, int(np.argmin(solved)))
    return cost
