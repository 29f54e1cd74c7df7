"""A cost model of steps: what each step should take, fitted to the recent steps of the run.

The model is linear and its coefficients are not negative: a constant, and a cost for each step that decodes several
rows (a CPU computes one row with other kernels), decoding row, draft token, step with prefill, prompt token, key that
decodes read, and pair of query and key in prefill. It is fitted by least squares in which outliers count little
(`robust`), so that stalls do not raise the expected time. The cost of prompts is part of the expected time only if the
fit determines this cost: its standard error must be small beside it.

Where steps overlap, the time between the results of two steps is no cost of one step. From the results of step k-1 to
the results of step k, the host commits step k-1, then plans and launches step k+1, while the device computes step k.
The time is the longer of both. So the device's time and each part of the host's time are fitted by themselves, and
`expected` puts these together. A prefill that is launched kernel by kernel costs its launch this way, in the time of
the step before. An engine that measures neither (vLLM) reports only when a step ended. If its steps overlap, nothing
tells the time of a prompt from the launch of the next step: prompts then have no cost. The time of a step with prompts,
or before one, is compared with that of other such steps (UsualTimes).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from minitui.text import ms
from minitui.viewmodel.history.steps import Steps

LEAST_ALIKE = 5  # with fewer steps to compare with, the usual time is unknown
SIMILAR = 2.0  # prompts are alike if the ratio of their tokens is at most this, and at least its reciprocal
SHORT = 64  # tokens: the lengths of shorter prompts make little difference
MOST = (10, 90)  # percentiles: most steps lie between these


@dataclass(frozen=True, slots=True)
class Usual:
    """The times of other steps with prompts in the same places."""

    ms: float  # their median
    low: float
    high: float  # most took between `low` and `high`
    deviation: float  # typical deviation from the median
    steps: int
    tokens: tuple[int, int]  # the fewest and the most prompt tokens in one of them; (0, 0): without prompts
    before: bool  # True if they are before steps with prompts

    @property
    def where(self) -> str:
        """Returns "before a step with prompts", or "with 40 to 90 prefill tokens" if the next has none."""
        low, high = self.tokens
        several = f"{low:,} to {high:,}" if high > low else f"{low:,}"
        own = [f"with {several} prefill token{'s' * (high > 1)}"] if high else []
        return " ".join([*own, *["before a step with prompts"] * self.before])

    def __str__(self) -> str:
        return f"{self.where} (median of {self.steps:,}, most {ms(self.low)} to {ms(self.high)} ms)"


@dataclass(frozen=True, slots=True)
class UsualTimes:
    """The fitted steps, a row each, of an engine that reports only when a step ended and whose steps overlap.

    A step is compared with steps that had prompts in the same places: in the step, in the next step or in both. Their
    number in the next step matters little: in a recording of an H200, decode steps take 10 ms, before a step with 2
    prompt tokens 23 to 38, and before one with 300, 26 to 47.
    """

    number: np.ndarray
    own: np.ndarray  # prompt tokens of the step
    ahead: np.ndarray  # prompt tokens of the next step, if it was planned meanwhile
    took: np.ndarray  # ms

    def of(self, step: int, own: int, ahead: int) -> Usual | None:
        """Returns the usual time of steps like this one, without this one; None without prompts, or if there are too
        few like it. Steps with about as many prompt tokens are preferred."""
        if not own and not ahead:
            return None
        places = ((self.own > 0) == (own > 0)) & ((self.ahead > 0) == (ahead > 0)) & (self.number != step)
        ratio = (self.own + SHORT) / (own + SHORT)
        alike = places & (ratio <= SIMILAR) & (ratio >= 1 / SIMILAR)
        if alike.sum() < LEAST_ALIKE:
            alike = places
        if alike.sum() < LEAST_ALIKE:
            return None
        took, tokens = self.took[alike], self.own[alike]
        median, (low, high) = float(np.median(took)), np.percentile(took, MOST)
        deviation = 1.4826 * float(np.median(np.abs(took - median)))
        return Usual(
            median, float(low), float(high), deviation, len(took), (int(tokens.min()), int(tokens.max())), ahead > 0
        )


ROUNDS = 6  # number of times that the errors are weighted again
FIRST_SPREAD = 0.03  # relative error of a time, before the first fit tells it
ALIKE = 1e-9  # the same for features that grow together so closely that nothing tells one from the other
SINGULAR = 1e-12  # smaller singular values of the products of features, relative to the largest, are zero


@dataclass(frozen=True, slots=True)
class Fit:
    """Costs, and how certain these are. costs [features], in ms covariance [features, features] of the costs own [n]
    the share of each fitted time in the time that the fit gives for the same work (its leverage)"""

    costs: np.ndarray
    covariance: np.ndarray
    own: np.ndarray

    def of(self, work: np.ndarray) -> np.ndarray:
        """Returns the time [n] that work [n, features] costs."""
        return work @ self.costs

    def error(self, work: np.ndarray) -> np.ndarray:
        """Returns the standard error [n] of the time that work [n, features] costs."""
        return np.sqrt(np.maximum(((work @ self.covariance) * work).sum(axis=1), 0.0))


def robust(work: np.ndarray, took: np.ndarray, prior: np.ndarray | None = None) -> Fit:
    """Returns the costs of work [n, features] that took these times [n], by iteratively reweighted least squares.
    `prior`: combinations [k, features] of costs that are 0 unless the times tell otherwise: each in units of the error
    of all times together."""
    scale = np.maximum(work.max(axis=0), 1.0)
    scaled = work / scale
    # Minimise relative errors: a prefill of 60 ms may deviate more than a decode step of 3 ms.
    weights = base = 1.0 / np.maximum(took, max(float(np.median(took)), 1e-6))
    cost, spread = np.zeros(work.shape[1]), FIRST_SPREAD
    for _ in range(ROUNDS):
        used = weights
        rows, right = scaled * weights[:, None], took * weights
        if prior is not None:
            rows, right = np.vstack((rows, spread * prior / scale)), np.append(right, np.zeros(len(prior)))
        cost = _non_negative(rows, right)
        errors = np.abs(took - scaled @ cost)
        limit = 1.5 * max(1.4826 * float(np.median(errors)), 1e-6)
        spread = 1.4826 * float(np.median(errors * base))
        weights = base * np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-12)))
    weighted = scaled * used[:, None]
    free = int(work.any(axis=0).sum())
    variance = float(np.sum((errors * used) ** 2)) / max(1, len(took) - free)
    # All features count, also those that cost nothing: between features that grow together, the fit may have chosen.
    inverse = np.linalg.pinv(weighted.T @ weighted, rcond=SINGULAR, hermitian=True)
    own = ((weighted @ inverse) * weighted).sum(axis=1)
    return Fit(cost / scale, variance * inverse / np.outer(scale, scale), own)


def unseen(work: np.ndarray) -> np.ndarray:
    """Returns the directions [features, k] in which no work [n, features] lies: its times tell no cost of these."""
    scale = np.maximum(work.max(axis=0), 1.0)
    values, vectors = np.linalg.eigh((work / scale).T @ (work / scale))
    return vectors[:, values <= ALIKE * max(1.0, values[-1])] / scale[:, None]


def _non_negative(work: np.ndarray, took: np.ndarray) -> np.ndarray:
    """Returns least-squares coefficients, none negative: drops the lowest and solves again while any is negative.
    Solves the normal equations: with a thousand steps and seven features, this takes a tenth of the time."""
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


FEATURES = (
    "steps", "steps with several rows", "rows", "draft tokens", "prefill steps", "prefill tokens", "keys",
    "prefill pairs",
)
WITHOUT_PREFILL = np.array([not name.startswith("prefill") for name in FEATURES])
SEVERAL = FEATURES.index("steps with several rows")
ROWS = [FEATURES.index("rows"), FEATURES.index("draft tokens")]
PREFILL_STEPS = FEATURES.index("prefill steps")
PREFILL_TOKENS = FEATURES.index("prefill tokens")
FIT_STEPS = 1_000  # the model is fitted to this many recent steps
LEAST_STEPS = 12  # with fewer steps there is no model
LEAST_ROWS = 8  # with fewer steps of one row, or of several, both cost the same
LEAST_PREFILLS = 5  # with fewer steps with prefill, the deviation of such steps is unknown
CONSIDERABLE = 0.1  # share of a time
DETERMINED = 0.3  # a cost is known if its standard error is at most this share of the cost
OWN = 0.25  # a step with a larger share in its own expected time does not explain itself
UNSEEN = 1e-3  # prompts with a larger share of work that no fitted step had have no known cost
WAITED = 0.1  # ms: a host that waits longer than this was faster than the device
PLANNED = ("plan", "launch")


@dataclass(frozen=True, slots=True)
class Windows:
    """What host and device did in some steps; the arrays have a row for each step, and times in ms. The window of step
    k is the time from the results of step k-1 to the results of step k."""

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
        return (self.ahead[:, PREFILL_STEPS] > 0) | (self.here & (self.work[:, PREFILL_STEPS] > 0))


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected times of windows, in ms. `prefill`: what prompts cost: {-1: those of the step before, 0: of the step,
    1: of the next step} -> the part of `total`; 0 if the fit does not determine this cost. `untold`: bool, there
    are such prompts; `total` is then without them. `lacking`: bool, the same for the host's time only."""

    total: np.ndarray
    prefill: dict[int, np.ndarray]
    lacking: np.ndarray
    untold: np.ndarray

    @property
    def with_prefill(self) -> np.ndarray:
        """Bool: prompts take a considerable part of the time."""
        return sum(self.prefill.values(), np.zeros(len(self.total))) > CONSIDERABLE * self.total


