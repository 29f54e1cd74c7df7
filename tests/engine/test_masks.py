"""End ids outside the vocabulary, and masks that together leave no token: only the request concerned may notice."""

from __future__ import annotations

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
from engine.params import SamplingParams
from tests.support.models import VOCAB, make_request, make_runner, reference, save

BOUND = -(-VOCAB // 32)


class Script:
    """A grammar: after i tokens it allows `sets[i]`, later the last of them."""

    def __init__(self, *sets: set[int]) -> None:
        self._sets, self._drawn = sets, 0
        self.failed = ""

    def mask(self) -> np.ndarray:
        bits = np.zeros(BOUND * 32, np.uint8)
        bits[sorted(self._sets[min(self._drawn, len(self._sets) - 1)])] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def advance(self, token: int) -> bool:
        self._drawn += 1
        return False


class Scripts:
    """Compiles `regex` to the script of that name."""

    def __init__(self, **scripts: tuple[set[int], ...]) -> None:
        self._scripts = scripts

    def compile(self, params: SamplingParams) -> Any:
        return Script(*self._scripts[params.regex or ""])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference("qwen3"), tmp_path_factory.mktemp("qwen3"))


def make_engine(checkpoint: Path, eos: set[int], grammars: Any = None) -> Engine:
    runner = make_runner(checkpoint, num_blocks=100, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    return Engine(runner, SchedulerConfig(64, 4, 256), eos_ids=frozenset(eos), grammars=grammars)


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.check()


def greedy(engine: Engine, ids: list[int], **params: Any) -> Request:
    return engine.add_request(ids, SamplingParams(temperature=0.0, max_tokens=8, **params))


def test_an_end_id_outside_the_vocabulary_masks_nothing_of_another_request(checkpoint: Path) -> None:
    alone = make_engine(checkpoint, set())
    expected = greedy(alone, [5, 6, 7])
    run(alone)
    for token in expected.output_ids:  # an index of the row above that falls on what the row below draws
        engine = make_engine(checkpoint, {VOCAB + token, 2 * VOCAB + 3, -1})
        first = greedy(engine, [8, 9], min_tokens=8)
        second = greedy(engine, [5, 6, 7])
        run(engine)
        assert second.output_ids == expected.output_ids
        assert (first.finish_reason, len(first.output_ids)) == ("length", 8)


def test_the_sampler_itself_takes_no_id_beyond_a_row(checkpoint: Path) -> None:
    """Ranks of a parallel engine get requests from elsewhere."""
    sampler = make_runner(checkpoint, max_num_seqs=4).loaded.batch.sampler
    request = make_request([1, 2], 0, min_tokens=4, max_tokens=8)
    request.stop_ids = frozenset({3, VOCAB, VOCAB + 3, -VOCAB})
    sampler.set_row(RowSettings.of(request))
    assert sampler._stop_ids[0].tolist() == [3]


def test_masks_that_leave_nothing_end_their_request_with_a_sentence_and_no_other(checkpoint: Path) -> None:
    end = 2
    scripts = Scripts(ends=({10, 11}, {12}, {end}), empty=({10}, set()), free=(set(range(VOCAB)),))
    engine = make_engine(checkpoint, {end}, scripts)
    early = greedy(engine, [5, 6], regex="ends", min_tokens=5)
    whole = greedy(engine, [5, 6], regex="ends", min_tokens=2)
    empty = greedy(engine, [5, 6], regex="empty")
    other = greedy(engine, [5, 6, 7], ignore_eos=True)
    run(engine)
    assert early.finish_reason == (
        "error: after 2 tokens the reply's grammar allows only the end of the reply, which min_tokens = 5 forbids: "
        "lower min_tokens or allow more tokens"
    )
    assert (whole.finish_reason, whole.output_ids[1:]) == ("stop", [12, end])
    assert empty.finish_reason == "error: the reply's grammar allows no token after 1 token"
    assert (other.finish_reason, len(other.output_ids)) == ("length", 8)
    assert NOT_FINITE not in early.finish_reason + empty.finish_reason


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_tokens": 1, "regex": "over"}, "after 0 tokens the reply's grammar allows only the end"),
        ({"min_tokens": 1, "stop_token_ids": range(VOCAB)}, f"each of the {VOCAB} token ids ends the reply"),
    ],
)
def test_masks_that_leave_nothing_to_begin_with_are_refused(
    checkpoint: Path, params: dict[str, Any], message: str
) -> None:
    engine = make_engine(checkpoint, {2}, Scripts(over=({2},)))
    with pytest.raises(InvalidRequest, match=message) as caught:
        greedy(engine, [5, 6], **params)
    assert caught.value.field == "min_tokens" and not engine.has_work


def test_more_logprobs_than_the_vocabulary_has_tokens_are_all_of_them(tmp_path: Path) -> None:
    runner = make_runner(save(reference("qwen3", vocab_size=7), tmp_path), num_blocks=40, max_num_seqs=4)
    engine = Engine(runner, SchedulerConfig(64, 4, 128))
    request = engine.add_request([1, 2], SamplingParams(max_tokens=2, logprobs=20, prompt_logprobs=20))
    emitted = [item for _ in range(4) for item in engine.step()]
    assert request.finish_reason == "length"
    given = [item.logprobs for item in emitted if item.logprobs] + (emitted[0].prompt_logprobs or [])
    assert len(given) == 3 and all(len(logprobs.top) == 7 for logprobs in given)
