"""The usual times of steps beside prompts, for engines that report only when a step ended and whose steps overlap.

vLLM's time of step k is the time from the results of step k-1 to those of step k. In this time the device computes step
k, and the host plans and launches step k+1. No record tells one from the other, so prompts have no cost. But a step can
be compared with other steps of the run that had prompts in the same places: in step k, in step k+1 or in both.

Steps are alike if they have about as many prompt tokens. The number in the next step matters little: in a recording of
an H200, decode steps take 10 ms, before a step with 2 prompt tokens 23 to 38, and before one with 300, 26 to 47.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minitui.text import ms

LEAST_ALIKE = 5  # with fewer steps to compare with, the usual time is unknown
ALIKE = 2.0  # prompts are alike if the ratio of their tokens is at most this, and at least its reciprocal
SHORT = 64  # tokens: the lengths of shorter prompts make little difference
MOST = (10, 90)  # percentiles: most steps lie between these


@dataclass(frozen=True, slots=True)
class Usual:
    """The times of other steps with prompts in the same places."""

    ms: float  # their median
    low: float
    high: float  # most took between `low` and `high`
    deviation: float  # typical deviation from the median
    steps: int
    tokens: tuple[int, int]  # the fewest and the most prompt tokens in one of them; (0, 0): without prompts
    before: bool  # True if they are before steps with prompts

    @property
    def where(self) -> str:
        """Returns "before a step with prompts", or "with 40 to 90 prefill tokens" if the next has none."""
        low, high = self.tokens
        several = f"{low:,} to {high:,}" if high > low else f"{low:,}"
        own = [f"with {several} prefill token{'s' * (high > 1)}"] if high else []
        return " ".join([*own, *["before a step with prompts"] * self.before])

    def __str__(self) -> str:
        return f"{self.where} (median of {self.steps:,}, most {ms(self.low)} to {ms(self.high)} ms)"


@dataclass(frozen=True, slots=True)
class UsualTimes:
    """The fitted steps; a row each."""

    number: np.ndarray
    own: np.ndarray  # prompt tokens of the step
    ahead: np.ndarray  # prompt tokens of the next step, if it was planned meanwhile
    took: np.ndarray  # ms

    def of(self, step: int, own: int, ahead: int) -> Usual | None:
        """Returns the usual time of steps like this one, without this one; None without prompts, or if there are too
        few like it. Steps with about as many prompt tokens are preferred."""
        if not own and not ahead:
            return None
        places = ((self.own > 0) == (own > 0)) & ((self.ahead > 0) == (ahead > 0)) & (self.number != step)
        ratio = (self.own + SHORT) / (own + SHORT)
        alike = places & (ratio <= ALIKE) & (ratio >= 1 / ALIKE)
        if alike.sum() < LEAST_ALIKE:
            alike = places
        if alike.sum() < LEAST_ALIKE:
            return None
        took, tokens = self.took[alike], self.own[alike]
        median, (low, high) = float(np.median(took)), np.percentile(took, MOST)
        deviation = 1.4826 * float(np.median(np.abs(took - median)))
        return Usual(
            median, float(low), float(high), deviation, len(took), (int(tokens.min()), int(tokens.max())), ahead > 0
        )
