"""Masks the tokens that a request excludes with `allowed_token_ids` and `bad_words`, or all but the tokens of a replay.
`dead_end` checks that all masks of a request together (also its grammar and min_tokens) allow at least one token.

Both classes have the interface of a grammar, so the scheduler and the sampler treat them as one. If the request also
has a grammar, both masks apply.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.core.request import Grammar, Request
from engine.errors import InvalidRequest
from engine.params import SamplingParams


class TokenRules:
    """The rules of one reply. A word of several tokens is excluded by masking its last token whenever the reply ends
    with the word's other tokens. The prompt does not count."""

    def __init__(
        self, params: SamplingParams, words: Sequence[Sequence[int]], vocab_size: int, grammar: Grammar | None = None
    ) -> None:
        """`words`: the token ids of the bad words. Raises InvalidRequest if no token is left for the first draw."""
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        allowed = params.allowed_token_ids
        bits[slice(vocab_size) if allowed is None else list(allowed)] = 1
        bits[[word[0] for word in words if len(word) == 1]] = 0
        self._mask = np.packbits(bits, bitorder="little").view(np.int32)
        self._ends: dict[int, list[tuple[list[int], int]]] = {}  # last token of a beginning -> [(beginning, end)]
        for *beginning, end in words:
            if beginning:
                self._ends.setdefault(beginning[-1], []).append((beginning, end))
        self._longest = max(map(len, words), default=0) - 1
        self._recent: list[int] = []  # the last drawn tokens, as many as the longest beginning
        self._grammar = grammar
        if not self._mask.any():
            raise InvalidRequest(
                f"bad_words exclude all {len(allowed or ()):,} tokens of allowed_token_ids: allow more tokens"
                if allowed is not None else f"bad_words exclude all {vocab_size:,} tokens of the model", "bad_words",
            )

    @property
    def failed(self) -> str:
        return self._grammar.failed if self._grammar is not None else ""

    def mask(self) -> np.ndarray:
        mask = self._mask.copy()
        for beginning, end in self._ends.get(self._recent[-1], ()) if self._recent else ():
            if self._recent[-len(beginning) :] == beginning:
                mask.view(np.uint32)[end // 32] &= np.uint32(~(1 << end % 32) & 0xFFFFFFFF)
        return mask if self._grammar is None else mask & self._grammar.mask()

    def advance(self, token_id: int) -> bool:
        if self._longest > 0:
            self._recent = [*self._recent, token_id][-self._longest :]
        return self._grammar is not None and self._grammar.advance(token_id)


class Replay:
    """Allows only the next token of a known reply (`trace_decode_token_ids`)."""

    failed = ""

    def __init__(self, reply: Sequence[int], vocab_size: int) -> None:
        self._reply, self._words, self._at = reply, -(-vocab_size // 32), 0

    def mask(self) -> np.ndarray:
        mask = np.zeros(self._words, np.uint32)
        token = self._reply[min(self._at, len(self._reply) - 1)]
        mask[token // 32] = 1 << token % 32
        return mask.view(np.int32)

    def advance(self, _token_id: int) -> bool:
        self._at += 1
        return False  # its length is the request's max_tokens


def dead_end(request: Request) -> str:
    """Returns the reason why no token is allowed next, as a sentence; empty if a token is allowed. This function is
    slow, because it computes the grammar's mask. Call it only for a new request that has masks, or after the sampler
    could not draw a token."""
    drawn, least = len(request.ids) - request.prompt_len, request.params.min_tokens
    if request.grammar is None:
        return ""  # the only mask is min_tokens: it forbids the stop ids, which are never the whole vocabulary
    bits = np.unpackbits(request.grammar.mask().view(np.uint8), bitorder="little")
    if request.grammar.failed:
        return request.grammar.failed
    tokens = f"{drawn:,} token{'' if drawn == 1 else 's'}"
    allowed = set(np.flatnonzero(bits).tolist())
    if not allowed:
        return f"{_masks(request.params)} allows no token after {tokens}"
    if drawn < least and allowed <= request.stop_ids:
        return (
            f"after {tokens} {_masks(request.params)} allows only the end of the reply, which min_tokens = {least:,} "
            "forbids: lower min_tokens or allow more tokens"
        )
    return ""


def _masks(params: SamplingParams) -> str:
    """Returns the names of the request's masks, as the subject of a sentence."""
    names = ["allowed_token_ids"] if params.allowed_token_ids is not None else []
    names += ["bad_words"] if params.bad_words else []
    if params.structured or not names:
        names.insert(0, "the reply's grammar")
    return names[0] if len(names) == 1 else f"the combination of {', '.join(names[:-1])} and {names[-1]}"
