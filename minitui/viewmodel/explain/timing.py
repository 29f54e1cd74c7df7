"""Step timings: percentiles by kind of step, the cause of a slow step, host and device time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from minitui.text import count, ms
from minitui.viewmodel.explain.causes import (
    REST,
    TOLERANCE,
    UNMEASURED,
    WORTH,
    Cause,
    Explanation,
    explain,
    few_prompts,
    in_parts,
    largest_first,
    neighbour,
    prefilled,
)
from minitui.viewmodel.explain.cost_model import CostModel
from minitui.viewmodel.explain.limits import Limit, OtherPrograms, limits
from minitui.viewmodel.history.steps import KINDS, StepRow, Steps
from minitui.viewmodel.history.tokens import FirstToken, FirstTokens, percentiles

WINDOW_SECONDS = 10.0
LEAST_EXPECTED_MS = 0.005  # less is written as 0.00
LEAST_REST = 0.01  # a smaller share of the excess is not called unexplained
OVERLAPPED = 1.05  # a device time of more times the step's time began before the step's time
MAX_STEPS = 20_000  # the largest number of steps in the window
RECENT_FIRST_TOKENS = 32


@dataclass(frozen=True, slots=True)
class KindStats:
    """Durations of the steps of one kind in the window, in ms. `share`: the kind's share of the total of all kinds."""

    steps: int = 0
    p50: float = 0.0
    p99: float = 0.0
    worst: float = 0.0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Timings:
    """The figures of a window of steps, which ends at the last step on the screen. `seconds`: the sum of step times."""

    decode: KindStats = KindStats()
    mixed: KindStats = KindStats()
    prefill: KindStats = KindStats()
    by_device: bool = False  # the three are the device's times, because steps overlap
    median_ms: float | None = None  # median duration of the steps that only decode; without such steps, of all
    seconds: float = 0.0
    steps: int = 0
    slowest: StepRow | None = None
    first_token: FirstToken | None = None  # of the request that was the last to get its first token
    median_first_ms: float | None = None  # median time to first token, of the last RECENT_FIRST_TOKENS
    first_tokens: int = 0  # how many first tokens this median includes
    host_ms: float = 0.0  # mean per step: plan + launch + commit
    launch_known: bool = True  # False: the engine does not report its launches; host_ms is plan + commit
    device_ms: float | None = None  # mean per step; None: not measured
    device_busy: float = 0.0  # device time as a share of step time
    ranks: int = 1  # GPUs that share the model
    comm_ms: float = 0.0  # mean time per step in collectives, from the `comm` records
    comm_share: float = 0.0  # share of step time in collectives
    drafted: int = 0  # draft tokens verified
    accepted: int = 0  # draft tokens accepted
    per_row: float = 1.0  # tokens per row and decode step, accepted drafts included
    limits: tuple[OtherPrograms | Limit, ...] = ()  # what limits the speed: host, device or other programs