@dataclass(frozen=True, slots=True)
class CostModel:
    """Fits have one cost for each of FEATURES, in ms."""

    steps: Steps = field(repr=False, compare=False)  # the history to which the model is applied
    whole: Fit | None  # the time of a step; None: steps overlap, and `device` and `host` give the time
    device: Fit | None  # the device's time; None: not measured
    host: dict[str, Fit]  # plan, launch and commit
    emit: float  # the usual time between two steps
    reports: bool  # the engine reports its launches or its device; False: only when a step ended
    unseen: np.ndarray  # directions [FEATURES, k] of prompts that no fitted step had
    alone: frozenset[int]  # the fitted steps of which a share above OWN of the expected time is their own time
    untold: np.ndarray  # directions [FEATURES, k] in which no fitted step lies: their costs are unknown
    rare: float | None  # "steps with several rows" of the kind of steps that the fit has too few of; None: of neither
    spreads: tuple[float, float] = (0.0, 0.0)  # typical deviation (without prefill, with prefill)
    device_spreads: tuple[float, float] = (0.0, 0.0)
    usual: UsualTimes | None = None  # of steps beside prompts; only if steps overlap and the engine does not report

    def expected(self, windows: Windows) -> Expected:
        """Returns the expected times of these windows."""
        prompts = ~WITHOUT_PREFILL
        if self.whole is not None:
            total, cost = self.whole.of(windows.work), self.whole.of(windows.work * prompts)
            known = (self.whole.error(windows.work * prompts) <= DETERMINED * cost) & self._seen(windows.work)
            return Expected(total - cost * ~known, {0: cost * known}, ~known, ~known)
        assert self.device is not None
        fits = {**self.host, "device": self.device}
        before, own, ahead = (
            {name: fit.of(work * prompts) for name, fit in fits.items()}  # what the prompts cost
            for work in (windows.before, windows.work, windows.ahead)
        )
        zero, here = np.zeros(len(windows.number)), windows.here
        plan, launch = self.host["plan"], self.host["launch"]
        planned = [plan.of(work) + launch.of(work) for work in (windows.work, windows.ahead)]
        commit = self.host["commit"].of(windows.before)
        host = commit + self.emit + planned[0] * here + planned[1]
        # The device begins with a step when its launch begins, but not before the step before has ended.
        offset = np.where(here, commit + self.emit + plan.of(windows.work), -windows.head)
        device = offset + self.device.of(windows.work)
        total = np.maximum(host, device)
        # Without the prompts, the host and the device would need this much less.
        host_less = {-1: before["commit"], 0: (own["plan"] + own["launch"]) * here, 1: ahead["plan"] + ahead["launch"]}
        all_less = sum(host_less.values(), zero)
        device_less = own["device"] - np.where(own["device"] > 0, windows.head, 0.0)
        cost = np.maximum(total - np.maximum(host - all_less, device - device_less), 0.0)
        # The prompts of the longer path caused the cost.
        by_host = host >= device
        errors = np.where(by_host, self._host_error(windows), self.device.error(windows.work * prompts))
        known = errors <= DETERMINED * np.where(by_host, all_less, own["device"])
        launched = windows.work * windows.here[:, None] + windows.ahead
        known &= np.where(by_host, self._seen(windows.before) & self._seen(launched), self._seen(windows.work))
        of_host = {i: ms / np.maximum(all_less, 1e-9) for i, ms in host_less.items()}
        prefill = {i: cost * known * np.where(by_host, share, i == 0) for i, share in of_host.items()}
        return Expected(total - cost * ~known, prefill, by_host & ~known, ~known)

    def knows(self, step: int) -> bool:
        """True if fitted steps tell what the decoding rows of this step cost: some had as many rows, or their numbers
        of rows varied, so that the fit does not guess. A step without decoding rows is always known."""
        work = _work(self.steps, np.array([step % self.steps.capacity]))
        if not work[0, ROWS].any():
            return True
        if work[0, SEVERAL] == self.rare:
            return False
        if self.rare is not None:
            work[:, SEVERAL] = 0
        fitted = self.whole if self.whole is not None else self.device
        assert fitted is not None
        decoding = work * WITHOUT_PREFILL
        return any(
            bool(_within(part, self.untold)[0] and (fitted.error(part) <= DETERMINED * fitted.of(part))[0])
            for part in (decoding, work)
        )

    def device_time(self, windows: Windows) -> tuple[np.ndarray, np.ndarray]:
        """Returns the expected times of the device, and which of them lack the prompts, because the fit does not
        determine what these cost. Call it only if the device's time is measured."""
        assert self.device is not None
        prompts = windows.work * ~WITHOUT_PREFILL
        cost = self.device.of(prompts)
        lacking = (self.device.error(prompts) > DETERMINED * cost) | ~self._seen(windows.work)
        return self.device.of(windows.work) - cost * lacking, lacking

    def _seen(self, work: np.ndarray) -> np.ndarray:
        """Returns for each row of work [n, FEATURES] whether fitted steps had such prompts; True without prompts."""
        return _within(work, self.unseen)

    def _host_error(self, windows: Windows) -> np.ndarray:
        """Returns the standard error of what prompts cost the host."""
        prompts, here = ~WITHOUT_PREFILL, windows.here[:, None]
        squares = self.host["commit"].error(windows.before * prompts) ** 2
        for name in PLANNED:
            squares = squares + self.host[name].error((windows.work * here + windows.ahead) * prompts) ** 2
        return np.sqrt(squares)


