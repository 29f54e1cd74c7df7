"""A chat's next prompt as token ids: the rendered template, with the ids of earlier turns kept where they match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

THINK, END_THINK = "<think>", "</think>"


class Codec(Protocol):
    """The part of a tokenizer that a conversation needs."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which no text encodes to."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of the ids."""

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """The ids of the rendered conversation."""


@dataclass(frozen=True)
class Prompt:
    """A prompt. Its first `kept` ids are the kept ids of the conversation. If the template changed an earlier turn,
    `diverges_at` is the first token that differs and `reason` says why."""

    ids: list[int]
    kept: int = 0
    diverges_at: int | None = None
    reason: str = ""


def continue_prompt(rendered: list[int], kept: list[int], codec: Codec) -> Prompt:
    """The rendered prompt, with as many of the `kept` ids as possible.

    Both are split at their control tokens. Piece by piece, kept ids replace the rendered ids of the same text: a model
    may use other tokens for a text than the tokenizer. This ends at the first piece with another text.
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
        elif _control(old[index], piece, codec):
            at = len(ids)
            return Prompt(ids + _joined(new[index:]), at, at, "the template rewrites an earlier turn")
        elif text_of(old[index]) == text_of(piece):
            ids += old[index]
        elif index == len(old) - 1 and (rest := _rest(old[index], piece, text_of)) is not None:
            # The answer was cut short: the rendering continues it.
            return Prompt(ids + old[index] + rest + _joined(new[index + 1 :]), kept=len(kept))
        elif index == len(new) - 1 and old[index][: len(piece)] == piece:
            ids += piece  # the end of the kept answer was removed
        else:
            at = len(ids) + _common(old[index], piece)
            reason = _why(text_of(old[index]), text_of(piece), index)
            return Prompt(ids + _joined(new[index:]), at, at, reason)
    else:
        # All rendered pieces matched, and some kept ones are left over: a message was removed.
        return Prompt(ids, len(ids))
    return Prompt(ids + _joined(new[len(old) :]), len(ids))


def _joined(pieces: list[list[int]]) -> list[int]:
    return [token for piece in pieces for token in piece]


def _control(a: list[int], b: list[int], codec: Codec) -> bool:
    """True if one of two different pieces is a control token: they cannot have the same text."""
    return a[0] in codec.special_ids or b[0] in codec.special_ids


def _pieces(ids: list[int], special: frozenset[int]) -> list[list[int]]:
    """Splits the ids; each control token is a piece of its own."""
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
    """The ids of `piece` after the text of `old`; None if no token begins exactly there."""
    begun, whole = text_of(old), text_of(piece)
    if not whole.startswith(begun):
        return None
    wanted = whole[len(begun) :]
    for start in range(len(piece), -1, -1):
        text = text_of(piece[start:])
        if text == wanted:
            return piece[start:]
        if len(text) > len(wanted) + 4:  # half a character decodes to up to four replacement characters
            return None
    return None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of ids at the beginning that both have."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _why(old: str, new: str, piece: int) -> str:
    if END_THINK in old and END_THINK not in new:
        return "the template drops the thinking of earlier turns"
    if END_THINK in new and END_THINK not in old:
        return "the template adds an empty thinking part"
    if piece <= 1:
        return "the system prompt was changed"
    return "an earlier message differs"
