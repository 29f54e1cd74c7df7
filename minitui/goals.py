"""Goals for the times of a request, written as "first=500,gap=50": for `advise --goal` and `bench --url --slo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.errors import InvalidRequest
from minitui.text import duration, listed

WORDS = {
    "first": "first token within {}",
    "gap": "a mean gap of at most {}",
    "total": "the whole answer within {}",
}  # of the gaps between the tokens of one answer, the mean counts
MEANINGS = {
    "first": "the longest time to first token",
    "gap": "the longest mean gap between tokens of a request",
    "total": "the longest time of a whole answer",
}


def goals_of(text: str, names: Sequence[str] = ("first", "gap")) -> dict[str, float]:
    """Returns {"first": 500.0, "gap": 50.0} for "first=500,gap=50", in ms. Raises InvalidRequest."""
    goals: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            goals[name] = float(value)
        except ValueError:
            goals[name] = -1.0
        if name not in names or not 0 < goals[name] < 1e9:
            meanings = listed([MEANINGS[one] for one in names])
            raise InvalidRequest(f"{text[:60]!r} is not a list of goals: write first=500,gap=50: {meanings}, in ms")
    return goals


def goal_words(goals: Mapping[str, float]) -> str:
    """Returns "first token within 500 ms and a mean gap of at most 50.0 ms"."""
    return listed([words.format(duration(goals[name])) for name, words in WORDS.items() if name in goals])


def keeps(goals: Mapping[str, float], **times: float) -> bool:
    """Returns True if each of the times of a request, in ms, is within its goal."""
    return all(times[name] <= most for name, most in goals.items())
