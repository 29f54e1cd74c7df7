"""Reads config.json into a ModelConfig, as transformers 5 does. Unsupported settings are refused."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config import DTYPES
from engine.errors import CheckpointError
from engine.fields import Fields, shown
from engine.files import read_json
from engine.model.config import NO_ROPE, ExpertsConfig, ModelConfig, RopeConfig
from engine.model.families import ARCHITECTURES, MODEL_TYPES, WITH_IMAGES, Architecture
from engine.model.hf.layers import LayerReader, read_delta
from engine.model.hf.packing import read_packing
from engine.model.hf.rope import MOST_POSITIONS, RopeReader
from engine.model.hf.uneven import MOST_EXPERTS, read_uneven

TIED = "tie_word_embeddings"
SHARED = "shared_expert_intermediate_size"
MOST_LAYERS = 10_000


class ConfigReader:
    """Reads the fields of a config.json. A field that this engine does not use must have no effect."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._raw = fields.raw

    def model_config(self) -> ModelConfig:
        """Returns the configuration. Raises CheckpointError; its message names the file and the field."""
        fields = self._fields
        name = self._architecture()
        arch = ARCHITECTURES[name]
        self._fill_in(arch)
        hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        layers = fields.count("num_hidden_layers", most=MOST_LAYERS)
        head_dim = fields.count("head_dim", hidden // heads)
        if head_dim % 2:
            raise self._fields.error(f"has head_dim {head_dim}: rotary positions need an even number")
        reader = LayerReader(fields, arch, layers)
        windows = reader.windows()
        rope, layer_ropes = self._ropes(arch, head_dim, reader.rotated(), windows)
        config = ModelConfig(
            architecture=name, vocab_size=fields.count("vocab_size"), hidden_size=hidden,
            intermediate_size=fields.count("intermediate_size"), num_layers=layers, num_heads=heads,
            num_kv_heads=self._kv_heads(heads), head_dim=head_dim,
            max_position=fields.count("max_position_embeddings", most=MOST_POSITIONS),
            rms_norm_eps=fields.number(arch.eps, 1e-6), rope=rope, tie_word_embeddings=fields.flag(TIED),
            qkv_bias=self._bias(arch.qkv_bias), output_bias=self._bias(arch.output_bias),
            mlp_bias=self._bias(arch.mlp_bias), qk_norm=arch.qk_norm, full_qk_norm=arch.full_qk_norm,
            layer_norm=arch.layer_norm, wide_norms=arch.wide_norms, pre_norms=arch.pre_norms,
            post_norms=arch.post_norms, activation=arch.activation, gated=arch.gated,
            attention_scale=1.0 if arch.uneven else self._attention_scale(arch),
            softcap=self._own(arch, "attn_logit_softcapping", 0.0), sinks=arch.sinks,
            logit_softcap=self._own(arch, "final_logit_softcapping", 0.0),
            embedding_scale=hidden**0.5 if arch.scaled_embedding else self._own(arch, "embedding_multiplier", 1.0),
            residual_scale=self._own(arch, "residual_multiplier", 1.0),
            logit_scale=1 / self._own(arch, "logits_scaling", 1.0), layer_ropes=layer_ropes, windows=windows,
            value_norm=arch.uneven, layer_scalars=arch.uneven,
            experts=self._experts(arch, layers) if arch.experts else None,
            delta=read_delta(fields, layers) if arch.delta else None, output_gate=arch.delta, dtype=self._dtype(),
        )
        if arch.uneven:
            config = read_uneven(fields, config)
        config = replace(config, packing=read_packing(fields, config))
        if config.max_context > MOST_POSITIONS:
            raise self._fields.error(
                f"asks for {config.max_context:,} positions with rope scaling: at most {MOST_POSITIONS:,} are "
                "supported; correct max_position_embeddings or the rope factor"
            )
        self._refuse_foreign(arch, config)
        return config

    def _fill_in(self, arch: Architecture) -> None:
        """Give the fields that the file lacks the values that the family's own code gives them."""
        has_rope = bool({"rope_parameters", "rope_scaling"} & self._raw.keys())
        if arch.uneven and self._raw.get("rope_parameters") is None:  # here, null means the defaults
            has_rope = False
            self._raw.pop("rope_parameters", None)
        for key, value in arch.defaults.items():
            if not (key == "rope_parameters" and has_rope):
                self._raw.setdefault(key, value)

    def _bias(self, setting: bool | str) -> bool:
        return self._fields.flag(setting) if isinstance(setting, str) else setting

    def _own(self, arch: Architecture, key: str, default: float) -> float:
        """Returns a factor that only some families have; `default` for the others and for null. It is above 0."""
        if key not in arch.reads.split() or self._raw.get(key) is None:
            return default
        return self._fields.number(key, open_low=True)

    def _attention_scale(self, arch: Architecture) -> float:
        scalar = self._own(arch, "query_pre_attn_scalar", 0.0)
        return scalar**-0.5 if scalar else self._own(arch, "attention_multiplier", 0.0)

    def _ropes(
        self, arch: Architecture, head_dim: int, rotated: list[bool], windows: tuple[int, ...]
    ) -> tuple[RopeConfig, tuple[RopeConfig, ...]]:
        """Returns the rotary positions of the model, and those of each layer (empty if all layers are equal)."""
        reader = RopeReader(self._fields, arch, head_dim)
        if arch.two_ropes:
            whole, local = reader.two()
            return whole, tuple(local if window else whole for window in windows)
        rope = reader.one()
        return rope, () if all(rotated) else tuple(rope if yes else RopeConfig(NO_ROPE) for yes in rotated)

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
            titles = ", ".join(each.title for each in ARCHITECTURES.values())
            raise self._fields.error(f"names {shown(what)[1:-1]}{nearest(what)}: supported are {titles}")
        if of_kind is not None and ARCHITECTURES[of_kind] != ARCHITECTURES[name]:
            raise self._fields.error(
                f"has the architecture {name} and the model_type {kind!r}, which belong to different "
                "families: correct the wrong one"
            )
        return name

    def _kv_heads(self, heads: int) -> int:
        kv_heads = self._fields.count("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self._fields.error(
                f"has {heads} attention heads and {kv_heads} key/value heads: the first must be a "
                "multiple of the second; correct num_key_value_heads"
            )
        return kv_heads

    def _dtype(self) -> str:
        value = str(self._raw.get("dtype") or self._raw.get("torch_dtype") or "float32").removeprefix("torch.")
        if value not in DTYPES:
            raise self._fields.error(f"has dtype {shown(value)}: supported are {', '.join(DTYPES)}")
        return value

    def _experts(self, arch: Architecture, layers: int) -> ExpertsConfig | None:
        fields = self._fields
        counts = {fields.count(k, most=MOST_EXPERTS) for k in ("num_experts", "num_local_experts") if k in self._raw}
        if len(counts) == 2:
            raise self._fields.error("has num_experts and num_local_experts, which differ: remove the wrong one")
        count = counts.pop() if counts else fields.count("num_experts")
        per_token = fields.count("num_experts_per_tok")
        if per_token > count:
            raise self._fields.error(
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
            count=count, per_token=per_token, inner_size=fields.count(arch.experts),
            normalised=fields.flag("norm_topk_prob"), layers=sparse, biases=arch.clamped,
            limit=self._own(arch, "swiglu_limit", 0.0), alpha=self._own(arch, "swiglu_alpha", 0.0),
            shared_size=fields.count(SHARED) if SHARED in arch.reads.split() else 0,
        )

    def _refuse_foreign(self, arch: Architecture, config: ModelConfig) -> None:
        """Refuse settings of other families that this architecture does not support."""
        # If an architecture always has biases, attention_bias is not checked: loading fails if a bias is missing.
        supported = {
            "layer_types": arch.window != "none" or arch.delta,
            "use_sliding_window": arch.window in ("layers", "used"),
            "attention_bias": arch.qkv_bias in (True, "attention_bias"),
            "mlp_bias": arch.mlp_bias == "mlp_bias",
            "use_qk_norm": arch.qk_norm or arch.full_qk_norm,
            "qk_norm": arch.qk_norm or arch.full_qk_norm,
        }
        own = {key for key, is_supported in supported.items() if is_supported} | set(arch.reads.split())
        neutral = neutral_values(config.hidden_size, config.head_dim, config.num_layers)
        if arch.activation == "gelu":
            neutral |= dict.fromkeys(ACTIVATIONS, ("gelu_pytorch_tanh",))
        if arch.delta:
            neutral["attn_output_gate"] = (True,)
        if arch.layer_norm:
            neutral["norm_type"] = ("layer_norm",)
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
            raise self._fields.error(
                f"has {key} = {shown(value)}, which is not supported for {config.architecture} "
                f"(allowed: {only}): use another model, or remove the field if the model was trained without it"
            )


def read_model_config(directory: str | Path, overrides: dict[str, Any] | None = None) -> ModelConfig:
    """Returns the configuration in a checkpoint's config.json. Raises CheckpointError if it is not supported.

    overrides   values that replace those of the file; "text_config" is merged with the file's
    """
    path = Path(directory) / "config.json"
    raw = read_json(path)
    if not overrides:
        return ConfigReader(Fields(path, _text_part(path, raw))).model_config()
    given, text = dict(overrides), raw.get("text_config")
    if isinstance(text, dict) and isinstance(given.get("text_config"), dict):
        given["text_config"] = text | given["text_config"]
    try:
        return ConfigReader(Fields(path, _text_part(path, raw | given))).model_config()
    except CheckpointError as error:
        raise CheckpointError(f"{error} ({', '.join(map(str, overrides))} from hf_overrides)") from None


def _text_part(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the text model, for a model that also reads images; else `raw` itself."""
    names = raw.get("architectures")
    named = [each for each in names if isinstance(each, str)] if isinstance(names, list) else []
    name = next((each for each in named if each in WITH_IMAGES), None)
    if name is None:
        return raw
    text, kind = raw.get("text_config"), WITH_IMAGES[name]
    if text is None and name.startswith("Qwen2"):
        text = raw  # as published: all fields in one object
    if not isinstance(text, dict):
        raise CheckpointError(f"{path} names {name}, but has no text_config: download the file again")
    if name.startswith("Qwen"):
        ropes = {key: _of_text(text[key]) for key in ("rope_scaling", "rope_parameters") if key in text}
        text = {**text, **ropes, "model_type": kind}
    if kind == "qwen3_moe":  # the weights of a token's experts always sum to 1, and the outer field decides
        text = {**text, "norm_topk_prob": True, TIED: raw.get(TIED, False)}
    tied = [part[TIED] for part in (raw, text) if part.get(TIED) is not None]  # older files have the field inside
    text = {**text, TIED: next(filter(None, tied), False)} if tied else text
    outer = {key: raw[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in raw}
    return {**outer, "model_type": kind, **text, "architectures": None}


def _of_text(rope: Any) -> Any:
    """Returns the rotary positions of text: its tokens have the same place in time, height and width of an image."""
    if not isinstance(rope, dict):
        return rope
    text = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return {key: "default" if value == "mrope" else value for key, value in text.items()}


# Architecture -> the beginnings of the names of others that are built like it, but whose names differ.
RELATIVES = {
    "LlamaForCausalLM": "apertus arcee baichuan ernie idefics internlm llava minicpm mllama orion smolvlm yi",
    "Qwen3ForCausalLM": "hunyuan internvl",
    "Qwen2ForCausalLM": "mimo",
    "Qwen3MoeForCausalLM": "bailing deepseek dots kimi minimax",
    "MixtralForCausalLM": "dbrx grok",
    "MistralForCausalLM": "pixtral voxtral",
    "Gemma2ForCausalLM": "paligemma",
    "Glm4ForCausalLM": "chatglm",
    "StableLmForCausalLM": "gptneox",
    "Starcoder2ForCausalLM": "gptbigcode",
}
GENERATES = ("CausalLM", "ConditionalGeneration")  # what follows "For" in the name of a model that generates text
WITH_OUTPUT = ("LMHead", "Chat", "Omni")  # models named …Model that generate text


def nearest(name: str) -> str:
    """Returns clauses that say what the model `name` is, if it generates no text, and which family is the nearest."""
    _, made, purpose = name.partition("For")
    what = ""
    if made and not purpose.startswith(GENERATES):
        what = ", which is not a model that generates text"
    elif name.endswith("Model") and not any(each in name for each in WITH_OUTPUT):
        what = ", a model without an output matrix, such as an embedding model, which generates no text"
    found = _nearest(name)
    if found is None:
        return what
    family = ARCHITECTURES[found]
    return f"{what}, and the nearest family is {family.title} (for example {family.example})"


def _nearest(name: str) -> str | None:
    alike = [each for each in ARCHITECTURES if _letters(name).startswith(_letters(each))]
    if not alike:
        relatives = {stem: each for each, stems in RELATIVES.items() for stem in stems.split()}
        return next((each for stem, each in relatives.items() if _stem(name).startswith(stem)), None)

    def key(other: str) -> tuple[bool, int, int]:
        pairs = zip(_stem(name), _stem(other), strict=False)
        common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        version = int((re.search("[0-9]", other) or "0")[0])
        return ("moe" in _stem(other)) == ("moe" in _stem(name)), common, version

    return max(alike, key=key)


def _stem(name: str) -> str:
    """Returns the name of the family in an architecture's name, as in "qwen3moe" of Qwen3MoeForCausalLM."""
    return name.partition("For")[0].removesuffix("Model").lower().replace("_", "")


def _letters(name: str) -> str:
    return re.match("[a-z]*", _stem(name))[0]  # type: ignore[index]


OFF: tuple[Any, ...] = (False, "", [], {})  # 0 is accepted too: it equals False

# Neutral: null, false, 0 or empty.
SWITCHES = """
    attn_logit_softcapping final_logit_softcapping logit_softcapping logits_soft_cap output_logit_soft_cap
    moe_router_logit_softcapping mlp_gate_softcap mlp_up_softcap clip_qkv qk_l2_clip_threshold swiglu_limit
    activation_sparsity_pattern
    use_qk_norm qk_norm qk_layernorm use_sandwich_norm use_post_norm use_attention_gate gating gated_norm_rank
    attn_output_gate apply_residual_connection_post_layernorm use_parallel_residual parallel_residual parallel_attn
    new_decoder_architecture add_out_norm
    use_bidirectional_attention bidirectional prefix_lm is_encoder_decoder add_cross_attention
    attention_chunk_size dual_chunk_attention_config use_dual_chunk_attention sliding_window_pattern
    sliding_window_size global_attn_every_n_layers local_attention local_layer_ids attention_window_size window_size
    keep_window_size attention_types full_attn_idxs attn_layer_indices layers_block_type block_types block_configs
    num_kv_shared_layers attention_k_eq_v hidden_size_per_layer_input enable_moe_block use_double_wide_mlp
    add_swa_attention_sink_bias add_full_attention_sink_bias learnable_sink_init
    swa_num_attention_heads swa_num_key_value_heads swa_head_dim num_attention_heads_per_layer per_layer_config
    alibi use_alibi learned_pos_emb sinusoidal_embeddings rope_interleave rope_interleaved use_mrope mrope_section
    no_rope_layer_interval nope_layer_interval layer_rope_theta rope_local_base_freq compress_rope_theta
    use_logn_attn use_dynamic_ntk attn_temperature_tuning log_scaling_n_floor scale_attn_by_inverse_layer_idx
    llama_4_scaling
    scale_embedding embedding_scale mup_enabled use_mup logits_mup_width_multiplier mlp_multipliers ssm_multipliers
    H_cycles L_cycles hc_mult hc_count altup_num_inputs laurel_rank
    n_group topk_group first_k_dense_replace moe_apply_router_weight_on_input moe_layers zero_expert_num
    quantization
"""

# Neutral: null or 1.
FACTORS = """
    residual_multiplier embedding_multiplier logits_scaling logit_scale lm_head_multiplier key_multiplier
    attention_in_multiplier attention_out_multiplier attention_value_scale width_multiplier scale_emb
    routed_scaling_factor route_scale router_scaling_factor moe_routed_scaling_factor moe_layer_freq
    partial_rotary_factor rotary_pct rotary_percent rope_ratio full_attn_alpha_factor full_attn_beta_factor
    mlp_alpha_factor mlp_beta_factor
"""

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")

# Neutral: null or one of the listed values.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(ACTIVATIONS, ("silu", "swish")),
    "scoring_func": ("softmax",),
    "expert_selection_fn": ("softmax",),
    "topk_method": ("greedy",),
    "norm_type": ("rmsnorm", "rms_norm", "rms"),
    "position_embedding_type": ("rope", "rotary"),
    "is_causal": (True,),
    "causal": (True,),
    "use_rope": (True,),
    "scale_attn_weights": (True,),
}


def neutral_values(hidden: int, head_dim: int, layers: int) -> dict[str, tuple[Any, ...]]:
    """Returns the neutral values of each foreign key, besides null, for a model of this size."""
    return {
        **dict.fromkeys(SWITCHES.split(), OFF),
        **dict.fromkeys(FACTORS.split(), (1,)),
        **ACCEPTED,
        "query_pre_attn_scalar": (head_dim,),
        "attention_multiplier": (head_dim**-0.5, 1 / math.sqrt(head_dim)),
        "rotary_dim": (head_dim,),
        "dim_model_base": (hidden,),
        "scale_depth": (math.sqrt(layers),),
        "no_rope_layers": ([], [1] * layers),
        "layer_types": (["full_attention"] * layers,),
        "use_sliding_window": (False,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    }
