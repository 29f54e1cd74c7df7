"""Every architecture of GGUF: a file has the configuration and the weights of the checkpoint that it was made of.

FAMILY_CONFIGS=20 runs 20 configurations of each family; the default is one.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import CheckpointError
from engine.gguf.families import FAMILIES
from engine.gguf.header import BLOCKS
from engine.hub.resolve import resolve_model
from engine.model.config import ModelConfig, RopeConfig
from engine.model.hf.config import read_model_config
from engine.model.rope import rope_table
from tests.support import paths
from tests.support.checkpoints.gguf_files import ARCHITECTURES, HELD, no_tokenizer, write_gguf
from tests.support.families import LLAMA3, checkpoint
from tests.support.models import load_decoder, rewrite

gguf = pytest.importorskip("gguf")
SEEDS = range(1, 1 + int(os.environ.get("FAMILY_CONFIGS", "1")))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def made(kind: str, seed: int, directory: Path, **fields: Any) -> Path:
    checkpoint(kind, seed, directory, **{**HELD.get(kind, {}), **fields})
    return directory


def without_positions(config: ModelConfig) -> ModelConfig:
    rope = RopeConfig(
        rotary_dim=config.rope.rotary_dim, interleaved=config.rope.interleaved, query_beta=config.rope.query_beta
    )
    # Files of Gemma 4 do not say whether their checkpoint is a unified one: only defaults of fields differ.
    return replace(config, dtype="", rope=rope, layer_ropes=(), architecture=config.architecture.replace("Unified", ""))


def positions(config: ModelConfig) -> torch.Tensor:
    """The rotary positions of every layer, for short and for long contexts."""
    ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
    tables = [rope_table(each, config.head_dim, size, config.max_position) for each in ropes for size in (64, 256)]
    return torch.cat(tables)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_file_is_the_checkpoint(kind: str, seed: int, tmp_path: Path) -> None:
    """Some random configurations of Phi-3 have longrope, and this one of Llama has its own."""
    fields = {"rope_scaling": LLAMA3} if kind == "llama" else {}
    directory = made(kind, seed, tmp_path / "model", **fields)
    theirs = resolve_model(str(write_gguf(directory, tmp_path / "model.gguf")))
    found, expected = read_model_config(theirs), read_model_config(directory)
    assert without_positions(found) == without_positions(expected)
    torch.testing.assert_close(positions(found), positions(expected), rtol=0, atol=1e-5)
    for ours, other in zip(load_decoder(directory).slots(), load_decoder(theirs).slots(), strict=True):
        torch.testing.assert_close(other.view, ours.view, rtol=1e-6, atol=1e-6, msg=ours.name)


@pytest.mark.parametrize("kind", ["mixtral", "gemma2", "gpt_oss", "qwen3_next", "gemma4_text"])
def test_quantised_and_16_bit_files_are_close(kind: str, tmp_path: Path) -> None:
    """Experts, folded norms, blocks of MXFP4, which stay blocks in gpt-oss, and 4-bit numbers, which stay such without
    experts."""
    directory = made(kind, 0, tmp_path / "model", hidden_size=64, intermediate_size=64)
    parameters = [slot.view for slot in load_decoder(directory).slots()]
    for form, close in (("Q8_0", 0.02), ("BF16", 0.01), ("MXFP4", 0.3), ("Q4_0", 0.2)):
        theirs = resolve_model(str(write_gguf(directory, tmp_path / f"{form}.gguf", form)))
        blocks = [name for name in load_file(theirs / "model.safetensors") if name.endswith("_blocks")]
        assert bool(blocks) == (form == "MXFP4" and kind == "gpt_oss")
        config = read_model_config(theirs)
        assert form != "Q4_0" or (config.packing is None) == (config.experts is not None)
        for ours, other in zip(parameters, load_decoder(theirs).slots(), strict=True):
            assert (other.view - ours).norm() <= close * ours.norm(), other.name


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_files_may_have_the_head_for_later_tokens_and_experts_in_one_tensor(kind: str, tmp_path: Path) -> None:
    """As the converter writes them from published checkpoints, and with --fuse-gate-up-exps."""
    directory = made(kind, 0, tmp_path / "model")
    theirs = resolve_model(str(write_gguf(directory, tmp_path / "model.gguf", fused=True, next_layers=2)))
    found = read_model_config(theirs)
    assert without_positions(found) == without_positions(read_model_config(directory))
    stacked = [name for name in load_file(theirs / "model.safetensors") if name.endswith(".experts.gate_up_proj")]
    assert len(stacked) == (found.num_layers if found.experts else 0)
    for ours, other in zip(load_decoder(directory).slots(), load_decoder(theirs).slots(), strict=True):
        torch.testing.assert_close(other.view, ours.view, rtol=1e-6, atol=1e-6, msg=ours.name)


def test_a_file_with_only_the_head_for_later_tokens_is_refused(tmp_path: Path) -> None:
    """The converter writes mtp-NAME.gguf with --mtp."""
    directory = made("qwen3_5_text", 0, tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    rewrite(directory, lambda held: [held.pop(name) for name in tensors if ".layers." in name])
    path = write_gguf(directory, tmp_path / "mtp.gguf", next_layers=1)
    with pytest.raises(CheckpointError, match="has only the layers that predict later tokens"):
        resolve_model(str(path), weights=False)


def test_what_the_family_does_not_have_is_refused(tmp_path: Path) -> None:
    """The settings of a file become those of config.json, and its reader knows them."""
    directory = made("qwen3", 0, tmp_path / "model")

    def refused(name: str, change: Any) -> str:
        path = write_gguf(directory, tmp_path / f"{name}.gguf", tokenizer=lambda w: (no_tokenizer(w), change(w)))
        with pytest.raises(CheckpointError) as caught:
            resolve_model(str(path), weights=False)
        return str(caught.value)

    said = refused("a", lambda writer: writer.add_logit_scale(3.0))
    assert "a.gguf has logits_scaling = 3.0, which is not supported for Qwen3ForCausalLM" in said
    assert "is_causal = False" in refused("b", lambda w: w.add_causal_attention(False))
    assert "split.count = 2, but its name means 1 part" in refused("e", lambda w: w.add_uint16("split.count", 2))
    assert "rotates 8 of the 32 numbers" in refused("c", lambda writer: writer.add_rope_dimension_count(8))


def test_layers_of_gemma4_that_differ_in_another_way_are_refused(tmp_path: Path) -> None:
    directory = made("gemma4_text", 1, tmp_path / "model")

    def refused(name: str, key: str, value: Any) -> str:
        def change(writer: Any) -> None:
            no_tokenizer(writer)
            (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"gemma4.{key}", value)

        path = write_gguf(directory, tmp_path / f"{name}.gguf", tokenizer=change)
        with pytest.raises(CheckpointError) as caught:
            resolve_model(str(path), weights=False)
        return str(caught.value)

    layers = read_model_config(directory).num_layers
    assert "those of the last" in refused("a", "feed_forward_length", [96, *[24] * (layers - 1)])
    assert "feed_forward_length = [96]: it must be a number, or one for each layer" in refused(
        "b", "feed_forward_length", [96]
    )
    assert "rotates 2 of the" in refused("c", "rope.dimension_count_swa", 2)
    assert "no gemma4.attention.sliding_window_pattern with both kinds" in refused(
        "d", "attention.sliding_window_pattern", [True] * layers
    )


def test_an_unknown_architecture_names_the_nearest(tmp_path: Path) -> None:
    for kind, hint in (("gemma3n", ", and the nearest is gemma3: supp"), ("mamba", "'mamba': supp")):
        writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(CheckpointError, match=f"{hint}orted in GGUF are llama, qwen2, qwen3, "):
            resolve_model(str(tmp_path / "x.gguf"))


def test_every_architecture_is_tested() -> None:
    assert set(ARCHITECTURES.values()) == set(FAMILIES)


def test_the_readme_lists_the_architectures_and_the_types() -> None:
    text = (paths.ROOT / "README.md").read_text()
    said, _, rest = text.partition("**GGUF.**")[2].partition("The file is unpacked")
    assert set(re.findall(r"`([\w-]+)`", said)) == set(FAMILIES)
    types = re.findall(r"\b(?:B?F(?:16|32)|I?Q\d_\w+|MXFP4)\b", rest.partition("become")[0])
    assert set(types) == {name for name, *_ in BLOCKS.values()}
