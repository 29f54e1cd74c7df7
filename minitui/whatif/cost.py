"""What a step costs on the device of a recording: fitted to all its steps, with its error.

The fit is that of the timings panel (viewmodel/explain/cost_model.py): a constant, and a cost for each row, prompt
token, key and so on. Beside the keys that each row reads, the keys that all rows hold have a cost: a device reads a
shared block from its memory once. If steps overlap, a step takes the longer of the device's time and the host's. The
device computes a step without a CUDA graph while the host launches it. Such a device has a core for each part of a
chunk, and waits for the part that reads the longest text: there, the end of the longest prompt has a cost instead of
the pairs of query and key. It waits for the longest text that rows decode, too: several programs share it, more of them
if there are fewer rows. Where the recording lacks the host's times, the steps beside prompts tell them.

A played step takes the fitted time, and deviates from it as a recorded step did that it resembles: padded to the same
number of rows, with about the same time, rows and longest text. Kernels have steps and corners that no line has (a GPU
waits for the longest text, a CPU changes its kernels at 48 tokens), a step of the same work does not always take the
same time, and the 99th percentile is made of that. Recorded deviations are used equally often, so that their sum is
right. Stalls come after as many steps as in the recording; in a longer run, they come again, but for one in the first
step: the start of a run, when many requests arrive.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from engine.errors import EngineError
from minitui.text import count
from minitui.viewmodel.explain import cost_model
from minitui.viewmodel.explain.cost_model import LEAST_STEPS, PREFILL_STEPS, PREFILL_TOKENS, ROWS, SEVERAL, robust
from minitui.viewmodel.history.steps import Steps

FEATURES = (*cost_model.FEATURES, "held keys", "longest prompt", "longest share")
KEYS, PAIRS, HELD, LONGEST_PROMPT, LONGEST_SHARE = range(FEATURES.index("keys"), len(FEATURES))
BEYOND = 1.1  # multiple of the most work in a recorded step
NAMES = ("steps", "rows", "rows", "draft tokens", "prompts", "prompt tokens", "keys that decodes read",
         "pairs of query and key in prompts", "tokens in the blocks that requests hold",
         "tokens up to the end of a prompt's chunk", "tokens that a program of the device reads, of the longest text")
NEAR = 8  # recorded steps, of which one gives the deviation
CONSIDERED = 256  # recorded steps with about the same time, among which the nearest are sought
UNLIKE_LONGEST, UNLIKE_ROWS = 0.6, 0.5  # weights of differences, beside that of the fitted times
FEW = 4  # with fewer recorded steps of the same size, those of other sizes tell the deviation
ALIKE = 1.25  # without recorded steps of the same size, up to this factor, a step is extrapolated
STALL, RARE = 1.5, 0.03  # multiple of the usual time of such steps; the most stalls, as a share of the steps of a kind
LEAST = 0.01  # share of the median step; a step with a shorter fitted time counts as one that does not deviate
ONE_ROW, SEVERAL_ROWS, PROMPTS, NO_GRAPH = KINDS = range(4)  # the kinds of steps; NO_GRAPH: or the next step has none
# If the recorded steps do not tell costs apart: rows cost nothing beside their keys, and a key costs as much for each
# row that reads it as for being held. And one step says that prompts cost nothing but their tokens, and the longest
# text nothing but its keys: all prompts may fill the budget, and all texts may be as long. The numbers are the
# certainty of this, relative to that of the recorded steps.
ROWS_FREE, KEYS_ALIKE, PROMPTS_FREE, SHARE_FREE = 3.0, 1.0, 30.0, 40.0


@dataclass(slots=True)
class Costs:
    """Costs by feature, in ms: `own` of the device, and `launched` of the host, which launches a step while the device
    computes the step before (`overlap`). Timeline tells when both have done their part.

    `most`: the most of each feature in a recorded step. `steps`: of the fit. `error`: the median relative deviation of
    a step. `stalls`: (steps before it, ms beyond the usual time) of each recorded stall. `no_graph`: ms to launch a
    step without a graph beyond the launch of another step. `tail`: see Timeline. `alone`: for each recorded step that
    was launched when none was in flight, the ms beyond the device's; empty if the engine reports what its host does.
    """

    own: list[float]
    launched: list[float]
    overlap: bool
    most: list[float]
    steps: int
    error: float
    stalls: list[tuple[int, float]]
    recorded: list[RecordedSteps]  # by kind
    no_graph: float = 0.0
    tail: float = 0.0
    graphs: Graphs = field(default_factory=dict)
    alone: list[float] = field(default_factory=list)

    @property
    def limits(self) -> list[float]:
        """Work of a step is extrapolated if it is larger."""
        return [BEYOND * most for most in self.most]

    def of(self, work: Sequence[float], kind: int) -> tuple[float, float]:
        """Returns what work [FEATURES] costs: (own, launched)."""
        return cost_of(work, self.own), cost_of(work, self.launched) + self.no_graph * (kind == NO_GRAPH)

    def beyond(self, most: Sequence[float]) -> list[str]:
        """Returns in words how the largest steps of a played run exceed the recorded ones: "1,024 prompt tokens in a
        step (at most 512 were recorded)"."""
        return [
            f"{most[i]:,.0f} {name} in a step (at most {self.most[i]:,.0f} were recorded)"
            for i, name in enumerate(NAMES) if i not in (0, SEVERAL) and most[i] > self.limits[i]
        ]


