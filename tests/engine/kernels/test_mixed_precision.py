"""Several schemes of compressed-tensors in one checkpoint: each matrix is loaded by its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import CheckpointError, EngineError
from engine.model.config import Packing
from engine.model.hf.config import read_model_config
from engine.model.linear import ByteWeight, Fp8Weight, Int8Rows
from engine.worker.weights import quantised
from tests.support.checkpoints.images import save_layouts, with_images
from tests.support.families import checkpoint
from tests.support.kernels.ranks import ranks_are_threads  # noqa: F401 (a fixture)
from tests.support.models import load_decoder, make_runner, prompt, reference, save
from tests.support.packing import (
    E4M3,
    FORMATS,
    FP8_ROWS,
    INT4_GROUPS,
    INT8_ROWS,
    compressed,
    pack_quantized,
    per_row,
    quantise,
    several,
)
from tests.support.parity import PROMPT, exact_logits, last_logits, their_logits

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 4, "vocab_size": 208}
KINDS = ("qwen3", "qwen3_moe")
UNKNOWN = compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="channel")  # NVFP4 has groups


def fp8_rows(matrix: torch.Tensor) -> Any:
    return per_row(matrix, E4M3)


def int8_rows(matrix: torch.Tensor) -> Any:
    return per_row(matrix, torch.int8)


def written(model: Any, directory: Path, config: dict[str, Any], stores: dict[str, Any]) -> Path:
    """The model's checkpoint with quantised matrices, which the model gets too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMATS, "mixed", (config, stores))
        quantise(model, save(model, directory / "plain"), directory / "m", "mixed")
    return directory / "m"


def read_schemes(directory: Path, config: dict[str, Any], source: Path | None = None) -> Packing:
    """What is read of a quantization_config. `source`: the checkpoint of the other fields; None: a Qwen3."""
    source = source or save(reference("qwen3", **SIZES), directory / "source")
    raw = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    packing = read_model_config(directory).packing
    assert packing is not None
    return packing


def test_a_name_precedes_an_expression_which_precedes_the_class(tmp_path: Path) -> None:
    groups = [
        (INT4_GROUPS, ["Linear"]), (FP8_ROWS, ["re:.*self_attn.*", "re:.*layers.0.mlp.*"]),
        (INT8_ROWS, ["model.layers.0.self_attn.o_proj"]),
    ]
    ignore = ["lm_head", "re:.*layers.0.*v_proj"]
    model = reference("qwen3", **SIZES).eval()
    stores = {
        "0.self_attn.o_proj": int8_rows, "1.self_attn": fp8_rows, "0.self_attn.q": fp8_rows,
        "0.self_attn.k": fp8_rows, "0.mlp": fp8_rows, "1.mlp": pack_quantized,
    }
    directory = written(model, tmp_path, several(groups, ignore), stores)
    packing = read_model_config(directory).packing
    assert packing is not None
    found = {name: packing.of(f"model.layers.0.{name}.weight") for name in ("self_attn.o_proj", "self_attn.v_proj")}
    assert found["self_attn.o_proj"] == Packing("compressed-tensors", strategy="channel")
    assert found["self_attn.v_proj"] is None
    expected = their_logits(model.double(), prompt(0, PROMPT)).log_softmax(-1)
    torch.testing.assert_close(exact_logits(directory), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "attention", "mlp"), [("phi3", "qkv_proj", "mlp"), ("qwen3_moe", "attn", "experts")])
def test_the_names_are_those_of_the_checkpoint(kind: str, attention: str, mlp: str, tmp_path: Path) -> None:
    """Phi-3 has q, k and v in one matrix; the matrices of experts have a scheme, too."""
    if kind == "qwen3_moe":
        theirs = reference(kind, moe_intermediate_size=64)
        theirs.set_experts_implementation("eager")  # the other ways do not support float64
    else:
        theirs = checkpoint(kind, 0, tmp_path / "family", hidden_size=64, intermediate_size=96)
    config = several([(FP8_ROWS, [f"re:.*{attention}.*"]), (INT4_GROUPS, [f"re:.*{mlp}.*"])], ["lm_head"])
    directory = written(theirs, tmp_path, config, {attention: fp8_rows, mlp: pack_quantized})
    expected = their_logits(theirs.double(), prompt(0, PROMPT)).log_softmax(-1)
    torch.testing.assert_close(exact_logits(directory), expected, rtol=0, atol=1e-5)


def test_the_experts_of_mixtral_have_names_of_their_own(tmp_path: Path) -> None:
    checkpoint("mixtral", 0, tmp_path / "mixtral")
    name = "model.layers.0.block_sparse_moe.experts.0.w1"
    config = several([(FP8_ROWS, ["re:.*self_attn.*"]), (UNKNOWN, ["re:.*w1"])], ["lm_head"])
    with pytest.raises(CheckpointError, match=f"'channel' for {name} in"):
        read_schemes(tmp_path, config, tmp_path / "mixtral")


