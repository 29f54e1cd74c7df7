"""Quantised checkpoints: what is loaded is exactly what the format says, against the dequantised model in float64."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import CheckpointError
from engine.model.four_bits import Int4Weight
from engine.model.hf.config import read_model_config
from engine.model.hf.packing import METHODS
from engine.model.linear import ByteWeight, Int8Weight
from engine.worker.limits import resolve
from engine.worker.weights import quantised
from tests.support import paths
from tests.support.families import checkpoint, random_config
from tests.support.kernels.ranks import ranks_are_threads  # noqa: F401 (a fixture)
from tests.support.models import Driver, load_decoder, make_request, make_runner, prompt, reference, rewrite, save
from tests.support.packing import FORMATS, awq, compressed, gptq, mxfp4, pack_quantized, quantise
from tests.support.parity import PROMPT, exact_logits, last_logits, our_logits, their_logits

DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 16, "layer_types": ...,
    "full_attention_interval": 2, "mlp_only_layers": ...,
}
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA, "qwen3_next": DELTA, "gemma4_text": {"attention_bias": False, "enable_moe_block": False},
}
SIZES = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = reference("qwen3", **SIZES)
    return model, save(model, tmp_path_factory.mktemp("plain"))


def quantised_copy(plain: tuple[Any, Path], directory: Path, name: str) -> Any:
    """Writes the quantised checkpoint; returns a copy of the model, in float64, with the matrices that it has."""
    model, source = plain
    exact = copy.deepcopy(model)
    quantise(exact, source, directory, name)
    return exact.double().eval()


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_computes_what_its_matrices_stand_for(
    name: str, plain: tuple[Any, Path], tmp_path: Path
) -> None:
    """Float64 of both; the matrices are far from those before quantisation, so ignoring a part would show."""
    before = their_logits(plain[0], prompt(0, PROMPT)).log_softmax(-1).double()
    exact = quantised_copy(plain, tmp_path / "m", name)
    expected = their_logits(exact, prompt(0, PROMPT)).log_softmax(-1)
    torch.testing.assert_close(exact_logits(tmp_path / "m"), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(before, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", ["phi3", "glm4", "granite"])
def test_rows_are_reordered_split_and_scaled_after_they_are_expanded(kind: str, tmp_path: Path) -> None:
    """One qkv or gate_up matrix, partial and interleaved rotary positions, multipliers."""
    seed = next(s for s in range(99) if "partial_rotary_factor" in random_config(kind, s) or kind == "granite")
    theirs = checkpoint(kind, seed, tmp_path / "plain")
    quantise(theirs, tmp_path / "plain", tmp_path / "m", "gptq")
    expected = their_logits(theirs, prompt(0, PROMPT)).log_softmax(-1)
    torch.testing.assert_close(exact_logits(tmp_path / "m"), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "name"), zip(HYBRID, ["fp8 rows", "fp8 blocks", "int4 groups"], strict=True))
def test_hybrid_models_compute_what_their_quantised_matrices_stand_for(kind: str, name: str, tmp_path: Path) -> None:
    """Projections of delta rules, gated queries, heads of two sizes, per-layer embeddings."""
    theirs = checkpoint(kind, 1, tmp_path / "plain", **HYBRID[kind])
    before = their_logits(theirs, prompt(0, PROMPT)).log_softmax(-1)
    quantise(theirs, tmp_path / "plain", tmp_path / "m", name)
    expected = their_logits(theirs, prompt(0, PROMPT)).log_softmax(-1)
    assert not torch.allclose(before, expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(exact_logits(tmp_path / "m"), expected, rtol=0, atol=1e-5)


def test_the_experts_of_gpt_oss_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.support.families as families

    raw = random_config("gpt_oss", 0) | {"intermediate_size": 64}
    monkeypatch.setattr(families, "random_config", lambda kind, seed: raw)
    theirs = checkpoint("gpt_oss", 0, tmp_path / "plain")
    dense = mxfp4(tmp_path / "plain", tmp_path / "m")
    theirs.load_state_dict(theirs.state_dict() | dense)
    expected = their_logits(theirs, prompt(0, PROMPT)).log_softmax(-1)
    torch.testing.assert_close(exact_logits(tmp_path / "m"), expected, rtol=0, atol=1e-5)


FOUR_BITS = {  # groups that our 4-bit form takes as they are
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
        lambda m: gptq(m, 4, 32, False),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, lambda m: awq(m, 64)),
    "symmetric": (
        compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=32),
        lambda m: pack_quantized(m, group=32),
    ),
    "rows": (
        compressed("pack-quantized", type="int", num_bits=4, strategy="channel"),
        lambda m: pack_quantized(m, group=m.shape[1]),
    ),
    "in bytes": FORMATS["int4 groups in bytes"],
}


@pytest.mark.parametrize(
    ("kind", "name"), [*(("llama", name) for name in FOUR_BITS), ("granite", "awq"), ("glm4", "gptq")]
)
def test_4_bits_in_groups_are_computed_as_they_are(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with multipliers (Granite) and other orders of rows (GLM-4). No number is rounded again."""
    if why_not := Int4Weight.why_not():
        pytest.skip(why_not)
    monkeypatch.setitem(FORMATS, name, FOUR_BITS[name])
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_attention_heads": 4}
    if kind == "llama":
        theirs = reference(kind, **sizes)
        save(theirs, tmp_path / "plain")
    else:
        import tests.support.families as families

        raw = random_config(kind, 0) | sizes | {"num_key_value_heads": 2}
        monkeypatch.setattr(families, "random_config", lambda kind, seed: raw)
        theirs = checkpoint(kind, 0, tmp_path / "plain")
    quantise(theirs, tmp_path / "plain", tmp_path / "m", name)
    driver = Driver(make_runner(tmp_path / "m", "auto"))
    assert driver.runner.loaded.quantization == "int4"
    expected = load_decoder(tmp_path / "m")
    for ours, exact in zip(driver.runner.loaded.model.slots(), expected.slots(), strict=True):
        if isinstance(ours.view, Int4Weight):
            torch.testing.assert_close(ours.view.dense(), exact.view.double(), rtol=1e-3, atol=1e-7)
    found = our_logits(driver, make_request(prompt(0, PROMPT), 0), [PROMPT]).double()
    exact = their_logits(theirs, prompt(0, PROMPT))
    assert (found - exact).norm() < 0.04 * exact.norm(), "the rounding of activations, and of the output matrix"


