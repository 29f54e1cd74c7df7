"""Masks of bad_words, allowed_token_ids, min_tokens and grammars: what they exclude is never drawn, and nothing else
changes. Masks that together leave no token end only their own request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.core.commit import NOT_FINITE
from engine.core.engine import Engine
from engine.core.request import Request
from engine.core.scheduler import SchedulerConfig
from engine.core.step import RowSettings
from engine.errors import InvalidRequest
from engine.params import LONGEST_BAD_WORD, MAX_BAD_WORDS, SamplingParams
from engine.text.structured import Grammars
from engine.text.tokenizer import Tokenizer
from minitui.tutor import model_dir
from tests.support.models import VOCAB, make_request, make_runner, reference, save
from tests.support.simulation import run


class Script:
    """A grammar: after i tokens it allows `sets[i]`, later the last of them. It ends after `length` tokens."""

    failed = ""

    def __init__(self, sets: Sequence[set[int]], length: int = VOCAB) -> None:
        self._sets, self._length, self._drawn = sets, length, 0

    def mask(self) -> np.ndarray:
        bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
        bits[sorted(self._sets[min(self._drawn, len(self._sets) - 1)])] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def advance(self, token: int) -> bool:
        self._drawn += 1
        return self._drawn == self._length


END = 2
SCRIPTS = {
    "even": Script([set(range(0, VOCAB, 2))], 3), "ends": Script([{10, 11}, {12}, {END}]),
    "empty": Script([{10}, set()]), "over": Script([{END}]),
}


class Compiler:
    """Compiles `regex` to a copy of the script of that name. A bad word is token ids: "5 7" is the ids 5 and 7."""

    def compile(self, params: SamplingParams) -> Any:
        return copy(SCRIPTS[params.regex or ""])

    def words(self, texts: tuple[str, ...]) -> list[list[int]]:
        return [[int(part) for part in text.split()] for text in texts]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference("qwen3"), tmp_path_factory.mktemp("qwen3"))


def make_engine(checkpoint: Path, overlap: bool = False, drafts: int = 0, eos: Iterable[int] = ()) -> Engine:
    runner = make_runner(checkpoint, num_blocks=100, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    config = SchedulerConfig(64, 4, 256, speculative_tokens=drafts)
    return Engine(runner, config, overlap=overlap, grammars=Compiler(), eos_ids=frozenset(eos))


def ask(engine: Engine, ids: Sequence[int] = (5, 6, 7), **params: Any) -> Request:
    return engine.add_request(list(ids), SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **params}))


def reply(engine: Engine, **params: Any) -> list[int]:
    request = ask(engine, **params)
    run(engine, check=True)
    assert not request.finish_reason.startswith("error"), request.finish_reason
    return request.output_ids


def test_only_allowed_tokens_are_drawn_and_neighbours_draw_as_before(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    free = reply(engine)
    allowed = [token for token in range(VOCAB) if token not in free][::3]
    limited, other = ask(engine, allowed_token_ids=allowed), ask(engine)
    sampled = ask(engine, allowed_token_ids=allowed, temperature=2.0, seed=3)
    run(engine, check=True)
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
        ({"min_tokens": 1, "regex": "over"}, "min_tokens", "after 0 tokens the reply's grammar allows only the end"),
        ({"min_tokens": 1, "stop_token_ids": range(VOCAB)}, "min_tokens", f"each of the {VOCAB} token ids ends"),
        ({"bad_words": [""]}, "bad_words", "none of them empty"),
        ({"bad_words": [5]}, "bad_words", "strings"),
        ({"bad_words": ["a"] * (MAX_BAD_WORDS + 1)}, "bad_words", "at most 1,024"),
        ({"bad_words": ["a" * (LONGEST_BAD_WORD + 1)]}, "bad_words", "string of 257 characters"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(
    checkpoint: Path, params: dict[str, Any], field: str, message: str
) -> None:
    engine = make_engine(checkpoint, eos={END})
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


def test_an_end_id_outside_the_vocabulary_masks_nothing_of_another_request(checkpoint: Path) -> None:
    expected = reply(make_engine(checkpoint), max_tokens=8)
    for token in expected:  # an index of the row above that falls on what the row below draws
        engine = make_engine(checkpoint, eos={VOCAB + token, 2 * VOCAB + 3, -1})
        first = ask(engine, [8, 9], min_tokens=8, max_tokens=8)
        second = ask(engine, max_tokens=8)
        run(engine, check=True)
        assert second.output_ids == expected
        assert (first.finish_reason, len(first.output_ids)) == ("length", 8)


def test_the_sampler_itself_takes_no_id_beyond_a_row(checkpoint: Path) -> None:
    """Ranks of a parallel engine get requests from elsewhere."""
    sampler = make_runner(checkpoint, max_num_seqs=4).loaded.batch.sampler
    request = make_request([1, 2], 0, min_tokens=4, max_tokens=8)
    request.stop_ids = frozenset({3, VOCAB, VOCAB + 3, -VOCAB})
    sampler.set_row(RowSettings.of(request))
    assert sampler._stop_ids[0].tolist() == [3]


def test_masks_that_leave_nothing_end_their_request_with_a_sentence_and_no_other(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, eos={END})
    early = ask(engine, regex="ends", min_tokens=5)
    whole = ask(engine, regex="ends", min_tokens=2)
    empty = ask(engine, regex="empty")
    other = ask(engine, max_tokens=8, ignore_eos=True)
    run(engine, check=True)
    assert early.finish_reason == (
        "error: after 2 tokens the reply's grammar allows only the end of the reply, which min_tokens = 5 forbids: "
        "lower min_tokens or allow more tokens"
    )
    assert (whole.finish_reason, whole.output_ids[1:]) == ("stop", [12, END])
    assert empty.finish_reason == "error: the reply's grammar allows no token after 1 token"
    assert (other.finish_reason, len(other.output_ids)) == ("length", 8)
    assert NOT_FINITE not in early.finish_reason + empty.finish_reason


def test_more_logprobs_than_the_vocabulary_has_tokens_are_all_of_them(tmp_path: Path) -> None:
    runner = make_runner(save(reference("qwen3", vocab_size=7), tmp_path), num_blocks=40, max_num_seqs=4)
    engine = Engine(runner, SchedulerConfig(64, 4, 128))
    request = engine.add_request([1, 2], SamplingParams(max_tokens=2, logprobs=20, prompt_logprobs=20))
    emitted = [item for _ in range(4) for item in engine.step()]
    assert request.finish_reason == "length"
    given = [item.logprobs for item in emitted if item.logprobs] + (emitted[0].prompt_logprobs or [])
    assert len(given) == 3 and all(len(logprobs.top) == 7 for logprobs in given)
