"""An index of the n-grams of a text, for prompt lookup (engine/core/speculation.py)."""

from __future__ import annotations

from array import array

NGRAM = 3  # tokens in an n-gram; with 2 tokens there were more drafts, but fewer were accepted
CANDIDATES = 16  # number of earlier places that are compared with the end of the text, the latest first
ENOUGH = 16  # the search ends at a place where this many tokens match the end of the text
LONGEST_PAUSE = 64  # at most this many tokens are decoded without drafts after failed drafts


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
        """Draft `most` tokens: the text after the earlier place that has the longest match with the end of `ids`. If
        several matches are equally long, the latest place is used. The draft is empty if the last NGRAM tokens do not
        occur earlier in the indexed text, or while drafts are paused."""
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
