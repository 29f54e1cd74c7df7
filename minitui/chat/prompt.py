"""Makes a chat's next prompt from the rendered template: kept ids replace rendered ids of the same text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

THINK, END_THINK = "<think>", "</think>"


class Codec(Protocol):
    """The part of a tokenizer that a conversation needs."""

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of control tokens; a user's text never encodes to them."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of the ids."""

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Returns the ids of the rendered conversation."""


@dataclass(frozen=True)
class Prompt:
    """A prompt. Its first `kept` ids are also the first ids that the conversation kept. If the conversation kept more
    ids, and the prompt differs from them, `diverges_at` is the index of the first difference, and `reason` says why."""

    ids: list[int]
    kept: int = 0
    diverges_at: int | None = None
    reason: str = ""


def continue_prompt(rendered: list[int], kept: list[int], codec: Codec) -> Prompt:
    """Returns the rendered prompt with as many of the `kept` ids as possible.

    Both lists are split into pieces at control tokens. A kept piece replaces the rendered piece if both have the same
    text, because a model may generate other tokens for a text than the tokenizer. The first piece whose text differs,
    and all later pieces, are rendered pieces.
    """

    def text_of(piece: list[int]) -> str:
        return codec.decode(piece, skip_special_tokens=False)

    ids: list[int] = []
    old, new = _pieces(kept, codec.special_ids), _pieces(rendered, codec.special_ids)
    for index, piece in enumerate(new):
        if index >= len(old):
            break
        if old[index] == piece:
            ids += piece
        elif {old[index][0], piece[0]} & codec.special_ids:  # of different pieces: their texts differ, too
            at = len(ids)
            return Prompt(ids + _joined(new[index:]), at, at, "the template rewrites an earlier turn")
        elif text_of(old[index]) == text_of(piece):
            ids += old[index]
        elif index == len(old) - 1 and (rest := _rest(old[index], piece, text_of)) is not None:
            # The answer was cut short, and the rendered text continues it.
            return Prompt(ids + old[index] + rest + _joined(new[index + 1 :]), kept=len(kept))
        elif index == len(new) - 1 and old[index][: len(piece)] == piece:
            ids += piece  # the kept answer is longer than the rendered answer
        else:
            at = len(ids) + _common(old[index], piece)
            reason = _difference(text_of(old[index]), text_of(piece), index)
            return Prompt(ids + _joined(new[index:]), at, at, reason)
    else:
        # All rendered pieces matched. If a message was removed, there are more kept pieces than rendered pieces.
        return Prompt(ids, len(ids))
    return Prompt(ids + _joined(new[len(old) :]), len(ids))


def _joined(pieces: list[list[int]]) -> list[int]:
    return [token for piece in pieces for token in piece]


def _pieces(ids: list[int], special: frozenset[int]) -> list[list[int]]:
    """Returns the ids split at control tokens. Each control token is a separate piece."""
    pieces: list[list[int]] = []
    run: list[int] = []
    for token in ids:
        if token in special:
            if run:
                pieces.append(run)
            pieces.append([token])
            run = []
        else:
            run.append(token)
    if run:
        pieces.append(run)
    return pieces


def _rest(old: list[int], piece: list[int], text_of: Callable[[list[int]], str]) -> list[int] | None:
    """Returns the ids of `piece` after the text of `old`; None if no id begins exactly where that text ends."""
    beginning, whole = text_of(old), text_of(piece)
    if not whole.startswith(beginning):
        return None
    wanted = whole[len(beginning) :]
    for start in range(len(piece), -1, -1):
        text = text_of(piece[start:])
        if text == wanted:
            return piece[start:]
        if len(text) > len(wanted) + 4:  # an incomplete character decodes to up to four replacement characters
            return None
    return None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _difference(old: str, new: str, piece: int) -> str:
    """Returns the likely reason why the rendered text differs from the kept text of piece `piece`."""
    if END_THINK in old and END_THINK not in new:
        return "the template drops the thinking of earlier turns"
    if END_THINK in new and END_THINK not in old:
        return "the template adds an empty thinking part"
    if piece <= 1:
        return "the system prompt was changed"
    return "an earlier message differs"
