"""Tiny random configurations of each supported family, as config.json has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.support.models import SMALL, SMALL_EXPERTS, VOCAB

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


def random_config(kind: str, seed: int) -> dict[str, Any]:
    """A config.json of the family with the model_type `kind`: fields that have defaults are there or not."""
    random = Random(f"{kind} {seed}")
    layers = random.choice([2, 3, 4])
    raw = {**SMALL, "model_type": kind, "num_hidden_layers": layers, "num_key_value_heads": random.choice([1, 2, 4])}
    raw |= {"tie_word_embeddings": random.random() < 0.5}
    return without_gaps(raw | FAMILIES[kind](random, layers))


def without_gaps(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields without those whose value is `...`."""
    return {key: value for key, value in raw.items() if value is not ...}


def _maybe(random: Random, **fields: Any) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if random.random() < 0.6}


def _layer_types(random: Random, layers: int) -> dict[str, Any]:
    """Half of the time, one of the layers at least has a window and one has none."""
    if random.random() < 0.5:
        return {}
    kinds = ["full_attention", "sliding_attention"]
    kinds += random.choices(kinds, k=layers - 2)
    random.shuffle(kinds)
    return {"layer_types": kinds}


def _window(random: Random) -> dict[str, Any]:
    return {"sliding_window": random.choice([3, 11])}


def _rope(random: Random) -> dict[str, Any]:
    scaling = random.choice([None, YARN, LLAMA3, LINEAR])
    return _maybe(random, rms_norm_eps=1e-4, rope_theta=5000.0, rope_scaling=scaling)


def _qwen(random: Random, layers: int) -> dict[str, Any]:
    fields = {"use_sliding_window": True} | _window(random) | _rope(random)
    return fields | _maybe(random, max_window_layers=random.choice([0, 1])) | _layer_types(random, layers)


def _qwen3_moe(random: Random, layers: int) -> dict[str, Any]:
    fields = {"norm_topk_prob": random.random() < 0.5, "decoder_sparse_step": random.choice([1, 2]), **SMALL_EXPERTS}
    window = {"use_sliding_window": True} | _window(random)
    return _rope(random) | fields | _maybe(random, attention_bias=True) | _maybe(random, **window)


def _ministral3(random: Random, layers: int) -> dict[str, Any]:
    scaling = {
        "type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.3,
        "max_position_embeddings": 128,
    }
    return {"rope_parameters": scaling, **_maybe(random, sliding_window=9)}


def _smollm3(random: Random, layers: int) -> dict[str, Any]:
    fields = _maybe(random, attention_bias=True, mlp_bias=True, rope_theta=5000.0)
    fields |= random.choice([{}, {"no_rope_layer_interval": 2}, {"no_rope_layers": [1, 0, 1, 1, 0][:layers]}])
    if random.random() < 0.5:
        fields |= {"use_sliding_window": True, "sliding_window": 5}
    return fields | {"head_dim": 16}


def _phi3(random: Random, layers: int) -> dict[str, Any]:
    share = random.choice([0.5, 0.75, 1.0])
    fields: dict[str, Any] = {"head_dim": ..., "original_max_position_embeddings": 128}
    fields |= _maybe(random, sliding_window=7) | ({} if share == 1.0 else {"partial_rotary_factor": share})
    half = int(16 * share) // 2
    if random.random() < 0.7:
        factors = {name: [random.uniform(1, 4) for _ in range(half)] for name in ("short_factor", "long_factor")}
        fields["rope_scaling"] = {"type": "longrope", **factors}
    return fields


def _olmo3(random: Random, layers: int) -> dict[str, Any]:
    scaling = {key: value for key, value in YARN.items() if key != "rope_theta"}
    fields = _maybe(random, attention_bias=True, rope_scaling=scaling)
    return fields | _layer_types(random, layers) | {"head_dim": 16, "sliding_window": random.choice([3, 11])}


def _gemma2(random: Random, layers: int) -> dict[str, Any]:
    fields = _maybe(
        random, attn_logit_softcapping=random.choice([None, 5.0]), final_logit_softcapping=random.choice([None, 3.0]),
        attention_bias=True,
    )
    fields |= {"query_pre_attn_scalar": random.choice([16, 37]), "sliding_window": 9}
    return fields | _layer_types(random, layers)


