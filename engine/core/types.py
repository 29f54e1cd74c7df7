"""The few types that travel between the stages.

    SamplingParams   what a caller asks of the sampler
    Request          one sequence, from submission to its finish
    StepPlan         who runs in a step and where their tokens go: plain arrays
    StepResult       what the device drew
    Emitted          what a commit made of it, for one request

The scheduler sees lengths, never a tensor; the model sees tensors, never a Request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import InvalidRequest

if TYPE_CHECKING:
    from engine.core.radix import Node
    from engine.core.speculation import Lookup

POLICIES = ("fcfs", "longest-prefix", "static")  # of the scheduler
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a reply is drawn. Names and defaults are those of vLLM, so that what is known there holds here.

    Logits are processed in this order: grammar mask and `logit_bias`, `min_tokens`, penalties, `temperature`,
    `top_k`, `top_p`, `min_p`, then a draw by Gumbel-max. `temperature=0` is exact argmax.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    min_tokens: int = 0  # so many are drawn before a stop token or a stop string may end the reply
    max_tokens: int | None = 16  # None: as many as context and pool allow
    seed: int | None = None  # None: one is drawn at submission, and recorded
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # the sampled token's, and the top n
    prompt_logprobs: int | None = None
    # At most one of these three constrains the reply (needs the extra "structured").
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Callers pass lists and single strings, as they may with vLLM; keep one form.
        for name in ("stop", "stop_token_ids", "choice"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = (value,)
            object.__setattr__(self, name, tuple(value or ()))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def structured(self) -> bool:
        return self.json_schema is not None or self.regex is not None or bool(self.choice)

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest, naming the field, for anything the engine must never see."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidRequest(f"{f.name} is {value}: it must be a finite number", f.name)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("n", self.n, 1, 128)
        _integer("top_k", self.top_k, 0, vocab_size)
        _integer("min_tokens", self.min_tokens, 0, 1 << 31)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 1 << 31)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}", "min_tokens"
                )
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS or any(not isinstance(s, str) or not s for s in self.stop):
            raise InvalidRequest(
                f"stop must be at most {MAX_STOP_STRINGS} strings, none of them empty; it is {self.stop!r}", "stop"
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, vocab_size - 1)
        if not isinstance(self.logit_bias, dict | None):
            raise InvalidRequest(
                f"logit_bias is of type {type(self.logit_bias).__name__}: it must be a dict of token id to bias",
                "logit_bias",
            )
        for token, bias in (self.logit_bias or {}).items():
            _integer("logit_bias", token, 0, vocab_size - 1)
            _number("logit_bias", bias, -100.0, 100.0)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} is of type {type(getattr(self, name)).__name__}: it must be a bool", name)
        if not isinstance(self.json_schema, dict | str | None):
            raise InvalidRequest(
                f"json_schema is of type {type(self.json_schema).__name__}: it must be a dict, or JSON as a string",
                "json_schema",
            )
        if not isinstance(self.regex, str | None):
            raise InvalidRequest(f"regex is of type {type(self.regex).__name__}: it must be a string", "regex")
        if any(not isinstance(choice, str) for choice in self.choice):
            raise InvalidRequest("choice must be strings only", "choice")
        if (self.json_schema is not None) + (self.regex is not None) + bool(self.choice) > 1:
            raise InvalidRequest("only one of json_schema, regex and choice can constrain a reply", "json_schema")
        if self.prompt_logprobs is not None and self.n > 1:
            raise InvalidRequest(f"prompt_logprobs goes with n = 1 only; n is {self.n}", "prompt_logprobs")


def _number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value!r}: it must be a finite number", name)
    if value > high or value < low or (open_low and value == low):
        bound = "above" if open_low else "at least"
        raise InvalidRequest(f"{name} is {value}: it must be {bound} {low:g} and at most {high:g}", name)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name} is {value!r}: it must be a whole number", name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}: it must be from {low:,} to {high:,}", name)


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One sequence. The scheduler owns every field below `params`; others read.

    Lengths, in tokens::

        0 ........ written ........ planned ........ total
        |  KV known written |  KV in flight  |  no KV yet   |

    `len(ids)` are known on the host, `in_flight` more (at most one) have been drawn by steps not yet committed;
    `total = len(ids) + in_flight`. A step that plans up to `total` samples the next token.
    `table[i]` is the physical block of tokens [i*block_size, (i+1)*block_size). Its first `shared_blocks`
    entries stand in the radix tree on the path that ends at `node`; the rest are private to this request.
    """

    id: int
    ids: list[int]
    params: SamplingParams
    seed: int
    max_total: int  # prompt + reply may not grow beyond
    stop_ids: frozenset[int] = frozenset()
    group: str = ""  # a label for whoever submitted it (a chat session); the engine does not read it
    sample_index: int = 0  # which of n samples: the noise differs by it
    prompt_len: int = 0
    state: RequestState = RequestState.WAITING
    finish_reason: str = ""
    row: int = -1
    planned: int = 0
    last_step: int = -1  # in which it has an entry
    decoding: bool = False  # it has drawn a token since it was last admitted; then total = planned + 1
    epoch: int = 0  # raised when work in flight becomes void: it finished, or a step failed
    table: list[int] = field(default_factory=list)
    node: Node | None = None  # None: the root
    shared_blocks: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the tree at first admission and later matches
    match: tuple[str, int, str] = ("", 0, "")  # why its first prefix match stopped, where, and how far it came
    preemptions: int = 0
    overtaken: int = 0  # how many younger ones were admitted while it waited (policy longest-prefix)
    prompt_logprobs_given: int = 0  # a resumed prefill computes them again
    # Seconds on the log's clock, and on that which stands while work is held back; 0 until it happens.
    submitted_at: float = 0.0
    admitted_at: float = 0.0
    submitted_work: float = 0.0
    admitted_work: float = 0.0
    first_token_work: float = 0.0  # the step clock's to set
    grammar: Any = None  # engine.text.structured.Grammar, advanced at commit
    lookup: Lookup | None = None  # once it has been drafted for
    drafted: int = 0  # draft tokens of the step in flight
    drafted_tokens: int = 0  # of all steps that have committed
    accepted_tokens: int = 0  # of those, how many were what it drew

    @property
    def in_flight(self) -> int:
        """Tokens drawn by steps not yet committed, while it runs. Not counted but derived: a step need not touch it."""
        return self.planned + 1 - len(self.ids) if self.decoding else 0

    @property
    def total(self) -> int:
        return len(self.ids) + self.in_flight

    @property
    def output_ids(self) -> list[int]:
        return self.ids[self.prompt_len :]


