"""Reads from a config.json which layers have a gated delta rule, and its sizes."""

from __future__ import annotations

from engine.fields import Fields
from engine.model.config import DeltaConfig

LINEAR, FULL = "linear_attention", "full_attention"
MOST_HEADS, LARGEST_HEAD, MOST_TAPS = 4096, 4096, 64


def read_delta(fields: Fields, layers: int) -> DeltaConfig | None:
    """Returns the delta rule of a model with this number of layers; None if no layer has one. Raises CheckpointError.

    Without layer_types, every full_attention_interval-th layer has attention.
    """
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        every = fields.count("full_attention_interval", 4)
        kinds = [LINEAR if (layer + 1) % every else FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (LINEAR, FULL) for kind in kinds):
        raise fields.refuse("layer_types", f"'{LINEAR}' or '{FULL}' for each of the {layers} layers")
    if FULL not in kinds:
        raise fields.refuse(
            "layer_types" if fields.raw.get("layer_types") else "full_attention_interval",
            f"such that at least one of the {layers} layers has {FULL}",
        )
    key_heads = fields.count("linear_num_key_heads", most=MOST_HEADS)
    value_heads = fields.count("linear_num_value_heads", most=MOST_HEADS)
    if value_heads % key_heads:
        raise fields.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads, {key_heads:,}")
    key_dim, value_dim = (fields.count(f"linear_{name}_head_dim", most=LARGEST_HEAD) for name in ("key", "value"))
    taps = fields.count("linear_conv_kernel_dim", least=2, most=MOST_TAPS)
    delta = DeltaConfig(tuple(kind == LINEAR for kind in kinds), key_heads, value_heads, key_dim, value_dim, taps)
    return delta if LINEAR in kinds else None
