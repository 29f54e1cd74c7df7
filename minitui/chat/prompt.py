"""A chat's prompt as token ids: what the template renders, continued from the ids that were sent and received
before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

THINK, END_THINK = "<think>", "</think>"




class Codec(Protocol):
    """As much of a tokenizer as a conversation needs."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which no text can spell."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids."""

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """The ids of a conversation."""


@dataclass(frozen=True)
class Prompt:
    """The ids of a turn. `kept` leading ones are those of the conversation so far; where it goes another way although
    more was kept, `diverges_at` is that token and `reason` says why."""

    ids: list[int]
    kept: int = 0
    diverges_at: int | None = None
    reason: str = ""


def continue_prompt(rendered: list[int], kept: list[int], codec: Codec) -> Prompt:
    """Keep as much of the ids of the conversation so far as the template's rendering of it allows.

    Both are cut at their control tokens. Piece by piece, the kept ids stand where the ids are equal or spell the same
    text: a model may have spelled its answer in other tokens than the tokenizer would. The first piece that says
    something else ends it.
    """

    def spell(piece: list[int]) -> str:
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
        elif spell(old[index]) == spell(piece):
            ids += old[index]
        elif index == len(old) - 1 and (rest := _rest(old[index], piece, spell)) is not None:
            # An answer cut short is the beginning of its piece: the rendering goes on after it.
            return Prompt(ids + old[index] + rest + _joined(new[index + 1 :]), kept=len(kept))
        elif index == len(new) - 1 and old[index][: len(piece)] == piece:
            ids += piece  # an answer that goes on from here was taken back
        else:
            at = len(ids) + _common(old[index], piece)
            reason = _why(spell(old[index]), spell(piece), index)
            return Prompt(ids + _joined(new[index:]), at, at, reason)
    else:
        # Everything rendered was kept, and more was kept than rendered: a message was taken back.
        return Prompt(ids, len(ids))
    return Prompt(ids + _joined(new[len(old) :]), len(ids))


def _joined(pieces: list[list[int]]) -> list[int]:
    return [token for piece in pieces for token in piece]


def _control(a: list[int], b: list[int], codec: Codec) -> bool:
    """Is one of two different pieces a control token? Then no text can make them equal."""
    return a[0] in codec.special_ids or b[0] in codec.special_ids


def _pieces(ids: list[int], special: frozenset[int]) -> list[list[int]]:
    """Cut before and after every control token, which stands as a piece of its own."""
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


def _rest(old: list[int], piece: list[int], spell: Callable[[list[int]], str]) -> list[int] | None:
    """The last ids of `piece`, which spell what follows the text of `old`; None if no token begins there."""
    begun, whole = spell(old), spell(piece)
    if not whole.startswith(begun):
        return None
    wanted = whole[len(begun) :]
    for start in range(len(piece), -1, -1):
        text = spell(piece[start:])
        if text == wanted:
            return piece[start:]
        if len(text) > len(wanted) + 4:  # half a character spells up to four marks
            return None
    return None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def _why(old: str, new: str, piece: int) -> str:
    if END_THINK in old and END_THINK not in new:
        return "the template drops the thinking of earlier turns"
    if END_THINK in new and END_THINK not in old:
        return "the template adds an empty thinking part"
    if piece <= 1:
        return "the system prompt was changed"
    return "the conversation reads otherwise there"
