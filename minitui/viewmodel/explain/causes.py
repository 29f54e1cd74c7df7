"""Explains slow steps: the cost model gives the expected time of a step, and measured parts show what took longer.

A cause is named only with evidence from the records: a pause that the engine measured, a part of the host's time that
took longer than usual, or a device time above the model's. A cause gets at most the time that it cost, and the rest of
the excess is called unexplained.

Times vary, also without a cause. An excess that is not much larger than others in this run makes no step slow. But the
measured parts that took longer than expected are still told (`varied`).

A step's time is the time since the results of the step before. It contains the commit of the step before and, where
steps overlap, the plan and the launch of the next step. The names of causes say so, for example "launch of next step 57
(prefill of r12)".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from minitui.text import count, ms
from minitui.viewmodel.explain.cost_model import (
    PLANNED,
    PREFILL_TOKENS,
    WITHOUT_PREFILL,
    CostModel,
    Usual,
    Windows,
    windows,
)
from minitui.viewmodel.history.steps import StepRow, Steps

TOLERANCE = 0.25  # usual variation: an excess up to this share of the expected time needs no explanation
NOISE = 4.0  # an excess up to this many typical deviations needs no explanation
MOSTLY = 0.5  # pauses in an excess that needs no explanation are named if they are at least this share of the excess
WORTH = 0.1  # causes with a smaller share of the excess are not named
LONG = 2.0  # prompts that make a step longer by this factor are a reason in lines of text
NAMED = 2  # requests named in a cause; more are counted
EMIT = "output and commands"
REST = "rest"  # of an excess beside its causes: within the usual variation; a larger one is "unexplained"
UNMEASURED = "device (cause unknown)"  # slower than in other steps of the same work


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that cost `ms` of a step. `key`: its kind, the same in every step; for JSON."""

    name: str
    ms: float
    key: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """What the prompts of `step` cost of the time of a step: `ms` of the expected time. `parts`: the measured times
    that contain this cost, the longest first; empty if not all are measured."""

    step: int
    ms: float
    parts: tuple[Cause, ...]


