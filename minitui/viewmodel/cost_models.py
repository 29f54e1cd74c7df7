"""The cost model of each step. It is chosen once and stays: a step is explained by the same model on every screen, at
every moment of time travel, and in the lines of `minitui tail`.

A live step is explained by a model of the steps before it. The models are fitted after fixed numbers of steps, so it
does not matter when the explanation is asked for. The first steps of a run have no steps before them: they share the
first model. The first FIT_STEPS steps of a recording are explained by a model of all of these steps (`look_ahead`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from engine.trace.records import Record
from engine.trace.state import State
from minitui.viewmodel.cost_model import FIT_STEPS, CostModel, fit
from minitui.viewmodel.steps import Steps

REFIT = 128  # steps: after this many, a model is fitted again; at first, after half of the steps
FIRST_FIT = 32  # steps: after this many, the first model is fitted
MODELS_KEPT = 300


class CostModels:
    """The models of the steps of one history."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._fitted: OrderedDict[int, CostModel | None] = OrderedDict()
        self._ahead: tuple[int, CostModel | None] = (-1, None)  # explains the steps up to this one

    def look_ahead(self, recorded: Steps) -> None:
        """Explain the first steps by a model of `recorded`, the first steps of the recording that is played."""
        model = fit(recorded, recorded.committed)
        self._ahead = recorded.committed, replace(model, steps=self._steps) if model is not None else None

    def of(self, step: int) -> CostModel | None:
        """Returns the model that explains a step; None: too few steps are known."""
        until, model = self._ahead
        if step <= until:
            return model
        fitted = self._fitted_after(step)
        if fitted > self._steps.committed:
            return None
        if fitted not in self._fitted:
            self._fitted[fitted] = fit(self._steps, fitted)
            if len(self._fitted) > MODELS_KEPT:
                self._fitted.popitem(last=False)
        return self._fitted[fitted]

    def _fitted_after(self, step: int) -> int:
        """Returns the step after which the model of `step` is fitted."""
        begin = self._steps.begin + FIRST_FIT
        while begin <= step and begin - self._steps.begin < REFIT:
            following = 2 * begin - self._steps.begin
            if following > step:
                return begin
            begin = following
        return max(begin, step // REFIT * REFIT)


def first_steps(snapshot: dict[str, Any], records: Iterable[Record]) -> Steps:
    """Returns the first FIT_STEPS steps after a snapshot."""
    state, steps = State.from_snapshot(snapshot), Steps()
    for request in state.requests.values():
        if request.joined_at >= 0:
            steps.adopt(request.id, state.computed(request), state.step + 1)
    folds = {
        "step": steps.fold_step, "draft": steps.fold_draft, "accept": steps.fold_accept, "time": steps.fold_time,
        "parts": steps.fold_parts, "comm": steps.fold_comm, "finish": steps.fold_release,
        "preempt": steps.fold_release, "requeue": steps.fold_release,
    }  # fmt: skip
    seq = snapshot["seq"]
    for record in records:
        if record[0] != seq + 1:
            break
        seq = record[0]
        if (fold := folds.get(record[2])) is not None:
            fold(record)
        if record[2] == "time" and record[3] in steps and record[3] >= steps.begin + FIT_STEPS - 1:
            break
    return steps
