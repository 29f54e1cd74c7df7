"""Reads from a config.json how the layers of Gemma 4 differ: in their heads, their MLPs, and whose keys they read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.fields import Fields, shown
from engine.model.config import ExpertsConfig, ModelConfig

OF_A_LAYER = ("head_dim", "num_key_value_heads")  # the fields that per_layer_config may replace
MOST_EXPERTS = 65_536
LARGEST_HEAD = 1 << 16


def read_uneven(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Returns the configuration with the fields that differ between layers. Raises CheckpointError. `config`: of the
    layers with a window."""
    if fields.raw.get("use_bidirectional_attention") not in (None, "vision"):  # "vision": tokens of images only
        raise fields.refuse("use_bidirectional_attention", "null or 'vision': text is generated from left to right")
    config = replace(config, keys_as_values=fields.flag("attention_k_eq_v"))
    heads = _heads(fields, config)
    source = _sources(fields, config, heads)
    shared = [source[layer] != layer for layer in range(config.num_layers)]
    per_layer = fields.count("hidden_size_per_layer_input", 0, least=0)
    if per_layer and fields.count("vocab_size_per_layer_input", config.vocab_size) != config.vocab_size:
        raise fields.refuse("vocab_size_per_layer_input", f"vocab_size, {config.vocab_size:,}")
    wide = fields.flag("use_double_wide_mlp") and any(shared)
    size = config.intermediate_size
    return replace(
        config, layer_heads=heads if len(set(heads)) > 1 else (), num_kv_heads=heads[0][0], head_dim=heads[0][1],
        kv_source=source if any(shared) else (),
        layer_widths=tuple(2 * size if reads else size for reads in shared) if wide else (), per_layer_size=per_layer,
        experts=_experts(fields, config) if fields.flag("enable_moe_block") else None,
    )


def _heads(fields: Fields, config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Returns the key/value heads and the head size of each layer."""
    whole: dict[str, Any] = {"head_dim": fields.count("global_head_dim", 512)}
    if config.keys_as_values and fields.raw.get("num_global_key_value_heads") is not None:
        whole["num_key_value_heads"] = fields.count("num_global_key_value_heads")
    own: Any = fields.raw.get("per_layer_config")
    if own is None:
        own = {str(i): whole for i in range(config.num_layers) if not config.window(i)}
    if isinstance(own, dict):  # transformers 5 writes numbers of equal length: "05", "11"
        own = {key.lstrip("0") or key[-1:]: each for key, each in own.items()}
    names = {str(i) for i in range(config.num_layers)}
    if not isinstance(own, dict) or not all(
        key in names and isinstance(each, dict) and each.keys() <= set(OF_A_LAYER) for key, each in own.items()
    ):
        raise fields.refuse(
            "per_layer_config", f"an object with {' and '.join(OF_A_LAYER)} by the numbers of layers, from '0' on"
        )
    found = []
    for layer in range(config.num_layers):
        each = Fields(fields.path, own.get(str(layer), {}), f" for layer {layer}")
        kv_heads = each.count("num_key_value_heads", config.num_kv_heads)
        dim = each.count("head_dim", config.head_dim, most=LARGEST_HEAD)
        if dim % 2:
            key = "global_head_dim" if fields.raw.get("per_layer_config") is None else "per_layer_config"
            raise fields.refuse(key, f"such that heads have an even size, but those of layer {layer} have {dim}")
        if config.num_heads % kv_heads:
            key = "num_global_key_value_heads" if fields.raw.get("per_layer_config") is None else "per_layer_config"
            raise fields.refuse(
                key, f"such that the {config.num_heads} query heads of layer {layer} are a multiple of its {kv_heads} "
                "key/value heads",
            )
        found.append((kv_heads, dim))
    if len({heads for layer, heads in enumerate(found) if not config.window(layer)}) > 1:
        raise fields.refuse("per_layer_config", "the same for all layers without a window: they share a block table")
    return tuple(found)


def _sources(fields: Fields, config: ModelConfig, heads: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Returns for each layer whose keys and values it reads: the last layers read those of earlier ones."""
    count = fields.count("num_kv_shared_layers", 0, least=0)
    kinds = [(config.window(layer), *heads[layer]) for layer in range(config.num_layers)]
    own = max(0, config.num_layers - count)
    last = {kind: layer for layer, kind in enumerate(kinds[:own])}
    if lacking := [kind for kind in kinds[own:] if kind not in last]:
        raise fields.refuse(
            "num_kv_shared_layers",
            f"so small that the first {own} of the {config.num_layers} layers have every kind of layer: "
            f"{shown(f'none has a window of {lacking[0][0]}' if lacking[0][0] else 'none has full attention')[1:-1]}, "
            f"{lacking[0][1]} key/value heads of size {lacking[0][2]}",
        )
    return (*range(own), *(last[kind] for kind in kinds[own:]))


def _experts(fields: Fields, config: ModelConfig) -> ExpertsConfig:
    count, per_token = fields.count("num_experts", most=MOST_EXPERTS), fields.count("top_k_experts")
    if per_token > count:
        raise fields.refuse("top_k_experts", f"at most num_experts, {count}")
    size = fields.count("moe_intermediate_size")
    return ExpertsConfig(count, per_token, size, True, (True,) * config.num_layers, beside_mlp=True)
