"""The decoder against transformers, on tiny random models of every architecture and every kind of rotary scaling.

fp32: logits within 2e-5 of their largest magnitude. float64: the same greedy tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from engine.model import ops
from engine.model.config import RopeConfig
from engine.model.rope import attention_factor, inverse_frequencies, rope_table
from tests.support.families import LINEAR, LLAMA3, YARN
from tests.support.models import SMALL, SMALL_EXPERTS, Driver, make_request, make_runner, prompt, reference, save
from tests.support.parity import (
    PROMPT,
    Checkpoints,
    assert_close,
    assert_parity,
    checkpoints_of,
    compiled_or_not,  # noqa: F401 (a fixture)
    decodes_on_a_cpu,
    needs_kernels,
    our_logits,
    their_logits,
)

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen2-some-layers-windowed": (
        "qwen2", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    ),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-dynamic-rope": ("llama", {"rope_parameters": DYNAMIC}),
    "mistral-sliding-window": ("mistral", {"sliding_window": 11}),
}
REPLY = 14


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return checkpoints_of(MODELS, tmp_path_factory)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers_whole_and_in_chunks(name: str, checkpoints: Checkpoints) -> None:
    model, directory = checkpoints(name)
    assert_parity(model, Driver(make_runner(directory)))


def _random_config(random: Any) -> dict[str, Any]:
    """A config.json as a checkpoint may have it: fields that have defaults are there or not."""
    kind = random.choice(["mistral", "mistral", "qwen2", "qwen3", "qwen3_moe", "llama"])
    layers = random.choice([2, 3, 4])
    raw = {**SMALL, "model_type": kind, "num_hidden_layers": layers, "num_key_value_heads": random.choice([1, 2, 4])}
    if kind == "qwen3_moe":
        raw |= {**SMALL_EXPERTS, "norm_topk_prob": random.random() < 0.5, "decoder_sparse_step": random.choice([1, 2])}
    if kind == "qwen2":
        raw["head_dim"] = 16
    maybe: dict[str, Any] = {"tie_word_embeddings": True, "rms_norm_eps": 1e-4, "rope_theta": 5000.0}
    if kind != "llama" and random.random() < 0.9:
        raw["sliding_window"] = random.choice([None, 3, 9, 11, 20])
    if kind.startswith("qwen"):
        maybe |= {"use_sliding_window": True, "max_window_layers": random.choice([0, 1, layers, 28])}
    if kind in ("qwen3", "llama", "qwen3_moe"):
        maybe |= {"attention_bias": True}
    if kind == "llama":
        maybe |= {"mlp_bias": True}
    maybe["rope_scaling"] = random.choice([None, {"type": "linear", "factor": 2.0}, YARN, LLAMA3])
    raw |= {key: value for key, value in maybe.items() if random.random() < 0.6}
    windowed = raw.get("sliding_window", 4096) and (kind == "mistral" or raw.get("use_sliding_window"))
    if kind in ("mistral", "qwen2", "qwen3") and raw.get("sliding_window", 4096) and random.random() < 0.6:
        kinds = ["full_attention", "sliding_attention"] if windowed else ["full_attention"]
        raw["layer_types"] = [random.choice(kinds) for _ in range(layers)]
    if kind == "qwen3_moe":
        raw.pop("max_window_layers", None)
    return raw


@pytest.mark.parametrize("seed", range(6))
def test_any_config_computes_what_transformers_does_beyond_the_window(seed: int, tmp_path: Path) -> None:
    """In float64, from a config.json that transformers has not put in order before."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = _random_config(Random(seed))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(seed)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), experts_implementation="eager")
    theirs = theirs.double().eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in name else 0.1 if "bias" in name else 0.05))
    theirs.save_pretrained(tmp_path, save_original_format=True)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ids = prompt(seed, PROMPT)
    ours = our_logits(Driver(make_runner(tmp_path, "float64")), make_request(ids, 0), [PROMPT])
    expected = their_logits(theirs, ids).log_softmax(-1)
    torch.testing.assert_close(ours.log_softmax(-1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2-some-layers-windowed", "llama3-rope"])
def test_a_batch_of_mixed_lengths_gives_each_request_what_it_gets_alone(name: str, checkpoints: Checkpoints) -> None:
    _, directory = checkpoints(name)
    prompts = [prompt(seed, length) for seed, length in enumerate((3, 37, 1, 20))]
    alone = []
    for ids in prompts:
        alone.append(Driver(make_runner(directory, "float64")).generate(make_request(ids, 0), 8))
    driver = Driver(make_runner(directory, "float64"))
    requests = [make_request(ids, row) for row, ids in enumerate(prompts)]
    driver.run([(requests[0], 3, True), (requests[1], 30, False)])
    driver.run([(requests[0], 1, True), (requests[1], 7, True), (requests[2], 1, True)])  # a prompt of one token
    driver.run([(requests[0], 1, True), (requests[1], 1, True), (requests[2], 1, True), (requests[3], 20, True)])
    while any(len(request.output_ids) < 8 for request in requests):
        driver.run([(request, 1, True) for request in requests if len(request.output_ids) < 8])
    assert [request.output_ids for request in requests] == alone


def test_a_token_the_host_has_not_seen_is_taken_from_the_device(checkpoints: Checkpoints) -> None:
    _, directory = checkpoints("qwen3")
    ids = prompt(4, PROMPT)
    expected = Driver(make_runner(directory)).generate(make_request(ids, 0), 6)
    driver = Driver(make_runner(directory))
    request = make_request(ids, 0)
    driver.run([(request, PROMPT, True)])
    for _ in range(5):
        driver.run([(request, 1, True)], unknown=True)
    assert request.output_ids == expected


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


@pytest.mark.usefixtures("compiled_or_not")
@pytest.mark.parametrize("name", ["qwen2-some-layers-windowed", "llama-biases"])
@pytest.mark.parametrize("count", [2, 7])
def test_decode_steps_on_a_cpu_compute_what_the_decoder_does(name: str, count: int, checkpoints: Checkpoints) -> None:
    """They have their own arithmetic: the same logits, and the same keys and values."""
    _, directory = checkpoints(name)
    for ours, plainly in zip(*decodes_on_a_cpu(directory, count), strict=True):
        torch.testing.assert_close(ours, plainly, rtol=0, atol=1e-5 * float(plainly.abs().max()))


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
