"""Tensor parallelism: several ranks compute what one computes, each reads only its own slices, and all end together."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.distributed import HashStore

from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.scheduler import SchedulerConfig
from engine.errors import DeviceLost, EngineDead, EngineError
from engine.llm import LLM
from engine.model import weights
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.hf.config import read_model_config
from engine.parallel import mailbox
from engine.parallel.group import Timings
from engine.parallel.processes import Workers, device_of
from engine.parallel.shards import check, shard_config, shard_slots
from engine.params import SamplingParams
from engine.process.client import EngineClient
from engine.worker.rank_runner import LeadRunner
from engine.worker.runner import Runner
from engine.worker.sampler import Drawn, Wants
from minitui.tutor import model_dir
from tests.support.kernels.ranks import ThreadRanks, run_in_threads
from tests.support.models import VOCAB, Driver, eager, make_request, make_runner, plain_runner, reference, save
from tests.support.waiting import drained, ended, wait_until

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 97}),
    "experts": ("qwen3_moe", {"moe_intermediate_size": 41, "mlp_only_layers": [1]}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return {name: save(reference(kind, **options), folder / name) for name, (kind, options) in KINDS.items()}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    run_in_threads(monkeypatch)
    yield


def ranks(directory: Path, size: int, dtype: str = "float64", **options: Any) -> LeadRunner:
    runner = make_runner(directory, dtype, tensor_parallel_size=size, **options)
    assert isinstance(runner, LeadRunner)
    return runner


def play(runner: Runner | LeadRunner) -> tuple[list[Any], list[torch.Tensor]]:
    """Chunked prefill beside decodes, a shared prefix, draws, penalties, logprobs, tokens the host has not seen: all
    that came out, and the logits."""
    logits: list[torch.Tensor] = []
    sampler = runner.loaded.batch.sampler
    sample = sampler.sample
    sampler.sample = lambda rows, *rest: (logits.append(rows.clone()), sample(rows, *rest))[1]  # type: ignore[method-assign]
    driver = Driver(runner)
    first = make_request([5, 198, 100, 99, 7, 8, 50, 49, 3], 0)
    second = make_request([5, 198, 100, 99, 77, 150], 1, seed=9, temperature=0.9, top_k=50, repetition_penalty=1.3)
    scored = make_request([9, 8, 7, 120, 199 - 5, 0], 2, prompt_logprobs=2, logprobs=1)
    driver.run([(first, 5, False)])
    driver.run([(first, 4, True)])
    driver.share(second, first, 1)
    driver.run([(first, 1, True), (second, 2, True), (scored, 3, False)])
    told: list[Any] = [driver.result]
    driver.run([(first, 1, True), (second, 1, True), (scored, 3, True)], unknown=True)
    told.append(driver.result)
    for _ in range(5):
        driver.run([(first, 1, True), (second, 1, True), (scored, 1, True)], unknown=True)
    return [first.ids, second.ids, scored.ids, [shown(result) for result in told]], logits


def shown(result: Any) -> Any:
    """Prompt logprobs without the digits in which sums in another order differ."""
    return {
        entry: [(p.token_id, round(p.logprob, 8), p.rank, [(i, round(v, 8)) for i, v in p.top]) for p in positions]
        for entry, positions in result.prompt_logprobs.items()
    }


@pytest.mark.parametrize("kind", ["tied", "llama", "experts"])
def test_tokens_of_four_ranks_are_those_of_one_in_float64(
    kind: str, checkpoints: dict[str, Path], threads: None
) -> None:
    """Each of the 2 key/value heads is held twice; 199 tokens do not divide by 4. Two ranks: test_families.py."""
    alone, expected = play(plain_runner(*_parts(checkpoints[kind])))
    runner = ranks(checkpoints[kind], 4)
    together, found = play(runner)
    assert together == alone
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    assert isinstance(runner.loaded.group, ThreadRanks) and runner.loaded.group.collectives > 20
    runner.close()


def _parts(directory: Path, dtype: str = "float64") -> tuple[ModelConfig, EngineConfig, Path]:
    config = EngineConfig(
        model=str(directory), device="cpu", dtype=dtype, block_size=4, num_blocks=64, max_num_seqs=8, cpu_threads=1
    )
    return read_model_config(directory), config, directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_several_ranks_are_as_near_to_exact_as_those_of_one(
    dtype: str, checkpoints: dict[str, Path], threads: None
) -> None:
    def prompt_logits(runner: Runner | LeadRunner) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        sampler = runner.loaded.batch.sampler
        sample = sampler.sample
        sampler.sample = lambda rows, *rest: (seen.append(rows.double()), sample(rows, *rest))[1]  # type: ignore[method-assign]
        driver = Driver(runner)
        driver.run([(make_request(list(range(3 * i, 3 * i + 20)), i), 20, True) for i in range(6)])
        runner.close()
        return seen[0]

    exact = prompt_logits(plain_runner(*_parts(checkpoints["qwen3"])))
    one = (prompt_logits(plain_runner(*_parts(checkpoints["qwen3"], dtype))) - exact).abs().max()
    four = (prompt_logits(ranks(checkpoints["qwen3"], 4, dtype)) - exact).abs().max()
    assert 0 < four < 3 * one, f"{four:.2g} against {one:.2g} with one rank"


def _engine(runner: Any, drafts: int = 0) -> Engine:
    return Engine(runner, SchedulerConfig(24, 6, max_model_len=100, speculative_tokens=drafts))


def _crowd(engine: Engine) -> list[tuple[str, list[int]]]:
    """Twelve requests in a pool for four, some of them aborted half-way; how each ended, and its tokens."""
    rng = np.random.default_rng(3)
    system = rng.integers(3, VOCAB, 13).tolist()
    requests = []
    for i in range(12):
        ids = system[: 13 if i % 3 else 6] + rng.integers(3, VOCAB, 3 + i).tolist()
        params = SamplingParams(max_tokens=14, temperature=0.7 * (i % 2), seed=i, ignore_eos=True)
        requests.append(engine.add_request(ids, params))
    for step in range(400):
        if not engine.has_work:
            break
        if step in (4, 9):
            engine.abort(requests[step].id)
        engine.step()
        engine.check()
    assert not engine.has_work
    return [(request.finish_reason, request.ids) for request in requests]


@pytest.mark.parametrize("drafts", [0, 4])
def test_prefix_cache_preemption_and_aborts_with_several_ranks(
    drafts: int, checkpoints: dict[str, Path], threads: None
) -> None:
    runner = ranks(checkpoints["experts"], 2, num_blocks=18)
    engine = _engine(runner, drafts)
    together = _crowd(engine)
    records = engine.log.drain()
    kinds = {record[2] for record in records}
    assert {"preempt", "evict", "comm"} <= kinds and any(r[2] == "match" and r[4] for r in records)
    model, config, directory = _parts(checkpoints["experts"])
    alone = _crowd(_engine(plain_runner(model, replace(config, num_blocks=18), directory), drafts))
    assert bool(drafts) == ("draft" in kinds)
    assert together == alone and {reason for reason, _ in alone} == {"length", "abort"}
    runner.close()


def test_a_draw_that_fails_ends_its_requests_and_the_ranks_go_on(
    checkpoints: dict[str, Path], threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ranks(checkpoints["qwen3"], 2)
    engine = _engine(runner)
    sampler = runner.loaded.batch.sampler
    sample, broken = sampler.sample, []

    def once(*arguments: Any) -> Any:
        if not broken:
            broken.append(True)
            raise ValueError("the grammar is lost")
        return sample(*arguments)

    monkeypatch.setattr(sampler, "sample", once)
    failing = engine.add_request([5, 6, 7], SamplingParams(max_tokens=4, temperature=0))
    engine.step()
    assert "the grammar is lost" in failing.finish_reason
    later = engine.add_request([5, 6, 7], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    while engine.has_work:
        engine.step()
    expected = Driver(plain_runner(*_parts(checkpoints["qwen3"]))).generate(make_request([5, 6, 7], 0), 4)
    assert later.output_ids == expected
    runner.close()


def test_a_rank_that_fails_in_a_step_ends_the_engine(
    checkpoints: dict[str, Path], threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = ranks(checkpoints["qwen3"], 2)
    engine = _engine(runner)
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=4))
    engine.step()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(eager(runner._workers.runners[1]), "forward", fail)
    with pytest.raises(DeviceLost, match="rank 1 of 2 failed: out of memory"):
        engine.step()


def test_each_rank_reads_only_its_slices_and_together_they_read_everything(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, int]] = []

    class Watched:
        def __init__(self, path: Path, **options: Any) -> None:
            self.file = opened(path, **options)

        def __enter__(self) -> Watched:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def keys(self) -> list[str]:
            return list(self.file.keys())

        def get_tensor(self, name: str) -> torch.Tensor:
            tensor = self.file.get_tensor(name)
            read.append((name, tensor.numel()))
            return tensor

        def get_slice(self, name: str) -> Any:
            return WatchedSlice(name, self.file.get_slice(name))

    class WatchedSlice:
        def __init__(self, name: str, part: Any) -> None:
            self.name, self.part = name, part
            self.get_shape, self.get_dtype = part.get_shape, part.get_dtype

        def __getitem__(self, index: Any) -> torch.Tensor:
            tensor = self.part[index]
            read.append((self.name, tensor.numel()))
            return tensor

    opened = weights.safe_open
    monkeypatch.setattr(weights, "safe_open", Watched)
    for kind in ("llama", "tied", "experts"):
        config = read_model_config(checkpoints[kind])
        by_rank: list[dict[str, int]] = []
        for rank in range(2):
            read.clear()
            progress: list[dict[str, Any]] = []
            model = Decoder(shard_config(config, rank, 2), torch.float32, torch.device("cpu"), 16)
            slots = shard_slots(model.slots(), config, rank, 2)
            weights.load_weights(slots, checkpoints[kind], config.tie_word_embeddings, progress.append)
            by_rank.append(dict(read))
            assert progress[-1]["done"] == progress[-1]["total"] == 4 * sum(n for _, n in read)
        sizes = {name: tensor.numel() for name, tensor in _state(checkpoints[kind]).items()}
        for name, size in sizes.items():
            ours = [read_by.get(name, 0) for read_by in by_rank]
            if "norm" in name or "mlp.gate.weight" in name:
                assert ours == [size, size], name
            elif name.endswith(("o_proj.bias", "down_proj.bias")):
                assert ours == [size, 0], name
            else:
                assert sum(ours) == size and max(ours) <= 0.52 * size, (name, ours, size)


def _state(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("kind", ["qwen2", "experts"])
def test_dummy_weights_are_the_same_whatever_the_number_of_ranks(kind: str, checkpoints: dict[str, Path]) -> None:
    config = read_model_config(checkpoints[kind])
    whole = Decoder(config, torch.float32, torch.device("cpu"), 16)
    weights.dummy_weights(whole.slots(), 5)
    parts = []
    for rank in range(4):
        model = Decoder(shard_config(config, rank, 4), torch.float32, torch.device("cpu"), 16)
        weights.dummy_weights(shard_slots(model.slots(), config, rank, 4), 5)
        parts.append(model)
    for i, layer in enumerate(whole.layers):
        shards: list[Any] = [part.layers[i] for part in parts]
        q, k, _ = layer.qkv.split([4 * 32, 2 * 32, 2 * 32])
        ours = [shard.qkv.split([32, 32, 32]) for shard in shards]
        assert torch.equal(torch.cat([one[0] for one in ours]), q)
        assert torch.equal(torch.cat([ours[0][1], ours[2][1]]), k) and torch.equal(ours[0][1], ours[1][1])
        assert torch.equal(torch.cat([shard.output for shard in shards], 1), layer.output)
        mlp: Any = layer.mlp
        assert torch.equal(torch.cat([shard.mlp.down for shard in shards], -1), mlp.down)
    assert torch.equal(torch.cat([part.head for part in parts])[:VOCAB], whole.head)


def test_a_model_that_cannot_be_split_is_refused_with_the_numbers_that_work(checkpoints: dict[str, Path]) -> None:
    config = read_model_config(checkpoints["qwen3"])
    with pytest.raises(EngineError, match=r"size is 3, but .* 4 query heads and 2 key/value heads.*use 1, 2 or 4"):
        check(config, 3)
    with pytest.raises(EngineError, match="size is 4, but the intermediate_size of this model is only 3"):
        check(replace(config, intermediate_size=3), 4)
    odd = replace(config, num_heads=6, num_kv_heads=6)
    check(odd, 3)
    with pytest.raises(EngineError, match="size is 4"):
        check(odd, 4)
    with pytest.raises(EngineError, match="tensor_parallel_size is 0"):
        EngineConfig(tensor_parallel_size=0)


def test_the_result_of_a_step_is_invalid_after_a_rank_was_lost(checkpoints: dict[str, Path], threads: None) -> None:
    """Kernels that waited for the lost rank are let go, and come to an end with nonsense."""
    runner: Any = ranks(checkpoints["qwen3"], 2)
    driver = Driver(runner)
    request = make_request([5, 6, 7], 0)
    driver.run([(request, 3, True)])
    let_go = threading.Event()
    runner.loaded.group.abort = let_go.set
    launched = runner.launch(driver.plan([(request, 1, True)]), {})
    runner._workers.failure = "rank 1 of 2 (process 7) ended by signal SIGKILL"
    runner._workers.on_lost(runner._workers.failure)
    assert let_go.wait(5)
    with pytest.raises(DeviceLost, match="rank 1 of 2"):
        launched.wait()
    runner.close()


def test_all_ranks_get_the_sampling_settings_of_a_row(checkpoints: dict[str, Path], threads: None) -> None:
    """Ranks that draw with graphs do so by themselves: from the same settings, sent with the plan."""
    runner: Any = ranks(checkpoints["qwen3"], 2)
    request = make_request([5, 6, 7], 3, seed=9, temperature=0.9, top_k=50, min_p=0.1, stop_token_ids=[4], min_tokens=2)
    request.grammar = object()
    runner.loaded.batch.sampler.sample = lambda logits, rows, positions, *_: Drawn(
        logits.argmax(-1), torch.zeros(len(logits), dtype=torch.bool), rows[:0], None
    )
    Driver(runner).run([(request, 3, True)])
    runner.close()
    ours, theirs = runner.loaded.batch.sampler, runner._workers.runners[1].loaded.batch.sampler
    assert ours.asked(np.array([3])) == theirs.asked(np.array([3])) > Wants.GRAMMAR
    for mine, others in zip(ours.host_settings(), theirs.host_settings(), strict=True):
        assert np.array_equal(mine[3], others[3])


def test_a_second_engine_of_a_process_leaves_the_mailboxes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks would wait for each other without end: torch numbers the exchanges of a process, not of a group."""
    monkeypatch.setattr(mailbox, "_connected", True)
    store = HashStore()
    for rank in (0, 1):
        with pytest.raises(RuntimeError, match="an earlier engine of this process"):
            mailbox.connect(store, rank, 2, 64, torch.device("cpu"))



