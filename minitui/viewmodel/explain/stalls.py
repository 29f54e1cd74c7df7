"""Explains the waits of one request from records: what the engine did before its first token, and between two tokens.

A gap covers whole steps. causes.py explains the last step of the gap: prompts, also those of a step that was launched
meanwhile, and each measured cause get at most what they cost, and the rest is unexplained. The steps before the last
one did not compute the request. If the request was preempted in the gap, the steps in which it was in the queue are one
cause, and each step that computed its tokens again is explained like a last step.

The time to first token is a queue and a prefill, which covers the steps up to the first token. Where steps overlap, the
step before the first chunk launched this chunk, so it counts, too. Each step is explained like the last step of a gap;
the cost of prompts is divided by their tokens into the request's own and those of other requests. Of the time in the
queue, only measured pauses are causes, and only the part that must lie in this time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from minitui.text import count, duration, ms
from minitui.viewmodel.explain.causes import (
    REST,
    WORTH,
    Cause,
    Prefill,
    explain,
    few_prompts,
    in_parts,
    largest_first,
    listed,
    neighbour,
    prefilled,
)
from minitui.viewmodel.history.lane import PREFILLING, Gap, Lane
from minitui.viewmodel.history.steps import StepRow

if TYPE_CHECKING:
    from minitui.viewmodel.view import View

ROUNDED = 0.005  # a smaller share of a gap is lost where its parts are rounded
STALL_FROM = 2.0  # times the median gap of a request: a longer gap is a stall
SHORTEST_PAUSE_MS = 1.0  # shorter pauses are not mentioned


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a gap was as long as it was, in ms: `usual` and `named` add up to the gap."""

    usual: float | None  # what its own steps should take without prompts; None: too few such steps have a time
    causes: tuple[Cause, ...] = ()
    unexplained: float = 0.0
    variation: float = 0.0  # a rest that is too small to need an explanation
    varied: tuple[Cause, ...] = ()  # how much longer measured parts took than usual; no more than in other steps
    note: str = ""  # work in the gap whose cost is not known

    @classmethod
    def of(cls, steps: Sequence[Reason], causes: Iterable[Cause]) -> Reason:
        """Returns the reasons of several steps as one, with these causes in place of theirs."""
        usual = [reason.usual for reason in steps if reason.usual is not None]
        return cls(
            sum(usual) if usual else None, tuple(causes), sum(reason.unexplained for reason in steps),
            sum(reason.variation for reason in steps), tuple(part for reason in steps for part in reason.varied),
        )

    @property
    def named(self) -> list[Cause]:
        """Every part of the gap that has a name, the largest first."""
        found = [*self.causes, *(replace(part, name=f"{part.name} longer than usual") for part in self.varied)]
        if self.unexplained:
            found.append(Cause("unexplained", self.unexplained, "unexplained"))
        took = (self.usual or 0.0) + sum(cause.ms for cause in found) + self.variation
        if found and self.variation > ROUNDED * took:  # without the variation, the words would not add up
            found.append(Cause(REST, self.variation, "variation"))
        return largest_first(found)

    @property
    def by_key(self) -> dict[str, float]:
        """All of the gap by the kind of cause, the largest first: the values add up to the gap, in ms."""
        found = dict.fromkeys((cause.key for cause in self.named), 0.0)
        rest = {"usual": self.usual or 0.0, "unexplained": self.unexplained, "variation": self.variation}
        for key, took in [(part.key, part.ms) for part in (*self.causes, *self.varied)] + list(rest.items()):
            if took:
                found[key] = found.get(key, 0.0) + took
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        if self.usual is None and not self.causes:
            return "cause unknown: the times of too few such steps are known" + self._note
        parts = [f"{part.name} {ms(part.ms)}" for part in self.named]
        if not parts:
            return f"usual ({ms(self.usual or 0.0)} ms expected, up to 25 % more)" + self._note
        return ", ".join(parts) + (f" + usual {ms(self.usual)} ms" if self.usual else " ms") + self._note

    @property
    def _note(self) -> str:
        return f"; {self.note}" if self.note else ""


def gap_words(view: View, lane: Lane, gap: Gap) -> str:
    """Returns the gap in words, with its reason."""
    return in_words(gap, explain_gap(view, lane, gap))


