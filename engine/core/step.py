"""What travels through a step: the plan, as plain arrays; what the device drew; and what the commit made of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from engine.core.request import Request


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
