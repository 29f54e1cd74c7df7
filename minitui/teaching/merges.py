"""How a byte-level BPE tokenizer cuts a text: its merge rules, in the order in which they are applied to the text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise

import tokenizers

from engine.errors import EngineError
from engine.text.detokenizer import BYTE_OF
from engine.text.tokenizer import Tokenizer

NO_BREAK = "\xa0"  # a space at which no line ends


@dataclass(frozen=True, slots=True)
class Merge:
    """One rule, applied wherever its pair occurs in the text. `pieces`: the whole text after it."""

    rule: int  # its number; the rule with the lowest number is applied first
    pair: tuple[bytes, bytes]
    pieces: tuple[bytes, ...]
    new: frozenset[int]  # indices of the pieces that the rule made


def merges(tokenizer: Tokenizer, text: str) -> tuple[tuple[bytes, ...], list[Merge]]:
    """Returns the text's bytes, one by one, and the merges that make its tokens from them. Raises EngineError if the
    tokenizer does not use byte-level BPE, or if the merges do not give its own tokens."""
    source = tokenizer.to_json()
    model = json.loads(source)["model"]
    cutter = tokenizers.Tokenizer.from_str(source).pre_tokenizer
    if model.get("type") != "BPE" or cutter is None:
        raise EngineError("this tokenizer does not merge pairs of pieces, so there are no merges to show")
    pairs = (tuple(rule.split(" ") if isinstance(rule, str) else rule) for rule in model["merges"])
    rules = {pair: number for number, pair in enumerate(pairs, 1)}
    words = [list(word) for word, _ in cutter.pre_tokenize_str(text)]
    begin = _flat(words)[0]
    done: list[Merge] = []
    while True:
        found = {pair for word in words for pair in pairwise(word) if pair in rules}
        if not found:
            break
        best = min(found, key=rules.__getitem__)
        words = [_merged(word, best) for word in words]
        pieces, new = _flat(words, "".join(best))
        done.append(Merge(rules[best], (_bytes(best[0]), _bytes(best[1])), pieces, new))
    if (done[-1].pieces if done else begin) != tuple(map(tokenizer.token_bytes, tokenizer.encode(text))):
        raise EngineError("the merges do not give this tokenizer's own tokens: it uses more than byte-level BPE")
    return begin, done


def _merged(word: list[str], pair: tuple[str, ...]) -> list[str]:
    out: list[str] = []
    rest = iter(range(len(word)))
    for i in rest:
        if tuple(word[i : i + 2]) == pair:
            out.append("".join(pair))
            next(rest)
        else:
            out.append(word[i])
    return out


def _flat(words: list[list[str]], made: str = "") -> tuple[tuple[bytes, ...], frozenset[int]]:
    """Returns all pieces as bytes, and the indices of the pieces that are spelled `made`."""
    pieces = [piece for word in words for piece in word]
    return tuple(map(_bytes, pieces)), frozenset(i for i, piece in enumerate(pieces) if piece == made)


def _bytes(piece: str) -> bytes:
    """Returns the bytes of a piece: byte-level BPE spells each byte as one printable character."""
    return bytes(BYTE_OF[character] for character in piece)


def shown_piece(raw: bytes) -> str:
    """Returns the piece's text; its bytes in hexadecimal digits, such as <f0 9f>, if it is not whole characters."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return f"<{raw.hex(' ')}>"


def quoted(piece: str) -> str:
    """Returns the piece in quotation marks; no line ends at its spaces."""
    return f"“{piece}”".replace(" ", NO_BREAK)