def summarise(steps: Steps, firsts: FirstTokens, horizon: int, seq: int) -> Timings:
    """Returns the timings of the last WINDOW_SECONDS of step time up to step `horizon`. Only time inside steps counts:
    a long pause does not empty the window."""
    last = steps.get(horizon)
    while last is not None and last.wall_ms is None:  # the timing of this step has not arrived
        last = steps.get(last.step - 1)
    seen = firsts.until(seq)[-RECENT_FIRST_TOKENS:]
    median = percentiles(np.array([item.total_ms for item in seen]))[0] if seen else None
    if last is None:
        return Timings(first_token=seen[-1] if seen else None, median_first_ms=median, first_tokens=len(seen))
    for most in (MAX_STEPS // 8, MAX_STEPS):  # the smaller number is almost always enough
        at = steps.indices(max(steps.first, last.step - most), last.step)
        at = at[~np.isnan(steps.column("wall")[at])]
        spent = np.cumsum(steps.column("took")[at][::-1])  # ms: the sums from the last step back to each step
        if spent[-1] > WINDOW_SECONDS * 1e3:
            break
    at = at[-max(1, int(np.searchsorted(spent, WINDOW_SECONDS * 1e3, "right"))) :]
    wall = steps.column("took")[at]
    decodes = steps.column("decodes")[at]
    kinds = steps.kinds(at)
    drafted, accepted = int(steps.column("drafted")[at].sum()), int(steps.column("accepted")[at].sum())
    numbers = steps.column("step")[at]
    worst = steps.get(int(numbers[int(wall.argmax())])) if len(wall) else None
    device = steps.column("device")[at]
    known = ~np.isnan(device)
    # With overlap, the time between two results includes the launch of the next step: a slow launch would count for the
    # kind of another step. So the kinds are then compared by the device's time.
    overlapped = bool((device[known] > OVERLAPPED * wall[known] + 0.05).any())
    took = np.where(known, device, wall) if overlapped else wall
    total = float(took.sum()) or 1.0
    decoding = wall[kinds == 0]
    comm = steps.column("comm")[at]
    exchanged = ~np.isnan(comm)
    launch = steps.column("launch")[at]
    host = steps.column("plan")[at] + np.nan_to_num(launch) + steps.column("commit")[at]
    return Timings(
        **{name: _stats(took[kinds == kind], total) for kind, name in enumerate(KINDS)}, by_device=overlapped,
        median_ms=float(np.median(decoding if len(decoding) else wall)), seconds=float(wall.sum()) / 1e3, steps=len(at),
        slowest=worst, first_token=seen[-1] if seen else None, median_first_ms=median, first_tokens=len(seen),
        host_ms=float(host.mean()), launch_known=not np.isnan(launch).any(),
        device_ms=float(device[known].mean()) if known.any() else None,
        device_busy=min(1.0, float(device[known].sum()) / float(wall[known].sum())) if known.any() else 0.0,
        ranks=steps.ranks if exchanged.any() else 1, comm_ms=float(comm[exchanged].mean()) if exchanged.any() else 0.0,
        comm_share=float(comm[exchanged].sum() / (wall[exchanged].sum() or 1.0)) if exchanged.any() else 0.0,
        drafted=drafted, accepted=accepted,
        per_row=1 + accepted / int(decodes.sum()) if decodes.any() else 1.0, limits=tuple(limits(steps, last.step)),
    )


USUAL = "usual "  # begins the last part of `why_briefly`, which may be left out


def took_words(row: StepRow) -> str:
    """Returns how long a step took: "5.24 ms". A step that began on the device before the results of the step before it
    arrived: "20.4 ms on the device, ready 1.52 ms after step 362"."""
    if row.took_ms is None:
        return ""
    if row.device_ms is None or row.device_ms <= OVERLAPPED * row.took_ms + 0.05:
        return f"{ms(row.took_ms)} ms"
    return f"{ms(row.device_ms)} ms on the device, ready {ms(row.took_ms)} ms after step {row.step - 1:,}"


def why_briefly(row: StepRow, model: CostModel | None) -> str:
    """Returns `why_slow` for a narrow panel, the largest part first: "prefill of r64 17.9, launch +12.3, usual 4.4", or
    "next step's prefill of r64 17.9" if this was launched meanwhile. The parts add up to the time of the step. A
    cost without a plus is expected."""
    explanation = explain(row, model)
    if model is None or explanation is None:
        return ""
    excess = _excess(row, model, explanation)
    parts = [(part.ms, f"{_brief(part)} +{ms(part.ms)}") for part in excess]
    for prefill in explanation.prefills:
        computed = model.steps.get(prefill.step)
        if computed is not None and prefill.ms > WORTH * explanation.expected:
            whose = {-1: "previous step's ", 0: "", 1: "next step's "}[prefill.step - row.step]
            parts.append((prefill.ms, f"{whose}prefill of {prefilled(computed)} {ms(prefill.ms)}"))
    if (beside := explanation.beside) is not None and beside.ms > WORTH * explanation.expected:
        parts.append((beside.ms, f"{'before' if beside.ahead else 'with'} prompts {ms(beside.ms)}"))
    told = [text for _, text in sorted(parts, reverse=True)]
    expected = "expected time unknown" if explanation.untold else f"expected {ms(explanation.expected)} ms"
    if not excess:  # all parts are in the expected time
        return f"{expected}: {', '.join(told)}" if told else expected
    rest = explanation.took - sum(part for part, _ in parts)
    return ", ".join([*told, f"{USUAL}{ms(rest)}"] if rest >= 0.005 else told)


def usual_words(row: StepRow, model: CostModel | None) -> str:
    """Returns "within 25 % of the expected 12.2 ms" for a step that prompts did not make longer and that has no excess
    to explain; else an empty string."""
    found = explain(row, model)
    if model is None or found is None or found.beside is not None or found.untold or _excess(row, model, found):
        return ""
    if found.prefill > WORTH * found.expected:
        return ""
    faster = found.took < (1 - TOLERANCE) * found.expected
    compared = "faster than" if faster else f"within {100 * TOLERANCE:.0f} % of"
    return f"{compared} the expected {ms(found.expected)} ms"


def _brief(part: Cause) -> str:
    """Returns a cause without the step and the number of tokens: "launch", "prefill of r64"."""
    if part.key == "device":
        return part.name.removeprefix("device in the ").partition(" (")[0]
    return part.name.partition(" of ")[0]


def _excess(row: StepRow, model: CostModel, explanation: Explanation) -> list[Cause]:
    """Returns the named parts of an excess that is more than the usual variation, and the rest. As in the texts of
    gaps, a rest within the usual variation needs no explanation. If it contains the time of prompts that no other steps
    tell, it is not called unexplained."""
    if not explanation.slow and not explanation.longer:
        return []
    found = explanation.causes or explanation.varied
    parts = [replace(part, name=UNMEASURED) if part.name == "device" else part for part in found]
    excess = explanation.took - explanation.expected
    rest = excess - sum(part.ms for part in parts)
    name, key = (REST, "variation") if rest <= explanation.variation else ("unexplained", "unexplained")
    if key == "unexplained" and explanation.untold and model.reports:
        name, key = few_prompts(row), "prompts_unknown"
    parts += [Cause(name, rest, key)] * (rest > max(LEAST_REST * excess, 0.005))
    return largest_first(parts)


def _stats(wall: np.ndarray, total: float) -> KindStats:
    if not len(wall):
        return KindStats()
    return KindStats(len(wall), *percentiles(wall), worst=float(wall.max()), share=float(wall.sum()) / total)


def why_slow(row: StepRow, model: CostModel | None, always: bool = False) -> str:
    """Returns the expected time of a step and, if the step took longer, the measured causes, in milliseconds:
    "expected 6.9 ms, +83.9: garbage collection 80.1, unexplained 3.8". Empty while too few steps are timed.
    If other steps took as much longer, the text also has the prompts' measured times: "(measured: launch 36.1 ms)".
    `always`: a difference within the usual variation, which has no causes, has words, too."""
    explanation = explain(row, model)
    if model is None or explanation is None:
        return ""
    text = f"expected {ms(explanation.expected)} ms"
    if (beside := explanation.beside) is not None:
        text += f", usual {beside.usual}"
        text += f"; {beside.next_step(row.step)}" if beside.ahead else ""
    elif explanation.untold or (row.chunks and not model.reports and not explanation.prefills):
        of = f"its {count(row.prefill_tokens, 'prefill token')}" if row.chunks else "the prompts of the step beside it"
        lacks = explanation.expected < LEAST_EXPECTED_MS
        text = f"the usual time of {of} is unknown" if lacks else f"{text} without {of}, whose time is unknown"
    for prefill in explanation.prefills:
        computed = model.steps.get(prefill.step)
        if computed is None or (prefill.step != row.step and prefill.ms <= WORTH * explanation.expected):
            continue
        tokens = count(computed.prefill_tokens, "prefill token")
        if prefill.step != row.step:
            part = f"{prefill.parts[0].name} of " if prefill.parts else ""
            tokens = f"the {part}{neighbour(prefill.step, row.step)} ({tokens})"
        text += f", {ms(prefill.ms)} of it for {tokens}"
        if explanation.longer and not explanation.slow and (measured := in_parts(prefill)):
            text += f" (measured: {measured})"
    excess = explanation.took - explanation.expected
    if not (parts := _excess(row, model, explanation)):
        words = "faster than expected" if excess < -TOLERANCE * explanation.expected else "within the usual variation"
        return f"{text}, {'-' if excess <= -0.005 else '+'}{ms(abs(excess))}: {words}" if always else text
    told = ", ".join(f"{part.name} {ms(part.ms)}" for part in parts)
    unexplained = any(part.key == "unexplained" for part in parts)
    ended_only = " (this engine reports only when a step ended)" * (not model.reports and unexplained)
    added = f", +{ms(excess)}" if explanation.expected >= LEAST_EXPECTED_MS else ""
    return f"{text}{added}: {told}{ended_only}"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The timed steps of a range. All times are in ms."""

    step: np.ndarray  # numbers
    took: np.ndarray  # StepRow.took_ms
    kind: np.ndarray  # indices in KINDS

    def slowest(self, n: int) -> list[int]:
        """Returns the numbers of the `n` slowest steps, the slowest first."""
        order = np.argsort(-self.took, kind="stable")[:n]
        return [int(step) for step in self.step[order]]

    def columns(self, most: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """Returns (steps per column, the longest time, the median, the index of the slowest step) of at most `most`
        columns, oldest first."""
        k = max(1, math.ceil(len(self.took) / most))
        begins = np.arange(0, len(self.took), k)
        parts = [self.took[begin : begin + k] for begin in begins]
        longest = np.array([part.max() for part in parts])
        median = np.array([np.median(part) for part in parts])
        return k, longest, median, np.array([begin + part.argmax() for begin, part in zip(begins, parts, strict=True)])

    def histogram(self, rows: int) -> list[tuple[float, list[int]]]:
        """Returns at most `rows` bins of equal ratio as (upper limit, number of steps of each of KINDS)."""
        low, high = float(self.took.min()), float(self.took.max())
        if not high > low > 0:
            return [(high, [int((self.kind == kind).sum()) for kind in range(len(KINDS))])]
        edges = np.geomspace(low, high, rows + 1)
        at = np.clip(np.searchsorted(edges, self.took, "right") - 1, 0, rows - 1)
        counts = np.bincount(at * len(KINDS) + self.kind, minlength=rows * len(KINDS)).reshape(rows, len(KINDS))
        return [(float(edges[i + 1]), counts[i].tolist()) for i in range(rows)]


def step_times(steps: Steps, horizon: int, count: int) -> StepTimes:
    """Returns the times of the timed steps among the last `count` steps up to step `horizon`."""
    at = steps.indices(horizon - count + 1, horizon)
    at = at[~np.isnan(steps.column("wall")[at])]
    return StepTimes(steps.column("step")[at], steps.column("took")[at], steps.kinds(at))


def rows_of(steps: Steps, numbers: list[int]) -> list[StepRow]:
    """Returns the rows of these steps; steps that are no longer kept are left out."""
    return [row for row in map(steps.get, numbers) if row is not None]
