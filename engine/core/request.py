"""A request: one sequence, from its submission to its end. It has ids and lengths, but no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from engine.core.ngrams import Lookup
    from engine.core.node import Node
from engine.params import SamplingParams
from engine.trace.side_pool import OWN


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Grammar(Protocol):
    """The masks of one reply, advanced by the tokens drawn so far (engine/text/structured.py, token_rules.py)."""

    @property
    def failed(self) -> str:
        """Why the grammar cannot continue, as a sentence; empty if it can."""

    def mask(self) -> np.ndarray:
        """Returns int32 [ceil(vocab_size / 32)]: bit t % 32 of word t // 32 is 1 if token t is allowed next."""

    def advance(self, token_id: int) -> bool:
        """Advance by a drawn token; return True if the reply is complete."""


class Grammars(Protocol):
    """Compiles grammars for one tokenizer."""

    def compile(self, params: SamplingParams) -> Grammar:
        """Returns the grammar that `params` specify. Raises InvalidRequest if it cannot be compiled."""

    def words(self, texts: tuple[str, ...]) -> list[list[int]]:
        """Returns the token ids of each text, with and without a space before the text (for `bad_words`)."""


@dataclass(eq=False, slots=True)
class Request:
    """One sequence. Only engine/core writes the fields below `params`; other code only reads them.

    Lengths, in tokens::

        0 ........ written ........ planned ........ total
        |    KV written     |  KV in flight  |  no KV yet   |

    `len(ids)` tokens are known on the host. `in_flight` more (at most one) were drawn by steps that are not committed
    yet; `total = len(ids) + in_flight`. A step samples the request's next token if it plans the request up to `total`.
    `table[i]` is the physical block of tokens [i*block_size, (i+1)*block_size). Its first `shared_blocks` entries are
    in the radix tree, on the path to `node`; the rest are private to this request.
    """

    id: int
    ids: list[int]
    params: SamplingParams
    seed: int
    max_total: int  # the most tokens of prompt and reply together
    stop_ids: frozenset[int] = frozenset()
    group: str = ""  # a label from the caller, such as the id of a chat; the engine does not read it
    sample_index: int = 0  # which of the n samples of a prompt; the noise depends on it
    priority: int = 0  # with the policy "priority", requests with a lower number are admitted first
    cache_salt: str = ""  # cached blocks are shared only between requests with the same salt
    prompt_len: int = 0
    arrived: int = 0  # the number of its record "submit": lower than those of younger requests
    state: RequestState = RequestState.WAITING
    finish_reason: str = ""
    row: int = -1  # the row in the batch, also in the block table; -1: not running
    planned: int = 0
    last_step: int = -1  # the last step with an entry of this request
    decoding: bool = False  # True after the first draw since the last admission; then total = planned + 1
    epoch: int = 0  # increases when results in flight become invalid: the request finished, or a step failed
    table: list[int] = field(default_factory=list)
    node: Node | None = None  # None: the root
    shared_blocks: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the tree before any preemption
    match: tuple[str, int, str] = ("", 0, "")  # `stop`, `at` and `detail` of the record "match", before any preemption
    preemptions: int = 0
    lost: int = 0  # the most tokens with KV that it had at a preemption: up to here, its tokens are computed again
    # With side groups (engine/core/side_groups.py): for each group, its pages or slots by their places.
    side: list[dict[int, int]] = field(default_factory=list)
    state_at: int = OWN  # the place of its newest recurrent state
    draft_places: list[int] = field(default_factory=list)  # of the states after the last token and after each draft
    branch: int = 0  # tokens that full attention had, if another group cut the last match; 0: none did
    prefixes: list[int] = field(default_factory=list)  # without a prefix cache: hash of the text up to each full block
    contents: list[int] = field(default_factory=list)  # and the number of this text (Copies in engine/core/cache.py)
    overtaken: int = 0  # younger requests admitted while this one waited (policy longest-prefix)
    prompt_logprobs_given: int = 0  # positions whose logprobs were returned; a resumed prefill skips these
    # Seconds on the log's clock; 0: not yet. The *_work times do not count the time while the gate was closed.
    submitted_at: float = 0.0
    admitted_at: float = 0.0
    submitted_work: float = 0.0
    admitted_work: float = 0.0
    ttft_ms: tuple[float, float] | None = None  # queue and prefill, as recorded; None: no token yet (step_clock.py)
    grammar: Grammar | None = None  # advanced when a step is committed
    lookup: Lookup | None = None  # made for the first draft
    drafted: int = 0  # draft tokens of the step in flight
    drafted_tokens: int = 0  # draft tokens of all committed steps
    accepted_tokens: int = 0  # how many of these were accepted

    @property
    def in_flight(self) -> int:
        """Tokens drawn by steps that are not committed yet. Computed from other fields, so steps need not update it."""
        return self.planned + 1 - len(self.ids) if self.decoding else 0

    @property
    def total(self) -> int:
        return len(self.ids) + self.in_flight

    @property
    def output_ids(self) -> list[int]:
        return self.ids[self.prompt_len :]