def _gemma3(random: Random, layers: int) -> dict[str, Any]:
    scaling = random.choice([None, {"rope_type": "linear", "factor": 8.0}])
    fields = _maybe(random, rope_theta=20000.0, rope_local_base_freq=500.0, rope_scaling=scaling)
    fields |= {"query_pre_attn_scalar": random.choice([16, 37]), "sliding_window": 9, "head_dim": 32}
    return fields | (_layer_types(random, layers) or {"sliding_window_pattern": 2})


def _gemma4_unified(random: Random, layers: int) -> dict[str, Any]:
    layers = random.choice([3, 4, 6])
    both = ["sliding_attention", "full_attention"]
    kinds = both + random.choices(both, k=layers - 3)
    kinds = [*random.sample(kinds, len(kinds)), "full_attention"]
    seen = 1 + max(kinds.index(kind) for kind in set(kinds))
    fields = _maybe(
        random, attention_k_eq_v=True, num_global_key_value_heads=random.choice([None, 1, 2]),
        num_kv_shared_layers=random.randint(0, layers - seen), use_double_wide_mlp=True,
        final_logit_softcapping=random.choice([None, 3.0]), attention_bias=random.random() < 0.3,
    )
    fields |= {"num_hidden_layers": layers, "layer_types": kinds, "sliding_window": random.choice([3, 9, 11])}
    if random.random() < 0.5:
        whole = {"rope_type": "proportional", "rope_theta": 2e4, "partial_rotary_factor": 0.5, "factor": 2.0}
        local = {"rope_type": "default", "rope_theta": 500.0}
        fields |= {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}
    return fields | {"global_head_dim": random.choice([16, 48, 64])}


def _gemma4(random: Random, layers: int) -> dict[str, Any]:
    fields = _gemma4_unified(random, layers)
    # transformers needs embeddings of layers in models that share keys and values.
    # Their roots are exact: transformers rounds them to the type in which it loads a model.
    sizes = [4, 16] if fields.get("num_kv_shared_layers") else [0, 4, 16]
    fields |= {"hidden_size_per_layer_input": random.choice(sizes), "vocab_size_per_layer_input": VOCAB}
    if random.random() < 0.4:
        fields |= {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 40}
    return fields


def _gated_delta(random: Random, layers: int) -> dict[str, Any]:
    key_heads, each = random.choice([1, 2]), random.choice([1, 2, 3])
    rope = {"rope_type": "default", "rope_theta": 5e3, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    share = random.choice([0.25, 0.5])
    fields = _maybe(random, rope_parameters=rope | {"partial_rotary_factor": share})
    if random.random() < 0.5:
        kinds = ["full_attention", "linear_attention", *random.choices(["linear_attention", "full_attention"], k=2)]
        fields |= {"layer_types": random.sample(kinds[:layers], layers)}
    else:
        fields |= {"full_attention_interval": random.choice([2, layers])}
    return fields | {
        "head_dim": 32, "linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * each,
        "linear_key_head_dim": random.choice([8, 16]), "linear_value_head_dim": random.choice([8, 12]),
        "linear_conv_kernel_dim": random.choice([2, 3, 4]),
    }


def _gated_delta_experts(random: Random, layers: int) -> dict[str, Any]:
    return _gated_delta(random, layers) | {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": random.choice([16, 40]),
    }


def _qwen3_next(random: Random, layers: int) -> dict[str, Any]:
    fields = _gated_delta_experts(random, layers) | _maybe(random, norm_topk_prob=False, mlp_only_layers=[1])
    if "rope_parameters" in fields:
        fields["rope_parameters"] = {k: v for k, v in fields["rope_parameters"].items() if "mrope" not in k}
    return fields


def _gpt_oss(random: Random, layers: int) -> dict[str, Any]:
    fields = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40, "sliding_window": 9}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
    fields |= _maybe(random, swiglu_limit=0.5, rope_scaling=scaling)
    return fields | _layer_types(random, layers)


def _norm_in_double(module: Any, x: torch.Tensor) -> torch.Tensor:
    found = module._norm(x)
    return found * module.weight if module.with_scale else found


