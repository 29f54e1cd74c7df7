"""The data of a step: its plan as plain arrays, the tokens that the device drew, and the output of its commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.core.request import Grammar, Request
from engine.params import SamplingParams

NO_IDS = np.zeros(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class RowSettings:
    """The sampling settings of one row of the batch. The sampler reads them when a request takes the row."""

    row: int
    params: SamplingParams
    seed: int
    sample_index: int  # number of this sample among the n samples of a prompt; the sampling noise depends on it
    stop_ids: frozenset[int]
    prompt_len: int
    constrained: bool  # a grammar masks the row's logits
    counted_ids: np.ndarray  # int64: the request's ids so far, if penalties count them; else empty

    @staticmethod
    def of(request: Request) -> RowSettings:
        """Returns the settings of a request that has a row."""
        params = request.params
        return RowSettings(
            request.row, params, request.seed, request.sample_index, request.stop_ids, request.prompt_len,
            constrained=request.grammar is not None,
            counted_ids=np.array(request.ids, np.int64) if params.has_penalties else NO_IDS,
        )


class TableChanges(NamedTuple):
    """Changes to the persistent block table of a group: table[row, column] = block."""

    rows: np.ndarray  # int32 [m]
    columns: np.ndarray  # int32 [m]
    blocks: np.ndarray  # int32 [m]


class PromptTargets(NamedTuple):
    """The prompt tokens that one prefill chunk predicts, for a request that asked for prompt logprobs."""

    token_ids: list[int]  # the prompt's tokens at start + 1 … start + q_len, up to the end of the prompt
    top: int  # how many of the most likely tokens to report at each position


@dataclass(slots=True)
class StepPlan:
    """The plan of one step, as plain data that can be sent to other ranks. The entries are in this order: `num_decodes`
    decodes of one token; `num_drafted` decodes of one token and its drafts; prefill chunks. In a decode with drafts, a
    token is drawn after the first token and after each draft."""

    step: int
    rows: np.ndarray  # int32 [n]  the request's row in the persistent batch state
    starts: np.ndarray  # int32 [n]  position of the first token computed; everything before it is in the KV cache
    q_lens: np.ndarray  # int32 [n]  tokens computed
    samples: np.ndarray  # bool  [n]  True: a token is drawn at the last position; with drafts, at each position
    token_ids: np.ndarray  # int32 [sum q_lens]; -1: the row's last token, which only the device knows so far
    num_decodes: int
    tables: list[TableChanges]  # of each cache group with pages, applied before the step
    joins: list[RowSettings]  # the settings of the requests that take a row in this step
    prompt_targets: dict[int, PromptTargets]  # by entry, for the chunks of requests that want prompt logprobs
    num_drafted: int = 0
    # For a model with recurrent states: their segments (StateMeta in engine/attention/base.py).
    segments: np.ndarray | None = None  # int32 [m, 4]  first token, end token, source slot, target slot
    cu_segments: np.ndarray | None = None  # int32 [n + 1]  entry i has the segments [cu[i], cu[i + 1])

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_decoding(self) -> int:
        """The number of decodes, with and without drafts; the prefill chunks follow them."""
        return self.num_decodes + self.num_drafted

    def drafts(self) -> Iterator[tuple[int, list[int]]]:
        """Yield (entry, its draft tokens) for each entry with drafts."""
        end = self.num_decodes
        for entry in range(self.num_decodes, self.num_decoding):
            begin, end = end, end + int(self.q_lens[entry])
            yield entry, self.token_ids[begin + 1 : end].tolist()


class Scheduled(NamedTuple):
    """A plan and its requests. It stays in the scheduler's process; other ranks get the plan alone."""

    plan: StepPlan
    requests: tuple[Request, ...]  # by entry
    epochs: list[int]  # by entry: its request's epoch when the step was planned; if it has changed, the result is void
    grammars: Mapping[int, Grammar]  # by entry, for the requests that have one


@dataclass(slots=True)
class TokenLogprobs:
    """The log-probability and rank of one token. `top`: the most likely tokens at its position, as (id, logprob)."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True)
class StepResult:
    """The tokens that a step drew."""

    ids: list[int]  # by entry; -1 for entries that do not sample or that have drafts
    bad: list[int] = field(default_factory=list)  # entries whose logits were NaN or infinite
    # For each entry with drafts: the draw after each of its tokens, even after a rejected draft; -1: bad logits.
    checked: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by entry: one item for each draw
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by entry, for its PromptTargets
    # (layer, tokens of each expert), counted since the last step that reported them. None: not reported.
    expert_load: list[tuple[int, list[int]]] | None = None
    device_ms: float | None = None  # None if unknown
    # (ranks, ms in collectives). The time includes waits for other ranks, except in CUDA graphs. None: one rank.
    comm: tuple[int, float] | None = None
    arrived_us: int = 0  # the engine's working time when the ids arrived on the host; set by engine/core/step_clock.py


@dataclass(slots=True)
class Emitted:
    """The output of a commit for one request: a token, the reason why the request ended, or both."""

    request: Request
    token_id: int | None  # None: no token was drawn
    finish_reason: str = ""  # empty: the request continues
    arrived_us: int = 0  # `StepResult.arrived_us` of its step
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
