"""Speculation over a real (tiny, random) model: with and without drafts, the same tokens and the same logprobs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.build import build_engine
from engine.core.engine import Engine
from engine.core.request import Request
from engine.errors import EngineError
from engine.params import SamplingParams
from engine.text.output import OutputProcessor
from minitui.cli.options import engine_config
from tests.engine.model.test_engine_model import SCHEDULES, make_engine
from tests.engine.test_output import Letters
from tests.support.models import VOCAB, Driver, eager, make_request, make_runner, reference, save
from tests.support.simulation import run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference("qwen3").double(), tmp_path_factory.mktemp("qwen3"))


def wordy(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests of few words, so that those meet again: a bias keeps the replies to the prompt's."""
    r = random.Random(seed)
    words = [r.randrange(3, VOCAB) for _ in range(5)]
    prefix = [r.choice(words) for _ in range(16)]
    wanted = []
    for i in range(10):
        ids = prefix[: r.randrange(4, 17)] + [r.choice(words) for _ in range(r.randrange(8))]
        settings: dict[str, Any] = {
            "temperature": r.choice([0.0, 0.0, 0.6, 1.0]), "top_k": r.choice([0, 3]), "top_p": r.choice([1.0, 0.8]),
            "min_p": r.choice([0.0, 0.05]), "logprobs": r.choice([None, 0, 2]), "ignore_eos": True,
        }
        if i % 4 == 1:
            settings |= {"stop_token_ids": (words[0],), "min_tokens": r.choice([0, 9])}
        if i % 5 == 4:
            settings |= {"frequency_penalty": 0.3}
        bias = dict.fromkeys(words, 30.0)
        wanted.append((ids, SamplingParams(seed=i, max_tokens=r.choice([9, 20, 30]), logit_bias=bias, **settings)))
    return wanted


def play(engine: Engine, seed: int, alone: bool = False) -> tuple[list[Request], list[list[Any]]]:
    """All requests, a few at a time or one after the other, and the logprobs of each."""
    r, requests, waiting = random.Random(seed), [], wordy(seed)
    logprobs: dict[int, list[Any]] = {}
    while waiting or engine.has_work:
        arriving = int(not engine.has_work) if alone else r.choice([0, 1, 4])
        for ids, params in [waiting.pop(0) for _ in range(min(len(waiting), arriving))]:
            requests.append(engine.add_request(ids, params))
        for item in engine.step():
            if item.logprobs is not None:
                logprobs.setdefault(item.request.id, []).append(item.logprobs)
        engine.check()
    return requests, [logprobs.get(request.id, []) for request in requests]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> dict[int, tuple[list[list[int]], list[list[Any]]]]:
    """Each request alone, uncached, without drafts."""
    found = {}
    for seed in (1, 2):
        requests, logprobs = play(make_engine(checkpoint, budget=256, prefix_caching=False), seed, alone=True)
        found[seed] = [request.output_ids for request in requests], logprobs
    return found


@pytest.mark.parametrize(("schedule", "seed"), [(name, 1 + i % 2) for i, name in enumerate(SCHEDULES)])
def test_drafts_change_neither_a_token_nor_a_logprob(
    checkpoint: Path, plain: dict[int, Any], schedule: str, seed: int
) -> None:
    engine = make_engine(checkpoint, speculative_tokens=5, **SCHEDULES[schedule])
    requests, logprobs = play(engine, seed)
    expected, expected_logprobs = plain[seed]
    assert [request.output_ids for request in requests] == expected
    for mine, theirs in zip(logprobs, expected_logprobs, strict=True):
        assert [(m.token_id, m.rank, [id for id, _ in m.top]) for m in mine] == [
            (t.token_id, t.rank, [id for id, _ in t.top]) for t in theirs
        ]
        assert [m.logprob for m in mine] == pytest.approx([t.logprob for t in theirs], abs=1e-9)
    drafted, accepted = sum(r.drafted_tokens for r in requests), sum(r.accepted_tokens for r in requests)
    if schedule != "chunked":  # there, prompts leave little of the budget
        assert drafted > 30 and 0 < accepted < drafted
    if schedule == "preempted":
        assert sum(request.preemptions for request in requests) > 0