def test_targets_may_have_the_names_of_a_model_with_images(tmp_path: Path) -> None:
    _, published = save_layouts(with_images("qwen3_vl"), tmp_path)
    groups = [
        (FP8_ROWS, ["model.language_model.layers.0.self_attn.q_proj"]), (INT4_GROUPS, ["re:.*language_model.*mlp.*"]),
        (UNKNOWN, ["re:.*visual.*"]),
    ]
    packing = read_schemes(tmp_path, several(groups, ["re:.*lm_head"]), published)
    found = [packing.of(f"model.layers.0.{name}.weight") for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.gate")]
    assert [None if each is None else each.bits for each in found] == [8, 4, 4]
    assert packing.of("model.layers.0.self_attn.k_proj.weight") is None


@pytest.mark.parametrize(
    ("targets", "ignore", "name"),
    [
        (["re:.*mlp.*"], [], r"model\.layers\.0\.mlp\.gate_proj"),
        (["re:.*mlp.*"], ["re:.*layers.0.*"], r"model\.layers\.1\.mlp\.gate_proj"),
        (["model.layers.1.mlp.down_proj"], [], r"model\.layers\.1\.mlp\.down_proj"),
        (["lm_head"], [], "lm_head"),
    ],
)
def test_an_unsupported_scheme_is_refused_with_the_first_matrix_that_has_it(
    targets: list[str], ignore: list[str], name: str, tmp_path: Path
) -> None:
    message = rf"nvfp4-pack-quantized' with 4 bits, strategy 'channel' for {name} in its quantization_config: supp"
    with pytest.raises(CheckpointError, match=message):
        read_schemes(tmp_path, several([(FP8_ROWS, ["re:.*self_attn.*"]), (UNKNOWN, targets)], ignore))


def test_a_quantised_matrix_without_a_target_is_named(tmp_path: Path) -> None:
    model = reference("qwen3", **SIZES)
    config = several([(FP8_ROWS, ["re:.*self_attn.*"]), (INT8_ROWS, ["re:.*(gate|down)_proj"])], [])
    directory = written(model, tmp_path, config, {"self_attn": fp8_rows, "mlp": int8_rows})
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight is of type I8") as caught:
        load_decoder(directory)
    assert "has model.layers.0.mlp.up_proj.weight_scale" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("re:(", r"the target 're:\(' \(missing .*\) in its quantization_config: supported are regular expressions"),
        ("re:(a+)+b", r"the target 're:\(a\+\)\+b' .* at most 6 repetitions and no repeated group"),
        ("re:.*.*.*.*.*.*.*x", "at most 6 repetitions"),
        (7, r"targets = \[7\] in its quantization_config: it must be a list of names"),
    ],
)
def test_a_target_that_cannot_be_matched_is_named(target: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_schemes(tmp_path, several([(FP8_ROWS, ["Linear"]), (INT8_ROWS, [target])], []))


# ---- how they are computed


def test_integers_of_8_bits_are_computed_as_stored_on_a_cpu_and_other_mixtures_are_expanded(tmp_path: Path) -> None:
    int8_tensor = compressed("int-quantized", type="int", strategy="tensor")
    config = several([(INT8_ROWS, ["re:.*self_attn.*"]), (int8_tensor, ["re:.*mlp.*"])], ["lm_head"])
    stores = {"self_attn": int8_rows, "mlp": lambda m: per_row(m, torch.int8, True)}
    directory = written(reference("qwen3", **SIZES), tmp_path, config, stores)
    assert make_runner(directory, "auto").loaded.quantization == "int8"
    config = several([(INT8_ROWS, ["re:.*self_attn.*"]), (INT4_GROUPS, ["re:.*mlp.*"])], ["lm_head"])
    directory = written(
        reference("qwen3", **SIZES), tmp_path / "other", config, {"self_attn": int8_rows, "mlp": pack_quantized}
    )
    assert make_runner(directory, "auto").loaded.quantization == "none"


def test_on_a_gpu_all_schemes_must_be_computed_as_they_are_stored(tmp_path: Path) -> None:
    models = {kind: read_model_config(save(reference(kind, **SIZES), tmp_path / kind)) for kind in KINDS}

    def check(*schemes: Packing, kind: str = "qwen3") -> None:
        targets = tuple((f"re:.*layers.{i}.*", scheme) for i, scheme in enumerate(schemes))
        packing = Packing("compressed-tensors", schemes=targets)
        quantised.check_kept(replace(models[kind], packing=packing), torch.device("cuda"))

    floats, integers = (Packing("compressed-tensors", floats=each, strategy="channel") for each in (True, False))
    check(floats, integers)
    with pytest.raises(EngineError, match="not packed integers"):
        check(floats, Packing("compressed-tensors", 4, 16))
    with pytest.raises(EngineError, match="not per 64 x 64"):
        check(integers, Packing("compressed-tensors", floats=True, strategy="block", block=(64, 64)))
    with pytest.raises(EngineError, match="experts support 8-bit floats"):
        check(floats, integers, kind="qwen3_moe")


@pytest.mark.usefixtures("ranks_are_threads")
def test_8_bits_of_several_schemes_are_computed_as_stored(tmp_path: Path) -> None:
    """On one device and two ranks. In layer 1, k has another scheme than q and v, so all three are expanded."""
    model = reference("qwen3", **SIZES)
    groups = [(FP8_ROWS, ["Linear"]), (INT8_ROWS, ["re:.*mlp.*", "model.layers.1.self_attn.k_proj"])]
    stores = {"1.self_attn.k_proj": int8_rows, "self_attn": fp8_rows, "mlp": int8_rows}
    directory = written(model, tmp_path, several(groups, ["lm_head"]), stores)
    expected = their_logits(model.double().eval(), prompt(0, PROMPT)).log_softmax(-1)
    for size in (1, 2):
        runner = make_runner(directory, "float64", quantization="checkpoint", tensor_parallel_size=size)
        torch.testing.assert_close(last_logits(runner), expected[-1], rtol=0, atol=1e-5)
        first, second = runner.loaded.model.layers
        assert isinstance(first.qkv, Fp8Weight) and isinstance(second.mlp.down, Int8Rows)
        assert not isinstance(second.qkv, ByteWeight)
        assert any("11 matrices are computed in 8 bits" in note for note in runner.loaded.notes)
        assert any("3 are expanded" in note and "for q, k and v" in note for note in runner.loaded.notes)
        if size == 2:
            runner.close()
