"""Makes config.json from the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine.fields import Fields, shown
from engine.gguf.families import Family
from engine.gguf.header import Header
from engine.model.config import LONGROPE
from engine.model.hf.config import MOST_LAYERS, ConfigReader
from engine.model.hf.layers import FULL, LINEAR, SLIDING

# Key of the metadata, without the architecture -> field of config.json. A family that lacks the field refuses it.
FIELDS = {
    "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling", "use_parallel_residual": "use_parallel_residual",
    "attention.clamp_kqv": "clip_qkv", "attention.causal": "is_causal",
    "leading_dense_block_count": "first_k_dense_replace", "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group", "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
}
STATES, STEPS = "ssm.state_size", "time_step_rank"
LOCAL_BASE = "rope.freq_base_swa"
ROPE_FIELDS = {  # of yarn
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor", "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow", "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
}
PUBLISHED = 8192, (1.0, 4.0)  # the original context and the bands of all published models of Llama 3
CLOSE = 1e-4  # of float32 numbers that other programs computed
STILL = 1e20  # a frequency that is divided by more does not turn
SOFTMAX = 1  # the value of expert_gating_func
FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
OF_ROPE = (FREQUENCIES, LONG, SHORT)  # tensors that become fields of config.json


def config(header: Header, family: Family) -> dict[str, Any]:
    """Returns the contents of config.json. Raises CheckpointError if the model is damaged or not supported."""
    found = _config(header, family)
    ConfigReader(Fields(header.path, dict(found))).model_config()
    return found


def _config(header: Header, family: Family) -> dict[str, Any]:
    kind, arch = header.get("general.architecture", str), family.arch

    def whole(key: str, default: int | None = None) -> int:
        return header.get(f"{kind}.{key}", int, default)

    hidden, heads, layers = whole("embedding_length"), whole("attention.head_count"), whole("block_count")
    drafts = whole("nextn_predict_layers", 0)  # layers of the MTP head, behind the others; they are not read
    layers -= drafts
    if drafts and not any(name.startswith("blk.0.") for name in header.tensors):
        raise header.error("has only the layers that predict later tokens (mtp): give the GGUF file of the model")
    if heads < 1 or hidden < 1 or not 0 < layers <= MOST_LAYERS:
        raise header.error(f"has {layers} layers with {heads} heads and an embedding of {hidden}: download it again")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise header.error("has no matrix token_embd.weight: download it again")
    head_dim = whole("attention.key_length", hidden // heads)
    norm = "layer_norm_epsilon" if arch.layer_norm else "layer_norm_rms_epsilon"
    stored = {tensor.type for tensor in header.tensors.values() if len(tensor.shape) > 1}
    found = {
        "architectures": [family.architecture],
        "model_type": arch.model_type, "vocab_size": embedding.shape[0], "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "head_dim": head_dim, arch.eps: header.get(f"{kind}.attention.{norm}", float),
        "max_position_embeddings": whole("context_length"), "pad_token_id": None,
        "hidden_act": "gelu_pytorch_tanh" if arch.activation == "gelu" else arch.activation,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "bfloat16" if stored == {"BF16"} or not family.half_range else
                 "float32" if stored == {"F32"} else "float16",
    }
    for field, module in ((arch.mlp_bias, "ffn_down"), (arch.output_bias, "attn_output"), (arch.qkv_bias, "attn_q")):
        if isinstance(field, str):
            found[field] = f"blk.0.{module}.bias" in header.tensors
    for key, field in FIELDS.items():
        if f"{kind}.{key}" in header.metadata:
            found[field] = header.metadata[f"{kind}.{key}"]
    found |= _rope(header, kind, family, head_dim)
    found |= _windows(header, kind, family, layers, found)
    if arch.uneven:
        return found | _uneven(header, kind, found)
    found["num_key_value_heads"] = whole("attention.head_count_kv", heads)
    if family.wide_queries:
        found["query_pre_attn_scalar"] = hidden // heads if layers == family.wide_queries else head_dim
    if f"{kind}.{STATES}" in header.metadata:
        found |= _delta(header, kind, layers)
    inner = whole("feed_forward_length", whole("expert_feed_forward_length", 0))
    if arch.experts:
        found |= _experts(header, kind, family, inner)
    return {"intermediate_size": inner, **found}


def _experts(header: Header, kind: str, family: Family, inner: int) -> dict[str, Any]:
    gating = header.get(f"{kind}.expert_gating_func", int, SOFTMAX)
    if gating not in (0, SOFTMAX) or header.metadata.get(f"{kind}.expert_weights_norm") is False:
        raise header.error("chooses experts by other numbers than softmax: use its checkpoint in safetensors")
    own = family.arch.experts
    return {
        "num_local_experts" if own == "intermediate_size" else "num_experts": header.get(f"{kind}.expert_count", int),
        "num_experts_per_tok": header.get(f"{kind}.expert_used_count", int), "norm_topk_prob": True,
        own: header.get(f"{kind}.expert_feed_forward_length", int, inner),
    }


def _uneven(header: Header, kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of Gemma 4, whose layers with and without a window differ in their heads."""
    layers, local = found["num_hidden_layers"], [each == SLIDING for each in found.get("layer_types", ())]
    if all(local) or not any(local):
        raise header.error(f"has no {kind}.attention.sliding_window_pattern with both kinds of layers")

    def of_layers(key: str) -> list[int]:
        value = header.metadata.get(f"{kind}.{key}")
        values: list[Any] = value if isinstance(value, list) else [value] * layers
        if len(values) != layers or any(type(each) is not int or each < 1 for each in values):
            raise header.error(f"has {kind}.{key} = {shown(value)}: it must be a number, or one for each layer")
        return values

    heads, widths = of_layers("attention.head_count_kv"), of_layers("feed_forward_length")
    first, whole, width = local.index(True), local.index(False), widths[0]
    wide = layers - found.get("num_kv_shared_layers", 0)
    if heads != [heads[first if each else whole] for each in local]:
        raise header.error(f"has {heads} key/value heads, not one number for each kind of layer: download it again")
    doubled = [width] * wide + [2 * width] * (layers - wide)
    if widths not in ([width] * layers, doubled):
        raise header.error(f"has MLPs of {widths}: those of the last {layers - wide} layers may be twice as wide only")
    fields: dict[str, Any] = {
        "head_dim": header.get(f"{kind}.attention.key_length_swa", int), "global_head_dim": found["head_dim"],
        "num_key_value_heads": heads[first], "intermediate_size": width, "use_double_wide_mlp": widths[-1] != width,
        "attention_k_eq_v": f"blk.{whole}.attn_v.weight" not in header.tensors,
    }
    if heads[first] != heads[whole]:
        fields["num_global_key_value_heads"] = heads[whole]
    if count := header.get(f"{kind}.expert_count", int, 0):
        fields |= {
            "enable_moe_block": True, "num_experts": count,
            "top_k_experts": header.get(f"{kind}.expert_used_count", int),
            "moe_intermediate_size": header.get(f"{kind}.expert_feed_forward_length", int),
        }
    rotated = header.get(f"{kind}.rope.dimension_count_swa", int, fields["head_dim"])
    if rotated != fields["head_dim"]:
        raise header.error(
            f"rotates {rotated} of the {fields['head_dim']} numbers of a head with a window: use its checkpoint in "
            "safetensors"
        )
    return fields


