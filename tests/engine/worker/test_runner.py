"""Whole steps: from a plan to its tokens, and the state that stays between steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from engine.config import EngineConfig
from engine.worker.cpu.cores import default_threads
from engine.worker.eager import padded
from engine.worker.loaded import CPU_KV_BYTES
from engine.worker.runner import Runner
from tests.support.models import VOCAB, Driver, eager, held, make_request, make_runner, prompt, reference, save
from tests.support.parity import step_logits


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference("qwen3"), tmp_path_factory.mktemp("runner"))


@pytest.fixture
def driver(directory: Path) -> Driver:
    return Driver(make_runner(directory))


def padding(directory: Path) -> Driver:
    """Runs steps as on a GPU without CUDA graphs."""
    runner = make_runner(directory)
    runner.executors = [eager(runner)]
    runner.executors[0].pads = True
    return Driver(runner)


@pytest.mark.parametrize("pads", [False, True])
def test_only_entries_that_sample_draw(directory: Path, pads: bool) -> None:
    driver = padding(directory) if pads else Driver(make_runner(directory))
    requests = [make_request(prompt(i), i) for i in range(3)]
    assert driver.run([(requests[0], 20, True), (requests[1], 5, False)])[1] == -1
    assert driver.run([(requests[1], 5, False), (requests[2], 7, False)]) == [-1, -1]
    drawn = driver.run([(requests[0], 1, True), (requests[1], 10, True), (requests[2], 13, True)])
    assert min(drawn) >= 0
    assert driver.result.bad == []


def test_indices_are_padded_to_few_numbers_and_never_to_more_than_memory_was_measured_with() -> None:
    found = [padded(np.arange(n) * 3, 200) for n in range(300)]
    assert [indices[:n].tolist() for n, indices in enumerate(found)] == [[3 * i for i in range(n)] for n in range(300)]
    assert all((indices[n:] == 3 * (n - 1)).all() for n, indices in enumerate(found))
    assert {len(indices) for indices in found[:201]} == {0, 1, 2, 4, 8, 16, 32, 64, 128, 200}
    assert [len(indices) for indices in found[201:]] == [*range(201, 300)]


def test_nan_in_one_request_ends_it_alone(directory: Path) -> None:
    runner = make_runner(directory)
    with torch.inference_mode():
        runner.loaded.model.embedding[198] = torch.nan
    driver = Driver(runner)
    requests = [make_request(prompt(0), 0), make_request([*prompt(1), 198], 1), make_request(prompt(2), 2)]
    driver.run([(requests[0], 20, True), (requests[1], 21, True), (requests[2], 20, True)])
    assert driver.result.bad == [1]
    first = [request.output_ids for request in (requests[0], requests[2])]
    for _ in range(3):
        driver.run([(request, 1, True) for request in requests])
        assert driver.result.bad == [1]
    clean = [Driver(make_runner(directory)).generate(make_request(prompt(i), 0), 4) for i in (0, 2)]
    assert [requests[0].output_ids, requests[2].output_ids] == clean
    assert [ids[:1] for ids in clean] == first
    assert runner.loaded.pool.keys[0][0].isfinite().all(), "the null block stays finite"


def test_logprobs_are_reported_by_entry(directory: Path) -> None:
    driver = Driver(make_runner(directory))
    wanted: list[dict[str, Any]] = [{}, {"logprobs": 3}, {"logprobs": 0}]
    requests = [make_request(prompt(i), i, **params) for i, params in enumerate(wanted)]
    driver.run([(requests[0], 20, True), (requests[1], 5, False), (requests[2], 20, True)])
    assert list(driver.result.logprobs) == [2]
    driver.run([(requests[0], 1, True), (requests[1], 15, True), (requests[2], 1, True)])  # decodes are put first
    assert sorted(driver.result.logprobs) == [1, 2]
    greedy = driver.result.logprobs[2][0]
    assert greedy.token_id == requests[1].ids[-1]
    assert greedy.rank == 1
    assert greedy.top[0] == (greedy.token_id, pytest.approx(greedy.logprob))
    assert len(greedy.top) == 3
    assert driver.result.logprobs[1][0].top == []


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("chunks", [[20], [7, 1, 12], [19, 1]])
def test_prompt_logprobs_are_those_of_the_whole_prompt_however_chunked(
    directory: Path, chunks: list[int], pads: bool
) -> None:
    model = reference("qwen3")
    ids = prompt(8)
    with torch.no_grad():
        exact = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    driver = padding(directory) if pads else Driver(make_runner(directory))
    request, other, third = make_request(ids, 0, prompt_logprobs=2), make_request(prompt(9), 1), make_request(ids, 2)
    found = []
    driver.run([(other, 20, True)])
    for i, count in enumerate(chunks):
        driver.run([(other, 1, True), (request, count, i == len(chunks) - 1), (third, 5, False)])
        found += driver.result.prompt_logprobs.get(1, [])
    assert [entry.token_id for entry in found] == ids[1:]
    for position, entry in enumerate(found):
        row = exact[position]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        assert [token for token, _ in entry.top] == row.topk(2).indices.tolist()
    assert request.output_ids == [int(exact[-1].argmax())]
    driver.run([(other, 1, True), (request, 1, True)])
    assert driver.result.prompt_logprobs == {}
    with torch.no_grad():
        assert other.output_ids == model(torch.tensor([other.ids])).logits[0].argmax(-1)[19:-1].tolist()


def test_the_model_s_inputs_have_the_types_that_kernels_need(driver: Driver) -> None:
    requests = [make_request(prompt(i), i) for i in range(2)]
    for entries in ([(requests[0], 20, True)], [(requests[0], 1, True), (requests[1], 6, False)]):
        plan = driver.plan(entries)
        driver.runner.loaded.batch.apply(plan)
        inputs = eager(driver.runner).build_inputs(plan)
        meta = inputs.meta
        assert {t.dtype for t in (meta.block_table, meta.seq_lens, meta.cu_seqlens_q)} == {torch.int32}
        assert {t.dtype for t in (meta.positions, meta.slot_mapping, inputs.token_ids)} == {torch.int64}
        requests[0].ids.append(5)
    assert meta.cu_seqlens_q.tolist() == [0, 1, 7]
    assert meta.seq_lens.tolist() == [21, 6]
    assert meta.positions.tolist() == [20, *range(6)]
    blocks = [requests[0].table[5], *[requests[1].table[i // 4] for i in range(6)]]
    assert meta.slot_mapping.tolist() == [4 * block + p % 4 for block, p in zip(blocks, [20, *range(6)], strict=True)]
    assert (meta.num_decodes, meta.max_q_len, meta.max_seq_len) == (1, 6, 21)
    assert meta.logit_rows is not None
    assert meta.logit_rows.tolist() == [0]


def test_nothing_is_kept_of_requests_that_have_ended(directory: Path) -> None:
    driver = Driver(make_runner(directory))

    def serve(count: int) -> tuple[int, int]:
        for i in range(count):
            driver._next_block = 1 + 8 * (i % 8)
            settings = {"presence_penalty": 0.5, "logit_bias": {5: 1.0}, "logprobs": 2} if i % 3 == 0 else {}
            request = make_request(prompt(i, 6), i % 8, **settings)
            request.id = 100_000 + driver.step
            driver.generate(request, 2)
        return held()

    early = serve(120)
    late = serve(240)
    assert late[0] - early[0] < 60, f"{late[0] - early[0]} objects more after 240 requests"
    assert late[1] - early[1] < 8 << 20, f"{late[1] - early[1]} bytes more after 240 requests"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_on_a_cpu_close_to_fp32(directory: Path, dtype: str) -> None:
    ids = prompt(2)
    exact, half = Driver(make_runner(directory)), Driver(make_runner(directory, dtype))
    logits = []
    for driver in (exact, half):
        plan = driver.plan([(make_request(ids, 0), 20, True)])
        logits.append(step_logits(driver.runner, plan).float())
    error = (logits[0] - logits[1]).abs().max() / logits[0].abs().max()
    assert error < (0.05 if dtype == "bfloat16" else 0.01)
    assert len(half.generate(make_request(ids, 1), 5)) == 5


def test_the_pool_is_as_large_as_asked_and_bounded_by_default(directory: Path) -> None:
    assert make_runner(directory, num_blocks=7).num_blocks == 8
    assert make_runner(directory, num_blocks=None, kv_tokens=30).num_blocks == 9  # 8 blocks of 4, and the null block
    default: Runner = make_runner(directory, num_blocks=None)
    assert default.num_blocks - 1 == 16 * default.loaded.max_model_len / 4
    assert default.loaded.pool.nbytes < CPU_KV_BYTES


def test_a_pool_on_a_cpu_takes_memory_when_it_is_used(directory: Path) -> None:
    """So a start does not wait until the system has filled all of it with zeros."""
    process = psutil.Process()
    before = process.memory_info().rss
    pool = make_runner(directory, num_blocks=None, kv_tokens=1 << 19).loaded.pool
    assert pool.nbytes > 500e6 and process.memory_info().rss - before < 100e6
    assert not pool.keys[0][-1].any() and not pool.values[-1][0].any()


def test_a_cpu_computes_with_as_many_threads_as_the_machine_allows(directory: Path) -> None:
    before = torch.get_num_threads()
    try:
        make_runner(directory, cpu_threads=None)
        assert torch.get_num_threads() == default_threads()
    finally:
        torch.set_num_threads(before)


def test_the_largest_batch_and_the_longest_sequence_fit(directory: Path) -> None:
    driver = Driver(make_runner(directory, max_num_seqs=3, num_blocks=200))
    longest = make_request(prompt(0, 255), 0)
    requests = [longest, make_request(prompt(1), 1), make_request(prompt(2), 2)]
    driver.run([(requests[0], 255, True), (requests[1], 20, True), (requests[2], 20, True)])
    driver.run([(request, 1, True) for request in requests])
    assert len(longest.ids) == driver.runner.loaded.max_model_len + 1
    assert EngineConfig(max_num_seqs=3).max_num_seqs == driver.runner.loaded.batch.max_rows


@pytest.mark.parametrize("speculation,drawn", [("off", 4), ("prompt-lookup", 12)])
def test_memory_is_measured_with_logits_for_every_token_that_a_step_may_draw(
    directory: Path, speculation: str, drawn: int
) -> None:
    runner = make_runner(directory, max_num_seqs=4, speculation=speculation, speculative_tokens=2)
    with torch.inference_mode():
        assert runner.loaded.warm_up(30).shape == (drawn, VOCAB)
        assert runner.loaded.warm_up(3).shape == (3, VOCAB)
