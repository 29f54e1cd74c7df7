"""What a lesson shows in a panel besides the engine's records: a text in pieces, a key that is read, candidates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pieces:
    """A text in pieces. `prompt`: how many pieces are the prompt; the others are the reply. None: there is no reply."""

    title: str
    pieces: tuple[str, ...]
    line: str = ""  # a sentence about the picture
    ids: tuple[int, ...] = ()  # the token id of each piece, if the pieces are tokens
    lit: frozenset[int] = frozenset()  # the pieces that are new
    prompt: int | None = None


Board = Pieces
