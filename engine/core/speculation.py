"""Speculative decoding by prompt lookup: guess tokens from the request's own text and check several in one step.

A reply often repeats earlier text: code to edit, names, sentences of the prompt. The draft tokens are the tokens that
followed an earlier occurrence of the last tokens (Saxena 2023, "prompt lookup"). One step computes the last token and
k draft tokens, and draws a token at each position exactly as it would without drafts: same logits, same settings, same
noise (engine/kernels/noise.py depends only on seed, sample index and position). A draft token is accepted if it equals
the token drawn at its position. The first drawn token that differs is correct too: it replaces the draft token, and the
later draft tokens are rejected.

So a reply has the same tokens with and without drafts, greedy or sampled; only the number of steps differs. This is
exact in float64 on a CPU. In half precision and on GPUs, steps of different shapes round differently, so the result
may differ where two tokens are nearly equally likely.

The KV of rejected drafts is beyond `planned`: later tokens overwrite it, and it is never published.

Requests with penalties or a grammar get no drafts: penalties and grammars depend on the tokens before a draw, and some
of these tokens could be drafts that are rejected later.

The gain depends on the text. With the bundled model, the time per token fell from 23.2 to 5.1 ms for code repeated with
small edits, and rose from 6.9 to 7.0 ms for text without repetition (engine/kernels/MEASURED.md).
"""

from __future__ import annotations

from engine.core.ngrams import Lookup
from engine.core.request import Request

INDEXED_TOKENS = 2048  # the most tokens indexed in a step, for all requests together: 100,000 tokens take 0.2 s


class PromptLookup:
    """Makes the drafts of each step. `tokens`: the most draft tokens of a request in one step."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._indexable = INDEXED_TOKENS

    def begin_step(self) -> None:
        """Allow INDEXED_TOKENS again. Call this before the drafts of each step are made."""
        self._indexable = INDEXED_TOKENS

    def draft(self, request: Request, start: int, room: int) -> list[int]:
        """Draft up to `room` tokens after the last token, which is at position `start`. The draft is often empty."""
        room = min(room, self.tokens, request.max_total - start - 2)
        known = len(request.ids) == start + 1  # False: the last token is in flight
        if room <= 0 or not known or request.params.has_penalties or request.grammar is not None:
            return []
        if request.lookup is None:
            request.lookup = Lookup()
        self._indexable -= request.lookup.index(request.ids, self._indexable)
        return request.lookup.follow(request.ids, room)

    @staticmethod
    def learn(request: Request, drafted: int, accepted: int) -> None:
        """Record how much of a draft was accepted. Call this before the tokens of the step are appended."""
        request.drafted_tokens += drafted
        request.accepted_tokens += accepted
        assert request.lookup is not None, "a draft needs a lookup"
        request.lookup.learn(accepted, len(request.ids) + accepted + 1)
