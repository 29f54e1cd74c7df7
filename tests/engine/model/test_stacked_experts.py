"""Checkpoints with the experts of a layer as one tensor (Qwen3-VL-MoE): layouts, ranks, and 8-bit floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import CheckpointError
from engine.model.hf.config import read_model_config
from engine.model.linear import Fp8Blocks
from engine.worker.weights import quantised
from minitui.cli.verify import _loaded
from tests.support.checkpoints.images import save_layouts, with_images
from tests.support.kernels.ranks import ranks_are_threads  # noqa: F401 (a fixture)
from tests.support.models import Driver, load_decoder, make_request, make_runner, prompt, rewrite
from tests.support.packing import FORMATS, fp8_block, per_row
from tests.support.parity import PROMPT, last_logits, our_logits, their_logits

SIZES = {  # blocks of 128 fit, and no expert is square
    "hidden_size": 128, "head_dim": 64, "num_key_value_heads": 4, "num_experts": 3, "moe_intermediate_size": 256,
}
LAYER = "model.language_model.layers.{}.mlp.experts."


def quantise_experts(model: Any, directory: Path, layout: str) -> None:
    """Round the experts of a checkpoint of [E, in, out] to 8-bit floats; give `model` the matrices they stand for.
    `layout`: "in, out" as published by Qwen, "out, in", or "each": every expert's matrices by themselves."""
    state = model.state_dict()

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts = tensors.pop(name).float()
            if layout == "each":
                _store_each(tensors, name, experts, state[name])
                continue
            experts = experts if layout == "in, out" else experts.transpose(1, 2)
            stored, dense = zip(*(fp8_block(expert, (128, 128)) for expert in experts), strict=True)
            tensors[name] = torch.stack([each["weight"] for each in stored])
            tensors[f"{name}_scale_inv"] = torch.stack([each["weight_scale_inv"] for each in stored])
            exact = torch.stack(dense)
            state[name].copy_(exact.transpose(1, 2) if layout == "in, out" else exact)

    rewrite(directory, change)
    model.load_state_dict(state)
    path = directory / "config.json"
    config = FORMATS["fp8 rows" if layout == "each" else "fp8 blocks of 128"][0]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def _store_each(tensors: dict[str, torch.Tensor], name: str, experts: torch.Tensor, state: torch.Tensor) -> None:
    prefix, _, leaf = name.rpartition(".")
    for i, expert in enumerate(experts):
        stored, dense = per_row(expert.t().contiguous(), torch.float8_e4m3fn)
        leaves = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else ["down_proj"]
        for suffix in ("weight", "weight_scale"):
            for each, part in zip(leaves, stored[suffix].chunk(len(leaves)), strict=True):
                tensors[f"{prefix}.{i}.{each}.{suffix}"] = part.contiguous()
        state[i].copy_(dense)


@pytest.mark.usefixtures("ranks_are_threads")
@pytest.mark.parametrize("layout", ["new", "published"])
def test_both_layouts_are_split_over_ranks(layout: str, tmp_path: Path) -> None:
    theirs = with_images("qwen3_vl_moe", moe_intermediate_size=42, num_key_value_heads=4)
    new, published = save_layouts(theirs, tmp_path)
    shapes = [load_file(path / "model.safetensors")[LAYER.format(0) + "down_proj"].shape for path in (new, published)]
    assert shapes == [(6, 64, 42), (6, 42, 64)]
    expected = their_logits(theirs, prompt(0, PROMPT))[-1].log_softmax(-1)
    runner = make_runner(tmp_path / layout, "float64", tensor_parallel_size=2)
    found = last_logits(runner)
    runner.close()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_outer_field_ties_the_embedding_and_the_weights_of_experts_sum_to_1(tmp_path: Path) -> None:
    """As in transformers, whose text_config says tied, and which ignores norm_topk_prob."""
    _, published = save_layouts(with_images("qwen3_vl_moe"), tmp_path)
    path = published / "config.json"
    raw = json.loads(path.read_text())
    raw["text_config"] |= {"tie_word_embeddings": True, "norm_topk_prob": False}
    path.write_text(json.dumps(raw))
    config = read_model_config(published)
    assert config.experts is not None and config.experts.normalised and not config.tie_word_embeddings
    path.write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    assert read_model_config(published).tie_word_embeddings


def test_experts_of_another_shape_are_named_with_both_shapes(tmp_path: Path) -> None:
    _, published = save_layouts(with_images("qwen3_vl_moe"), tmp_path)
    name = LAYER.format(1) + "down_proj"
    rewrite(published, lambda tensors: tensors.update({name: tensors[name][:, :7].contiguous()}))
    message = r"layers\.1\.mlp\.experts\.down_proj is \[6, 7, 64\] and should be \[6, 64, 40\]"
    with pytest.raises(CheckpointError, match=message):
        load_decoder(published)


@pytest.mark.usefixtures("ranks_are_threads")
@pytest.mark.parametrize("layout", ["in, out", "out, in", "each"])
def test_8_bit_floats_are_expanded_or_computed_as_stored(layout: str, tmp_path: Path) -> None:
    """On one device and on two ranks; transformers gets the expanded matrices for `minitui verify`."""
    theirs, ids = with_images("qwen3_vl_moe", **SIZES), prompt(0, PROMPT)
    _, published = save_layouts(theirs, tmp_path)
    quantise_experts(theirs, published, layout)
    expected = their_logits(theirs, ids).log_softmax(-1)
    driver = Driver(make_runner(published, "float64"))
    ours = our_logits(driver, make_request(ids, 0), [PROMPT]).log_softmax(-1)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    for size in (1, 2):
        runner = make_runner(published, "float64", quantization="checkpoint", tensor_parallel_size=size)
        torch.testing.assert_close(last_logits(runner), expected[-1], rtol=0, atol=1e-5)
        if size == 2:
            runner.close()
    config = read_model_config(published)
    again = _loaded(published, config, dtype=torch.float64, experts_implementation="eager").eval()
    torch.testing.assert_close(their_logits(again, ids).log_softmax(-1), expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("ranks_are_threads")
def test_the_bytes_of_transposed_blocks_are_kept(tmp_path: Path) -> None:
    _, published = save_layouts(theirs := with_images("qwen3_vl_moe", **SIZES), tmp_path)
    quantise_experts(theirs, published, "in, out")
    stored = load_file(published / "model.safetensors")[LAYER.format(1) + "down_proj"].view(torch.uint8)
    runner = make_runner(published, "float64", quantization="checkpoint")
    down = runner.loaded.model.layers[1].mlp.down
    assert isinstance(down, Fp8Blocks)
    assert torch.equal(down.values.view(torch.uint8).unflatten(0, (3, -1)), stored.transpose(1, 2))
    assert "18 matrices are computed in 8 bits, as the checkpoint stores them" in runner.loaded.notes
    config = read_model_config(published)
    estimate = quantised.weight_bytes("checkpoint", config, torch.float64, directory=published)
    assert estimate == runner.loaded.model.nbytes
