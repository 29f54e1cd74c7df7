"""Constrained replies: whatever the model would rather say, what it says obeys."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from engine.errors import InvalidRequest
from engine.params import SamplingParams
from engine.text import structured
from engine.text.structured import Grammars
from engine.text.tokenizer import Tokenizer
from tests.engine.text.test_tokenizer import byte_level, write
from tests.support.models import Driver, make_request, make_runner, reference, save

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}


def wide(properties: int) -> dict[str, Any]:
    """A schema any part of whose properties may be there, in this order: as many ways on from each."""
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(properties)}}


PADDING = 37  # ids of the model beyond the tokenizer's


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write(tmp_path_factory.mktemp("tokenizer"), byte_level(), eos_token="<|im_end|>"))


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocab = tokenizer.vocab_size + PADDING
    return save(reference("qwen3", vocab_size=vocab, max_position_embeddings=512), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size + PADDING)


def reply(driver: Driver, requests: list[Any], tokenizer: Tokenizer, most: int = 200) -> list[str]:
    """Run all to their end in one batch, advancing grammars at commit as the engine does."""
    open_ = list(requests)
    driver.run([(request, len(request.ids), True) for request in requests])
    for _ in range(most):
        for request in list(open_):
            token = request.ids[-1]
            ended = token in request.stop_ids or (request.grammar is not None and request.grammar.advance(token))
            if ended or (request.grammar is None and len(request.output_ids) == 12):
                open_.remove(request)
        if not open_:
            break
        driver.run([(request, 1, True) for request in open_])
    return [tokenizer.decode(request.output_ids) for request in requests]


def constrained(grammars: Grammars, row: int, seed: int, **params: Any) -> Any:
    request = make_request([10 + seed, 11, 12], row, seed, temperature=1.5, **params)
    request.grammar = grammars.compile(request.params)
    return request


@pytest.mark.parametrize("seed", range(4))
def test_replies_obey_a_schema_a_regex_and_a_choice_in_one_batch_with_free_ones(
    seed: int, model: Path, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    driver = Driver(make_runner(model, num_blocks=400, max_num_seqs=5))
    free = make_request([10, 11, 12], 4, seed, temperature=1.0)
    requests = [
        constrained(grammars, 0, seed, json_schema=SCHEMA),
        constrained(grammars, 1, seed, regex=r"[a-z]{3}-\d{2}"),
        constrained(grammars, 2, seed, choice=["yes", "no", 'quote"d\n']),
        constrained(grammars, 3, seed, json_schema=json.dumps(SCHEMA)),
        free,
    ]
    found = reply(driver, requests, tokenizer)
    for text in (found[0], found[3]):
        value = json.loads(text)
        assert set(value) == {"name", "size"}
        assert len(value["name"]) <= 8
        assert 0 <= value["size"] <= 99
    assert re.fullmatch(r"[a-z]{3}-\d{2}", found[1])
    assert found[2] in ("yes", "no", 'quote"d\n')
    alone = Driver(make_runner(model))
    assert alone.generate(make_request([10, 11, 12], 0, seed, temperature=1.0), 12)[:12] == free.output_ids[:12]


def test_the_mask_says_what_may_come_next(tokenizer: Tokenizer, grammars: Grammars) -> None:
    grammar = grammars.compile(SamplingParams(choice=("a", "bc")))

    def allowed() -> set[bytes]:
        bits = np.unpackbits(grammar.mask().view(np.uint8), bitorder="little")
        assert len(bits) >= tokenizer.vocab_size + PADDING
        assert not bits[tokenizer.vocab_size :].any(), "ids the tokenizer does not have"
        return {tokenizer.token_bytes(token) for token in np.flatnonzero(bits)}

    letters = {letter: tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc"}
    first = allowed()
    assert {b"a", b"b"} <= first <= {b"a", b"b", b"bc"}
    assert grammar.advance(letters["b"]) is False
    assert allowed() == {b"c"}
    assert grammar.advance(letters["c"]) is True


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"json_schema": {"type": "no such type"}}, "json_schema"),
        ({"json_schema": "{not json"}, "json_schema"),
        ({"regex": "(unclosed"}, "regex"),
        ({"regex": "(" * 4000}, "regex"),
        ({"regex": r"[^\s\S]"}, "regex"),  # nothing is in this class
        ({"json_schema": {"$ref": "#"}}, "json_schema"),
        ({"json_schema": wide(3000)}, "json_schema"),
        ({"json_schema": {"type": "number", "minimum": float("inf")}}, "json_schema"),
    ],
)
def test_what_is_no_grammar_is_refused_at_submission(params: dict[str, Any], field: str, grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} cannot be used as a grammar: .") as caught:
        grammars.compile(SamplingParams(**params))
    assert caught.value.field == field
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    assert " at line 1 column " not in str(caught.value), "a place in a text that the caller has not written"


COSTLY = r"(?:[\p{L}\p{N}]{1,200})" * 20


@pytest.mark.parametrize("params", [{"regex": COSTLY}, {"json_schema": {"type": "string", "pattern": f"^{COSTLY}$"}},
                                    {"json_schema": wide(1000)}])
def test_a_grammar_that_would_soon_be_too_costly_is_refused_at_submission(
    params: dict[str, Any], grammars: Grammars
) -> None:
    with pytest.raises(InvalidRequest, match=r"it is too costly to apply after a few tokens .*: make it smaller"):
        grammars.compile(SamplingParams(**params))


def test_a_grammar_that_turns_out_too_costly_fails_and_is_not_taken_for_complete(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    grammar = grammars.compile(SamplingParams(regex=f"-{{80}}{COSTLY}"))
    for token in tokenizer.encode("-" * 80 + "abcdefgh" * 8, add_special_tokens=False):
        grammar.mask()
        assert grammar.advance(token) is False
    assert "grammar cannot continue: " in grammar.failed


AMBIGUOUS = 'start: s\ns: s s | "a" | s s s\n'  # each further "a" takes longer


def test_the_masks_of_one_reply_take_a_limited_time(
    tokenizer: Tokenizer, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "MASK_SECONDS", 0.05)
    monkeypatch.setattr(structured, "MASK_SECONDS_PER_TOKEN", 0.0001)
    grammar = grammars.compile(SamplingParams(grammar=AMBIGUOUS))
    letter = tokenizer.encode("a", add_special_tokens=False)[0]
    began = time.thread_time()
    for _ in range(100):
        grammar.mask()
        grammar.advance(letter)
        if grammar.failed:
            break
    assert "takes more than 0.1 ms per token: make it simpler" in grammar.failed
    assert time.thread_time() - began < 5


def exponential(patterns: int) -> dict[str, Any]:
    return {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{10 + i}}}"} for i in range(patterns)]}


def test_a_compilation_ends_at_its_limit_of_processor_time_and_others_go_on(grammars: Grammars) -> None:
    """Without a limit, each further pattern doubles the time and the memory: 29 never end."""
    grammars.compile(SamplingParams(regex="first"))
    refusals: list[str] = []

    def attack() -> None:
        try:
            grammars.compile(SamplingParams(json_schema=exponential(29)))
        except InvalidRequest as error:
            refusals.append(str(error))

    thread = threading.Thread(target=attack)
    thread.start()
    while thread.is_alive():
        grammars.compile(SamplingParams(regex="meanwhile [a-z]+"))
        thread.join(0.05)
    grammars.compile(SamplingParams(regex="after"))
    [refusal] = refusals
    assert "its compilation did not end within 1 seconds of processor time" in refusal and "make it smaller" in refusal


@pytest.mark.parametrize(("schema", "reason"), [
    ({"anyOf": [{"type": "string", "pattern": f"a{i}"} for i in range(300)]}, "it has 300 patterns; the limit is 256"),
    ({"type": "object", "patternProperties": {f"a{i}": {} for i in range(300)}}, "it has 300 patterns"),
    ({"type": "string", "pattern": "a" * 9000}, "a pattern has 9,000 characters; the limit is 8,192"),
    ({"type": "string", "pattern": "(a{1,10001})"}, "repeats a part 10001 times; the limit is 10,000"),
    ({"type": "string", "pattern": "a{2,99999999999999999999999}"}, "the limit is 10,000"),
])
def test_patterns_have_limits(schema: Any, reason: str, grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        grammars.compile(SamplingParams(json_schema=schema))


def test_without_the_library_the_message_says_what_to_install(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequest, match=r"pip install '.\[structured\]'") as caught:
        grammars.compile(SamplingParams(regex="a"))
    assert caught.value.field == "regex"


def test_a_mask_leaves_the_noise_of_a_seed_as_it_is(model: Path, grammars: Grammars) -> None:
    """Where the mask allows what would have been drawn without it, that is drawn."""
    compared = 0
    for seed in range(12):
        masked = constrained(grammars, 0, seed, regex=r"(?s:.)*")
        plain = make_request(masked.ids, 1, seed, temperature=1.5)
        bits = np.unpackbits(masked.grammar.mask().view(np.uint8), bitorder="little")
        ours, free = Driver(make_runner(model)).run([(masked, 3, True), (plain, 3, True)])
        if bits[free]:
            compared += 1
            assert ours == free
    assert compared > 3


WORDS = {"[UNK]": 0, "a": 1, "b": 2, "##b": 3}
PIECES = [("<unk>", 0.0), ("▁a", -1.0), ("a", -2.0), ("b", -1.5)]


def with_bytes() -> tokenizers.Tokenizer:
    """A Unigram tokenizer whose vocabulary has every byte."""
    pieces = [*PIECES, *((f"<0x{i:02X}>", -9.0) for i in range(256))]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize("beyond", [-40, 0, PADDING])
@pytest.mark.parametrize("make", [byte_level, with_bytes])
def test_a_model_without_an_end_token_or_with_fewer_ids_than_its_tokenizer_obeys_too(
    beyond: int, make: Any, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(write(tmp_path, make()))
    assert not tokenizer.eos_ids
    grammars = Grammars(tokenizer, tokenizer.vocab_size + beyond)
    grammar = grammars.compile(SamplingParams(regex="a+b"))
    first, last = (tokenizers.Tokenizer.from_str(tokenizer.to_json()).token_to_id(text) for text in "ab")
    for token in (first, first):
        bits = np.unpackbits(grammar.mask().view(np.uint8), bitorder="little")
        assert bits[token] and not bits[tokenizer.vocab_size :].any()
        assert not bits[tokenizer.vocab_size + beyond :].any(), "ids that the model does not have"
        assert grammar.advance(token) is False
    assert grammar.advance(last) is True


@pytest.mark.parametrize(
    "model",
    [models.WordPiece(WORDS, unk_token="[UNK]"), models.WordLevel(WORDS, unk_token="[UNK]"), models.Unigram(PIECES, 0)],
    ids=["WordPiece", "WordLevel", "Unigram"],
)
def test_a_tokenizer_that_the_library_cannot_read_is_a_refusal_each_time(model: Any, tmp_path: Path) -> None:
    grammars = Grammars(Tokenizer(write(tmp_path, tokenizers.Tokenizer(model))), 4)
    for params, field in ((SamplingParams(regex="a"), "regex"), (SamplingParams(choice=("a",)), "choice")):
        with pytest.raises(
            InvalidRequest, match=f"{field} cannot be used with this model: llguidance cannot"
        ) as caught:
            grammars.compile(params)
        assert caught.value.field == field


def test_a_reply_that_no_token_of_the_model_can_begin_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, byte_level(), eos_token="<|im_end|>"))
    with pytest.raises(InvalidRequest, match="no token of this model can begin a reply that satisfies it"):
        Grammars(tokenizer, 3).compile(SamplingParams(regex="zz"))
