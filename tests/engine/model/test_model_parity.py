"""The decoder against transformers in float32, its rotary scalings and its norms.

Every family, on every schedule and in float64: tests/engine/model/test_families.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model import ops
from engine.model.config import RopeConfig
from engine.model.rope import attention_factor, inverse_frequencies, rope_table
from tests.support.families import LINEAR, LLAMA3, YARN
from tests.support.models import Driver, make_request, make_runner, prompt, reference, save
from tests.support.parity import (
    PROMPT,
    Checkpoints,
    assert_close,
    assert_parity,
    checkpoints_of,
    decodes_on_a_cpu,
    needs_kernels,
    our_logits,
    their_logits,
)

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen2-some-layers-windowed": (
        "qwen2", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-dynamic-rope": ("llama", {"rope_parameters": DYNAMIC}),
    "mistral-sliding-window": ("mistral", {"sliding_window": 11}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return checkpoints_of(MODELS, tmp_path_factory)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers_whole_and_in_chunks(name: str, checkpoints: Checkpoints) -> None:
    model, directory = checkpoints(name)
    assert_parity(model, Driver(make_runner(directory)))


@pytest.mark.parametrize(("layout", "shards"), [(4, True), (5, False)])
def test_checkpoints_in_the_layouts_of_transformers_4_and_5_load(layout: int, shards: bool, tmp_path: Path) -> None:
    """4: rope_theta and rope_scaling with `type`, torch_dtype; 5: rope_parameters, dtype. One file and several."""
    model = reference("llama", rope_parameters=LLAMA3)
    scaling = {("type" if key == "rope_type" else key): value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = {"rope_parameters": None, "dtype": None, "rope_theta": LLAMA3["rope_theta"], "rope_scaling": scaling,
           "torch_dtype": "float32"}
    directory = save(model, tmp_path, shards, old if layout == 4 else None)
    keys = json.loads((directory / "config.json").read_text())
    assert ("rope_parameters" in keys, "rope_scaling" in keys) == ((False, True) if layout == 4 else (True, False))
    assert len(list(directory.glob("*.safetensors"))) > 1 if shards else (directory / "model.safetensors").is_file()
    ids = prompt(0, PROMPT)
    ours = our_logits(Driver(make_runner(directory)), make_request(ids, 0), [PROMPT])
    assert_close(ours, their_logits(model, ids))


@pytest.mark.parametrize("dim", [2, 32, 64, 128])
def test_inverse_frequencies_are_powers_of_theta(dim: int) -> None:
    """inv_freq[i] == θ^(−2i/D) exactly, inv_freq[0] == 1."""
    found = inverse_frequencies(RopeConfig(theta=1e6), dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    assert torch.equal(found, 1.0 / (1e6**exponents))
    assert found[0] == 1.0
    assert len(found) == dim // 2


@pytest.mark.parametrize("parameters", [YARN, YARN | {"mscale": 0.8, "mscale_all_dim": 0.5}, LLAMA3, LINEAR])
def test_scaled_frequencies_equal_those_of_transformers_to_the_bit(parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=64, max_position_embeddings=256, rope_parameters=dict(parameters))
    theirs, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    fields = {key: value for key, value in parameters.items() if key not in ("rope_type", "rope_theta")}
    original = fields.pop("original_max_position_embeddings", 256)
    ours = RopeConfig(parameters["rope_type"], 10000.0, original_max_position=original, **fields)
    assert torch.equal(inverse_frequencies(ours, 64), theirs)
    assert attention_factor(ours) == factor
    if parameters["rope_type"] == "yarn":
        assert factor != 1.0


def test_dynamic_scaling_beyond_the_original_context_equals_transformers_decoding_token_by_token(
    tmp_path: Path
) -> None:
    from transformers.cache_utils import DynamicCache

    model = reference("llama", rope_parameters=DYNAMIC, max_position_embeddings=32)

    ids = prompt(5, 60)
    cache, theirs = DynamicCache(), []
    with torch.no_grad():
        for token in ids:
            theirs.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0, 0])
    runner = make_runner(save(model, tmp_path))
    assert runner.loaded.max_model_len == 64
    assert_close(our_logits(Driver(runner), make_request(ids, 0), [60]), torch.stack(theirs))


def test_rotation_is_half_split_and_norm_comes_before_it() -> None:
    """Position 0 leaves heads as they are; elsewhere element i turns with element i + D/2."""
    torch.manual_seed(0)
    tokens, heads, kv_heads, dim = 3, 2, 1, 8
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    weight = torch.rand(heads + kv_heads, dim) + 0.5
    table = rope_table(RopeConfig(theta=100.0), dim, 10, 10)
    positions = torch.tensor([0, 3, 7])
    k_cache, v_cache = torch.zeros(2, 2, 4, kv_heads, dim)
    slots = torch.tensor([5, 1, 2])
    q = ops.qk_norm_rope_store(qkv.clone(), weight, 1e-6, ops.rope_rows(table, positions), k_cache, v_cache, slots)
    split = qkv.view(tokens, heads + 2 * kv_heads, dim)
    normed = split[:, :3] * torch.rsqrt(split[:, :3].pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    angle = positions[:, None, None] * inverse_frequencies(RopeConfig(theta=100.0), dim)
    a, b = normed.chunk(2, -1)
    expected = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
    torch.testing.assert_close(q, expected[:, :2])
    torch.testing.assert_close(k_cache.view(-1, 1, dim)[slots], expected[:, 2:])
    assert torch.equal(v_cache.view(-1, 1, dim)[slots], split[:, 3:])
    torch.testing.assert_close(q[0], normed[0, :2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (5, 100), (2, 8, 64), (70, 1024)])
def test_rms_norm_is_that_of_transformers_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    torch.manual_seed(0)
    norm = Qwen3RMSNorm(shape[-1], 1e-6).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(shape[-1]))
        x = (torch.randn(shape) * 5).to(dtype)
        assert torch.equal(ops.norm(x, norm.weight, 1e-6), norm(x))


@pytest.mark.parametrize("name", ["qwen3", "qwen2-some-layers-windowed", "llama-biases", "mistral-sliding-window"])
@pytest.mark.parametrize("count", [0, 2])
def test_steps_with_prompts_on_a_cpu_compute_what_the_decoder_does(
    name: str, count: int, checkpoints: Checkpoints
) -> None:
    """Whole prompts, ends of prompts, and chunks that do not end their prompt, with and without decodes."""
    needs_kernels()
    _, directory = checkpoints(name)
    chunks = [(0, 9), (11, 3), (6, 7), (4, 5)]
    for ours, plainly in zip(*decodes_on_a_cpu(directory, count, chunks), strict=True):
        torch.testing.assert_close(ours, plainly, rtol=0, atol=1e-5 * float(plainly.abs().max()))
