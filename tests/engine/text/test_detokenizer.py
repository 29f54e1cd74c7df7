"""Ids to text one by one, for every kind of decoder, against the library's decode of all ids."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from engine.text.detokenizer import BYTE_OF, Decoding

WORDS = [
    "▁", "▁▁", "▁the", "the", "a▁b", "##ing", "##", "ing", ".", "'", "n't", " do not", "a</w>", "</w>", "<pad>", "|",
    "Ġ", "é", "你好", "▁བོད", "🫨", "a", "b", "�", " ", "\n", "<0x4>", "<0xGG>", "</s>", "<think>",
]
LETTER = {byte: letter for letter, byte in BYTE_OF.items()}
ALPHABET = sorted(set(BYTE_OF) - {*WORDS})
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
VOCAB = [*dict.fromkeys([*WORDS, *BYTES, *ALPHABET])]
BYTE = {VOCAB.index(token): byte for byte, token in enumerate(BYTES)}
ID = {token: i for i, token in enumerate(VOCAB)}
FALLBACK = {
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "unigram with bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "nested": decoders.Sequence([decoders.Sequence([decoders.ByteFallback()]), decoders.Metaspace()]),
}
DECODERS: dict[str, Any] = FALLBACK | {
    "byte-level": decoders.ByteLevel(),
    "byte-level in a sequence": decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
    "metaspace, never prepended": decoders.Metaspace(prepend_scheme="never"),
    "wordpiece": decoders.WordPiece(),
    "wordpiece as it is": decoders.WordPiece(cleanup=False),
    "suffixes": decoders.BPEDecoder(),
    "ctc": decoders.CTC(),
    "none": None,
}
SCRIPTS = [
    "བོད་སྐད་ནི་སྐད་ཡིག་ཅིག་ཡིན།",
    "ⵜⴰⵎⴰⵣⵉⵖⵜ",
    "ትግርኛ ቋንቋ",
    "ગુજરાતી",
    "မြန်မာဘာသာ",
    "𐎠𐎡𐎢 𒀀𒀁",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "naïve Ω ≠ ∑",
    "\x00\x7f\x80\xff",
    "\ufffd \ufffe",
]


@cache
def library(kind: str) -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(models.WordLevel(ID, unk_token="a"))
    if DECODERS[kind] is not None:
        found.decoder = DECODERS[kind]
    found.add_special_tokens(["</s>"])
    found.add_tokens(["<think>"])
    return found


@cache
def decoding(kind: str) -> Decoding:
    return Decoding(library(kind), frozenset({ID["</s>"]}))


def pieces(kind: str, ids: list[int], skip: bool = True) -> list[str]:
    stream = decoding(kind).start(skip)
    return [*(stream.push([token]) for token in ids), stream.flush()]


def repaired(ids: list[int], skip: bool) -> list[int]:
    """The ids, with U+FFFD spelled out for every byte that belongs to no character: such runs the library decodes."""
    ids = [token for token in ids if token < len(VOCAB) and not (skip and token == ID["</s>"])]
    out: list[int] = []
    at = 0
    while at < len(ids):
        for length in (1, 2, 3, 4):
            try:
                whole = len(bytes(BYTE[token] for token in ids[at : at + length]).decode()) == 1
            except (KeyError, UnicodeDecodeError):
                continue
            if whole:
                out += ids[at : at + length]
                break
        else:
            out += [ID[f"<0x{byte:02X}>"] for byte in b"\xef\xbf\xbd"] if ids[at] in BYTE else [ids[at]]
            length = 1
        at += length
    return out


def expected(kind: str, ids: list[int], skip: bool) -> str:
    return library(kind).decode(repaired(ids, skip) if kind in FALLBACK else ids, skip_special_tokens=skip)


anything = st.integers(0, len(VOCAB) + 3)
byte = st.sampled_from(sorted(BYTE))
text = st.one_of(st.sampled_from([*SCRIPTS, "▁x▁"]), st.text(max_size=6))
spelled = text.map(lambda text: [ID[f"<0x{byte:02X}>"] for byte in text.encode()])
lettered = text.map(lambda text: [ID[LETTER[byte]] for byte in text.encode()])  # as byte-level BPE spells it
word = st.sampled_from(range(len(WORDS)))
chunks = st.lists(st.one_of(anything, byte, word).map(lambda token: [token]) | spelled | lettered, max_size=25)
id_lists = chunks.map(lambda lists: [token for part in lists for token in part])


@pytest.mark.parametrize("kind", DECODERS)
@given(ids=id_lists, skip=st.booleans())
@settings(max_examples=50, deadline=None)
def test_pieces_joined_are_the_librarys_decode(kind: str, ids: list[int], skip: bool) -> None:
    joined = "".join(pieces(kind, ids, skip))
    assert joined == expected(kind, ids, skip)
    assert joined == decoding(kind).decode(ids, skip)


@pytest.mark.parametrize("kind", ["llama", "gemma", "unigram with bytes", "byte-level"])
@pytest.mark.parametrize("text", SCRIPTS)
def test_a_character_is_shown_with_its_last_byte(kind: str, text: str) -> None:
    stream = decoding(kind).start(True)
    assert stream.push([ID["a"]]) == "a"
    for character in text:
        tokens = [LETTER[b] if kind == "byte-level" else f"<0x{b:02X}>" for b in character.encode()]
        shown = [stream.push([ID[token]]) for token in tokens]
        assert shown == [""] * (len(tokens) - 1) + [character]
    assert stream.flush() == ""


@pytest.mark.parametrize("kind", [kind for kind in DECODERS if not kind.startswith("byte-level")])
def test_a_token_costs_the_same_however_long_the_text(kind: str) -> None:
    """Counted, not timed: how many tokens the library is given for each."""
    shared = Decoding(library(kind), frozenset())
    join, given = shared.join, []
    shared.join = lambda tokens: given.append(len(tokens)) or join(tokens)  # type: ignore[func-returns-value]
    tibetan = [ID[f"<0x{b:02X}>"] for b in SCRIPTS[0].encode()] * 12
    for ids in (tibetan, [ID["<0xF0>"]] * 900, [ID["a"], ID["<0xE0>"]] * 400):
        stream = shared.start(True)
        costs = []
        for token in ids:
            given.clear()
            stream.push([token])
            costs.append(sum(given))
        stream.flush()
        assert max(costs) <= 20


def test_tokens_alone_stand_for_the_text_that_they_add() -> None:
    def bytes_of(kind: str, token: str) -> bytes:
        return decoding(kind).bytes_of[ID[token]]

    assert [bytes_of("wordpiece", token) for token in ("##ing", "ing")] == [b"ing", b" ing"]
    assert [bytes_of("llama", token) for token in ("▁the", "the", "<0xE2>")] == [b" the", b"the", b"\xe2"]
    assert bytes_of("metaspace", "<0xE2>") == b"<0xE2>", "no decoder here reads it as a byte"
    assert bytes_of("byte-level", "Ġ") == b" "
    assert decoding("llama").bytes_of[len(VOCAB) + 9] == b""