def _within(work: np.ndarray, unseen: np.ndarray) -> np.ndarray:
    """Returns for each row of work [n, FEATURES] whether it has nothing in these directions [FEATURES, k]."""
    return (np.abs(work @ unseen) <= UNSEEN).all(axis=1)


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
    took, device = column("took")[at], column("device")[at]
    paused = np.nan_to_num(column("part:gc")[at].astype(np.float64)) + np.nan_to_num(column("part:delayed")[at])
    # If the host waited, it saw the step end on the device. Otherwise the step began at the earliest with its launch.
    waited = column("part:wait")[previous].astype(np.float64)
    head = np.where(parts["wait"] > WAITED, np.fmax(device - took, 0.0), own["launch"] + waited)
    return Windows(
        number, _work(steps, at), _work(steps, following) * ahead[:, None], _work(steps, previous) * before[:, None],
        here, np.where(~here & (waited < WAITED), head, 0.0), parts, own, took, np.minimum(paused, took), device,
    )


def _work(steps: Steps, at: np.ndarray) -> np.ndarray:
    column, tokens = steps.column, steps.prefilled(at)
    rows = column("decodes")[at] + column("drafted")[at]
    columns = (
        np.ones(len(at)), rows > 1, column("decodes")[at], column("drafted")[at], tokens > 0, tokens,
        column("keys")[at], column("pairs")[at],
    )
    return np.column_stack(columns).astype(np.float64)