def explain_gap(view: View, lane: Lane, gap: Gap) -> Reason:
    """Returns what took the time of a gap."""
    row = view.history.steps.get(gap.step)
    if row is None or gap.since not in view.history.steps:
        return Reason(None, (Cause("the steps are no longer kept, cause unknown", gap.ms, "unknown"),))
    if gap.so_far:
        return _so_far(view, lane, gap)
    if lane.preempted_in(gap.since, gap.step):
        return _after_preemption(view, lane, gap)
    steps, times = view.history.tokens.clock(gap.since, gap.step)
    before = 0.0
    causes: tuple[Cause, ...] = ()
    if len(steps) > 2:
        before = float(times[-2] - times[0]) * 1e3
        causes = (Cause(f"{count(len(steps) - 2, 'step')} without this request", before, "other_steps"),)
    reason = explain_step(view, row, gap.ms - before)
    if reason.usual is None and row.chunks:
        reason = Reason(None, (Cause(few_prompts(row), reason.unexplained, "prompts_unknown"),))
    return replace(reason, causes=causes + reason.causes)


@dataclass(frozen=True, slots=True)
class Stall:
    """The longest gap of some lanes, and what caused it."""

    lane: Lane
    gap: Gap
    reason: Reason

    @property
    def words(self) -> str:
        """Returns its length and its largest cause: "38.1 ms: prefill of r5"."""
        named = self.reason.named if self.reason.usual is not None or self.reason.causes else []
        names = [cause.name.partition(" (")[0] for cause in named if cause.key != "unknown"]
        why = names[0].removeprefix("usual extra time ") if names else "cause unknown"
        return f"{ms(self.gap.ms)} ms{' so far' if self.gap.so_far else ''}: {why}"


def worst_stall(view: View, lanes: Iterable[Lane], first: int, last: int) -> Stall | None:
    """Returns the longest gap between two tokens of these lanes that ended in the steps from `first` to `last`, or has
    not ended; None if it is shorter than STALL_FROM times the median gap of its request."""
    worst: tuple[Lane, Gap] | None = None
    usual = 0.0
    for lane in lanes:
        found = view.history.tokens.arrivals(lane, last)
        gaps = np.diff(found.at) * 1e3
        seen = np.where(found.steps[1:] >= first, gaps, 0.0)
        gap = found.gap(int(seen.argmax()) + 1) if len(gaps) and seen.max() > 0 else None
        if last == view.moment.horizon and lane.finish_step > last and lane.preemptions and not lane.running:
            so_far = view.history.tokens.running(lane, last, view.moment.since_result_ms)
            gap = so_far if gap is None or (so_far is not None and so_far.ms > gap.ms) else gap
        if gap is not None and (worst is None or gap.ms > worst[1].ms):
            worst, usual = (lane, gap), float(np.median(gaps)) if len(gaps) else 0.0
    if worst is None or worst[1].ms < STALL_FROM * usual:
        return None
    return Stall(*worst, explain_gap(view, *worst))


def in_words(gap: Gap, reason: Reason) -> str:
    """Returns the gap in words: "12.4 ms before token 17, step 132: garbage collection 8.1 ms"."""
    if gap.so_far:
        return f"{ms(gap.ms)} ms so far before token {gap.token:,}: {reason}"
    text = f"{ms(gap.ms)} ms before token {gap.token:,}, step {gap.step:,}: {reason}"
    if gap.paused_ms >= SHORTEST_PAUSE_MS:
        text += f" · {duration(gap.paused_ms)} of pause or slow motion are not counted"
    return text


def explain_step(
    view: View, row: StepRow, took: float, prompts_of: Callable[[Prefill, int], list[Cause]] | None = None,
    began: float = 0.0,
) -> Reason:
    """Returns the causes of `took` ms of a step. `prompts_of`: names the cost of prompts, as seen from a step. `began`:
    the time of the step before these, which is part of its usual time."""
    model = view.models.of(row.step)
    found = explain(row, model)
    if model is None or found is None:
        return Reason(None, (), took)
    usual = max(0.0, min(took, found.expected - found.prefill - began))
    left, causes = took - usual, []
    if prompts_of is None:
        prompts = [Cause(_prompts(view, one, row.step), one.ms, "prefill") for one in found.prefills]
    else:
        prompts = [cause for one in found.prefills for cause in prompts_of(one, row.step)]
    if (beside := found.beside) is not None:
        has = [f"this step has {row.prefill_tokens:,}"] if row.chunks else []
        has += [beside.next_step(row.step)] if beside.ahead else []
        prompts.append(Cause(f"usual extra time {beside.usual.where} ({'; '.join(has)})", beside.ms, "beside_prompts"))
    for cause in (*prompts, *found.causes):
        cost = min(cause.ms, left)
        if cost > WORTH * (took - usual):
            causes.append(replace(cause, ms=cost))
            left -= cost
    varied = []
    for part in found.varied:
        if left > 0:
            varied.append(replace(part, ms=min(part.ms, left)))
            left -= varied[-1].ms
    if left <= found.variation:
        return Reason(usual, tuple(causes), variation=left, varied=tuple(varied))
    if found.untold and model.reports:
        causes, left = [*causes, Cause(few_prompts(row), left, "prompts_unknown")], 0.0
    return Reason(usual, tuple(causes), left, varied=tuple(varied))


