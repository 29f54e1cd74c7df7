"""bad_words and allowed_token_ids: what they exclude is never drawn, and nothing else changes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.core.engine import Engine
from engine.core.request import Request
from engine.core.scheduler import SchedulerConfig
from engine.errors import InvalidRequest
from engine.params import LONGEST_BAD_WORD, MAX_BAD_WORDS, SamplingParams
from engine.text.structured import Grammars
from engine.text.tokenizer import Tokenizer
from minitui.tutor import model_dir
from tests.support.models import VOCAB, make_runner, reference, save


class Words:
    """Reads each bad word as token ids: "5 7" is the ids 5 and 7."""

    def compile(self, params: SamplingParams) -> Any:
        return Only(set(range(0, VOCAB, 2)))

    def words(self, texts: tuple[str, ...]) -> list[list[int]]:
        return [[int(part) for part in text.split()] for text in texts]


class Only:
    """A grammar that allows the same tokens at every position, and ends after three."""

    failed = ""

    def __init__(self, allowed: set[int]) -> None:
        self._allowed, self._left = allowed, 3

    def mask(self) -> np.ndarray:
        bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
        bits[sorted(self._allowed)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def advance(self, token: int) -> bool:
        self._left -= 1
        return not self._left


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference("qwen3"), tmp_path_factory.mktemp("qwen3"))


def make_engine(checkpoint: Path, overlap: bool = False, drafts: int = 0) -> Engine:
    runner = make_runner(checkpoint, num_blocks=100, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    config = SchedulerConfig(64, 4, 256, speculative_tokens=drafts)
    return Engine(runner, config, overlap=overlap, grammars=Words())


def ask(engine: Engine, **params: Any) -> Request:
    return engine.add_request([5, 6, 7], SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **params}))


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.check()


def reply(engine: Engine, **params: Any) -> list[int]:
    request = ask(engine, **params)
    run(engine)
    assert not request.finish_reason.startswith("error"), request.finish_reason
    return request.output_ids


def test_only_allowed_tokens_are_drawn_and_neighbours_draw_as_before(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    free = reply(engine)
    allowed = [token for token in range(VOCAB) if token not in free][::3]
    limited, other = ask(engine, allowed_token_ids=allowed), ask(engine)
    sampled = ask(engine, allowed_token_ids=allowed, temperature=2.0, seed=3)
    run(engine)
    assert set(limited.output_ids) <= set(allowed) and other.output_ids == free
    assert set(sampled.output_ids) <= set(allowed) and len(set(sampled.output_ids)) > 3
    assert reply(engine, allowed_token_ids=range(VOCAB)) == free, "a list of all tokens changes nothing"


@pytest.mark.parametrize(("overlap", "drafts"), [(False, 0), (True, 0), (False, 4)])
def test_a_bad_word_is_not_drawn_but_its_tokens_may_be(checkpoint: Path, overlap: bool, drafts: int) -> None:
    engine = make_engine(checkpoint, overlap, drafts)
    free = reply(engine)
    single = reply(engine, bad_words=[str(free[2])])
    assert free[2] not in single and single[:2] == free[:2][: len(single)]
    first, second = next(pair for pair in pairwise(free) if pair[0] != pair[1])
    pair = reply(engine, bad_words=[f"{first} {second}"])
    drawn = list(pairwise(pair))
    at = free.index(first)
    assert (first, second) not in drawn and pair[: at + 1] == free[: at + 1]
    three = reply(engine, bad_words=[" ".join(map(str, free[1:4]))])
    assert three[:3] == free[:3] and three[3] != free[3]


def test_the_prompt_does_not_begin_a_bad_word(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    free = reply(engine)
    assert reply(engine, bad_words=[f"7 {free[0]}"])[0] == free[0]


def test_rules_and_a_grammar_hold_together(checkpoint: Path) -> None:
    drawn = reply(make_engine(checkpoint), regex="even", allowed_token_ids=[3, 4, 5, 6, 8], bad_words=["4 4"])
    assert len(drawn) == 3 and set(drawn) <= {4, 6, 8} and drawn[:2] != [4, 4] != drawn[1:]


@pytest.mark.parametrize(
    ("params", "field", "message"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids", "is empty"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids", f"it must be from 0 to {VOCAB - 1}"),
        ({"allowed_token_ids": [1.0]}, "allowed_token_ids", "must be a whole number"),
        ({"allowed_token_ids": [3, 4], "bad_words": ["3", "4"]}, "bad_words", "exclude all 2 tokens"),
        ({"allowed_token_ids": [3, 5], "regex": "even"}, "allowed_token_ids", "the reply's grammar and allowed_token"),
        ({"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 2}, "min_tokens", "allowed_token_ids allows"),
        ({"bad_words": [""]}, "bad_words", "none of them empty"),
        ({"bad_words": [5]}, "bad_words", "strings"),
        ({"bad_words": ["a"] * (MAX_BAD_WORDS + 1)}, "bad_words", "at most 1,024"),
        ({"bad_words": ["a" * (LONGEST_BAD_WORD + 1)]}, "bad_words", "string of 257 characters"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(
    checkpoint: Path, params: dict[str, Any], field: str, message: str
) -> None:
    engine = make_engine(checkpoint)
    with pytest.raises(InvalidRequest, match=message) as caught:
        ask(engine, **params)
    assert caught.value.field == field and not engine.has_work


def test_without_a_tokenizer_bad_words_are_refused_and_allowed_tokens_are_not(checkpoint: Path) -> None:
    runner = make_runner(checkpoint, num_blocks=100, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    engine = Engine(runner, SchedulerConfig(64, 4, 256))
    with pytest.raises(InvalidRequest, match="no tokenizer") as caught:
        ask(engine, bad_words=["5"])
    assert caught.value.field == "bad_words"
    assert set(reply(engine, allowed_token_ids=(8,))) == {8}


def test_a_word_is_excluded_with_and_without_a_space_before_it() -> None:
    tokenizer = Tokenizer(model_dir())
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    found = [tokenizer.decode(ids) for ids in grammars.words(("cache", " token"))]
    assert found == ["cache", " cache", "token", " token"]
    lone = ("\ud800",)
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        grammars.words(lone)
    assert caught.value.field == "bad_words"
