"""A step that has been launched, and its result on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.core.step import StepResult
from engine.model.group import CollectiveTime
from engine.worker.logprobs import Logprobs


class DrawnLogprobs(NamedTuple):
    """Logprobs of the draws whose requests asked for logprobs."""

    draws: np.ndarray  # int64: indices of these draws
    values: Logprobs
    counts: list[int]  # for each of these draws: how many of the most likely tokens to list


class PromptLogprobs(NamedTuple):
    """Logprobs of the prompt tokens that one chunk predicts."""

    values: Logprobs
    token_ids: list[int]
    top: int  # how many of the most likely tokens to list for each prompt token


@dataclass(slots=True)
class LaunchedStep:
    """A launched step, whose results are copied to the host. `wait` blocks until the copies are complete. Arrays on the
    host may be views of pinned memory: they are valid only after the second of `events`."""

    num_entries: int  # entries of the plan
    outcome: np.ndarray  # int64, on the host: the drawn ids; −1 − id for a bad draw (see Drawn.bad)
    draws: np.ndarray | None  # int64: the indices in `outcome` that are draws of the plan; None: all
    entries: np.ndarray  # int64: the entry of each such draw; an entry with drafts appears once for each token
    drafted: range = range(0)  # the entries with drafts
    device_ms: float | None = None
    events: tuple[Any, Any] | None = None  # CUDA: begin and end of the step; None: the step is complete
    logprobs: DrawnLogprobs | None = None
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)  # by entry
    spent: CollectiveTime | None = None  # time in collectives
    # (indices of the layers with experts, number of tokens of each expert as int64 [layers, E] on the host)
    expert_load: tuple[list[int], torch.Tensor] | None = None
    check: Callable[[], None] | None = None  # called at the end of `wait`; raises if the outcome is invalid

    def wait(self) -> StepResult:
        """Wait for the step, and return its result."""
        try:
            return self._result()
        finally:
            if self.check is not None:
                self.check()

    def _result(self) -> StepResult:
        if self.events is not None:
            self.events[1].synchronize()
            self.device_ms = self.events[0].elapsed_time(self.events[1])
        result = StepResult([], device_ms=self.device_ms)
        if self.spent is not None:
            result.comm = self.spent.ranks, self.spent.ms
        drawn = (self.outcome if self.draws is None else self.outcome[self.draws]).tolist()
        one_each = len(drawn) == self.num_entries and not self.drafted
        if one_each and min(drawn, default=0) >= 0:
            result.ids = drawn
        else:
            result.ids = [-1] * self.num_entries
            self._enter_draws(result, drawn)
        if self.logprobs is not None:
            which, values, counts = self.logprobs
            tokens = [token if token >= 0 else -1 - token for token in self.outcome[which].tolist()]
            listed = values.listed(tokens, counts)
            for entry, logprobs in zip(self.entries[which].tolist(), listed, strict=True):
                result.logprobs.setdefault(entry, []).append(logprobs)
        for entry, prompt in self.prompt_logprobs.items():
            result.prompt_logprobs[entry] = prompt.values.listed(prompt.token_ids, [prompt.top] * len(prompt.token_ids))
        if self.expert_load is not None:
            layers, load = self.expert_load
            result.expert_load = list(zip(layers, load.tolist(), strict=True))
        return result

    def _enter_draws(self, result: StepResult, drawn: list[int]) -> None:
        """Write the drawn ids to the result: one id per entry, or a list of ids for an entry with drafts."""
        for entry, token in zip(self.entries.tolist(), drawn, strict=True):
            if entry in self.drafted:
                result.checked.setdefault(entry, []).append(max(token, -1))
                continue
            result.ids[entry] = token if token >= 0 else -1 - token
            if token < 0:
                result.bad.append(entry)
