"""Predictions: the letters of the choices, and the sentence about a guess."""

from __future__ import annotations

LETTERS = "abcd"  # names of the choices


def verdict(guess: int | None, right: int) -> str:
    """Returns a sentence about a guess, given the index of the right choice."""
    if guess is None:
        return f"The answer is {LETTERS[right]}."
    correct = "correct" if guess == right else f"the answer is {LETTERS[right]}"
    return f"You said {LETTERS[guess]}: {correct}."