@pytest.mark.parametrize("kind", ["llama", "granite", "glm4"])
def test_8_bit_integers_are_computed_as_they_are(kind: str, tmp_path: Path) -> None:
    """Without an option. Also with multipliers (Granite) and other orders of rows (GLM-4)."""
    theirs = checkpoint(kind, 0, tmp_path / "plain")
    quantise(theirs, tmp_path / "plain", tmp_path / "m", "int8 rows")
    driver = Driver(make_runner(tmp_path / "m", "auto"))
    loaded = driver.runner.loaded
    assert loaded.quantization == "int8"
    (note,) = resolve(loaded.config, loaded.model_config).notes
    assert "weights are computed in 8 bits (int8), as they are stored" in note
    stored = load_file(tmp_path / "m" / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(loaded.model.layers[1].mlp.down.values, stored)
    for ours, exact in zip(loaded.model.slots(), load_decoder(tmp_path / "m").slots(), strict=True):
        if isinstance(ours.view, Int8Weight) and "layers" in ours.name:
            torch.testing.assert_close(ours.view.rows(torch.arange(len(exact.view))), exact.view, rtol=1e-6, atol=1e-7)
    found = our_logits(driver, make_request(prompt(0, PROMPT), 0), [PROMPT]).double()
    exact = their_logits(theirs, prompt(0, PROMPT))
    assert (found - exact).norm() < 0.04 * exact.norm(), "the rounding of activations, and of the output matrix"


@pytest.mark.parametrize("name", ["int8 rows with zeros", "nvfp4", "mxfp4 of compressed-tensors"])
def test_what_our_forms_cannot_hold_is_expanded(name: str, plain: tuple[Any, Path], tmp_path: Path) -> None:
    quantised_copy(plain, tmp_path / "m", name)
    assert make_runner(tmp_path / "m", "auto").loaded.quantization == "none"


KEPT_SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 4, "vocab_size": 208}
KEPT = ("fp8 rows", "fp8 tensor", "fp8 whole", "fp8 blocks of 128", "int8 rows", "int8 tensor")


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = reference("qwen3", **KEPT_SIZES)
    return model, save(model, tmp_path_factory.mktemp("wider"))


@pytest.mark.usefixtures("ranks_are_threads")
@pytest.mark.parametrize("name", KEPT)
def test_8_bit_floats_are_computed_as_they_are_stored(name: str, wider: tuple[Any, Path], tmp_path: Path) -> None:
    """On one device and on two ranks: the checkpoint's bytes, and the logits of its matrices in float64."""
    expected = their_logits(quantised_copy(wider, tmp_path / "m", name), prompt(0, PROMPT)).log_softmax(-1)
    stored = load_file(tmp_path / "m" / "model.safetensors")
    for size in (1, 2):
        runner = make_runner(tmp_path / "m", "float64", quantization="checkpoint", tensor_parallel_size=size)
        torch.testing.assert_close(last_logits(runner), expected[-1], rtol=0, atol=1e-5)
        layer = runner.loaded.model.layers[1]
        q_rows, inner = 4 * 64 // size, 256 // size
        for matrix, part, leaf in (
            (layer.qkv.values[:q_rows], slice(q_rows), "self_attn.q_proj"),
            (layer.mlp.gate_up.values[inner:], slice(inner), "mlp.up_proj"),
            (layer.mlp.down.values, (slice(None), slice(inner)), "mlp.down_proj"),
        ):
            wanted = stored[f"model.layers.1.{leaf}.weight"][part].view(torch.uint8)
            assert torch.equal(matrix.view(torch.uint8), wanted), leaf
        assert "14 matrices are computed in 8 bits, as the checkpoint stores them" in runner.loaded.notes
        assert isinstance(runner.loaded.model.embedding, torch.Tensor)
        if size == 2:
            runner.close()