def fit(steps: Steps, horizon: int, without: tuple[int, ...] = ()) -> CostModel | None:
    """Returns the model of the steps up to `horizon`, without some steps; None if too few of them have a time."""
    at = steps.indices(horizon - FIT_STEPS + 1, horizon)
    at = at[~np.isnan(steps.column("wall")[at]) & ~np.isin(steps.column("step")[at], without)]
    if len(at) < LEAST_STEPS:
        return None
    seen = windows(steps, at)
    prefilling = seen.work @ ~WITHOUT_PREFILL > 0
    one, several = (np.sum((seen.work[:, 1] == many) & ~prefilling) for many in (0, 1))
    rare = None
    if min(one, several) < LEAST_ROWS:  # nothing tells the cost of several rows from the constant
        rare = float(one > several) if max(one, several) >= LEAST_ROWS else None
        seen.work[:, 1] = seen.before[:, 1] = seen.ahead[:, 1] = 0
    measured = ~np.isnan(seen.parts["wait"])
    known = ~np.isnan(seen.device)
    overlap = bool((seen.overlapped & measured & known).any())
    # With overlap, the host's pauses do not delay the device, and most end while the host would wait for the device.
    took = seen.took - (0.0 if overlap else seen.paused)
    device, device_spreads = None, (0.0, 0.0)
    if known.sum() >= LEAST_STEPS:
        computed = (seen.device if overlap else np.minimum(seen.device, took))[known]
        device = robust(seen.work[known], computed)
        device_spreads = _spreads(computed - device.of(seen.work[known]), prefilling[known])
    host = {name: robust(seen.work, values) for name, values in seen.own.items()}
    emit = float(np.median(seen.parts["emit"][measured])) if measured.any() else 0.0
    reports = device is not None or not np.isnan(steps.column("launch")[at]).any()
    told, usual, alike = np.ones(len(FEATURES), bool), None, np.ones(len(at), bool)
    if not reports and seen.overlapped.any():
        own, ahead = seen.work[:, PREFILL_TOKENS], seen.ahead[:, PREFILL_TOKENS]
        told, usual, quiet = WITHOUT_PREFILL, UsualTimes(seen.number, own, ahead, took), (own == 0) & (ahead == 0)
        alike = quiet if quiet.sum() >= LEAST_STEPS else alike
    whole = robust((seen.work * told)[alike], took[alike]) if device is None or not overlap else None
    shares = [(fitted.own, seen.number) for fitted in host.values()]
    shares += [(whole.own, seen.number[alike])] if whole is not None else []
    shares += [(device.own, seen.number[known])] if device is not None else []
    alone = frozenset(int(step) for own, number in shares for step in number[own > OWN])
    fitted = (seen.work * told)[alike] if whole is not None else seen.work[known]
    prompts = unseen(seen.work[:, ~WITHOUT_PREFILL])
    directions = np.zeros((len(FEATURES), prompts.shape[1]))
    directions[~WITHOUT_PREFILL] = prompts
    model = CostModel(
        steps, whole, device, host, emit, reports, directions, alone, unseen(fitted), rare,
        device_spreads=device_spreads, usual=usual,
    )
    expected = model.expected(seen)
    return replace(model, spreads=_spreads((took - expected.total)[alike], expected.with_prefill[alike]))


def _spreads(errors: np.ndarray, prefills: np.ndarray) -> tuple[float, float]:
    """Returns the typical deviation of the steps without prefill and of those with prefill."""
    every = 1.4826 * float(np.median(np.abs(errors)))
    found = [
        1.4826 * float(np.median(np.abs(errors[of]))) if of.sum() >= LEAST_PREFILLS else every
        for of in (~prefills, prefills)
    ]
    return found[0], found[1]