@dataclass(frozen=True, slots=True)
class BesidePrompts:
    """Prompts in a step or in the next one, of an engine that reports only when a step ended."""

    usual: Usual  # the time of such steps: the expected time of this step
    ms: float  # how much longer they take than steps without prompts; 0 if they do not
    ahead: int  # prompt tokens of the next step

    def next_step(self, step: int) -> str:
        """Returns "next step 57 has 424 prefill tokens", seen from `step`; empty without these."""
        return f"{neighbour(step + 1, step)} has {count(self.ahead, 'prefill token')}" if self.ahead else ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A step's time compared with its expected time, in ms. `causes` and `unexplained` add up to the excess. If the
    excess is no more than `tolerance`, `unexplained` is 0, and `causes` are the measured pauses in it."""

    took: float
    expected: float
    prefills: tuple[Prefill, ...]  # the parts of `expected` that prompt tokens take
    tolerance: float  # a smaller excess makes no step slow; pauses in it are named
    causes: tuple[Cause, ...] = ()
    unexplained: float = 0.0
    untold: bool = False  # `expected` is without prompts, because no other steps tell their time
    varied: tuple[Cause, ...] = ()  # measured parts that took longer than expected, of an excess within `tolerance`
    beside: BesidePrompts | None = None

    @property
    def slow(self) -> bool:
        """True if the step took longer than expected, with a measured pause or by more than `tolerance`."""
        return bool(self.causes or self.unexplained)

    @property
    def longer(self) -> bool:
        """True if the excess is more than the usual variation."""
        return self.took - self.expected > self.variation

    @property
    def variation(self) -> float:
        """An excess up to this is the usual variation: most steps beside prompts, and 25 % of other steps."""
        beside = self.beside.usual.high - self.expected if self.beside is not None else 0.0
        return max(TOLERANCE * self.expected, beside)

    @property
    def long(self) -> bool:
        """True if the step was slow, or if prompts made the step LONG times as long as without these, or longer."""
        return self.slow or min(self.took, self.expected) > LONG * (self.expected - self.prefill)

    @property
    def prefill(self) -> float:
        """The part of `expected` that all prompt tokens take, or that steps beside prompts usually take longer."""
        return sum(prefill.ms for prefill in self.prefills) + (self.beside.ms if self.beside is not None else 0.0)


def explain(row: StepRow, model: CostModel | None) -> Explanation | None:
    """Returns the step's time compared with the time that the model expects; None if one of them is unknown. Recordings
    of older versions have no parts, so their explanations have no causes."""
    if model is None or row.wall_ms is None or row.step not in model.steps:
        return None
    steps, parts = model.steps, row.parts
    window = windows(steps, np.array([row.step % steps.capacity]))
    times = model.expected(window)
    took, expected, prefilling = float(window.took[0]), float(times.total[0]), bool(times.with_prefill[0])
    noise, beside = model.spreads[prefilling], _beside_prompts(window, row, model, expected)
    if beside is not None:
        expected, noise = beside.usual.ms, beside.usual.deviation
    excess, tolerance = took - expected, max(TOLERANCE * expected, NOISE * noise)
    if window.head[0] and row.chunks:  # the rest of a prefill that began before varies as much as all of this prefill
        tolerance = max(tolerance, NOISE * model.device_spreads[True])
    prefills = [
        Prefill(row.step + i, float(cost[0]), _prefill_parts(window, row, i))
        for i, cost in times.prefill.items() if cost[0] > 0
    ]
    untold = bool(times.untold[0]) and beside is None
    found = Explanation(took, expected, tuple(prefills), tolerance, beside=beside, untold=untold)
    if excess <= found.variation or (excess <= tolerance and parts is None):
        return found
    if parts is None:
        return replace(found, unexplained=excess)
    left, causes = excess, []

    def blame(name: str, ms: float, key: str) -> None:
        nonlocal left
        ms = min(ms, left)
        if ms > WORTH * excess:
            causes.append(Cause(name, ms, key))
            left -= ms

    host = _host_parts(window, row, model, bool(times.lacking[0]))
    waited = parts.wait - max(0.0, expected - sum(part.usual for part in host))
    computes, device, noise = None, "device", model.device_spreads[bool(row.chunks)]
    if model.device is not None:
        times_of_device, without_prompts = model.device_time(window)
        computes = float(times_of_device[0])
        if without_prompts[0] and row.chunks:
            device = f"device in the prefill of {prefilled(row)} ({count(row.prefill_tokens, 'token')})"
            noise = model.device_spreads[False]  # that of prefills is how far these are above the time without prompts
    if excess <= tolerance:
        if parts.gc + (parts.delayed or 0.0) < MOSTLY * excess:
            for part in sorted(host, key=lambda part: -part.beyond):
                blame(part.name.partition(" (")[0], part.beyond, part.key)  # its prompts have a part of their own
            if row.device_ms is not None and computes is not None:
                ms = min(row.device_ms - computes, waited) if window.overlapped[0] else waited
                blame(device, ms, "device")
            return replace(found, varied=tuple(causes))
        blame("garbage collection", parts.gc, "garbage_collection")
        blame("another program on the core", parts.delayed or 0.0, "other_program")
        return replace(found, causes=tuple(causes))
    largest = max([part.beyond for part in host] + [waited])
    if parts.stops:
        blame("process stopped", largest, "process_stopped")
    blame("garbage collection", parts.gc, "garbage_collection")
    blame("another program on the core", parts.delayed or 0.0, "other_program")
    accounted = excess - left
    if row.comm_ms is not None and computes is not None:
        blame("exchange between ranks", row.comm_ms - computes, "exchange")
    for part in host:
        # The pauses above may lie in any part: subtract their time from the part with the largest excess.
        blame(part.name, part.beyond - (accounted if part.beyond == largest else 0.0), part.key)
    if row.device_ms is not None and computes is not None:
        own = row.device_ms - computes - accounted
        if own > NOISE * noise:
            # If the next step was launched meanwhile, the device delayed only a host that waited for it.
            ms = min(own, waited) if window.overlapped[0] else own
            blame(UNMEASURED if device == "device" else device, ms, "device")
    return replace(found, causes=tuple(causes), unexplained=left)


def _beside_prompts(window: Windows, row: StepRow, model: CostModel, without: float) -> BesidePrompts | None:
    """Returns how long steps with prompts in the same places take; None if unknown. `without`: the expected time of a
    step without prompts."""
    ahead = int(window.ahead[0, PREFILL_TOKENS])
    usual = model.usual.of(row.step, row.prefill_tokens, ahead) if model.usual is not None else None
    return BesidePrompts(usual, max(0.0, usual.ms - without), ahead) if usual is not None else None


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the host's time: how long it took, and how long it should have taken."""

    name: str
    took: float
    usual: float
    key: str

    @property
    def beyond(self) -> float:
        return self.took - self.usual


