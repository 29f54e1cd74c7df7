"""Figures as text: durations."""

from __future__ import annotations


def duration(value: float) -> str:
    """Milliseconds as people read them."""
    return f"{value:,.1f} ms" if value < 10 else f"{value:,.0f} ms" if value < 10_000 else f"{value / 1e3:,.1f} s"