@pytest.mark.usefixtures("ranks_are_threads")
@pytest.mark.parametrize("name", ["fp8 rows", "fp8 blocks of 128"])
def test_8_bit_floats_of_experts_are_computed_as_they_are_stored(name: str, tmp_path: Path) -> None:
    """On one device and on two ranks. One expert that is stored in another way, and its whole layer is expanded."""
    sizes = {**KEPT_SIZES, "moe_intermediate_size": 384, "num_experts": 4, "num_experts_per_tok": 2}
    exact = reference("qwen3_moe", **sizes)
    quantise(exact, save(exact, tmp_path / "plain"), tmp_path / "m", name)
    expected = their_logits(exact.eval(), prompt(0, PROMPT)).double().log_softmax(-1)
    stored = load_file(tmp_path / "m" / "model.safetensors")
    for size in (1, 2):
        runner = make_runner(tmp_path / "m", "float64", quantization="checkpoint", tensor_parallel_size=size)
        torch.testing.assert_close(last_logits(runner), expected[-1], rtol=0, atol=1e-4)
        mlp, inner = runner.loaded.model.layers[1].mlp, (384, 128)[size - 1]  # one rank has one block, the other two
        for matrix, part, leaf in (
            (mlp.gate_up.values[(2 * 3 + 1) * inner :], slice(inner), "up_proj"),
            (mlp.down.values[3 * 128 :], (slice(None), slice(inner)), "down_proj"),
        ):
            wanted = stored[f"model.layers.1.mlp.experts.3.{leaf}.weight"][part].view(torch.uint8)
            assert torch.equal(matrix.view(torch.uint8), wanted), leaf
        config, group = read_model_config(tmp_path / "m"), runner.loaded.group
        estimate = quantised.weight_bytes("checkpoint", config, torch.float64, group)
        assert estimate == runner.loaded.model.nbytes
        assert "32 matrices are computed in 8 bits, as the checkpoint stores them" in runner.loaded.notes
        if size == 2:
            runner.close()
    key = "model.layers.0.mlp.experts.2.up_proj.weight"
    scale = key + ("_scale" if name == "fp8 rows" else "_scale_inv")
    rewrite(tmp_path / "m", lambda tensors: tensors.update({key: tensors[key].float(), scale: torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.weight is of type F32"):
        make_runner(tmp_path / "m", "float64", quantization="checkpoint")
    rewrite(tmp_path / "m", lambda tensors: tensors.update({key: stored[key].float() * 2**-9}) or tensors.pop(scale))
    runner = make_runner(tmp_path / "m", "float64", quantization="checkpoint")
    kept = [isinstance(layer.mlp.gate_up, ByteWeight) for layer in runner.loaded.model.layers]
    assert kept == [False, True]
    assert any("20 matrices are computed" in note and "11 are expanded" in note for note in runner.loaded.notes)


@pytest.mark.usefixtures("ranks_are_threads")
@pytest.mark.parametrize("name", ["fp8 rows", "fp8 blocks of 128"])
def test_a_matrix_is_expanded_if_a_part_of_it_does_not_fit(name: str, wider: tuple[Any, Path], tmp_path: Path) -> None:
    """Two of q, k and v are not quantised in layer 0, and the heads of one rank of four fill half a block."""
    exact = quantised_copy(wider, tmp_path / "m", name)

    def plain(tensors: dict[str, torch.Tensor]) -> None:
        for leaf in ("k_proj", "v_proj"):
            key = f"model.layers.0.self_attn.{leaf}.weight"
            tensors[key] = exact.state_dict()[key].float()
            tensors.pop(key + "_scale", tensors.pop(key + "_scale_inv", None))

    rewrite(tmp_path / "m", plain)
    expected = their_logits(exact, prompt(0, PROMPT)).log_softmax(-1)
    runner = make_runner(tmp_path / "m", "float64", quantization="checkpoint")
    torch.testing.assert_close(last_logits(runner), expected[-1], rtol=0, atol=1e-5)
    assert isinstance(runner.loaded.model.layers[0].qkv, torch.Tensor)
    assert any("11 matrices are computed" in note and "1 are expanded" in note for note in runner.loaded.notes)
    config = read_model_config(tmp_path / "m")
    sizes = [quantised.weight_bytes("checkpoint", config, torch.float64, directory=d) for d in (tmp_path / "m", None)]
    assert sizes[0] == runner.loaded.model.nbytes > sizes[1]
    group = make_runner(tmp_path / "m", "float64", quantization="checkpoint", tensor_parallel_size=4)
    try:
        matrices = group.loaded.model.layers[1]
        held = [isinstance(each, ByteWeight) for each in (matrices.qkv, matrices.output, matrices.mlp.gate_up)]
        assert held == ([True, False, True] if name == "fp8 rows" else [False, False, False])
        torch.testing.assert_close(last_logits(group), expected[-1], rtol=0, atol=1e-5)
    finally:
        group.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' .*: supported are fp8, compressed-tensors,"),
        ({"quant_method": "gptq", "bits": 3}, "bits = 3 in its quantization_config: it must be 4 or 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' of awq with 4 bits"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "two sizes above 0"),
        (compressed("marlin-24", type="int", num_bits=4, strategy="group"), "format 'marlin-24' with 4 bits"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "supported are groups with weights"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -7}, "group_size = -7"),
        ("fp8", "quantization_config = 'fp8': it must be an object"),
    ],
)
def test_a_format_that_is_not_supported_is_named(change: Any, message: str, plain: Any, tmp_path: Path) -> None:
    raw = json.loads((plain[1] / "config.json").read_text()) | {"quantization_config": change}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_model_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_of_zeros_that_older_gptq_checkpoints_have_are_ignored(value: float, plain: Any, tmp_path: Path) -> None:
    quantised_copy(plain, tmp_path / "m", "gptq in order")
    before = load_decoder(tmp_path / "m")
    name = "model.layers.1.mlp.up_proj.bias"
    rewrite(tmp_path / "m", lambda tensors: tensors.update({name: torch.full((SIZES["intermediate_size"],), value)}))
    if value:
        with pytest.raises(CheckpointError, match=rf"has {re.escape(name)}, unknown to this architecture"):
            load_decoder(tmp_path / "m")
    else:
        after = load_decoder(tmp_path / "m")
        assert all(torch.equal(a.view, b.view) for a, b in zip(before.slots(), after.slots(), strict=True))