def _prompts(view: View, prefill: Prefill, step: int) -> str:
    """Returns "prefill of r12 (424 tokens)", with the parts of its time that the device did not need. If the prefill is
    not in `step` itself: "prefill of r12 in next step 57 (424 tokens, launched meanwhile)"."""
    row = view.history.steps.get(prefill.step)
    if row is None:
        return f"prefill of step {prefill.step:,}"
    lanes = [view.history.lanes.lanes[request] for request, *_ in row.chunks if request in view.history.lanes.lanes]
    again = sum(tokens for lane in lanes for step, tokens in lane.again if step == row.step)
    words = [count(row.prefill_tokens, "token") + (f", {again:,} of them again after a preemption" if again else "")]
    where = f" in {neighbour(row.step, step)}" if row.step != step else ""
    words[0] += ", launched meanwhile" * (row.step > step)
    if parts := in_parts(prefill):
        words.append(f"its {parts}")
    return f"prefill of {prefilled(row)}{where} ({'; '.join(words)})"


def _so_far(view: View, lane: Lane, gap: Gap) -> Reason:
    """Returns what is known about a gap that has not ended."""
    causes = []
    rest = view.moment.since_result_ms
    found = Reason(None)
    if lane.preempted_in(gap.since, view.moment.horizon + 1):
        found = _after_preemption(view, lane, gap)
        causes += [cause for cause in found.causes if cause.ms]
    elif gap.ms > rest:
        without = f"{count(gap.step - gap.since, 'step')} without this request"
        causes.append(Cause(without, gap.ms - rest, "other_steps"))
    if rest:
        row = view.history.steps.get(view.history.steps.committed + 1)
        computes = f" (prefill of {prefilled(row)})" if row is not None and row.chunks else ""
        what = "no results of a step" if row is None else f"step {row.step:,}{computes} has not ended"
        causes.append(Cause(f"{what} for", rest, "not_ended"))
    return replace(found, causes=tuple(causes))


def _after_preemption(view: View, lane: Lane, gap: Gap) -> Reason:
    """Returns the time in the queue, and the causes of the time of the steps that computed tokens again."""
    steps, times = view.history.tokens.clock(gap.since, gap.step)
    taken = np.diff(times) * 1e3
    own = np.zeros(len(taken), bool)
    for code, first, last in lane.spans:
        if code == PREFILLING:
            own |= (steps[1:] >= first) & (steps[1:] <= last)
    rows = [view.history.steps.get(step) for step in steps[1:][own].tolist()]
    timed = [(row, took) for row, took in zip(rows, taken[own].tolist(), strict=True) if row is not None]
    again_in = {row.step for row, _ in timed}

    def prompts(prefill: Prefill, step: int) -> list[Cause]:
        key = "recompute" if prefill.step in again_in else "prefill"
        return [Cause(_prompts(view, prefill, step), prefill.ms, key)]

    found = [explain_step(view, row, took, prompts) for row, took in timed]
    causes = [Cause("queue after a preemption", float(taken[~own].sum()), "queue")]
    causes += [cause for reason in found for cause in reason.causes if cause.key != "recompute"]
    again = lane.recomputed(gap.step) - lane.recomputed(gap.since)
    others = sum(row.prefill_tokens for row, _ in timed) - again
    computing = sum(cause.ms for reason in found for cause in reason.causes if cause.key == "recompute")
    share = computing / max(1, again + others)  # the prompts of its steps share the cost by their tokens
    if computing and again:
        causes.append(Cause(f"computing {count(again, 'token')} again", share * again, "recompute"))
    if computing and others:
        causes.append(Cause(f"{count(others, 'other prefill token')} in its steps", share * others, "prefill"))
    note = "" if computing or not again else f"{count(again, 'token')} computed again"
    return replace(Reason.of(found, causes), note=note)


PAUSES = ("process_stopped", "garbage_collection", "other_program")
SEVERAL = {  # key of causes in several steps -> their common name, if it does not begin each of their names
    "other_prefill": "prefill of other requests", "beside_prompts": "usual extra time with or before prompts",
}


