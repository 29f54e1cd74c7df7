"""Explains the time to first token from records: what the engine did while a request waited and computed its prompt.

The prefill covers the steps up to the first token. Where steps overlap, the step before the first chunk launched this
chunk, so it counts, too. Each step is explained like the last step of a gap (stalls.py); the cost of prompts is divided
by their tokens into the request's own and those of other requests. Of the time in the queue, only measured pauses are
causes, and only the part that must lie in this time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from minitui.text import count
from minitui.viewmodel.explain.causes import WORTH, Cause, Prefill, explain, listed, neighbour
from minitui.viewmodel.explain.stalls import Reason, explain_step
from minitui.viewmodel.history.lane import PREFILLING, Lane
from minitui.viewmodel.history.steps import StepRow

if TYPE_CHECKING:
    from minitui.viewmodel.view import View

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
    causes.append(Cause("queue", queue_ms - sum(cause.ms for cause in pauses), "queue"))
    if without:
        causes.append(Cause("steps without this request", without, "other_steps"))
    variation = sum(reason.variation for reason in found)
    last = view.history.steps.get(own[-1])
    if step < first and last is not None:  # recordings of older versions count the commit of the last step, too
        committed = min(left, last.commit_ms or 0.0)
        variation, left = variation + committed, left - committed
    if left > 0:
        causes.append(Cause("time outside of the known steps", left, "unknown"))
    usual = [reason.usual for reason in found if reason.usual is not None]
    varied = _merged(cause for reason in found for cause in reason.varied)
    least = WORTH * (prefill_ms - sum(usual))
    variation += sum(part.ms for part in varied if part.ms < least)
    return Reason(
        sum(usual) if usual else None, _merged(causes), sum(reason.unexplained for reason in found), variation,
        tuple(part for part in varied if part.ms >= least),
    )


def _prefill_steps(view: View, lane: Lane) -> list[int]:
    """Returns the known steps that computed the prompt up to the first token; empty if the last one is not known. What
    is computed again after a preemption ends behind the prompt, with the tokens of the reply."""
    found: list[int] = []
    for code, first, last in lane.spans:
        if code == PREFILLING:
            found += range(max(first, view.history.steps.first), last + 1)
            chunks = view.history.steps.chunks(found[-1]) if found else ()
            if any(id == lane.id and begin + n == lane.prompt_tokens for id, begin, n, _ in chunks):
                return found
    return []


def _pauses(view: View, row: StepRow | None, after: float, queue_ms: float) -> list[Cause]:
    """Returns the measured pauses that must lie in the time in the queue. `row`: the step in which this time ends,
    `after` ms before the step's results."""
    found = []
    while row is not None and row.took_ms is not None and row.parts is not None and queue_ms > 0:
        within = min(queue_ms, row.took_ms - after)
        reason = explain(row, view.models.of(row.step))
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