def test_a_sum_takes_the_path_that_measured_faster() -> None:
    timings = Timings(nccl=[12.0, 12, 13, 15, 20], mailbox=[4.0, 5, 9, 16], gathers=[10.0, 20], elect=5.0)
    assert timings.direct_rows == 4
    assert [timings.sum_us(n) for n in (1, 2, 3, 4, 5, 8, 12, 32)] == [4, 5, 7, 9, 13.5, 15, 17.5, 40]
    assert timings.nccl_us(3) == 12.5
    assert timings.draw_us(256, gathered=False) == 5 and timings.draw_us(2, gathered=True) == 20
    assert timings.note("") == ("sums over ranks: mailboxes up to 4 rows, 4.0 us for one row (NCCL: 12.0)")
    assert (
        Timings([9.0], [], [1.0], 0.0).note("it rains").endswith("9.0 us for one row; no mailboxes, because it rains")
    )
    assert Timings([9.0], [9.5], [1.0], 0.0).note("").endswith("9.0 us for one row (mailboxes: 9.5)")
    assert Timings([9.0, 9], [], [1.0], 0.0).direct_rows == Timings([9.0, 9], [9.0, 8], [1.0], 0.0).direct_rows == 0


def test_each_rank_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [device_of(torch.device("cuda"), rank, 4).index for rank in range(4)] == [0, 1, 2, 3]
    assert device_of(torch.device("cuda:2"), 1, 2) == torch.device("cuda:3")
    with pytest.raises(EngineError, match="from cuda:1 on, but this machine has 4 GPUs"):
        device_of(torch.device("cuda:1"), 0, 4)


