"""Formats counts, lists, ranges, durations, ordinals, and the reason why a prefix match ended."""

from __future__ import annotations

from collections.abc import Sequence

# `stop` of a match record -> (text, explanation). {at} is the index of a token or of a step, {cached} the number of
# tokens that were taken, {again} how many more full attention has.
MATCH_REASONS = {
    "whole": ("all full blocks were cached", "the last token is always computed"),
    "differs": ("differs at token {at}", "the cached texts have another token"),
    "ends": ("the cached text ends at token {at}", "the tree has no text after it"),
    "short": ("too short to share", "the prompt has at most one block"),
    "empty": ("the beginning is not cached", "no cached text has the same first token"),
    "evicted": ("the rest was evicted at step {at}", "the memory was needed for other tokens"),
    "state": (
        "full attention has {at} tokens, the nearest checkpoint is at {cached}: {again} tokens again",
        "a recurrent state can only go on where one was kept",
    ),
    "window": (
        "full attention has {at} tokens, the pages of {group} serve {cached}: {again} tokens again",
        "the pages behind a window leave the cache first",
    ),
}


def count(n: int, noun: str) -> str:
    """Returns "1 block", "6 blocks", "1,024 blocks"."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def listed(parts: Sequence[str]) -> str:
    """Returns "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def exact(value: float) -> float:
    """Returns milliseconds to the microsecond, which is what the engine measures. JSON has durations like this, and
    texts are made of them: so a sum of parts does not round differently in two places."""
    return round(value, 3)


def ms(value: float) -> str:
    """Returns milliseconds without a unit, with three significant digits: "7.13", "71.3", "713"."""
    value = exact(value)
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def duration(value: float) -> str:
    """Returns milliseconds with their unit: "7.13 ms", "71.3 ms", "812 ms", "12.4 s"."""
    return f"{ms(value)} ms" if value < 9_999.5 else f"{value / 1e3:,.1f} s"


def short(value: float) -> str:
    """Returns a number in a short form: "812", "9,999", "18.4k", "2.1M"."""
    if abs(value) < 10_000:
        return f"{value:,.0f}"
    if abs(value) < 999_950:
        return f"{value / 1000:.1f}k"
    return f"{value / 1e6:.1f}M"


def ranges(numbers: Sequence[int], most: int = 8) -> str:
    """Returns numbers with ranges: "12–15, 40"; an ellipsis after `most` parts."""
    parts: list[str] = []
    start = before = numbers[0]
    for number in [*numbers[1:], -1]:
        if number == before + 1:
            before = number
            continue
        parts.append(str(start) if start == before else f"{start}–{before}")
        start = before = number
        if len(parts) == most:
            parts.append("…")
            break
    return ", ".join(parts)


def percent(share: float, at_most: bool = False) -> str:
    """Returns a probability: "12.5%", "<0.1%". `at_most`: it may be smaller, "<12.5%"."""
    return f"{'<' * at_most}{share:.1%}" if share >= 0.001 else "<0.1%"


def ordinal(n: int) -> str:
    """Returns "1st", "2nd", "3rd", "4th"."""
    suffix = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"


def match_reason(
    stop: str, at: object, cached: int | None = None, detail: str = "", again_ms: float | None = None
) -> str:
    """Returns why a prefix match ended: "differs at token 1,112". An unknown `stop` is returned unchanged. `cached`:
    the number of tokens that it took; None: unknown, but some. `detail`: of the match; it names the group that cut the
    hit. `again_ms`: the time of the tokens that are computed again."""
    words, _ = MATCH_REASONS.get(stop, (stop, ""))
    words = words.replace("{group}", detail.partition("cut by ")[2] or "a window")
    if again_ms is not None and "{again}" in words:
        words += f", {duration(again_ms)}"
    if cached == 0:
        words = words.replace("the rest", "the beginning")
        words = words.replace("the nearest checkpoint is at {cached}", "but no checkpoint is in them")
    again = at - cached if isinstance(at, int) and cached is not None else None
    for name, value in ("at", at), ("cached", cached), ("again", again):
        words = words.replace(f"{{{name}}}", f"{value:,}" if isinstance(value, int) else "?")
    return words


def match_reasons() -> str:
    """Returns a line for each reason with its explanation, for help texts."""
    whys = {words.replace("{at}", "n"): why for words, why in MATCH_REASONS.values() if "{again}" not in words}
    whys["full attention has n tokens, …"] = "a window or a recurrent state has fewer"
    return "\n".join(f"  {words:<33} {why}" for words, why in whys.items())
