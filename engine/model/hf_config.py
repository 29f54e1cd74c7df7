"""Reads config.json into a ModelConfig, as transformers 5 does. Unsupported settings are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.config import DTYPES
from engine.errors import CheckpointError
from engine.fields import Fields, shown
from engine.files import read_json
from engine.model.config import (
    ARCHITECTURES,
    MODEL_TYPES,
    ROPE_KINDS,
    Architecture,
    ExpertsConfig,
    ModelConfig,
    RopeConfig,
)
from engine.model.foreign_keys import neutral_values

MOST_LAYERS = 10_000
MOST_EXPERTS = 65_536
MOST_POSITIONS = 1 << 24  # limits the size of the RoPE table; the longest published context is 10 million
LARGEST_FACTOR = 1e6  # of RoPE scaling
LEAST_TURNS, MOST_TURNS = 1e-6, 1e6  # the limits of a frequency band (yarn, llama3) must be in this range
DEFAULT_WINDOW = 4096  # the same in all families with windows
SLIDING, FULL = "sliding_attention", "full_attention"

ROPE_COMMON = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "finetuned",
}  # fmt: skip
ROPE_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
}  # fmt: skip


class ConfigReader:
    """Reads the fields of a config.json. A field that this engine does not use must have no effect."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._raw = fields.raw
        self._path = fields.path

    def _error(self, fault: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {fault}")

    def model_config(self) -> ModelConfig:
        """Returns the configuration. Raises CheckpointError; its message names the file and the field."""
        fields = self._fields
        name = self._architecture()
        arch = ARCHITECTURES[name]
        if self._raw.get("quantization_config"):
            raise self._error("has a quantization_config: quantised checkpoints are not supported; use the original")
        hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
        kv_heads = self._kv_heads(arch, heads)
        head_dim = fields.count("head_dim", arch.head_dim or hidden // heads)
        if head_dim % 2:
            raise self._error(f"has head_dim {head_dim}: rotary positions need an even number")
        bias = arch.qkv_bias is None and fields.flag("attention_bias")
        config = ModelConfig(
            architecture=name,
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.count("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position=fields.count("max_position_embeddings", most=MOST_POSITIONS),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=self._rope(head_dim),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            qkv_bias=bias if arch.qkv_bias is None else arch.qkv_bias,
            output_bias=bias,
            mlp_bias=arch.mlp_bias and fields.flag("mlp_bias"),
            qk_norm=arch.qk_norm,
            windows=self._windows(arch, layers),
            experts=self._experts(layers) if arch.experts else None,
            dtype=self._dtype(),
        )
        if config.max_context > MOST_POSITIONS:
            raise self._error(
                f"asks for {config.max_context:,} positions with rope scaling: at most {MOST_POSITIONS:,} are "
                "supported; correct max_position_embeddings or the rope factor"
            )
        self._refuse_foreign(arch, config)
        return config

    def _architecture(self) -> str:
        kind = self._raw.get("model_type")
        if kind is not None and not isinstance(kind, str):
            raise self._fields.refuse("model_type", "the name of a family, such as 'qwen3'")
        of_kind = MODEL_TYPES.get(kind or "")
        named = self._raw.get("architectures") or [of_kind]
        if not isinstance(named, list):
            raise self._fields.refuse("architectures", "a list of names")
        name = next((each for each in named if isinstance(each, str) and each in ARCHITECTURES), None)
        if name is None:
            what = ", ".join(str(each) for each in named if each) or kind or "no architecture"
            raise self._error(f"names {shown(what)[1:-1]}: supported are {', '.join(ARCHITECTURES)}")
        if of_kind is not None and ARCHITECTURES[of_kind] != ARCHITECTURES[name]:
            raise self._error(
                f"has the architecture {name} and the model_type {kind!r}, which belong to different "
                "families: correct the wrong one"
            )
        return name

    def _kv_heads(self, arch: Architecture, heads: int) -> int:
        default = heads if "num_key_value_heads" in self._raw else arch.kv_heads or heads
        kv_heads = self._fields.count("num_key_value_heads", default)
        if heads % kv_heads:
            raise self._error(
                f"has {heads} attention heads and {kv_heads} key/value heads: the first must be a "
                "multiple of the second; correct num_key_value_heads"
            )
        return kv_heads

    def _dtype(self) -> str:
        value = str(self._raw.get("dtype") or self._raw.get("torch_dtype") or "float32").removeprefix("torch.")
        if value not in DTYPES:
            raise self._error(f"has dtype {shown(value)}: supported are {', '.join(DTYPES)}")
        return value

    def _rope(self, head_dim: int) -> RopeConfig:
        """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (older versions).

        `type` is an older name of `rope_type`.
        """
        fields, raw = self._fields, self._rope_table()
        rope = Fields(self._path, raw, " in its rope parameters")
        named = [raw[key] for key in ("rope_type", "type") if raw.get(key) is not None]
        kind = named[0] if named else "default"
        if any(other != kind for other in named):
            raise self._error(f"has two rope types, {' and '.join(map(shown, named))}: remove the wrong one")
        if kind not in ROPE_KINDS:
            raise self._error(
                f"asks for rope type {shown(kind)}: supported are {', '.join(ROPE_KINDS)}; "
                "name one of them"
            )
        for key in raw.keys() - ROPE_COMMON - ROPE_KEYS[kind]:
            if raw[key] is not None and not (key.endswith("factor") and raw[key] == 1):
                raise self._error(
                    f"has {shown(key)[1:-1]} = {shown(raw[key])} in its rope parameters, which is not "
                    f"supported with rope type {kind!r}: use another model, or remove the field if it has no effect"
                )
        if raw.get("partial_rotary_factor", self._raw.get("partial_rotary_factor") or 1.0) not in (None, 1):
            raise self._error("has a partial_rotary_factor: only whole heads can be rotated")
        theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0, 1.0, True), 1.0, True)
        if kind == "default":
            return RopeConfig(theta=theta)
        context, original = fields.count("max_position_embeddings", most=MOST_POSITIONS), self._original_context(rope)
        if kind == "dynamic" and (original != context or head_dim == 2):
            raise self._error(
                f"has rope type 'dynamic' with {context:,} positions, {original:,} before stretching, and "
                f"head_dim {head_dim}: the two numbers of positions must be equal, and head_dim above 2"
            )
        low = high = 1.0
        if kind == "llama3":  # the bands of llama3 have no defaults
            low, high = (self._turns(rope, key) for key in ("low_freq_factor", "high_freq_factor"))
            if high <= low:
                raise rope.refuse("high_freq_factor", f"above low_freq_factor, {low:g}")
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=rope.number(
                "factor", max(1.0, context / original) if kind == "yarn" else None, 1.0, most=LARGEST_FACTOR
            ),
            original_max_position=original,
            attention_factor=rope.optional_number("attention_factor", True, LARGEST_FACTOR),
            mscale=rope.optional_number("mscale"),
            mscale_all_dim=rope.optional_number("mscale_all_dim"),
            beta_fast=self._turns(rope, "beta_fast", 32.0),
            beta_slow=self._turns(rope, "beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
            low_freq_factor=low,
            high_freq_factor=high,
        )

    def _turns(self, rope: Fields, key: str, default: float | None = None) -> float:
        """Returns the limit of a band: how many turns a dimension makes within the original context.

        If there is a default, 0 means the default.
        """
        if default is not None and not rope.number(key, default, most=MOST_TURNS):
            return default
        return rope.number(key, default, LEAST_TURNS, most=MOST_TURNS)

    def _rope_table(self) -> dict[str, Any]:
        tables = []
        for key in ("rope_parameters", "rope_scaling"):
            value = self._raw.get(key)
            if value is not None and not isinstance(value, dict):
                raise self._error(f"has rope parameters {shown(value)}: they must be an object")
            if value:
                tables.append(value)
        if len(tables) == 2 and tables[0] != tables[1]:
            raise self._error("has rope_parameters and rope_scaling, which differ: remove the wrong one")
        table = tables[0] if tables else {}
        nested = [key for key, value in table.items() if isinstance(value, dict)]
        if nested:
            raise self._error(
                f"has separate rope parameters for {shown(', '.join(nested))}: they must be the same for all layers, "
                "in one object"
            )
        return table

    def _original_context(self, rope: Fields) -> int:
        key = "original_max_position_embeddings"
        outer = self._fields.count(key, self._fields.count("max_position_embeddings"), most=MOST_POSITIONS)
        original = rope.count(key, outer, most=MOST_POSITIONS)
        if self._raw.get(key) is not None and original != outer:
            raise self._error(f"has {key} {outer:,}, and {original:,} in its rope parameters: correct the wrong one")
        return original

    def _experts(self, layers: int) -> ExpertsConfig | None:
        fields = self._fields
        counts = {fields.count(k, most=MOST_EXPERTS) for k in ("num_experts", "num_local_experts") if k in self._raw}
        if len(counts) == 2:
            raise self._error("has num_experts and num_local_experts, which differ: remove the wrong one")
        count = counts.pop() if counts else fields.count("num_experts")
        per_token = fields.count("num_experts_per_tok")
        if per_token > count:
            raise self._error(
                f"sends each token to {per_token} of {count} experts: correct num_experts_per_tok, which must be at "
                "most the number of experts"
            )
        step, dense = fields.count("decoder_sparse_step", 1), self._raw.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
            raise fields.refuse("mlp_only_layers", "a list of layer numbers")
        skipped = set(dense)
        sparse = tuple(layer not in skipped and (layer + 1) % step == 0 for layer in range(layers))
        if not any(sparse):
            return None
        return ExpertsConfig(
            count=count,
            per_token=per_token,
            inner_size=fields.count("moe_intermediate_size"),
            normalised=fields.flag("norm_topk_prob"),
            layers=sparse,
        )

    def _windows(self, arch: Architecture, layers: int) -> tuple[int, ...]:
        """Returns the window of each layer; () if no layer has a window."""
        fields = self._fields
        if arch.window == "none":
            return ()
        used = arch.window == "always" or fields.flag("use_sliding_window")
        is_null = "sliding_window" in self._raw and self._raw["sliding_window"] is None
        window = 0 if is_null else fields.count("sliding_window", DEFAULT_WINDOW, least=int(used))
        window = window if used else 0
        first = fields.count("max_window_layers", 28, least=0) if arch.window == "layers" else 0
        kinds = self._raw.get("layer_types")
        if kinds is None:
            kinds = [SLIDING if window and i >= first else FULL for i in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (SLIDING, FULL) for kind in kinds):
            raise self._error(
                f"has layer_types {shown(kinds)}: it must name '{SLIDING}' or '{FULL}' for each of the {layers} layers"
            )
        if SLIDING in kinds and not window:
            raise self._error(
                f"has {SLIDING} in layer_types, but no sliding_window in use: set sliding_window"
                + ("" if arch.window == "always" else ", and set use_sliding_window to true")
            )
        if arch.window == "used" and window and FULL in kinds:
            raise self._error(
                f"has {FULL} in layer_types and a sliding_window of {window} in use: this architecture "
                "has a window in every layer or in none"
            )
        return tuple(window if kind == SLIDING else 0 for kind in kinds) if SLIDING in kinds else ()

    def _refuse_foreign(self, arch: Architecture, config: ModelConfig) -> None:
        """Refuse settings of other families that this architecture does not support."""
        # If an architecture always has biases, attention_bias is not checked: loading fails if a bias is missing.
        supported = {
            "layer_types": arch.window != "none",
            "use_sliding_window": arch.window in ("layers", "used"),
            "attention_bias": arch.qkv_bias is not False,
            "mlp_bias": arch.mlp_bias,
            "use_qk_norm": arch.qk_norm,
            "qk_norm": arch.qk_norm,
        }
        own = {key for key, is_supported in supported.items() if is_supported}
        neutral = neutral_values(config.hidden_size, config.head_dim, config.num_layers)
        if arch.window == "none":
            neutral["sliding_window"] = ()
            if isinstance(self._raw.get("sliding_window"), int) and self._raw["sliding_window"] >= config.max_context:
                own.add("sliding_window")  # the window covers the whole context
        if arch.window == "used" and config.windows:
            neutral["max_window_layers"] = (0,)
        if arch.window == "always" and not config.windows:
            own.add("use_sliding_window")
        if arch.window == "always" and config.windows:
            neutral |= {"use_sliding_window": (True,), "max_window_layers": (0,)}
        for key in neutral.keys() & self._raw.keys() - own:
            value = self._raw[key]
            if value is None or value in neutral[key]:
                continue
            only = " or ".join(map(shown, (None, *neutral[key])))
            raise self._error(
                f"has {key} = {shown(value)}, which is not supported for {config.architecture} "
                f"(allowed: {only}): use another model, or remove the field if the model was trained without it"
            )


def read_model_config(directory: str | Path) -> ModelConfig:
    """Returns the configuration in a checkpoint's config.json. Raises CheckpointError if it is not supported."""
    path = Path(directory) / "config.json"
    return ConfigReader(Fields(path, read_json(path))).model_config()
