"""Stage 7: turns token ids into text as the ids are drawn, for every decoder that a tokenizer.json can specify.

    byte-level BPE (GPT-2, Qwen, Llama 3)           the bytes of the tokens are joined and decoded as UTF-8
    all others (SentencePiece, Unigram, WordPiece)  the library decodes the last token without and with the new token;
                                                    the difference is the new text

One-byte tokens (such as <0xE2>, SentencePiece's byte fallback) are first joined into characters. A byte that is not
part of a character becomes one replacement character, as in SentencePiece. The library `tokenizers` cannot decode these
tokens one by one: if one byte of a run is wrong, the library replaces all bytes of the run. So with the library, no
text of a run could be shown before the end of the run.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Protocol

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_EACH_BYTE = "engine.each-byte"  # a codecs error handler: one replacement character for each wrong byte

codecs.register_error(_EACH_BYTE, lambda error: ("\ufffd" * (error.end - error.start), error.end))  # type: ignore[attr-defined]


class Detokenizer(Protocol):
    """Turns a reply's ids into text as they arrive. The joined texts of `push` and `flush` equal decode(ids). An
    incomplete character is held back, so a replacement character appears only if the bytes are not UTF-8. The cost of a
    token does not depend on the number of tokens before it."""

    def push(self, ids: list[int]) -> str:
        """Add ids; return the text that they complete, which may be empty."""

    def flush(self) -> str:
        """Returns the text that was held back. Call this at the end of a reply."""


class Decoding:
    """The decoder of one tokenizer, shared by its detokenizers.

    byte_level      True if the joined bytes of the tokens are the text
    byte_fallback   True if a sequence of one-byte tokens can represent a character
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        decoder = tokenizer.decoder
        kinds = set(_kinds(json.loads(decoder.__getstate__()))) if decoder is not None else set()
        self.byte_level = kinds - {"Fuse"} == {"ByteLevel"}
        self.byte_fallback = "ByteFallback" in kinds
        self.join: Callable[[list[str]], str] = decoder.decode if decoder is not None else " ".join
        self.bytes_of = _BytesOf(self)

    def start(self, skip_special_tokens: bool) -> Detokenizer:
        """Returns a detokenizer for one reply."""
        skip = self._special_ids if skip_special_tokens else frozenset()
        return _ByteDetokenizer(self, skip) if self.byte_level else _WindowDetokenizer(self, skip)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Returns the text of `ids`, decoded all at once."""
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        if not self.byte_fallback or "\ufffd" not in text:
            return text
        stream = _WindowDetokenizer(self, self._special_ids if skip_special_tokens else frozenset())
        return self.join([token for part in (*stream.parts(ids), *stream.rest()) for token in part])

    def token(self, token_id: int) -> str | None:
        """Returns the token as the vocabulary spells it; None for an unknown id (vocabularies may be padded)."""
        return self._tokenizer.id_to_token(token_id)

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes(BYTE_OF[character] for character in token)
            except KeyError:  # an added token is spelled as plain text
                return token.encode()
        if self.byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return self.join(["\0", token])[1:].encode() if token else b""


class _BytesOf(dict[int, bytes]):
    """Token id -> the bytes that the token adds to the text if it is not the first token; empty for an unknown id."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = found = self._decoding.to_bytes(self._decoding.token(token_id) or "")
        return found


class _ByteDetokenizer:
    """Decodes byte-level BPE."""

    def __init__(self, decoding: Decoding, skip: frozenset[int]) -> None:
        self._bytes_of, self._skip = decoding.bytes_of, skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: list[int]) -> str:
        return self._decoder.decode(b"".join([self._bytes_of[each] for each in ids if each not in self._skip]))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _WindowDetokenizer:
    """Decodes everything else. A *part* is one token, or the one-byte tokens of one character."""

    def __init__(self, decoding: Decoding, skip: frozenset[int]) -> None:
        self._decoding = decoding
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")(_EACH_BYTE)
        # The last token that is not a one-byte token. It decides whether a space comes before the next token.
        self._token: list[str] = []
        self._before: list[str] = []  # `_token`, followed by the last part if that part consists of one-byte tokens
        self._known = 0  # number of characters in the text of `_before`; the text after them is new

    def push(self, ids: list[int]) -> str:
        return "".join([self._emit(part) for part in self.parts(ids)])

    def flush(self) -> str:
        return "".join([self._emit(part) for part in self.rest()])

    def parts(self, ids: Iterable[int]) -> Iterator[list[str]]:
        """Yields the parts that these ids complete."""
        fallback = self._decoding.byte_fallback
        for token_id in ids:
            token = self._decoding.token(token_id)
            if token is None or token_id in self._skip:
                continue
            if fallback and _BYTE_TOKEN.fullmatch(token):
                yield from map(_spelled, self._utf8.decode(bytes([int(token[3:5], 16)])))
            else:
                yield from self.rest()
                yield [token]

    def rest(self) -> Iterator[list[str]]:
        """Yields a replacement character for each byte held back, because its character was not completed."""
        yield from map(_spelled, self._utf8.decode(b"", final=True))

    def _emit(self, part: list[str]) -> str:
        join = self._decoding.join
        text = join(self._before + part)[self._known :]
        if self._decoding.byte_fallback and _BYTE_TOKEN.fullmatch(part[0]):
            self._before = self._token + part
        else:
            self._before = self._token = part
        self._known = len(join(self._before))
        return text


@lru_cache(4096)
def _spelled(character: str) -> list[str]:
    """Returns the byte tokens of a character. Callers must not change the list."""
    return [f"<0x{byte:02X}>" for byte in character.encode()]


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    """Yields the type of a decoder, or the types of its parts if it is a sequence."""
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _kinds(part)
    else:
        yield decoder["type"]


def _byte_alphabet() -> dict[str, int]:
    """Returns a dict from GPT-2's printable characters to the bytes that they represent."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
