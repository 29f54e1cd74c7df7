"""The parts of a step's duration: what the host did between the results of the step before and those of the step.

The parts add up to the duration (StepRow.took_ms). Pauses are no part: garbage collection, other programs and signals
interrupt any part.
"""

from __future__ import annotations

from dataclasses import dataclass

from minitui.viewmodel.spans import NOT_REPORTED
from minitui.viewmodel.step_row import PARTS, StepRow
from minitui.viewmodel.steps import Steps


@dataclass(frozen=True, slots=True)
class StepPart:
    """`kind`: one of step_row.PARTS but "gate", or NOT_REPORTED. `step`: the step that the work was for."""

    kind: str
    step: int
    ms: float | None  # None: not reported; it is then in NOT_REPORTED

    def name(self, step: int) -> str:
        """Returns its name in `step`: "launch of 57" for the launch of another step."""
        return self.kind if self.step == step or self.kind == "commit" else f"{self.kind} of {self.step:,}"


def parts_of(steps: Steps, row: StepRow) -> list[StepPart]:
    """Returns the parts of a timed step. With overlap, it contains the plan and the launch of the next step."""
    if row.took_ms is None:
        return []
    here, ahead = not steps.planned_ahead(row.step), steps.planned_ahead(row.step + 1)
    planned = [row] if here else []
    if ahead and (following := steps.get(row.step + 1)) is not None:
        planned.append(following)
    if row.parts is None:
        return _without_parts(steps, row, planned, here)
    found = []
    for kind in PARTS:
        took = getattr(row.parts, kind)
        if kind in ("plan", "launch") and planned:
            for step in planned[:-1]:  # the first of a run of overlapping steps: two steps were planned
                own = min(getattr(step, f"{kind}_ms") or 0.0, took)
                found.append(StepPart(kind, step.step, own))
                took -= own
            found.append(StepPart(kind, planned[-1].step, took))
        elif kind != "gate":
            found.append(StepPart(kind, row.step, took))
    return found


def _without_parts(steps: Steps, row: StepRow, planned: list[StepRow], here: bool) -> list[StepPart]:
    """Returns the parts that the `time` records tell, and the rest."""
    before, found, left = steps.get(row.step - 1), [], row.took_ms or 0.0
    work: list[tuple[str, int, float | None]] = []
    if not here and before is not None:
        work.append(("commit", row.step, before.commit_ms))
    work += [(kind, step.step, getattr(step, f"{kind}_ms")) for step in planned for kind in ("plan", "launch")]
    for kind, step, took in work:
        part = min(took, left) if took is not None else None
        found.append(StepPart(kind, step, part))
        left -= part or 0.0
    return [*found, StepPart(NOT_REPORTED, row.step, left)]
