"""minitui bench: what it counts as the least possible work, and that it measures and reports what it says."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.allocator import BlockAllocator
from engine.core.radix import RadixTree
from engine.gguf.header import read_header
from engine.llm import LLM
from engine.model.hf.config import read_model_config
from engine.trace.records import RecordLog
from minitui.bench import cpu, gpu, limits, llama, main
from minitui.bench.limits import Limits, Work, write_config
from minitui.bench.rows import Row
from minitui.dev import bench as host

LIMITS = Limits(copy=4.2e12, read=4.1e12, matmul=747e12, dtype="bfloat16")


@pytest.mark.parametrize("size,parameters,read_ms", [("8B", 8.19e9, 3.69), ("0.6B", 0.596e9, 0.29)])
def test_reading_the_weights_once_bounds_a_decode_step(
    tmp_path: Path, size: str, parameters: float, read_ms: float
) -> None:
    config = read_model_config(write_config(size, tmp_path))
    assert config.num_parameters == pytest.approx(parameters, rel=0.01)
    work = Work.of(config, 2)
    assert work.decode(LIMITS, [1]) * 1e3 == pytest.approx(read_ms, rel=0.01)
    # 64 sequences read the same weights and 64 times the keys and values: 8 heads of 128, twice, in 2 bytes a layer.
    extra = (work.decode(LIMITS, [1000] * 64) - work.decode(LIMITS, [1])) * LIMITS.read
    assert extra == pytest.approx((64_000 - 1) * config.num_layers * 2 * 8 * 128 * 2)


def test_a_mixture_reads_the_experts_that_its_tokens_want(tmp_path: Path) -> None:
    config = read_model_config(write_config("30B-A3B", tmp_path))
    assert config.num_parameters == pytest.approx(30.5e9, rel=0.01)
    assert config.active_parameters == pytest.approx(3.35e9, rel=0.01)
    work = Work.of(config, 2)
    alone = config.active_parameters - config.vocab_size * config.hidden_size  # the embedding is looked up, not read
    assert work.decode(LIMITS, [1]) == pytest.approx(alone * 2 / LIMITS.read, rel=0.01)
    assert [round(work.experts_used(n)) for n in (1, 8, 64, 4096)] == [8, 52, 126, 128]
    all_of_it = config.num_parameters - config.vocab_size * config.hidden_size
    assert work.decode(LIMITS, [1] * 256) == pytest.approx(all_of_it * 2 / LIMITS.read, rel=0.02)
    # A prefill multiplies with what its tokens use, not with all.
    assert work.prefill(LIMITS, [4096]) < 2 * 2 * config.active_parameters * 4096 / LIMITS.matmul


def test_a_prefill_is_bound_by_its_operations_and_a_cached_one_does_less(tmp_path: Path) -> None:
    config = read_model_config(write_config("8B", tmp_path))
    work = Work.of(config, 2)
    matrices = 2 * work.body * 4096 / LIMITS.matmul
    whole = work.prefill(LIMITS, [4096])
    # Causal attention: every token meets half of the others on average.
    attention = 4 * config.num_layers * 32 * 128 * 4096 * 4097 / 2 / LIMITS.matmul
    assert whole == pytest.approx(matrices + attention, rel=0.001)
    assert work.prefill(LIMITS, [4096], cached=4032) < whole / 20


def test_the_share_of_the_limit_reads_both_ways() -> None:
    assert Row("a", 50.0, "tok/s", limit=100.0).share == 0.5
    assert Row("b", 50.0, "ms", limit=10.0).share == 0.2
    line = Row("c", 9.0, "ms", 5.0, other=7.0).line()
    assert "best other       7.00" in line and " 56% of limit   5.00 ms" in line


def test_the_command_measures_the_bundled_model_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "REPLY", 12)
    monkeypatch.setattr(limits, "CPU_NUMBERS", 1 << 22)
    monkeypatch.setattr(main, "models", lambda *_: iter([("bundled", _bundled(), False)]))
    monkeypatch.setattr(llama, "PACKAGES", {"llama_cpp_that_is_missing": "llama-cpp-python"})
    main.measure(main.Options(device="cpu", json=True, threads=1, pairs=1))
    report = json.loads(capsys.readouterr().out)
    assert report["limits"]["read"] > 0 and report["limits"]["matmul"] > 0
    notes = report["models"]["bundled"]["notes"]
    assert any(note.endswith("pip install llama-cpp-python") for note in notes)
    rows = {row["name"]: row for row in report["models"]["bundled"]["rows"]}
    one, eight = rows["decode step, 1 row"], rows["decode step, 8 rows"]
    # A step's time is a difference of two times: on a busy machine it may even be negative.
    assert one["value"] != eight["value"] and one["other"] is None
    assert eight["tokens_per_s"] == pytest.approx(8e3 / eight["value"])
    unused, again = rows["8 streams, unused slots"], rows["8 streams, tokens computed again"]
    assert 0 < unused["value"] < 100 and (again["value"], again["note"]) == (0, "0 evicted, 0 preempted, 0 duplicate")
    above = any((row["share"] or 0) > 1 for row in rows.values())
    assert above == any(note.startswith("above 100% of a limit: ") for note in notes)
    cached, cold = rows["first token, 512 cached + 16"], rows["prompt of 512"]
    assert cached["value"] < cold["value"], "a cached prefix should make the first token come sooner"


class OtherEngine:
    """Takes the times that the test gives, and writes down when it ran."""

    def __init__(self, name: str, ms: Iterator[float], order: list[str]) -> None:
        self._name, self._ms, self._order = name, ms, order

    def decode(self, rows: int, prompt: int, steps: int) -> float:
        self._order.append(self._name)
        return next(self._ms)

    def first_tokens(self, prompt: int, rest: int) -> tuple[float, float]:
        return 1.0, 1.0


def test_two_engines_take_turns_and_the_ratio_is_that_of_pairs() -> None:
    order: list[str] = []
    ours = OtherEngine("ours", iter([1.0, 2.0, 9.0]), order)  # the third pair is on a slow machine: both take longer
    theirs = OtherEngine("theirs", iter([2.0, 4.0, 18.0]), order)
    runs = cpu._in_turn(3, ours, theirs, lambda engine: (engine.decode(1, 2, 3),))
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    row = cpu._row("decode step, 4 rows", runs, 0, 1.0, 4)
    assert (row.value, row.other, row.ratio, row.tokens_per_s) == (2.0, 4.0, 0.5, 2000.0)
    assert "llama.cpp       4.00   ratio 0.50" in row.line() and "2,000 tok/s" in row.line()


@pytest.mark.parametrize("kind,bytes_each", [("int8", 1.1), ("bf16", 2.1)])
def test_the_file_for_llama_cpp_has_the_models_shape(tmp_path: Path, kind: str, bytes_each: float) -> None:
    """Read by the engine's own reader of GGUF."""
    gguf = pytest.importorskip("gguf")
    config = replace(read_model_config(_bundled()), qkv_bias=True, tie_word_embeddings=False, num_layers=2)
    path = tmp_path / "shape.gguf"
    llama.write_gguf(config, llama.TYPES[kind], path)
    assert path.stat().st_size == pytest.approx(llama.file_bytes(config, llama.TYPES[kind]), rel=0.1)
    found = gguf.GGUFReader(str(path))
    numbers = sum(int(tensor.n_elements) for tensor in found.tensors)
    assert numbers == config.num_parameters and path.stat().st_size < numbers * bytes_each
    header = read_header(path)
    assert header.tensors["blk.1.ffn_down.weight"].shape == (config.hidden_size, config.intermediate_size)
    assert header.get("qwen3.attention.head_count_kv", int) == config.num_kv_heads


