"""Predictions: the letters of the choices, and the sentence about a guess."""

from __future__ import annotations

from dataclasses import dataclass

LETTERS = "abcd"  # names of the choices


@dataclass(frozen=True)
class Poll:
    """A question that waits for an answer: of a demo, of a page of a lesson, or about the next step."""

    question: str
    choices: tuple[str, ...]


def verdict(guess: int | None, right: int) -> str:
    """Returns a sentence about a guess, given the index of the right choice."""
    if guess is None:
        return f"The answer is {LETTERS[right]}."
    correct = "correct" if guess == right else f"the answer is {LETTERS[right]}"
    return f"You said {LETTERS[guess]}: {correct}."
