"""An 8-bit KV cache: no value is cut off, all steps read the same rounded numbers, and the error is bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention import kv_fp8
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.llm import LLM
from engine.model import ops
from engine.model.four_bits import Int4Tiles
from engine.model.hf.config import read_model_config
from engine.model.kv_scales import kv_scales
from engine.model.linear import ByteWeight
from engine.params import SamplingParams
from minitui import tutor
from tests.support.models import Driver, make_request, make_runner, prompt, reference, save
from tests.support.parity import step_logits

OPTIONS = {"kv_cache_dtype": "fp8"}
HALF_STEP = 2.0**-4  # of a normal number with four significant bits


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With and without normed keys, with and without biases."""
    return save(reference(request.param), tmp_path_factory.mktemp(request.param))


def logits_of(runner: Any, prompts: list[list[int]]) -> torch.Tensor:
    driver = Driver(runner)
    plan = driver.plan([(make_request(ids, row), len(ids), True) for row, ids in enumerate(prompts)])
    return step_logits(runner, plan).log_softmax(-1)


def test_stored_values_are_rounded_to_the_nearest(checkpoint: Path) -> None:
    """The first layer's inputs are the same with both caches, so its keys and values can be compared one by one."""
    plain, small = (make_runner(checkpoint, "float64", **options) for options in ({}, OPTIONS))
    for runner in (plain, small):
        logits_of(runner, [prompt(0, 60), prompt(1, 40)])
    wide_pool, narrow_pool = plain.loaded.pool, small.loaded.pool
    for wide, narrow, scale in zip(
        (wide_pool.keys[0], wide_pool.values[0]), (narrow_pool.keys[0], narrow_pool.values[0]), narrow_pool.scales[0],
        strict=True,
    ):
        assert wide.any()
        off = (kv_fp8.dequantise(narrow, scale, torch.float64) - wide).abs()
        least = scale[:, None] * 2.0**-10  # where its numbers have faded to half a step between them
        assert (off <= torch.maximum(wide.abs() * HALF_STEP, least)).all()


def test_no_input_leaves_the_range_and_the_bound_is_tight(checkpoint: Path) -> None:
    """The input that a row of the values' weights points at comes as near to the end of the range as a power of two
    allows."""
    model = make_runner(checkpoint, "float64", **OPTIONS).loaded.model
    config, layer = model.config, model.layers[1]
    first = (config.num_heads + config.num_kv_heads) * config.head_dim
    rows = layer.qkv[first:] * layer.input_norm
    worst = rows.norm(dim=1).argmax()
    x = ops.norm(rows[worst][None] * 1e3, layer.input_norm, 0.0)
    value = (x @ layer.qkv[first + worst]).abs()
    scale = kv_scales(model)[1][1, worst // config.head_dim]
    assert kv_fp8.E4M3_MAX / 2.4 < value / scale <= kv_fp8.E4M3_MAX
    assert float(scale.log2()) % 1 == 0


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_scales_of_quantised_weights_are_those_of_the_numbers_they_stand_for(kind: str) -> None:
    runner = LLM(str(tutor.model_dir()), device="cpu", quantization=kind, **OPTIONS).engine.runner
    model = runner.loaded.model
    found = kv_scales(model)
    for layer in model.layers:
        assert isinstance(layer.qkv, ByteWeight)
        layer.qkv = layer.qkv.rows(torch.arange(layer.qkv.shape[0]))
    assert all(torch.equal(*pair) for pair in zip(found, kv_scales(model), strict=True))


def test_the_rows_of_a_gpu_s_tiles_in_4_bits() -> None:
    torch.manual_seed(0)
    tiles = Int4Tiles.empty(256, 384, torch.device("cpu"))
    tiles.copy_(torch.randn(256, 384))
    ids = torch.tensor([3, 255, 128])
    assert torch.equal(tiles.rows(ids), tiles.wide(torch.float32)[ids])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference("qwen3"), tmp_path_factory.mktemp("qwen3"))


def replies(directory: Path, **options: Any) -> list[list[int]]:
    """The reply to a prompt alone, and to four of which three begin alike."""
    shared = prompt(0, 21)
    prompts = [shared + prompt(1, 5), shared + prompt(2, 14), prompt(3, 30), shared]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    settings = {"num_blocks": 64, "block_size": 4, **OPTIONS, **options}
    llm = LLM(str(directory), dtype="float64", device="cpu", load_tokenizer=False, **settings)
    found = [out.outputs[0].token_ids for part in (prompts[:1], prompts) for out in llm.generate(part, params, False)]
    llm.engine.check()
    return found


@pytest.fixture(scope="module")
def usual(qwen: Path) -> list[list[int]]:
    return replies(qwen)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7}, {"enable_prefix_caching": False}, {"num_blocks": 14}, {"block_size": 16},
        {"speculation": "prompt-lookup"},
    ],
    ids=["in chunks of 7", "nothing shared", "with preemptions", "larger blocks", "speculating"],
)
def test_how_a_prompt_is_computed_changes_no_token(qwen: Path, usual: list[list[int]], options: dict[str, Any]) -> None:
    """A step reads its own keys rounded, as every later step will: exact in float64."""
    assert replies(qwen, **options) == usual


def test_attention_is_off_by_four_percent_at_most() -> None:
    """Keys and values, independent and normal, are each off by 2.7 %, root mean square."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(8, 600, 64, dtype=torch.float64) for _ in range(3))
    scale = torch.full((8,), 2.0**-5)
    rounded = [
        kv_fp8.dequantise(kv_fp8.quantise(x.transpose(0, 1), scale), scale, torch.float64).transpose(0, 1)
        for x in (k, v)
    ]
    attend = torch.nn.functional.scaled_dot_product_attention
    wanted, got = attend(q, k, v), attend(q, *rounded)
    error = float((got - wanted).norm() / wanted.norm())
    assert 0.02 < error < 0.04


def test_the_bundled_model_answers_as_in_float32() -> None:
    chat = [
        {"role": "system", "content": tutor.DEFAULT_SYSTEM_PROMPT},
        {"role": "user", "content": "What does the scheduler do?"},
    ]
    params = SamplingParams(temperature=0, max_tokens=40)
    answers = [LLM(str(tutor.model_dir()), **o).chat(chat, params, False)[0].outputs[0].text for o in ({}, OPTIONS)]
    assert answers[0] == answers[1]


def test_the_pool_counts_a_byte_a_number(qwen: Path) -> None:
    config = read_model_config(qwen)
    llm = LLM(str(qwen), device="cpu", load_tokenizer=False, num_blocks=10, block_size=4, **OPTIONS)
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert llm.info.kv_cache_dtype == "fp8"
    assert llm.info.kv_bytes_per_token == per_token
    assert llm.engine.runner.loaded.memory.kv_cache == 11 * 4 * per_token
    assert LLM(str(qwen), device="cpu", load_tokenizer=False, num_blocks=1).info.kv_cache_dtype == "float32"


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(EngineError, match="kv_cache_dtype is 'int4': it must be auto or fp8"):
        EngineConfig(kv_cache_dtype="int4")