@dataclass(slots=True)
class StepPlan:
    """One step, as plain arrays: it can be sent to other ranks or copied to a device as it stands.

    Entries are ordered: those that decode one token first (`num_decodes` of them), then those that decode with drafts
    behind it (`num_drafted`: every one of their tokens draws the next), then the prefill chunks.
    """

    step: int
    rows: np.ndarray  # int32 [n]  the request's row in the persistent batch state
    starts: np.ndarray  # int32 [n]  position of the first token computed; everything before it is in the KV cache
    q_lens: np.ndarray  # int32 [n]  tokens computed
    samples: np.ndarray  # bool  [n]  draws a token from the logits of its last position; with drafts, of all
    token_ids: np.ndarray  # int32 [sum q_lens]; -1: the token this row drew last, known only to the device so far
    num_decodes: int
    # Changes to the persistent block table, to be applied before the step: table[row, column] = block.
    table_rows: np.ndarray  # int32 [m]
    table_columns: np.ndarray  # int32 [m]
    table_blocks: np.ndarray  # int32 [m]
    joins: list[Request]  # requests whose row begins with this step: their sampling settings are set up
    requests: list[Request]  # the n requests (host only)
    epochs: list[int]  # their epochs when planned: work of an older epoch is void
    num_drafted: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_decoding(self) -> int:
        """Entries that decode, with drafts or without; the prefill chunks come after them."""
        return self.num_decodes + self.num_drafted

    def drafts(self) -> Iterator[tuple[int, list[int]]]:
        """(entry, its draft tokens) of those that have any."""
        end = self.num_decodes
        for entry in range(self.num_decodes, self.num_decoding):
            begin, end = end, end + int(self.q_lens[entry])
            yield entry, self.token_ids[begin + 1 : end].tolist()


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token's own, and the `top` most likely as (id, logprob)."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True)
class StepResult:
    """What a launched step drew. Lists are aligned with the plan's entries; -1 where an entry does not sample."""

    ids: list[int]
    bad: list[int] = field(default_factory=list)  # entries whose logits were NaN or infinite
    checked: dict[int, list[int]] = field(default_factory=dict)  # by entry with drafts: the draw at each of its tokens,
    #   whether or not those before it were accepted; -1 where the logits were NaN or infinite
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by entry, one for each draw
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by entry, this chunk's positions
    expert_load: list[tuple[int, list[int]]] | None = None  # now and then: (layer, tokens of each of its experts)
    #   since the last step that told
    sample_ms: float = 0.0  # the part of the step spent on sampling, where it is known
    device_ms: float | None = None  # None where it is not known (yet)
    # Ranks, and the ms that they exchanged or waited for it (in graphs: what exchanging takes alone). None: one rank.
    comm: tuple[int, float] | None = None


@dataclass(slots=True)
class Emitted:
    """One request's share of a commit: the token it drew, if any, and its end, if this was it."""

    request: Request
    token_id: int | None
    finish_reason: str = ""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
