"""One sequence, from its submission to its end. The scheduler sees its lengths, never a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from engine.core.ngrams import Lookup
    from engine.core.radix import Node
from engine.params import SamplingParams


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Grammar(Protocol):
    """What one request's reply may still become (engine/text/structured.py)."""

    failed: str  # a sentence, once the grammar cannot be followed any further

    def mask(self) -> np.ndarray:
        """int32 [ceil(vocab_size / 32)]: bit t % 32 of word t // 32 says whether token t may come next."""

    def advance(self, token_id: int) -> bool:
        """Take a drawn token; True if the reply is complete."""


class Grammars(Protocol):
    """Compiles grammars for one tokenizer."""

    def compile(self, params: SamplingParams) -> Grammar:
        """The grammar that `params` asks for; InvalidRequest if it cannot be compiled."""


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
    grammar: Grammar | None = None  # advanced at commit
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