def test_the_readme_lists_the_formats() -> None:
    text = (paths.ROOT / "README.md").read_text()
    table = text.partition("| `quant_method` | supported |\n|---|---|\n")[2].partition("\n\n")[0]
    assert dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", table, re.MULTILINE)) == METHODS


def test_a_missing_or_misshapen_part_of_a_matrix_is_named(plain: tuple[Any, Path], tmp_path: Path) -> None:
    quantised_copy(plain, tmp_path / "m", "gptq")
    name = "model.layers.0.self_attn.q_proj.scales"

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:2].contiguous()
        del tensors["model.layers.1.mlp.up_proj.qzeros"]

    rewrite(tmp_path / "m", cut)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.qzeros.*q_proj\.scales is \[2, "):
        load_decoder(tmp_path / "m")


@pytest.mark.parametrize(
    ("name", "suffix", "value", "what"),
    [
        ("fp8 blocks", "weight_scale_inv", float("inf"), "not finite or are above 1e\\+30"),
        ("fp8 rows", "weight", float("nan"), "not finite"),
        ("int8 rows", "weight_scale", 3e38, "not finite or are above"),
        ("awq", "scales", float("nan"), "not finite"),
        ("awq", "scales", float("inf"), "not finite"),
        ("gptq", "g_idx", 6, "groups other than 0 to 5"),
        ("gptq", "g_idx", -1, "groups other than 0 to 5"),
        ("nvfp4", "weight_scale", float("nan"), "not finite"),
        ("nvfp4", "weight_global_scale", 0.0, "not finite"),
        ("mxfp4 of compressed-tensors", "weight_scale", 255, "not finite or are above"),
        ("int4 groups in another order", "weight_g_idx", 6, "groups other than 0 to 5"),
    ],
)
def test_hostile_scales_and_groups_are_named(
    name: str, suffix: str, value: float, what: str, plain: tuple[Any, Path], tmp_path: Path
) -> None:
    quantised_copy(plain, tmp_path / "m", name)
    tensor = f"model.layers.1.mlp.up_proj.{suffix}"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[tensor].view(-1)[-1] = value

    rewrite(tmp_path / "m", spoil)
    with pytest.raises(CheckpointError, match=rf"model.safetensors has .*{what}.* in {tensor}: download it again"):
        load_decoder(tmp_path / "m")
