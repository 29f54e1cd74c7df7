"""The cost model of each step. It is chosen once and stays: a step is explained by the same model on every screen, at
every moment of time travel, and in the lines of `minitui tail`.

A step is explained by a model of the steps before it: by what was known when it ended. The models are fitted after
fixed numbers of steps, so it does not matter when the explanation is asked for, and a recording of a whole run explains
each step as the live run did. The first steps of a run have no steps before them: they share the first model, which is
fitted after FIRST_FIT steps. A player knows these steps of its recording at once (`look_ahead`).

If the fitted steps do not tell what the rows of a step cost (they all had four rows, and this one has three), a model
that is fitted to the steps up to a few steps before explains it. If these do not tell it, either, the expected time is
unknown: on a CPU, a step of one row takes half the time of a step of two, and no other step says so.

A recording that begins in the middle of a run has no records of what was known at its begin. Its first FIT_STEPS steps
are explained by a model of all of these steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from engine.trace.kind import Record, kind_of, seq_of
from engine.trace.state import State
from minitui.viewmodel.explain.cost_model import FIT_STEPS, CostModel, fit
from minitui.viewmodel.history.steps import Steps

REFIT = 128  # steps: after this many, a model is fitted again; at first, after half of the steps
REFIT_SOON = 8  # steps: the same for steps whose rows have no known cost
FIRST_FIT = 32  # steps: after this many, the first model is fitted
MODELS_KEPT = 300


class Fitted:
    """The model of the steps up to `until`. A step that was fitted and has much weight in the model would explain
    itself: its expected time would be the time that it took. So each such step has a model without this step. A model
    has at most 8 costs, so it has few of these."""

    def __init__(self, steps: Steps, until: int) -> None:
        self.until = until
        self._steps = steps
        self._model = fit(steps, until)
        self._without: dict[tuple[int, ...], CostModel | None] = {}

    def of(self, step: int) -> CostModel | None:
        """Returns the model that explains a step; None: too few steps like it have a time."""
        model = self._best(step)
        return model if model is not None and (step not in model.steps or model.knows(step)) else None

    def _best(self, step: int) -> CostModel | None:
        if self._model is None:
            return None
        # The time of a step contains the commit of the step before, and may contain the launch of the next.
        own = tuple(near for near in (step - 1, step, step + 1) if near in self._model.alone)
        if not own:
            return self._model
        if own not in self._without:
            self._without[own] = fit(self._steps, self.until, own)
        return self._without[own]


class CostModels:
    """The models of the steps of one history."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._fitted: OrderedDict[int, Fitted] = OrderedDict()
        self._ahead: Fitted | None = None

    def look_ahead(self, first: Fitted) -> None:
        """Explain the steps up to `first.until` by the model of the first steps of the recording that is played."""
        self._ahead = first

    def of(self, step: int) -> CostModel | None:
        """Returns the model that explains a step; None: too few steps like it are known."""
        if self._ahead is not None and step <= self._ahead.until:
            model = self._ahead.of(step)
            return replace(model, steps=self._steps) if model is not None else None
        fitted = self._fitted_after(step)
        if fitted > self._steps.committed:
            return None
        model, soon = self._after(fitted, step), step // REFIT_SOON * REFIT_SOON
        return self._after(soon, step) if model is None and fitted < soon <= self._steps.committed else model

    def _after(self, fitted: int, step: int) -> CostModel | None:
        if fitted not in self._fitted:
            self._fitted[fitted] = Fitted(self._steps, fitted)
            if len(self._fitted) > MODELS_KEPT:
                self._fitted.popitem(last=False)
        return self._fitted[fitted].of(step)

    def _fitted_after(self, step: int) -> int:
        """Returns the step after which the model of `step` is fitted."""
        begin = self._steps.begin + FIRST_FIT
        while begin <= step and begin - self._steps.begin < REFIT:
            following = 2 * begin - self._steps.begin
            if following > step:
                return begin
            begin = following
        return max(begin, step // REFIT * REFIT)


def first_model(snapshot: dict[str, Any], records: Iterable[Record]) -> Fitted:
    """Returns the model of the first steps of a recording: of the steps after its first snapshot."""
    whole_run = snapshot["step"] < 0
    steps = first_steps(snapshot, records, FIRST_FIT + 1 if whole_run else FIT_STEPS)
    return Fitted(steps, steps.committed)


def first_steps(snapshot: dict[str, Any], records: Iterable[Record], number: int = FIT_STEPS) -> Steps:
    """Returns the first steps after a snapshot."""
    steps = Steps(2 * FIT_STEPS)
    steps.adopt(State.from_snapshot(snapshot))
    seq = snapshot["seq"]
    for record in records:
        if seq_of(record) != seq + 1:
            break
        seq = seq_of(record)
        steps.read(record)
        if kind_of(record) == "time" and steps.last_ended >= steps.begin + number - 1:
            break
    return steps
