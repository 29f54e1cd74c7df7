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

from array import array

from engine.core.request import Request

INDEXED_TOKENS = 2048  # the most tokens indexed in a step, for all requests together: 100,000 tokens take 0.2 s
NGRAM = 3  # tokens in an n-gram; with 2 tokens there were more drafts, but fewer were accepted
CANDIDATES = 16  # number of earlier places that are compared with the end of the text, the latest first
ENOUGH = 16  # the search ends at a place where this many tokens match the end of the text
LONGEST_PAUSE = 64  # at most this many tokens are decoded without drafts after failed drafts


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


class Lookup:
    """The n-grams of one request's text, and how many drafts in a row have failed.

    A place is the position after an n-gram. The places of an n-gram form a chain, as in LZ77: `_last` has the latest
    place of each n-gram, and `_before` has for each place the previous place of the same n-gram. A token adds one entry
    to `_before` and at most one entry to `_last`.
    """

    __slots__ = ("_before", "_failures", "_last", "_resume")

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], int] = {}  # n-gram -> its latest place
        self._before = array("i", [0] * NGRAM)  # place -> the previous place of the same n-gram; 0: none
        self._failures = 0  # drafts in a row without an accepted token
        self._resume = NGRAM + 1  # no drafts while the text is shorter than this

    def follow(self, ids: list[int], most: int) -> list[int]:
        """Draft `most` tokens: the text after the earlier place that has the longest match with the end of `ids`.

        If several matches are equally long, the latest place is used. The draft is empty if the last NGRAM tokens do
        not occur earlier in the indexed text, or while drafts are paused.
        """
        if len(ids) < self._resume:
            return []
        place, best, longest = self._last.get(tuple(ids[-NGRAM:]), 0), 0, 0
        for _ in range(CANDIDATES):
            if not place or longest == ENOUGH:
                break
            common = _in_common(ids, place)
            if common > longest:
                best, longest = place, common
            place = self._before[place]
        if not best:
            return []
        run = ids[best : best + most]
        return (run * (most // len(run) + 1))[:most]  # if fewer than `most` tokens follow the place, they are repeated

    def learn(self, accepted: int, length: int) -> None:
        """Record that `accepted` tokens of a draft were accepted. `length`: tokens of the text after this step."""
        self._failures = 0 if accepted else self._failures + 1
        if self._failures:
            self._resume = length + min(2**self._failures, LONGEST_PAUSE)

    def index(self, ids: list[int], most: int) -> int:
        """Index up to `most` more n-grams, but not the n-gram at the end of `ids`; return how many were indexed."""
        last, before, start = self._last, self._before, len(self._before)
        end = max(start, min(len(ids), start + most))
        columns = [ids[start - NGRAM + i : end - NGRAM + i] for i in range(NGRAM)]
        for place, gram in enumerate(zip(*columns, strict=True), start):
            before.append(last.get(gram, 0))
            last[gram] = place
        return end - start


def _in_common(ids: list[int], place: int) -> int:
    """Returns the number of tokens before `place` that equal the end of `ids`; at most ENOUGH."""
    length, end = NGRAM, len(ids)
    while length < ENOUGH and length < place and ids[place - 1 - length] == ids[end - 1 - length]:
        length += 1
    return length
