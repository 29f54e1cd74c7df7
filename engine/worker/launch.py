"""A step on its way through the device, and what comes back of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.core.step import StepResult
from engine.model.group import Spent
from engine.worker.sampler import Drawn, Logprobs

PromptLogprobs = tuple[Logprobs, list[int], int]  # of an entry's tokens, those tokens, how many on top were asked for


@dataclass(slots=True)
class Launched:
    """A step on its way. `wait` blocks until the device has drawn its tokens."""

    entries: int  # n of the plan
    samples: np.ndarray  # int64 [s]  the entries that draw, those with drafts once for each of their tokens
    drawn: Drawn
    logprob_counts: list[int]  # of each of drawn.logprob_rows: how many on top it asked for
    prompt_logprobs: dict[int, PromptLogprobs]  # by entry
    device_ms: float | None
    events: tuple[Any, Any] | None  # CUDA: where the step begins and ends
    outcome: Any  # int64 [s] on the host (an array, or pinned and good when `events` have passed): ids, −1 − id if bad
    drafted: range = range(0)  # the entries with drafts
    spent: Spent | None = None  # in collectives
    expert_load: tuple[list[int], torch.Tensor] | None = None  # layers; int64 [layers, E], on the host like the outcome

    def wait(self) -> StepResult:
        """The step's outcome, on the host."""
        if self.events is not None:
            self.events[1].synchronize()
            self.device_ms = self.events[0].elapsed_time(self.events[1])
        result = StepResult([-1] * self.entries, device_ms=self.device_ms)
        if self.spent is not None:
            result.comm = self.spent.ranks, self.spent.ms
        drawn = self.outcome.tolist()
        plain = len(drawn) == self.entries and not self.drafted
        if plain and min(drawn, default=0) >= 0:  # everyone drew once, nobody badly
            result.ids = drawn
        else:
            enter_draws(result, self.samples.tolist(), drawn, self.drafted)
        if self.drawn.logprobs is not None:
            rows = self.drawn.logprob_rows
            tokens = [token if token >= 0 else -1 - token for token in self.outcome[rows].tolist()]
            listed = self.drawn.logprobs.listed(tokens, self.logprob_counts)
            for entry, found in zip(self.samples[rows].tolist(), listed, strict=True):
                result.logprobs.setdefault(entry, []).append(found)
        for entry, (logprobs, tokens, top) in self.prompt_logprobs.items():
            result.prompt_logprobs[entry] = logprobs.listed(tokens, [top] * len(tokens))
        if self.expert_load is not None:
            result.expert_load = listed_load(*self.expert_load)
        return result


def enter_draws(result: StepResult, samples: list[int], drawn: list[int], drafted: range) -> None:
    """Enter what was drawn (ids, -1 - id where it is bad) for each of the entries `samples`; those that are `drafted`
    stand there once for each of their tokens."""
    for entry, token in zip(samples, drawn, strict=True):
        if entry in drafted:
            result.checked.setdefault(entry, []).append(max(token, -1))
            continue
        result.ids[entry] = token if token >= 0 else -1 - token
        if token < 0:
            result.bad.append(entry)


def listed_load(layers: list[int], load: torch.Tensor) -> list[tuple[int, list[int]]]:
    """What a step's result says of its experts: (layer, tokens of each)."""
    return list(zip(layers, load.tolist(), strict=True))