def test_llama_cpp_computes_the_same_steps_in_its_own_process() -> None:
    pytest.importorskip("llama_cpp")
    with llama.LlamaCpp(read_model_config(_bundled()), "int8", 1) as other:
        assert 0 < other.decode(2, 8, 8) < 1000
        cold, cached = other.first_tokens(256, 8)
        assert 0 < cached < cold
        other._process.kill()
        with pytest.raises(llama.NotMeasured, match="ended with status -9"):
            other.decode(1, 8, 8)


def test_what_llama_cpp_cannot_load_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(llama, "PACKAGES", {})
    with pytest.raises(llama.NotMeasured, match="no GGUF file is written for Qwen3MoeForCausalLM in int8"):
        llama.LlamaCpp(read_model_config(write_config("30B-A3B", tmp_path)), "int8", 1)
    monkeypatch.setattr("minitui.bench.llama.file_bytes", lambda *_: 1 << 60)
    with pytest.raises(llama.NotMeasured, match=r"takes 1152921504\.6 GB, and .* free: set TMPDIR"):
        llama.LlamaCpp(read_model_config(_bundled()), "int8", 1)


def test_a_batch_is_told_with_its_prompts_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "REPLY", 8)
    llm = LLM(_bundled(), device="cpu", cpu_threads=1)
    work = Work.of(read_model_config(_bundled()), 4)
    tries = [tuple(gpu.GpuRows(llm, work, LIMITS, {}).batch(4)) for _ in range(3)]  # another process may slow one
    decoding, whole = tries[0]
    assert (decoding.name, whole.name) == ("batch 4", "batch 4 with its prompts")
    faster = [0 < whole.value < decoding.value for decoding, whole in tries]
    assert any(faster), "512 prompt tokens take longer than a step that decodes four"
    # Four steps' worth of keys more or less is nothing beside the weights: a step is read once for four tokens.
    assert decoding.limit == pytest.approx(4 / work.decode(LIMITS, [132] * 4), rel=0.01)
    assert whole.limit == pytest.approx(4 * 8 / work.replies(LIMITS, [128] * 4, [8] * 4))


