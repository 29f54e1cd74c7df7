"""The whole engine over a real (tiny, random) model in float64: no schedule may change a single token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.core.engine import Engine
from engine.core.request import Request
from engine.core.scheduler import SchedulerConfig
from engine.params import SamplingParams
from engine.text.output import OutputProcessor
from tests.support.models import VOCAB, held, make_runner, reference, save
from tests.support.simulation import run

EOS = frozenset({2})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference("qwen3").double(), tmp_path_factory.mktemp("qwen3"))


def make_engine(checkpoint: Path, blocks: int = 200, budget: int = 64, rows: int = 8, **options: Any) -> Engine:
    overlap, caching = options.pop("overlap", False), options.pop("prefix_caching", True)
    size, dtype = options.pop("block_size", 4), options.pop("dtype", "float64")
    runner = make_runner(
        checkpoint, dtype, num_blocks=blocks, block_size=size, max_num_seqs=rows, max_num_batched_tokens=budget
    )
    config = SchedulerConfig(budget, rows, 256, **options)
    return Engine(runner, config, overlap=overlap, prefix_caching=caching, eos_ids=EOS)


def requests_of(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share prefixes, with all kinds of sampling settings."""
    r = random.Random(seed)
    prefix = [r.randrange(3, VOCAB) for _ in range(22)]
    wanted = []
    for i in range(14):
        ids = prefix[: r.randrange(0, 23)] + [r.randrange(3, VOCAB) for _ in range(r.randrange(1, 12))]
        params = SamplingParams(
            temperature=r.choice([0.0, 0.7, 1.3]), top_k=r.choice([0, 0, 5, 40]), top_p=r.choice([1.0, 0.9, 0.5]),
            min_p=r.choice([0.0, 0.05]), repetition_penalty=r.choice([1.0, 1.2]),
            presence_penalty=r.choice([0.0, 0.5]), frequency_penalty=r.choice([0.0, 0.3]),
            seed=i, max_tokens=r.choice([1, 5, 14]), min_tokens=r.choice([0, 1]),
        )
        wanted.append((ids, params))
    return wanted


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> dict[int, list[list[int]]]:
    """Each request alone, uncached, its prompt in one piece."""
    found = {}
    for seed in (1, 2):
        found[seed] = []
        engine = make_engine(checkpoint, budget=256, prefix_caching=False)
        for ids, params in requests_of(seed):
            request = engine.add_request(ids, params)
            run(engine, check=True)
            found[seed].append(request.output_ids)
    return found


SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"budget": 7},
    "tiny blocks": {"block_size": 1, "blocks": 300},
    "large blocks": {"block_size": 16, "blocks": 60},
    "preempted": {"blocks": 14, "watermark": 0.0},
    "evicting": {"blocks": 20, "budget": 16},
    "one row": {"rows": 1},
    "best prefix first": {"policy": "longest-prefix", "rows": 3},
    "static": {"policy": "static", "rows": 3},
}


@pytest.mark.parametrize(("overlap", "seed"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_changes_a_token(
    checkpoint: Path, alone: dict[int, list[list[int]]], schedule: str, overlap: bool, seed: int
) -> None:
    engine = make_engine(checkpoint, overlap=overlap, **SCHEDULES[schedule])
    r = random.Random(seed)
    requests: list[Request] = []
    arriving = requests_of(seed)
    while arriving or engine.has_work:
        for ids, params in [arriving.pop(0) for _ in range(min(len(arriving), r.choice([0, 0, 1, 5])))]:
            requests.append(engine.add_request(ids, params))
        engine.step()
        engine.check()
    assert [request.output_ids for request in requests] == alone[seed]
    if schedule == "preempted":
        assert sum(request.preemptions for request in requests) > 0
    if schedule == "evicting":
        assert any(record[2] == "evict" for record in engine.log.drain())
    if schedule == "batched":
        assert sum(request.cached_tokens for request in requests) > 0


def test_a_cached_prefix_does_not_change_the_answer_wherever_it_is_cut(checkpoint: Path) -> None:
    r = random.Random(1)
    ids = [r.randrange(3, VOCAB) for _ in range(30)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=None, logprobs=3)
    engine = make_engine(checkpoint)
    expected = engine.add_request(ids, params)
    run(engine, check=True)
    for cut in range(1, 30):
        engine.clear_cache()
        engine.add_request(ids[:cut], SamplingParams(temperature=0.0, max_tokens=1))
        run(engine, check=True)
        request = engine.add_request(ids, params)
        run(engine, check=True)
        assert request.output_ids == expected.output_ids, cut
        assert request.cached_tokens == cut // 4 * 4


def test_n_samples_of_one_prompt_differ_share_their_prompt_and_repeat_with_the_seed(checkpoint: Path) -> None:
    ids = [3 + i for i in range(41)]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)

    def draw() -> list[list[int]]:
        engine = make_engine(checkpoint)
        requests = [engine.add_request(ids, params, sample_index=i) for i in range(4)]
        run(engine, check=True)
        assert [r.cached_tokens for r in requests] == [0, 40, 40, 40]
        return [r.output_ids for r in requests]

    first = draw()
    assert first == draw()
    assert len({tuple(reply) for reply in first}) == 4


def test_memory_and_blocks_after_500_requests_are_what_they_were_after_50(checkpoint: Path) -> None:
    """Through a loop like a server's: nothing is kept of those that have finished."""
    engine = make_engine(checkpoint, blocks=64, budget=128, rows=16)
    outputs = OutputProcessor(None, engine)
    r = random.Random(0)
    sizes: list[tuple[int, int]] = []
    for n in range(500):
        request = engine.add_request(
            [r.randrange(3, VOCAB) for _ in range(r.randrange(1, 12))], SamplingParams(max_tokens=2, seed=n)
        )
        outputs.open(request)
        if n % 10 == 9:
            while engine.has_work:
                outputs.process(engine.step())
            engine.log.drain()
        if n in (49, 499):
            sizes.append(held())
    engine.check()
    assert not engine.scheduler.requests and not outputs._streams
    assert engine.cache.allocator.num_active == 0 and engine.cache.available == 64
    objects, size = (late - early for early, late in zip(*sizes, strict=True))
    assert objects < 100, f"{objects} objects more than after the 50th"
    assert size < 4 << 20, f"resident memory grew by {size >> 10} KiB since the 50th"


def test_prompt_logprobs_are_given_once_even_if_the_prompt_is_preempted(checkpoint: Path) -> None:
    """An elder request takes the blocks of one that is inside its prompt; each position is still told exactly once."""
    ids = [3 + i * 7 % 190 for i in range(40)]
    wanting = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2, ignore_eos=True)
    engine = make_engine(checkpoint, blocks=12, budget=9, watermark=0.0)
    elder = engine.add_request([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    for _ in range(4):
        engine.step()
    request = engine.add_request(ids, wanting)
    given: list[int] = []
    while engine.has_work:
        for item in engine.step():
            if item.request is request:
                given += [entry.token_id for entry in item.prompt_logprobs or []]
        engine.check()
    assert request.preemptions > 0 and elder.preemptions == 0
    assert given == ids[1:]