def test_a_rank_that_cannot_start_says_why(tmp_path: Path) -> None:
    model = read_model_config(model_dir())
    lost: list[str] = []
    workers = Workers(model, EngineConfig(device="cpu", tensor_parallel_size=2), tmp_path, lost.append)
    with pytest.raises(EngineError, match=r"holds neither model\.safetensors"):
        workers.meet()
    wait_until(lambda: lost, "a thread reports it")
    workers.close()
    assert len(lost) == 1 and ended(process.pid for process in workers._processes)


async def test_two_processes_answer_as_one_and_none_outlives_the_other(tmp_path: Path) -> None:
    prompt = list(range(40, 100))
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=4, ignore_eos=True)
    config = EngineConfig(
        model=str(model_dir()), device="cpu", dtype="float64", num_blocks=256, tensor_parallel_size=2, cpu_threads=1,
        max_num_seqs=8, max_num_batched_tokens=24,  # three chunks, of which the first two sample nothing
    )
    starting = asyncio.ensure_future(EngineClient.start(config, log_file=tmp_path / "engine.log"))
    alone = LLM(str(model_dir()), device="cpu", dtype="float64", num_blocks=64, cpu_threads=1)
    expected = alone.generate(prompt, params)[0].outputs[0].token_ids
    client = await starting
    deaths: list[str] = []
    client.on_death(deaths.append)
    try:
        assert client.info.tensor_parallel_size == 2 and "2 ranks" in client.info.notes[0]
        assert client.info.device.startswith("2 ranks of CPU")
        cancelled = client.submit(prompt[:30], replace(params, max_tokens=500))
        async for _ in (stream := client.submit(prompt, params)):
            cancelled.cancel()
        assert stream.ids == expected
        await drained(cancelled)
        await drained(again := client.submit(prompt, params))
        assert again.ids == expected and again.metrics["cached_tokens"] >= 48
        records = {record[2]: record for record in client.drain_records() if record[2] in ("comm", "time")}
        comm, timing = records["comm"], records["time"]
        assert comm[3:5] == (timing[3], 2) and 0 < comm[5] < timing[7]

        assert client.pid is not None
        (worker,) = psutil.Process(client.pid).children()
        open_stream = client.submit(prompt, replace(params, max_tokens=2000))
        await open_stream.started()
        began = time.monotonic()
        with pytest.raises(EngineDead, match=rf"rank 1 of 2 \(process {worker.pid}\) ended by signal SIGKILL"):
            async for _ in open_stream:
                if len(open_stream.ids) == 2:
                    os.kill(worker.pid, signal.SIGKILL)
        assert time.monotonic() - began < 30 and len(deaths) == 1
        wait_until(lambda: ended([client.pid, worker.pid]), "a rank lives on", 30)

        await client.restart()
        engine = client.pid
        assert engine is not None
        pids = [engine, *(child.pid for child in psutil.Process(engine).children())]
        async for _ in (stream := client.submit(prompt, replace(params, max_tokens=2000))):
            if len(stream.ids) == 2:
                break
        assert client._link is not None and len(pids) == 2
        with socket.socket(fileno=os.dup(client._link.transport.get_extra_info("socket").fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)  # what is left of a parent that has died
        wait_until(lambda: ended(pids), "a rank outlived the parent", 5)
    finally:
        await client.close()
