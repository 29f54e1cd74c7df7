"""Reads from a config.json how layers differ: which have a sliding window or a gated delta rule, and which rotate."""

from __future__ import annotations

from engine.fields import Fields, shown
from engine.model.config import DeltaConfig
from engine.model.families import Architecture

DEFAULT_WINDOW = 4096  # the same in all families with windows
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
MOST_HEADS, LARGEST_HEAD, MOST_TAPS = 4096, 4096, 64  # of a delta rule


class LayerReader:
    """Reads layer_types, no_rope_layers and the fields of sliding windows. `layers`: the number of layers."""

    def __init__(self, fields: Fields, arch: Architecture, layers: int) -> None:
        self._fields, self._arch, self._layers = fields, arch, layers

    def rotated(self) -> list[bool]:
        """Returns for each layer whether it rotates queries and keys by their positions."""
        if "no_rope_layers" not in self._arch.reads:
            return [True] * self._layers
        fields, layers = self._fields, self._layers
        rotated, every = fields.raw.get("no_rope_layers"), fields.count("no_rope_layer_interval", 4)
        if rotated is None:
            return [(layer + 1) % every != 0 for layer in range(layers)]
        if not isinstance(rotated, list) or len(rotated) < layers or any(each not in (0, 1) for each in rotated):
            raise fields.refuse("no_rope_layers", f"a list with 1 (rotated) or 0 for each of the {layers} layers")
        return [bool(each) for each in rotated[:layers]]

    def windows(self) -> tuple[int, ...]:
        """Returns the window of each layer; () if no layer has a window."""
        fields, arch, layers = self._fields, self._arch, self._layers
        if arch.window == "none":
            return ()
        used = arch.window == "always" or fields.flag("use_sliding_window")
        is_null = "sliding_window" in fields.raw and fields.raw["sliding_window"] is None
        window = 0 if is_null else fields.count("sliding_window", DEFAULT_WINDOW, least=int(used))
        window = window if used else 0
        first = fields.count("max_window_layers", 28, least=0) if arch.window == "layers" else 0
        kinds = fields.raw.get("layer_types")
        if kinds is None:
            every, whole = arch.full_layers or (1, 1)
            every = fields.count("sliding_window_pattern", every) if "sliding_window_pattern" in arch.reads else every
            whole = min(whole, every - 1) if arch.full_layers else whole
            local = [window and i >= first and i % every != whole for i in range(layers)]
            if "no_rope_layers" in arch.reads:
                local = [window and not rotated for rotated in self.rotated()]
            kinds = [SLIDING if each else FULL for each in local]
        if arch.uneven and isinstance(kinds, list):  # transformers does the same
            kinds = [*kinds[:-1], FULL]
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (SLIDING, FULL) for kind in kinds):
            raise self._fields.error(
                f"has layer_types {shown(kinds)}: it must name '{SLIDING}' or '{FULL}' for each of the {layers} layers"
            )
        if SLIDING in kinds and not window:
            raise self._fields.error(
                f"has {SLIDING} in layer_types, but no sliding_window in use: set sliding_window"
                + ("" if arch.window == "always" else ", and set use_sliding_window to true")
            )
        if arch.window == "used" and window and FULL in kinds:
            raise self._fields.error(
                f"has {FULL} in layer_types and a sliding_window of {window} in use: this architecture "
                "has a window in every layer or in none"
            )
        return tuple(window if kind == SLIDING else 0 for kind in kinds) if SLIDING in kinds else ()


def read_delta(fields: Fields, layers: int) -> DeltaConfig | None:
    """Returns the delta rule of a model with this number of layers; None if no layer has one. Raises CheckpointError.
    Without layer_types, every full_attention_interval-th layer has attention."""
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
