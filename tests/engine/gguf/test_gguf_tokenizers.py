"""Tokenizers in GGUF files: tokenizer.json is made from the metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from engine.errors import CheckpointError
from engine.gguf.header import Header
from engine.gguf.tokenizer import PATTERNS, end_tokens, tokenizer_files
from engine.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("llama-bpe", "I'LL pay 12345 €/m", ["I", "'LL", "Ġpay", "Ġ", "123", "45", "ĠâĤ¬/", "m"]),
        ("pixtral", "a 1234", ["a", "Ġ", "123", "4"]),
        ("glm4", "a 1234", ["a", "Ġ", "123", "4"]),
        ("stablelm2", "a 12", ["a", "Ġ", "1", "2"]),
        ("refact", "it's 123", ["it", "'s", "Ġ", "1", "2", "3"]),
        ("olmo", "it's 123", ["it", "'s", "Ġ123"]),
        ("gpt-4o", "aBc DON'T 1234 x/\n", ["a", "Bc", "ĠDON'T", "Ġ", "123", "4", "Ġx", "/Ċ"]),
        ("tekken", "aBc DON'T 12", ["a", "Bc", "ĠDON", "'T", "Ġ", "1", "2"]),
        ("seed-coder", "a 12;\n", ["a", "Ġ", "1", "2", ";", "Ċ"]),
    ],
)
def test_texts_are_split_as_the_file_says(pre: str, text: str, words: list[str], tmp_path: Path) -> None:
    """The words, before they are cut into tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": [],
        "tokenizer.ggml.tokens": alphabet,
    }
    made, _ = tokenizer_files(Header(tmp_path, metadata, {}))
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(made))
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_tokens_that_end_a_reply_are_known_by_name(tmp_path: Path) -> None:
    tokens = ["a", "<|end|>", "<end_of_turn>", "<|return|>", "</s>"]
    for named, expected in ((tokens, [4, 2, 3]), (tokens[:3], [1, 2])):
        metadata = {"tokenizer.ggml.tokens": named, "tokenizer.ggml.eos_token_id": 4, "tokenizer.ggml.eot_token_id": -1}
        assert end_tokens(Header(tmp_path, metadata, {})) == expected


def test_sentence_pieces_are_merged_by_their_scores(tmp_path: Path) -> None:
    pieces = {"▁": -20, "a": -21, "b": -22, "c": -23, "ab": -3, "bc": -1, "▁a": -5, "▁abc": -2, "abc": -4}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    scores = [0.0] * 259 + [float(score) for score in pieces.values()]
    fields = {
        "model": "llama", "tokens": tokens, "scores": scores, "token_type": [2, 3, 3, *[6] * 256, *[1] * 9],
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True,
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    made, config = tokenizer_files(Header(tmp_path, metadata, {}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    names = [tokens[i] for i in tokenizer.encode("abc é")]
    assert names == ["<s>", "▁abc", "▁", "<0xC3>", "<0xA9>"], "bc, then abc, then ▁abc"
    assert tokenizer.decode(tokenizer.encode("abc é")) == "abc é"


def test_qwen35_splits_as_transformers_does() -> None:
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    assert PATTERNS["qwen35"] == PRETOKENIZE_REGEX


def test_the_pieces_of_gemma4_are_merged_as_transformers_does(tmp_path: Path) -> None:
    """Its file lists the merges, in which the pieces' scores have no part."""
    from transformers.models.gemma.tokenization_gemma import GemmaTokenizer

    merges = [("b", "c"), ("a", "bc"), ("▁", "abc"), ("a", "b"), ("▁", "▁"), ("\n", "\n")]
    pieces = ["▁", "a", "b", "c", "\n", *("".join(pair) for pair in merges)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{i:02X}>" for i in range(256)), *pieces, "<turn|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    metadata = {
        "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 3, *[6] * 256, *[1] * len(pieces), 3],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges], "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
    }
    header = Header(tmp_path, metadata, {})
    made, _ = tokenizer_files(header)
    ours, theirs = tokenizers.Tokenizer.from_str(json.dumps(made)), GemmaTokenizer(vocab=vocab, merges=merges)
    for text in ("abc", "a  abc\n\nbc", "é ab", "  \n"):
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False).ids == expected and ours.decode(expected) == text
    assert ours.encode("a").ids == [2, vocab["a"]] and end_tokens(header) == [1, vocab["<turn|>"]]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.merges", ["a b", "ab c"], "tokenizer.ggml.merges that do not join two tokens to a third"),
        ("tokenizer.ggml.merges", [1], "tokenizer.ggml.merges that do not"),
        ("tokenizer.ggml.token_type", ["x"], "a damaged list of tokens"),
        ("tokenizer.ggml.pre", "klingon", "splits words as 'klingon' does: supported are llama-bpe"),
        ("tokenizer.ggml.model", "rwkv", "a tokenizer of type 'rwkv'"),
    ],
)
def test_a_damaged_tokenizer_is_named(key: str, value: Any, message: str, tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    assert tokenizer_files(Header(tmp_path, metadata, {}))
    with pytest.raises(CheckpointError, match=message):
        tokenizer_files(Header(tmp_path, metadata | {key: value}, {}))


def test_long_pieces_are_refused_before_they_are_cut_everywhere(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a" * 2_000], "tokenizer.ggml.scores": [0.0]}
    with pytest.raises(CheckpointError, match="tokens of more than 1,024 characters"):
        tokenizer_files(Header(tmp_path, metadata, {}))
