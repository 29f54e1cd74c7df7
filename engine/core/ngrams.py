"""Where the n-grams of a text stood before: what prompt lookup drafts from (engine/core/speculation.py)."""

from __future__ import annotations

from array import array

NGRAM = 3  # tokens that must have stood together before
CANDIDATES = 16  # places looked at, the most recent first
ENOUGH = 16  # tokens in common beyond which a place is taken without looking further
LONGEST_PAUSE = 64  # tokens decoded without drafts after many failures


class Lookup:
    """The n-grams of one request's text, and how its drafts have fared.

    The places of an n-gram are chained as in LZ77: `_last` knows its last place, `_before` of each place the one
    before it. A token costs an entry of each, whatever the length of the text.
    """

    __slots__ = ("_before", "_failures", "_last", "_resume")

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], int] = {}  # n-gram -> the position after it
        self._before = array("i", [0] * NGRAM)  # position after an n-gram -> that of the one before; 0: there is none
        self._failures = 0  # drafts in a row of which nothing was accepted
        self._resume = NGRAM + 1  # tokens of text from which on drafts are made

    def follow(self, ids: list[int], most: int) -> list[int]:
        """The `most` tokens after the place that has the most in common with the end of `ids`; of equals, the latest.

        Nothing if the last NGRAM tokens never stood together before, as far as `take_in` has come, or drafts are
        paused.
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
        return (run * (most // len(run) + 1))[:most]  # a text that repeats itself goes on repeating

    def learn(self, accepted: int, length: int) -> None:
        """Of a draft so many tokens were accepted; the text is `length` tokens long now."""
        self._failures = 0 if accepted else self._failures + 1
        if self._failures:
            self._resume = length + min(2**self._failures, LONGEST_PAUSE)

    def take_in(self, ids: list[int], most: int) -> int:
        """Index the next n-grams that have a token behind them, at most so many. Returns how many."""
        last, before, start = self._last, self._before, len(self._before)
        end = max(start, min(len(ids), start + most))
        columns = [ids[start - NGRAM + i : end - NGRAM + i] for i in range(NGRAM)]
        for place, gram in enumerate(zip(*columns, strict=True), start):
            before.append(last.get(gram, 0))
            last[gram] = place
        return end - start


def _in_common(ids: list[int], place: int) -> int:
    """How many tokens before `place` are those at the end of `ids`, up to ENOUGH."""
    length, end = NGRAM, len(ids)
    while length < ENOUGH and length < place and ids[place - 1 - length] == ids[end - 1 - length]:
        length += 1
    return length
