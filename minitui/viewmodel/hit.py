"""The last cache hit, beside the request that computed the reused tokens: how much sooner was the first token?"""

from __future__ import annotations

from dataclasses import dataclass

from minitui.viewmodel.history.lane import Lane
from minitui.viewmodel.view import View

LEAST_GAIN = 1.5  # below it, the share of cached tokens tells more: other prompts of the step took the time


@dataclass(frozen=True, slots=True)
class Hit:
    """A request that took tokens from the cache and has its first token. Times are those of the prefill, in ms: from
    the admission to the first token, without the queue."""

    lane: Lane
    prefill_ms: float
    source: Lane | None  # the request that computed the last of the reused blocks; None: no longer known

    @property
    def source_ms(self) -> float | None:
        """The prefill of the other request; None: unknown."""
        return None if self.source is None or self.source.ttft is None else self.source.ttft[1]

    @property
    def times_sooner(self) -> float | None:
        """The quotient of both times; None: unknown, or no gain."""
        if not self.source_ms or not self.prefill_ms:
            return None
        gain = self.source_ms / self.prefill_ms
        return gain if gain >= LEAST_GAIN else None


def last_hit(view: View) -> Hit | None:
    """Returns the hit whose first token was the last at the moment of the picture; None: there was none."""
    lanes, seq = view.history.lanes.lanes, view.moment.shown.state.seq
    for first in reversed(view.history.first_tokens.items):
        lane = lanes.get(first.request)
        if first.seq <= seq and lane is not None and lane.source >= 0 and lane.cached_tokens:
            return Hit(lane, first.prefill_ms, lanes.get(lane.source))
    return None