def explain_first_token(view: View, lane: Lane, queue_ms: float, prefill_ms: float) -> Reason | None:
    """Returns what took the time to first token, `queue_ms` + `prefill_ms`; None if its steps are not known."""
    own = _prefill_steps(view, lane)
    if not own:
        return None
    tokens = sum(n for step in own for id, _, n, _ in view.history.steps.chunks(step) if id == lane.id)
    name = f"its {count(tokens, 'prompt token')}" + (f" in {len(own):,} steps" if len(own) > 1 else "")

    def prompts(prefill: Prefill, step: int) -> list[Cause]:
        computed = view.history.steps.get(prefill.step)
        if computed is None:
            return [Cause(f"prefill of step {prefill.step:,}", prefill.ms, "other_prefill")]
        mine = sum(n for id, _, n, _ in computed.chunks if id == lane.id)
        others = computed.prefill_tokens - mine
        each = prefill.ms / max(1, mine + others)
        where = f" in {neighbour(computed.step, step)}" if computed.step != step else ""
        whose = listed([id for id, *_ in computed.chunks if id != lane.id])
        theirs = Cause(f"prefill of {whose}{where}", each * others, "other_prefill")
        return [cause for cause in (Cause(name, each * mine, "prefill"), theirs) if cause.ms]

    here = {*own, *(step - 1 for step in own if view.history.steps.planned_ahead(step))}
    found, without, left = [], 0.0, prefill_ms
    step, first = own[-1], min(here)
    row, part = view.history.steps.get(step), 0.0
    while left > 0 and step >= first and row is not None and row.took_ms is not None:
        part = min(left, row.took_ms)
        left -= part
        if step in here:
            found.append(explain_step(view, row, part, prompts, began=row.took_ms - part))
        else:  # it was preempted in its prefill
            without += part
        step -= 1
        row = row if left <= 0 else view.history.steps.get(step)
    if left > 0:  # the queue ends with the results before the first of these steps
        row, part = _before(view, view.history.steps.get(step + 1)) if step < first else None, 0.0
    pauses = _pauses(view, row, part, queue_ms)
    causes = [*pauses, *(cause for reason in found for cause in reason.causes)]
    causes.append(Cause("rest of the queue" if pauses else "queue", queue_ms - sum(p.ms for p in pauses), "queue"))
    if without:
        causes.append(Cause("steps without this request", without, "other_steps"))
    last, committed = view.history.steps.get(own[-1]), 0.0
    if step < first and last is not None:  # recordings of older versions count the commit of the last step, too
        committed = min(left, last.commit_ms or 0.0)
        left -= committed
    if left > 0:
        causes.append(Cause("time outside of the known steps", left, "unknown"))
    reason = Reason.of(found, _merged(causes))
    varied, least = _merged(reason.varied), WORTH * (prefill_ms - (reason.usual or 0.0))
    small = sum(part.ms for part in varied if part.ms < least)
    return replace(
        reason, variation=reason.variation + committed + small, varied=tuple(p for p in varied if p.ms >= least)
    )


def _prefill_steps(view: View, lane: Lane) -> list[int]:
    """Returns the known steps that computed the prompt up to the first token; empty if the last one is not known. What
    is computed again after a preemption ends behind the prompt, with the tokens of the reply."""
    found: list[int] = []
    for code, first, last in lane.spans:
        if code == PREFILLING:
            found += range(max(first, view.history.steps.first), last + 1)
            chunks = view.history.steps.chunks(found[-1]) if found else ()
            if any(id == lane.id and begin + n == lane.request.prompt_tokens for id, begin, n, _ in chunks):
                return found
    return []


def _pauses(view: View, row: StepRow | None, after: float, queue_ms: float) -> list[Cause]:
    """Returns the measured pauses that must lie in the time in the queue. `row`: the step in which this time ends,
    `after` ms before the step's results."""
    found = []
    while row is not None and row.took_ms is not None and row.parts is not None and queue_ms > 0:
        within, parts = min(queue_ms, row.took_ms - after), row.parts
        paused = parts.gc or parts.delayed or parts.stops  # most steps have no pause, and a queue has many steps
        reason = explain(row, view.models.of(row.step)) if paused else None
        for cause in reason.causes if reason is not None else ():
            ms = cause.ms - (row.took_ms - within)  # the pause may lie in the rest of the step
            if cause.key in PAUSES and ms > 0:
                found.append(Cause(cause.name, ms, cause.key))
        queue_ms, after = queue_ms - within, 0.0
        row = _before(view, row)
    return found


def _before(view: View, row: StepRow | None) -> StepRow | None:
    """Returns the step before; None if the engine was idle before this step, or if this is unknown."""
    worked = row is not None and row.parts is not None and row.parts.commit > 0
    return view.history.steps.get(row.step - 1) if worked and row is not None else None


def _merged(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Returns one cause for each key: with its name, or with what its names have in common and the number of steps."""
    by_key: dict[str, list[Cause]] = {}
    for cause in causes:
        by_key.setdefault(cause.key, []).append(cause)
    merged = []
    for key, found in by_key.items():
        name = found[0].name
        if len({cause.name for cause in found}) > 1:
            common = name.partition(" of ")[0].partition(" in the ")[0].partition(" (")[0]
            name = f"{SEVERAL.get(key, common)} in {len(found):,} steps"
        merged.append(Cause(name, sum(cause.ms for cause in found), key))
    return tuple(merged)