def _bundled() -> str:
    from minitui import tutor

    return str(tutor.model_dir())


def test_the_host_is_measured_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "BATCHES", (2, 32))
    monkeypatch.setattr(host, "TREES", (200,))
    monkeypatch.setattr(host, "RUNS", 1)
    said: list[str] = []
    report = host.measure(said.append)
    assert len(said) == 2 + 8 + 1
    assert {(cost["rows"], cost["delay"], cost["records"]) for cost in report["steps"]} == {
        (rows, delay, records) for rows in (2, 32) for delay in (0, 1) for records in (False, True)
    }
    assert all(0 < cost["plan_us"] + cost["commit_us"] < cost["worst_us"] for cost in report["steps"])
    (tree,) = report["tree"]
    assert tree["blocks"] == 200 and min(tree.values()) > 0


def test_a_step_and_the_tree_grow_with_what_they_must_and_no_faster() -> None:
    """Quadratic would be 64 times as much for eight times the rows, and for a tree 20 times larger 20 times."""
    few, many = (host.step_cost(rows, 0, True, runs=2) for rows in (32, 256))
    assert many.step_us < 24 * few.step_us
    small, large = ([host.tree_cost(blocks) for _ in range(3)] for blocks in (400, 8_000))
    for name in ("match_us", "insert_us", "split_us", "evict_us"):
        few_us, many_us = (min(getattr(cost, name) for cost in costs) for costs in (small, large))
        assert many_us < 8 * few_us, name


def test_evicting_a_long_reply_block_by_block_costs_no_more_a_block_than_a_short_one() -> None:
    def per_block(blocks: int) -> float:
        log, allocator = RecordLog(), BlockAllocator(blocks + 1)
        tree = RadixTree(16, allocator, log)
        held = allocator.allocate(blocks) or []
        node = tree.add(tree.root, 1, [(i,) * 16 for i in range(blocks)], held, -1)
        tree.unlock(node, log.append("finish", 1, "length", 0))
        allocator.release(held)
        began = time.thread_time()  # of this thread alone: other processes do not count
        for _ in range(blocks):
            assert tree.evict(1, "the pool is full") == 1
        return (time.thread_time() - began) / blocks

    long, short = (min(per_block(blocks) for _ in range(5)) for blocks in (2048, 64))
    assert long < 5 * short  # it was 28 times as much
