"""Sampling of tests."""

from __future__ import annotations

from minitui.chat.conversation import Sampling


def sampling(max_tokens: int) -> Sampling:
    """Greedy sampling: every run writes the same text."""
    return Sampling(temperature=0.0, max_tokens=max_tokens)
