"""Figures as text: counts, lists, durations, ordinals."""

from __future__ import annotations

from collections.abc import Sequence


def count(n: int, noun: str) -> str:
    """Returns "1 block", "6 blocks", "1,024 blocks"."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def listed(parts: Sequence[str]) -> str:
    """Returns "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def duration(value: float) -> str:
    """Returns milliseconds with their unit: "7.1 ms", "812 ms", "12.4 s"."""
    return f"{value:,.1f} ms" if value < 10 else f"{value:,.0f} ms" if value < 10_000 else f"{value / 1e3:,.1f} s"


def ms(value: float) -> str:
    """Returns milliseconds without a unit, with three significant digits: "7.13", "71.3", "713"."""
    if value < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def short(value: float) -> str:
    """Returns a number in at most five characters: 812, 9,999, 18.4k, 2.1M."""
    if abs(value) < 10_000:
        return f"{value:,.0f}"
    if abs(value) < 999_950:
        return f"{value / 1000:.1f}k"
    return f"{value / 1e6:.1f}M"


def ordinal(n: int) -> str:
    """Returns "1st", "2nd", "3rd", "4th"."""
    suffix = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"