class InDouble(TorchFunctionMode):
    """Computes in float64 what a model of transformers computes in float32, whatever its type."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Callable[..., Any]:
        def in_double(*args: Any, **options: Any) -> Any:
            with cls():
                return function(*args, **options)

        return in_double


FAMILIES: dict[str, Callable[[Random, int], dict[str, Any]]] = {  # the fields beside SMALL, of so many layers
    "llama": lambda random, layers: _maybe(random, attention_bias=True, mlp_bias=True) | _rope(random),
    "mistral": lambda random, layers: _rope(random) | _window(random) | _layer_types(random, layers),
    "qwen2": lambda random, layers: _qwen(random, layers) | {"head_dim": 16},
    "qwen3": lambda random, layers: _qwen(random, layers) | _maybe(random, attention_bias=True),
    "qwen3_moe": _qwen3_moe,
    "granite": lambda random, layers: _maybe(
        random, embedding_multiplier=random.choice([12.0, 0.7]), residual_multiplier=0.22, logits_scaling=8.0,
        mlp_bias=True, attention_bias=True, rope_theta=5000.0, rope_scaling=LLAMA3,
    ) | {"attention_multiplier": random.choice([0.015625, 0.3]), "head_dim": 16},
    "seed_oss": lambda random, layers: _maybe(
        random, attention_bias=random.random() < 0.5, attention_out_bias=True, mlp_bias=True, rope_theta=1e5,
        rope_scaling=random.choice([YARN, LINEAR]),
    ),
    "cwm": lambda random, layers: _window(random) | _maybe(random, rope_scaling=LLAMA3) | _layer_types(random, layers),
    "ministral": lambda random, layers: _layer_types(random, layers) | _window(random),
    "ministral3": _ministral3, "smollm3": _smollm3,
    "mixtral": lambda random, layers: {
        "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40
    } | _maybe(random, sliding_window=random.choice([None, 9]), rope_theta=5000.0),
    "phi3": _phi3,
    "olmo2": lambda random, layers: _maybe(random, attention_bias=True) | {"head_dim": 16},
    "olmo3": _olmo3,
    "glm4": lambda random, layers: _maybe(
        random, attention_bias=False, partial_rotary_factor=random.choice([0.25, 1.0]), rope_theta=5000.0
    ),
    "gemma2": _gemma2, "gemma3_text": _gemma3,
    "stablelm": lambda random, layers: {"head_dim": ...} | _maybe(
        random, use_qkv_bias=True, partial_rotary_factor=0.5, layer_norm_eps=1e-4
    ),
    "starcoder2": lambda random, layers: {"head_dim": ...} | _maybe(
        random, use_bias=random.random() < 0.5, sliding_window=7, norm_epsilon=1e-4
    ),
    "gpt_oss": _gpt_oss, "qwen3_5_text": _gated_delta, "qwen3_5_moe_text": _gated_delta_experts,
    "qwen3_next": _qwen3_next, "gemma4_text": _gemma4, "gemma4_unified_text": _gemma4_unified,
}


def checkpoint(kind: str, seed: int, directory: Path, **fields: Any) -> Any:
    """Write a checkpoint with a random config of the family; return the model of transformers, in float64. `fields`:
    replace those of the config, and `...` removes one. The config.json stays as it was before transformers put it in
    order."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = without_gaps(random_config(kind, seed) | fields)
    raw |= {"vocab_size_per_layer_input": raw["vocab_size"]} if "vocab_size_per_layer_input" in raw else {}
    directory.mkdir(exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(raw))
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(directory)
    # Their eager attention rounds probabilities to float32, which shows with the large scores of Gemma 4.
    attention = "sdpa" if kind.startswith("gemma4") else "eager"
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager", attn_implementation=attention)
    model = model.double().eval()
    for module in model.modules():
        if hasattr(module, "with_scale"):  # Gemma 4's norms, which compute in float32
            module.forward = _norm_in_double.__get__(module)
    if kind.startswith(("qwen3_5", "qwen3_next")):  # norms and the delta rule
        model.forward = InDouble.of(model.forward)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in name else 0.1 if "bias" in name else 0.05))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(directory, save_original_format=True)
    path.write_text(json.dumps(raw))
    return model