def _host_parts(window: Windows, row: StepRow, model: CostModel, lacking: bool) -> list[_Part]:
    """Returns the host's parts in a window, each with the step that it belongs to. `lacking`: the usual times are those
    without prompts, as the expected time is."""
    steps, (took, own) = model.steps, _measured(window)
    told = WITHOUT_PREFILL | (not lacking)
    usual = {i: {name: float(part.of(work * told)[0]) for name, part in model.host.items()}
             for i, work in ((-1, window.before), (0, window.work), (1, window.ahead))}
    found = [
        _Part(f"commit of {_named(steps, row.step - 1, row.step)}", took["commit"], usual[-1]["commit"], "commit"),
        _Part(f"{EMIT}{_came(steps.came(row.step))}", took["emit"], model.emit, "emit"),
    ]
    for name in PLANNED:
        if window.here[0]:
            rest = 0.0 if window.overlapped[0] else took[name] - own[name]  # nothing else was planned here
            found.append(_Part(name, own[name] + rest, usual[0][name], name))
        if window.overlapped[0]:
            ahead = f"{name} of {_named(steps, row.step + 1, row.step)}"
            found.append(_Part(ahead, took[name] - own[name], usual[1][name], name))
    return found


def _measured(window: Windows) -> tuple[dict[str, float], dict[str, float]]:
    """Returns (the host's parts of a window, the step's own plan and launch in it)."""
    own = {name: float(window.own[name][0]) if window.here[0] else 0.0 for name in PLANNED}
    return {name: float(values[0]) for name, values in window.parts.items()}, own


def _prefill_parts(window: Windows, row: StepRow, i: int) -> tuple[Cause, ...]:
    """Returns the measured times of the step `row.step + i` in this window, the longest first."""
    if row.parts is None:  # the longest may be missing
        return ()
    took, own = _measured(window)
    if i < 0:
        found = {"commit": took["commit"]}
    elif i > 0:
        found = {name: took[name] - own[name] for name in PLANNED}
    else:
        found = {**own, "device": row.device_ms or 0.0}
    return tuple(sorted((Cause(name, ms, name) for name, ms in found.items()), key=lambda part: -part.ms))


def _named(steps: Steps, step: int, seen_from: int) -> str:
    """Returns "next step 57", or "previous step 55 (prefill of r12)"."""
    row = steps.get(step)
    return neighbour(step, seen_from) + (f" (prefill of {prefilled(row)})" if row is not None and row.chunks else "")


def _came(requests: Sequence[tuple[int, int]]) -> str:
    """Returns " (r12 came with 16,000 prompt tokens)"; empty without requests. `requests`: with their tokens."""
    if not requests:
        return ""
    tokens = sum(tokens for _, tokens in requests)
    return f" ({listed([request for request, _ in requests])} came with {count(tokens, 'prompt token')})"


def neighbour(step: int, seen_from: int) -> str:
    """Returns "next step 57" for a step after the step `seen_from`, or "previous step 55" for one before."""
    return f"{'next' if step > seen_from else 'previous'} step {step:,}"


def prefilled(row: StepRow) -> str:
    """Returns the requests whose prompts a step computed: "r12 and r13", or "5 requests"."""
    return listed([request for request, *_ in row.chunks])


def few_prompts(row: StepRow) -> str:
    """Returns the name of a time whose prompts too few other steps explain: "2 prompts of 512 tokens (too few such
    steps yet to say more)"."""
    beside = "prompts of the step beside it"
    prompts = f"{count(len(row.chunks), 'prompt')} of {count(row.prefill_tokens, 'token')}" if row.chunks else beside
    return f"{prompts} (too few such steps yet to say more)"


def listed(requests: list[int]) -> str:
    """Returns the names of requests, or their number."""
    return count(len(requests), "request") if len(requests) > NAMED else " and ".join(f"r{id}" for id in requests)


def largest_first(causes: Iterable[Cause]) -> list[Cause]:
    """Returns the causes in the order in which every text has them."""
    return sorted(causes, key=lambda cause: -cause.ms)


def in_parts(prefill: Prefill) -> str:
    """Returns the parts of a prefill that are not the device's: "launch 4.20 ms, plan 1.07"; empty if only the device
    took time."""
    every = sum(part.ms for part in prefill.parts)
    worth = [part for part in prefill.parts if part.ms > WORTH * every]
    if not worth or worth[0].name == "device":
        return ""
    return ", ".join(f"{part.name} {ms(part.ms)}" for part in worth) + " ms"
