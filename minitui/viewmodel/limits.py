"""Says whether the host or the device limits the speed, from the share of time in which the host waits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minitui.viewmodel.cost_model import PLANNED, windows
from minitui.viewmodel.steps import Steps

LIMIT_STEPS = 1_000  # the last steps that decide
WAITS = 0.5  # a host that waits for at least this share of the time is limited by the device


@dataclass(frozen=True, slots=True)
class Limit:
    """What limits some steps. `which`: empty for all, " steps with prompts" for those in whose time the host launched
    prompts, " steps without prompts" for the others. `waits`: the host's share of waiting; None: not reported."""

    which: str
    waits: float | None
    steps: int

    @property
    def by(self) -> str:
        """What limits, if `waits` is known: "device" or "host"."""
        return "device" if (self.waits or 0.0) >= WAITS else "host"

    @property
    def what(self) -> str:
        """Returns "the device limits", or "the host limits steps with prompts"."""
        if self.waits is None:
            return "host or device limits? unknown"
        return f"the {self.by} limits{self.which}"

    def why(self, width: int = 1_000) -> str:
        """Returns ": the host waits 86 % of their time · last 743 steps"; without the number of steps if `width` is too
        small for it."""
        if self.waits is None:
            return ": the engine does not report its waits"
        text = f": the host waits {100 * self.waits:.0f} % of {'their' if self.which else 'the'} time"
        last = f" · last {self.steps:,} steps"
        return text + (last if len(self.what) + len(text) + len(last) <= width else "")


def limits(steps: Steps, horizon: int) -> list[Limit]:
    """Returns what limits the steps up to `horizon`: one Limit, or two if the host limits the steps in whose time it
    launches prompts and the device limits the others (or the reverse). Empty before the first timed step."""
    at = steps.indices(horizon - LIMIT_STEPS + 1, horizon)
    at = at[~np.isnan(steps.column("wall")[at])]
    if not len(at):
        return []
    seen = windows(steps, at)
    took = np.sum([seen.parts[name] for name in ("wait", "commit", "emit", *PLANNED)], axis=0)
    known = took > 0  # not NaN
    if not known.any():
        return [Limit("", None, len(at))]

    def waits(of: np.ndarray) -> float:
        return float(seen.parts["wait"][of].sum() / took[of].sum())

    prompts, every = seen.with_prompts, int(known.sum())
    kinds = {" steps without prompts": known & ~prompts, " steps with prompts": known & prompts}
    found = [Limit(which, waits(of), every) for which, of in kinds.items() if of.any()]
    if len({limit.waits is not None and limit.waits >= WAITS for limit in found}) > 1:
        return found
    return [Limit("", waits(known), every)]
