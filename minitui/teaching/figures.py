"""The figures that a demo or a lesson tells, counted from the records of its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from minitui.viewmodel.history.events import Event
from minitui.viewmodel.history.steps import StepRow


@dataclass(frozen=True, slots=True)
class Figures:
    """Totals over several steps, counted from their records. A prompt token is either computed or cached."""

    steps: int
    computed: int
    cached: int
    prefill_ms: float  # time of the steps that computed prompt tokens
    decode_ms: float  # time of the other steps
    drafted: int
    accepted: int
    decode_step_ms: dict[int, float] = field(default_factory=dict)  # tokens of a decode step -> median time

    @property
    def prompt_tokens(self) -> int:
        return self.computed + self.cached

    @property
    def share_cached(self) -> float:
        """Share of the prompt tokens that were cached, 0 to 1."""
        return self.cached / self.prompt_tokens if self.prompt_tokens else 0.0

    @classmethod
    def of(cls, steps: list[StepRow], hits: list[Event]) -> Figures:
        """Returns the figures of these steps and cache hits."""
        times: dict[int, list[float]] = {}
        for row in steps:
            if row.took_ms is not None and not row.chunks:
                times.setdefault(row.tokens, []).append(row.took_ms)
        return cls(
            steps=len(steps),
            computed=sum(row.prefill_tokens for row in steps),
            cached=sum(hit.record.tokens for hit in hits),
            drafted=sum(row.drafted for row in steps),
            accepted=sum(row.accepted for row in steps),
            prefill_ms=sum(row.took_ms or 0.0 for row in steps if row.chunks),
            decode_ms=sum(row.took_ms or 0.0 for row in steps if not row.chunks),
            decode_step_ms={tokens: median(some) for tokens, some in times.items()},
        )