def _delta(header: Header, kind: str, layers: int) -> dict[str, Any]:
    """Returns the fields of the gated delta rule, whose sizes have the names of state space models."""
    keys, values, inner = (header.get(f"{kind}.ssm.{key}", int) for key in ("group_count", STEPS, "inner_size"))
    linear = [f"blk.{layer}.ssm_a" in header.tensors for layer in range(layers)]
    found = {
        "linear_num_key_heads": keys, "linear_num_value_heads": values,
        "linear_key_head_dim": header.get(f"{kind}.{STATES}", int),
        "linear_value_head_dim": inner // max(1, values),
        "linear_conv_kernel_dim": header.get(f"{kind}.ssm.conv_kernel", int),
        "layer_types": [LINEAR if each else FULL for each in linear],
    }
    shared = header.get(f"{kind}.expert_shared_feed_forward_length", int, 0)
    return found | ({"shared_expert_intermediate_size": shared} if shared else {})


def _windows(header: Header, kind: str, family: Family, layers: int, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields for the layers with a window. Files of Llama, StarCoder2 and others have no window at all."""
    if family.arch.window != "always":
        return {}
    window, pattern = found.get("sliding_window"), header.metadata.get(f"{kind}.attention.sliding_window_pattern")
    if not window:  # Phi-4 has 0
        return {"sliding_window": None}
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        pattern = [layer % pattern != pattern - 1 for layer in range(layers)]
    if pattern is None:
        return {}
    if not isinstance(pattern, list) or len(pattern) != layers or any(each not in (0, 1) for each in pattern):
        raise header.error(
            f"has {kind}.attention.sliding_window_pattern = {shown(pattern)}: it must be a number, or true or false "
            f"for each of the {layers} layers"
        )
    return {"layer_types": [SLIDING if local else FULL for local in pattern]}


def _rope(header: Header, kind: str, family: Family, head_dim: int) -> dict[str, Any]:
    """Returns rope_parameters, and the context before stretching of longrope."""
    theta = header.get(f"{kind}.rope.freq_base", float, 10_000.0)
    rotated = header.get(f"{kind}.rope.dimension_count", int, head_dim)
    scaling = _proportional(header, rotated) if family.arch.uneven else _scaling(header, kind, theta, rotated)
    table = {"rope_theta": theta, **scaling}
    if table.get("rope_type") == "yarn":
        for key, field in ROPE_FIELDS.items():
            if f"{kind}.{key}" in header.metadata:
                table[field] = header.metadata[f"{kind}.{key}"]
        if "mscale_all_dim" in table:
            table["mscale"] = table["mscale_all_dim"]
        if family.arch.clamped:
            table["truncate"] = False  # of gpt-oss; the format has no field for it
    if family.arch.partial_rotary is not None and 0 < rotated <= head_dim:
        table["partial_rotary_factor"] = math.nextafter(rotated / head_dim, 1)  # the product is not below `rotated`
    elif rotated != head_dim:
        raise header.error(f"rotates {rotated} of the {head_dim} numbers of a head: use its checkpoint in safetensors")
    found: dict[str, Any] = {"rope_parameters": table}
    has_local = "rope_local_base_freq" in family.arch.reads
    local = header.get(f"{kind}.{LOCAL_BASE}", float, 10_000.0 if has_local else theta)
    if family.arch.two_ropes:
        found["rope_parameters"] = {FULL: table, SLIDING: {"rope_type": "default", "rope_theta": local}}
    elif local != theta:
        found["rope_local_base_freq"] = local  # which is refused
    if LONG in header.tensors:
        original = f"{kind}.rope.scaling.original_context_length"
        found["original_max_position_embeddings"] = header.get(original, int)
    return found


def _proportional(header: Header, rotated: int) -> dict[str, Any]:
    """Returns the positions of Gemma 4's full attention: the last frequencies are divided by so much that they do not
    turn."""
    found = np.array(header.numbers(FREQUENCIES))
    turning = int((found == 1).sum())
    if len(found) != rotated // 2 or not turning or (found[:turning] != 1).any() or (found[turning:] < STILL).any():
        raise header.error(f"stretches positions in its own way ({FREQUENCIES}): use the checkpoint in safetensors")
    return {"rope_type": "proportional", "partial_rotary_factor": turning / len(found)}


def _scaling(header: Header, kind: str, theta: float, rotated: int) -> dict[str, Any]:
    scaling = header.metadata.get(f"{kind}.rope.scaling.type", "none")
    factor = header.metadata.get(f"{kind}.rope.scaling.factor", 1.0)
    if LONG in header.tensors or SHORT in header.tensors:
        long, short = (header.numbers(name) for name in (LONG, SHORT))
        attention = header.metadata.get(f"{kind}.rope.scaling.attn_factor")
        return {"rope_type": LONGROPE, "long_factor": long, "short_factor": short, "attention_factor": attention}
    if FREQUENCIES in header.tensors:
        return _llama3(header, theta, rotated)
    if scaling not in ("none", "linear", "yarn"):
        raise header.error(f"stretches positions by {shown(scaling)}: supported are linear and yarn")
    return {"rope_type": "default"} if scaling == "none" else {"rope_type": scaling, "factor": factor}


def _llama3(header: Header, theta: float, rotated: int) -> dict[str, Any]:
    """Returns the bands of Llama 3's positions. The file has only what each frequency is divided by. Frequencies that
    turn often stay, slow ones are divided by the factor. Between the bands, the share of a frequency that stays grows
    with its turns per position: the line of these shares gives both bands."""
    found = np.array(header.numbers(FREQUENCIES))
    if len(found) != rotated // 2:
        raise header.error(f"has {len(found)} divisors of frequencies ({FREQUENCIES}), and {rotated // 2} frequencies")
    if not (np.isfinite(found) & (found >= 1 - CLOSE)).all():
        raise header.error(f"divides frequencies by numbers below 1 ({FREQUENCIES}): download it again")
    factor = float(found.max())
    if factor <= 1 + CLOSE:
        return {"rope_type": "default"}
    turns = theta ** -(np.arange(len(found)) / len(found)) / (2 * math.pi)  # per position
    stays = (1 / found - 1 / factor) / (1 - 1 / factor)
    slope, offset = _line(turns, stays)
    low, high = -offset / slope, (1 - offset) / slope  # turns per position
    whole, any_length = max(1, round(1 / low)), PUBLISHED[0]  # of length and bands, only the products are known
    likely = whole, (1.0, round(high * whole, 3))
    for original, bands in PUBLISHED, likely, (any_length, (low * any_length, high * any_length)):
        share = ((turns * original - bands[0]) / max(bands[1] - bands[0], CLOSE)).clip(0, 1)
        if np.allclose(1 / found, (1 - share) / factor + share, rtol=CLOSE):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": bands[0], "high_freq_factor": bands[1],
                "original_max_position_embeddings": original,
            }
    raise header.error(f"stretches positions in its own way ({FREQUENCIES}): use the checkpoint in safetensors")


def _line(turns: np.ndarray, stays: np.ndarray) -> tuple[float, float]:
    """Returns the slope and the offset of the shares between 0 and 1; one of those that fit, if there are too few."""
    between = (stays > CLOSE) & (stays < 1 - CLOSE)
    if between.sum() > 1:
        slope, offset = np.polyfit(turns[between], stays[between], 1)
        return float(slope), float(offset)
    fast = float(turns[stays >= 1 - CLOSE].min(initial=2 * turns[0]))
    slow = float(turns[stays <= CLOSE].max())
    if not between.any():
        return 1 / (fast - slow), -slow / (fast - slow)
    at, share = float(turns[between][0]), float(stays[between][0])
    slope = max((1 - share) / (fast - at), share / (at - slow))
    return slope, share - slope * at
