"""The configuration of Gemma 4, whose layers differ: what is read, and what is refused by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import CheckpointError
from engine.groups import cache_groups
from engine.model.config import ModelConfig, RopeConfig
from engine.model.hf.config import read_model_config

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "vocab_size_per_layer_input": 1000, "hidden_size_per_layer_input": 8, "global_head_dim": 32,
    "layer_types": [SLIDING, FULL] * 3, "sliding_window": 128,
}


def read(directory: Path, **changes: Any) -> ModelConfig:
    """`...` removes a field."""
    raw = {key: value for key, value in (GEMMA | changes).items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(raw))
    return read_model_config(directory)


def test_layers_with_a_window_and_without_differ_in_heads_and_positions(tmp_path: Path) -> None:
    config = read(tmp_path, attention_k_eq_v=True, num_global_key_value_heads=1)
    assert config.layer_heads == ((2, 16), (1, 32)) * 3 and config.scale == 1.0
    assert [config.projects_values(i) for i in range(6)] == [True, False] * 3
    assert config.rope_of(0) == RopeConfig()
    assert config.rope_of(1) == RopeConfig("proportional", theta=1e6, share=0.25)
    full, window = cache_groups(config)
    assert (full.head_dim, full.layers, window.window, window.layers) == (32, (1, 3, 5), 128, (0, 2, 4))
    # Keys are values only with attention_k_eq_v; without it, num_global_key_value_heads has no effect.
    assert read(tmp_path, num_global_key_value_heads=1).layer_heads == ((2, 16), (2, 32)) * 3


def test_the_last_layers_read_the_keys_of_the_last_own_layer_of_their_kind(tmp_path: Path) -> None:
    config = read(tmp_path, num_kv_shared_layers=3, use_double_wide_mlp=True)
    assert config.kv_source == (0, 1, 2, 1, 2, 1) and config.layer_widths == (96, 96, 96, 192, 192, 192)
    assert config.kv_bytes_per_token(torch.float32) == 4 * 2 * (2 * 2 * 16 + 2 * 32)
    full, window = cache_groups(config)
    assert (full.layers, full.readers, window.layers, window.readers) == ((1,), (3, 5), (0, 2), (4,))


def test_per_layer_config_says_the_same_as_the_fields_of_layers_without_a_window(tmp_path: Path) -> None:
    """transformers 5 writes per_layer_config in place of these fields."""
    fields = read(tmp_path, attention_k_eq_v=True, num_global_key_value_heads=1)
    own = {str(i): {"head_dim": 32, "num_key_value_heads": 1} for i in (1, 3, 5)}
    assert read(tmp_path, attention_k_eq_v=True, global_head_dim=..., per_layer_config=own) == fields
    own = {f"0{i}": each for i, each in own.items()}  # as with more than ten layers: they are written with equal length
    assert read(tmp_path, attention_k_eq_v=True, global_head_dim=..., per_layer_config=own) == fields


def test_without_layer_types_every_sixth_layer_and_the_last_has_full_attention(tmp_path: Path) -> None:
    config = read(tmp_path, layer_types=..., num_hidden_layers=8)
    assert [bool(window) for window in config.windows] == [True] * 5 + [False, True, False]
    assert not any(read(tmp_path, layer_types=[FULL] * 6).windows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all': it must be null or 'vision'"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers = 5: .* the first 1 of the 6 layers .* none has full att"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers = 7: .* the first 0 of the 6 layers .* a window of 128"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers = -1: it must be a whole number of 0 or more"),
        ({"vocab_size_per_layer_input": 999}, "vocab_size_per_layer_input = 999: it must be vocab_size, 1,000"),
        ({"hidden_size_per_layer_input": "x"}, "hidden_size_per_layer_input = 'x': it must be a whole number"),
        ({"enable_moe_block": True}, "has no field 'num_experts'"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
            "top_k_experts = 5: it must be at most num_experts, 4",
        ),
        ({"enable_moe_block": 1}, "enable_moe_block = 1: it must be true or false"),
        ({"global_head_dim": 33}, "global_head_dim = 33: .* an even size, but those of layer 1 have 33"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "num_global_key_value_heads = 3: .* the 4 query heads of layer 1 are a multiple of its 3 key/value heads",
        ),
        ({"per_layer_config": [1]}, r"per_layer_config = \[1\]: it must be an object with head_dim and"),
        ({"per_layer_config": {"6": {}}}, "per_layer_config = .* by the numbers of layers, from '0' on"),
        ({"per_layer_config": {"1": {"hidden_size": 3}}}, "per_layer_config = .*: it must be an object with head_dim"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config = .*: it must be the same for all layers wi"),
        ({"per_layer_config": {"2": {"head_dim": "x"}}}, "head_dim = 'x' for layer 2: it must be a whole number"),
        ({"layer_types": [SLIDING] * 5}, "has layer_types .* for each of the 6 layers"),
        ({"rope_parameters": {FULL: {"rope_type": "proportional", "partial_rotary_factor": 1.5}}}, "at most 1"),
        ({"rope_parameters": {"x": {}}}, "rope parameters for 'x'"),
        ({"model_type": "llama", "vocab_size_per_layer_input": ...}, "has .* = .*, which is not supported for Llama"),
    ],
)
def test_what_is_not_understood_is_refused_by_field(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, **changes)