class Timeline:
    """When the results of steps come, in ms. The host launches a step, and then waits for the results of the step
    before. The device computes steps one after the other; a step without a graph while the host launches it."""

    def __init__(self, tail: float = 0.0) -> None:
        """`tail`: the least time that the device computes after the launch of a step without a graph."""
        self._tail = tail
        self._now = self._host = self._device = 0.0  # the last results; until when each has work
        self._ends: deque[float] = deque()  # when the device has computed each step in flight

    @property
    def idle(self) -> bool:
        """True if no step is in flight."""
        return not self._ends

    def launch(self, own: float, launched: float, kind: int) -> None:
        """Launch a step."""
        begin, self._host = self._host, self._host + launched
        if kind == NO_GRAPH:
            self._device = max(max(self._device, begin) + own, self._host + self._tail)
        else:
            self._device = max(self._device, self._host) + own
        self._ends.append(self._device)

    def arrive(self) -> float:
        """Wait for the oldest step in flight; return the time since the results of the step before."""
        before, self._now = self._now, max(self._ends.popleft(), self._host)
        self._host = self._now
        return self._now - before


def work_of(
    n: int, drafted: int, keys: int, longest: int, chunks: Iterable[tuple[int, int]], held: int, graphs: Graphs
) -> tuple[float, ...]:
    """Returns the features [FEATURES] of a step in which `n` rows decode, which read `keys`, `longest` of them in one
    row; `chunks`: (start, tokens) of prompts; `held`: tokens in the blocks that requests hold."""
    tokens = pairs = end = prompts = 0
    for start, length in chunks:
        prompts += 1
        tokens += length
        pairs += length * (start + length // 2)
        end = max(end, start + length)
    share = share_of(n, prompts, longest, graphs)
    return 1, n + drafted > 1 and not tokens, n, drafted, tokens > 0, tokens, keys, pairs, held, end, share


def cost_of(work: Sequence[float], costs: Sequence[float]) -> float:
    """Returns what work [FEATURES] costs, in ms. A step with prompts costs no less than its decodes alone."""
    cost = sum(map(mul, work, costs))
    if not work[PREFILL_STEPS]:
        return cost
    several = work[ROWS[0]] + work[ROWS[1]] > 1
    return max(cost, several * costs[SEVERAL] + sum(work[i] * costs[i] for i in OF_DECODES))


def share_of(n: int, prompts: int, longest: int, graphs: Graphs) -> float:
    """Returns how many tokens of the longest text one program reads, if n rows decode: all if the device's splits are
    unknown, none if the rows are computed as chunks. More programs than fill the device run one after the other."""
    if not graphs.get("splits"):
        return longest
    if prompts and n + prompts <= graphs["prompts"]:
        return 0.0
    size = _padded(n, graphs["decodes" if prompts else "rows"])
    splits = graphs["splits"][min(bisect_left(graphs["rows"], size), len(graphs["rows"]) - 1)]
    return longest * max(1 / splits, n / graphs["programs"])


Graphs = dict[str, Any]  # EngineInfo.graphs
NO_GRAPHS: Graphs = {"rows": [], "decodes": [], "tokens": 0, "prompts": 0}  # no step with prompts has one
PREFILL = (PREFILL_STEPS, PREFILL_TOKENS, LONGEST_PROMPT)
OF_DECODES = (0, *ROWS, KEYS, HELD, LONGEST_SHARE)


class RecordedSteps(NamedTuple):
    """Recorded steps of a kind, sorted by size and then by fitted time. `like`: in rows, their fitted times, numbers of
    rows and longest texts. `multiples`: of the fitted times."""

    sizes: list[int]
    like: np.ndarray
    multiples: list[float]


AS_FITTED = RecordedSteps([1], np.array([[0.0], [1.0], [1.0]]), [1.0])  # no step deviates


class StepPath(NamedTuple):
    """What tells which recorded steps a step resembles: its kind, the number of rows to which the device pads it, its
    rows, and the tokens of the longest text that they read. Of NO_GRAPH, the size is 2 for a step without a graph."""

    kind: int
    size: int
    rows: int
    longest: int


def path_of(work: Sequence[float], prompts: int, longest: int, graphs: Graphs) -> StepPath:
    """Returns the path of a step with this work [FEATURES] and this number of prompts. If the sizes of
    graphs are unknown, a size that devices often pad to; 1 with prompts."""
    n = int(work[ROWS[0]] + work[ROWS[1]])
    if not work[PREFILL_STEPS]:
        return StepPath(int(n > 1), _padded(n, graphs.get("rows", ())), n, longest)
    if graphs and (prompts > graphs["prompts"] or n + work[PREFILL_TOKENS] > graphs["tokens"]):
        return StepPath(NO_GRAPH, 2, n, longest)
    beside = bool(graphs) and n + prompts > graphs["prompts"]
    return StepPath(PROMPTS, _padded(n + prompts, graphs["decodes"]) if beside else 1, n, longest)


def beside_no_graph(path: StepPath) -> StepPath:
    """Returns the path of a step, if a step without a graph is launched before its results."""
    return path if path.kind == NO_GRAPH else path._replace(kind=NO_GRAPH, size=1)


def _padded(n: int, sizes: Sequence[int]) -> int:
    if sizes and n <= sizes[-1]:
        return sizes[bisect_left(sizes, n)]
    if n <= 8:
        return 1 << (n - 1).bit_length() if n else 0
    step = max(8, 1 << n.bit_length() - 6 if n >= 64 else 8)
    return -(-n // step) * step


class Deviations:
    """Draws the times of a played run's steps."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._used = [[0] * len(recorded.sizes) for recorded in costs.recorded]
        self._longest = max(1.0, *(recorded.like[2].max() for recorded in costs.recorded))
        self._steps = self._stalled = self._alone = 0
        self.extrapolated = False  # no recorded step had about as many rows as the last one

    def took(self, path: StepPath, fitted: float, alone: bool = False) -> float:
        """Returns the time of a step: its fitted time with the deviation of one of the NEAR recorded steps that it
        resembles most, one of those used least. Adds a stall where one is due, and the host's time if it is `alone`."""
        costs, recorded, size = self._costs, self._costs.recorded[path.kind], path.size
        sizes = recorded.sizes
        self.extrapolated = bisect_right(sizes, size * ALIKE) == bisect_left(sizes, size / ALIKE)
        first, end = bisect_left(sizes, size), bisect_right(sizes, size)
        if end - first < FEW:
            first, end = 0, len(sizes)
        elif end - first > CONSIDERED:
            middle = first + int(np.searchsorted(recorded.like[0, first:end], fitted))
            first = max(first, min(middle - CONSIDERED // 2, end - CONSIDERED))
            end = first + CONSIDERED
        weights = np.array((1 / max(fitted, 1e-9), UNLIKE_ROWS / max(1, path.rows), UNLIKE_LONGEST / self._longest))
        step = np.array(((fitted,), (path.rows,), (path.longest,)))
        unlike = weights @ np.abs(recorded.like[:, first:end] - step)
        near = unlike.argpartition(NEAR)[:NEAR] if len(unlike) > NEAR else np.arange(len(unlike))
        used = self._used[path.kind]
        _, _, at = min((used[first + i], unlike[i], first + i) for i in near.tolist())
        used[at] += 1
        self._steps += 1
        stall = 0.0
        if costs.stalls:
            again, which = divmod(self._stalled, len(costs.stalls))
            index, ms = costs.stalls[which]
            if self._steps > again * costs.steps + index:
                stall = ms if index or not again else 0.0
                self._stalled += 1
        if alone and costs.alone:
            stall += costs.alone[self._alone % len(costs.alone)]
            self._alone += 1
        return fitted * recorded.multiples[at] + stall


def costs_of(steps: Steps, where: str, graphs: Graphs | None = None) -> Costs:
    """Returns the costs of recorded steps. Raises EngineError if too few of them have times; `where` they are from."""
    at, n = steps.indices(steps.first, steps.last), len(FEATURES)
    at = at[~np.isnan(steps.column("took")[at])]
    if len(at) < LEAST_STEPS:
        raise EngineError(
            f"{where} has {count(len(at), 'step')} with times; the cost of a step needs at least {LEAST_STEPS}: "
            "record a longer run"
        )
    seen = cost_model.windows(steps, at)
    host = sum((seen.parts[name] for name in ("commit", "emit", "plan", "launch")), np.zeros(len(at)))
    known = ~np.isnan(seen.device + host + seen.parts["wait"])
    overlap, took, no_graph, tail = bool(seen.overlapped.any()), seen.took, 0.0, 0.0
    measured = overlap and known.sum() >= LEAST_STEPS
    if not overlap and np.isnan(seen.parts["wait"]).all():  # then a step's time is without what lies between two steps
        between = np.diff(steps.column("arrived")[at] * 1e3, prepend=np.nan) - took
        follows = (steps.column("decodes")[at] > 0) & (between >= 0)  # the engine had work all along
        took = took + np.where(follows, between, np.median(between[follows]) if follows.any() else 0.0)
    alone = np.zeros(0)
    if overlap and not measured:
        first = seen.here & ~np.isnan(seen.device)
        host_of = np.where(first, np.maximum(took - seen.device, 0.0), 0.0)
        took, alone = took - host_of, host_of[first]
    graphs = graphs or (NO_GRAPHS if overlap and not measured else {})
    chunks = [steps.chunks(step) for step in seen.number.tolist()]
    ends = [max((start + length for _, start, length, _ in each), default=0) for each in chunks]
    prompts, longest = list(map(len, chunks)), steps.column("longest")[at].tolist()
    rows = zip(steps.column("decodes")[at].tolist(), prompts, longest, strict=True)
    for features in (seen.work, seen.ahead):
        features[:, SEVERAL] *= 1 - features[:, PREFILL_STEPS]  # as in work_of
    work = np.column_stack((seen.work, steps.column("in_use")[at], ends, [share_of(*one, graphs) for one in rows]))
    launched = np.column_stack((seen.ahead + seen.work * seen.here[:, None], np.zeros((len(at), n - HELD))))
    paths = [path_of(*one, graphs) for one in zip(work.tolist(), prompts, longest, strict=True)]
    untold = [PAIRS] if overlap else [LONGEST_PROMPT, LONGEST_SHARE]  # see above
    told, most = work.copy(), work.max(axis=0)
    told[:, untold], most[untold] = 0.0, np.inf
    kinds = np.array([path.kind for path in paths])
    if overlap:
        slow = kinds == NO_GRAPH
        slowly = slow & seen.here | np.append(slow[1:], False) & seen.overlapped
        if measured:
            of_device, of_launch = known & ~slow, known & ~slowly
            own = _of_device(told[of_device], np.minimum(seen.device, took)[of_device], _prior(told, took))
            of_host = robust(launched[of_launch], host[of_launch]).costs
            launch, usual = seen.own["launch"], float(np.median(seen.own["launch"]))
            if graphs:
                usual_of = float(np.median(launch[slow])) if slow.sum() >= FEW else graphs["launch_ms"]
                no_graph = max(0.0, usual_of - usual)
        else:
            own, of_host, no_graph, tail = _from_results(told, took, seen.device, slow, slowly)
    else:
        own, of_host, slow, slowly = robust(told, took, _prior(told, took)).costs, np.zeros(n), kinds < 0, kinds < 0
    own_costs, host_costs = own.tolist(), of_host.tolist()
    costs = [
        (cost_of(one, own_costs), cost_of(each, host_costs) + no_graph * late, kind)
        for one, each, late, kind in zip(told.tolist(), work.tolist(), slow.tolist(), kinds.tolist(), strict=True)
    ]
    fitted = np.array(_played(costs, seen.overlapped.tolist(), tail))
    kinds = np.where(slow | slowly, NO_GRAPH, kinds)
    paths = [beside_no_graph(path) if late else path for late, path in zip(slowly.tolist(), paths, strict=True)]
    # After a long launch, the device may have computed a step already: the fit then gives it no time at all.
    multiples = np.ones(len(at))
    np.divide(took, fitted, out=multiples, where=fitted > max(LEAST * float(np.median(took)), 1e-9))
    stalls, recorded = np.zeros(len(at)), []
    _, sizes, rows, texts = np.array(paths).T
    for kind in KINDS:
        mine = kinds == kind
        of = np.flatnonzero(mine)
        if len(of) < NEAR and kind == NO_GRAPH:
            recorded.append(AS_FITTED)
            continue
        if len(of) < NEAR:
            of = np.arange(len(kinds))
        of = of[np.lexsort((fitted[of], sizes[of]))]
        usual_multiples = _usual(multiples[of])
        stalled = multiples[of] > STALL * usual_multiples
        stalled &= stalled.mean() <= RARE  # else such steps are slow for a reason that the fit does not have
        stalls[of] = np.where(mine[of], (multiples[of] - usual_multiples) * fitted[of] * stalled, stalls[of])
        used = np.where(stalled, usual_multiples, multiples[of])
        recorded.append(RecordedSteps(sizes[of].tolist(), np.array((fitted, rows, texts))[:, of], used.tolist()))
    return Costs(
        own_costs, host_costs, overlap, most.tolist(), len(at), float(np.median(np.abs(multiples - 1))),
        [(i, ms) for i, ms in enumerate(stalls.tolist()) if ms], recorded, no_graph, tail, graphs, alone.tolist(),
    )


def _played(costs: list[tuple[float, float, int]], overlapped: list[bool], tail: float) -> list[float]:
    """Returns the times of recorded steps with these (own, launched, kind), in their order. `overlapped`: the next one
    was launched before a step's results."""
    timeline, found, launched = Timeline(tail), [], 0
    for i, ahead in enumerate(overlapped):
        while launched < min(len(costs), i + 1 + ahead):
            timeline.launch(*costs[launched])
            launched += 1
        found.append(timeline.arrive())
    return found


def _from_results(
    told: np.ndarray, took: np.ndarray, device: np.ndarray, slow: np.ndarray, slowly: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Returns (own, launched, no_graph, tail) of an engine that does not report what its host does, as vLLM. The
    results of a step come after the launch of the next one. So the steps before one with prompts tell what its launch
    takes, and the steps after those, what the device still computes after the launch."""
    of_host, prefill = np.zeros(told.shape[1]), np.isin(np.arange(told.shape[1]), PREFILL)
    quiet, known = ~slow & ~slowly, ~np.isnan(device)
    before = ~slow & slowly & np.append(slow[1:], False)
    after = np.flatnonzero(np.append(False, before[:-1]) & ~slowly)
    if min(quiet.sum(), slowly.sum()) < LEAST_STEPS or (known.sum() < LEAST_STEPS and len(after) < FEW):
        return _of_device(told, took, _prior(told, took)), of_host, 0.0, 0.0
    if before.sum() >= FEW:
        prompts = np.roll(told, -1, axis=0)[before][:, [PREFILL_STEPS, PREFILL_TOKENS]]
        no_graph, of_host[PREFILL_TOKENS] = robust(prompts, took[before]).costs
    else:
        no_graph = float(min([np.percentile(took[slowly], 10), *took[before]]))  # the device can take longer
    tail = float(np.percentile(took[slow & ~slowly], 10)) if (slow & ~slowly).any() else 0.0
    own = robust(told[quiet], took[quiet], _prior(told, took)[:3]).costs
    if known.sum() >= LEAST_STEPS:
        of, takes = slow & known, device
    else:
        of = np.isin(np.arange(len(took)), after)
        takes = took - tail + no_graph + told @ of_host - np.roll(told @ own, 1)
    return own + robust(told[of] * prefill, np.maximum(takes[of] - told[of] @ own, 0.0)).costs, of_host, no_graph, tail


def _of_device(work: np.ndarray, took: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Returns the costs of a GPU: it reads the weights while it multiplies prompts, so their steps have a constant of
    their own, which can be smaller than that of other steps."""
    split = work.copy()
    split[:, 0] -= work[:, PREFILL_STEPS]
    costs = robust(split, took, prior).costs
    costs[PREFILL_STEPS] -= costs[0]
    return costs


def _usual(multiples: np.ndarray) -> np.ndarray:
    """Returns for each of these steps, in their order, the median of the steps beside it."""
    beside = np.pad(multiples, FEW, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(beside, 2 * FEW + 1), axis=1)


def _prior(work: np.ndarray, took: np.ndarray) -> np.ndarray:
    """Returns what the fit assumes of costs that the recorded steps do not tell apart, for `robust`."""
    n, most, prior = len(FEATURES), work.max(axis=0), np.zeros((4, work.shape[1]))
    prior[0, ROWS[0]] = ROWS_FREE * most[ROWS[0]]
    prior[1, KEYS], prior[1, HELD] = KEYS_ALIKE * most[KEYS], -KEYS_ALIKE * most[KEYS]
    prior[2, LONGEST_SHARE] = SHARE_FREE * most[LONGEST_SHARE]
    prior[:2] *= np.sqrt(len(work))
    prior[3, PREFILL_STEPS::n] = PROMPTS_FREE
    return prior / max(float(np.median(took)), 1e-6)