def test_cpu_decode_computes_the_logits_of_the_decoder(tmp_path: Path) -> None:
    """In float32 decodes with drafts go a shorter way; it must see the same keys: no later draft, no other row."""
    directory = save(reference("qwen3"), tmp_path)
    r = np.random.default_rng(3)
    prompts = [r.integers(3, VOCAB, size=n).tolist() for n in (9, 14, 6)]
    drafts = [[], r.integers(3, VOCAB, size=3).tolist(), r.integers(3, VOCAB, size=5).tolist()]
    found = []
    for fast in (True, False):
        runner = make_runner(directory)
        driver = Driver(runner)
        requests = [make_request(prompt, row) for row, prompt in enumerate(prompts)]
        driver.run([(request, len(request.ids), True) for request in requests])
        for request in requests:
            driver.reserve(request, 24)
        plan = driver.plan([(request, 1, True) for request in requests])
        plan.token_ids = np.array([x for q, d in zip(requests, drafts, strict=True) for x in (q.ids[-1], *d)], np.int32)
        plan.q_lens = np.array([1 + len(draft) for draft in drafts], np.int32)
        plan.num_decodes, plan.num_drafted = 1, 2
        with torch.inference_mode():
            runner.loaded.batch.apply(plan)
            if fast:
                logits, draws = runner.executors[0].decode(plan, runner.executors[0].compiled)
            else:
                inputs = eager(runner).build_inputs(plan)
                logits, draws = eager(runner).forward(plan, inputs)[0], inputs.draws
        found.append((logits.clone(), draws.entries.tolist(), draws.rows.tolist(), draws.positions.tolist()))
    (fast_logits, *fast_rest), (logits, *rest) = found
    assert fast_rest == rest == [[0, *[1] * 4, *[2] * 6], [0, *[1] * 4, *[2] * 6], [10, *range(15, 19), *range(7, 13)]]
    torch.testing.assert_close(fast_logits, logits, atol=2e-4, rtol=2e-4)


def test_tokens_after_a_stop_string_inside_accepted_drafts_are_neither_shown_nor_counted(checkpoint: Path) -> None:
    def answer(tokens: int, stop: tuple[str, ...] = (), least: int = 0) -> tuple[str, int, int]:
        engine = make_engine(checkpoint, speculative_tokens=tokens)
        outputs = OutputProcessor(Letters(), engine)
        ids = [7, 8, 9, 10, 11] * 4
        bias = {id: 60.0 if id == 9 else 50.0 for id in (7, 8, 9)}
        params = SamplingParams(
            temperature=0.0, max_tokens=40, logit_bias=bias, ignore_eos=True, stop=stop, min_tokens=least, seed=1
        )
        request = engine.add_request(ids, params)
        outputs.open(request)
        text, told = "", 0
        while engine.has_work:
            deltas = outputs.process(engine.step())
            text += "".join(delta.text for delta in deltas)
            told += sum(len(delta.ids) for delta in deltas)
            metrics = [delta.metrics for delta in deltas if delta.metrics]
        assert metrics[-1]["output_tokens"] == told
        (finish,) = (record for record in engine.log.drain() if record[2] == "finish")
        assert finish[4] == ("stop" if stop else "length") and finish[5] == told
        return text, told, metrics[-1]["accepted_tokens"]

    whole, count, _ = answer(0)
    assert count == 40
    for at in range(10, 20, 3):
        stop = (whole[at : at + 3],)
        expected = answer(0, stop, at)
        assert answer(6, stop, at)[:2] == expected[:2] and expected[0] == whole[: whole.index(stop[0], at - 2)]
    assert answer(6)[2] > 20, "nothing was accepted: the test says nothing"


def test_the_engine_reports_its_speculation(checkpoint: Path) -> None:
    config = engine_config(
        str(checkpoint), speculation="prompt-lookup:6", kv_blocks=40, device="cpu",
        load_tokenizer=False, overlap="on",
    )
    built = build_engine(config)
    assert built.info.speculation == {"method": "prompt-lookup", "tokens": 6} and built.info.overlap is False
    assert any("not overlapped" in note for note in built.info.notes)
    request = built.engine.add_request([5, 6, 7] * 8, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    run(built.engine, check=True)
    assert request.drafted_tokens > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("eagle", "speculation is 'eagle': it must be off or prompt-lookup"),
        ("prompt-lookup:many", "a number must follow the colon"),
        ("prompt-lookup:0", "speculative_tokens is 0: it must be from 1 to 32"),
        ("prompt-lookup:33", "speculative_tokens is 33"),
    ],
)
def test_impossible_settings_are_refused(text: str, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        engine_config("", speculation=text)
