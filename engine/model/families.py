"""The table of the supported model families: what differs between architectures, as data.

Everything that a config.json says itself is read by engine/model/hf/config.py. The decoder (engine/model/decoder.py)
computes every family; engine/model/checkpoint.py maps names and tensors of a checkpoint to the decoder's parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """The properties of an architecture that config.json does not contain."""

    model_type: str = field(compare=False)  # in config.json
    title: str = field(compare=False)
    example: str = field(compare=False)  # a published checkpoint
    # Biases: True, False, or the field of config.json that decides.
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    full_qk_norm: bool = False
    # The layers with a sliding window:
    #   "none"    no layer
    #   "always"  the layers that layer_types marks; without layer_types, all layers but `full_layers`
    #   "layers"  if use_sliding_window is true: the layers that layer_types marks; without layer_types, the layers from
    #             max_window_layers on (with NoPE layers: the NoPE layers)
    #   "used"    if use_sliding_window is true: all layers
    window: str = "none"
    full_layers: tuple[int, int] | None = None  # (n, i): without layer_types, layers i, i + n, i + 2n … have no window
    experts: str = ""  # the field with the inner size of an expert; "": no mixtures of experts
    clamped: bool = False  # the experts are gpt-oss's: with biases and clamped gates
    sinks: bool = False
    eps: str = "rms_norm_eps"  # the field with the epsilon of norms
    layer_norm: bool = False
    wide_norms: bool = False
    offset_norms: bool = False  # the checkpoint has w for norms with weight 1 + w
    pre_norms: bool = True
    post_norms: bool = False
    activation: str = "silu"
    gated: bool = True
    scaled_embedding: bool = False  # embeddings are multiplied by √hidden_size
    partial_rotary: float | None = None  # the default of partial_rotary_factor; None: the whole head is rotated
    interleaved: bool = False
    longrope: bool = False  # rope kinds are "default" and "longrope"
    two_ropes: bool = False  # layers with a window have other rotary positions, without scaling
    uneven: bool = False  # Gemma 4: layers differ in more than that (engine/model/hf/uneven.py)
    # Foreign keys (engine/model/hf/config.py) that are read for this architecture.
    reads: str = ""
    delta: bool = False  # layers with a gated delta rule, and gates of the attention output
    fused_delta: bool = False  # the projections of the delta rule are in_proj_qkvz and in_proj_ba, key head by key head
    # Names of modules in the checkpoint, by the decoder's names.
    names: Mapping[str, str] = field(default_factory=dict)
    fused_qkv: bool = False  # one tensor qkv_proj
    fused_gate_up: bool = False  # one tensor gate_up_proj
    # The values of fields that config.json lacks. A null means that the field has no value.
    defaults: Mapping[str, Any] = field(default_factory=dict)


BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
LLAMA_BIASES: dict[str, Any] = {**BIASES, "mlp_bias": "mlp_bias"}
GEMMA: dict[str, Any] = {
    **BIASES, "window": "always", "wide_norms": True, "offset_norms": True, "post_norms": True, "activation": "gelu",
    "scaled_embedding": True,
    "names": {
        "post_attention_layernorm": "pre_feedforward_layernorm", "after_attention_norm": "post_attention_layernorm",
        "after_mlp_norm": "post_feedforward_layernorm",
    },
}
OLMO: dict[str, Any] = {
    **BIASES, "full_qk_norm": True, "wide_norms": True, "pre_norms": False, "post_norms": True,
    "names": {"after_attention_norm": "post_attention_layernorm", "after_mlp_norm": "post_feedforward_layernorm"},
}
SIZE_OF_GEMMA = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}
MINISTRAL3_ROPE = {
    "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}

GEMMA4: dict[str, Any] = {
    **GEMMA, "offset_norms": False, "qk_norm": True, "full_layers": (6, 5), "two_ropes": True, "uneven": True,
    "reads": "final_logit_softcapping num_kv_shared_layers per_layer_config attention_k_eq_v "
    "use_bidirectional_attention hidden_size_per_layer_input enable_moe_block use_double_wide_mlp",
    "names": GEMMA["names"] | {"gate": "router.proj"},
}
SIZE_OF_GEMMA4: dict[str, Any] = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "sliding_window": 512, "max_position_embeddings": 131_072, "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}

GATED_DELTA: dict[str, Any] = {
    "qk_norm": True, "wide_norms": True, "offset_norms": True, "partial_rotary": 0.25, "delta": True,
    "reads": "partial_rotary_factor mrope_section shared_expert_intermediate_size",
}
SIZE_OF_DELTA = {
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}
SIZE_OF_EXPERTS = {
    "num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "intermediate_size": 5632, "norm_topk_prob": True,
}

ARCHITECTURES = {
    "Qwen3ForCausalLM": Architecture(
        "qwen3", "Qwen3", "Qwen/Qwen3-8B", **BIASES, qk_norm=True, window="layers",
        defaults={"head_dim": 128, "num_key_value_heads": 32},
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2", "Qwen2, Qwen2.5", "Qwen/Qwen2.5-7B-Instruct", qkv_bias=True, window="layers",
        defaults={"num_key_value_heads": 32},
    ),
    "LlamaForCausalLM": Architecture("llama", "Llama 2, 3", "meta-llama/Llama-3.1-8B-Instruct", **LLAMA_BIASES),
    "MistralForCausalLM": Architecture(
        "mistral", "Mistral", "mistralai/Mistral-7B-Instruct-v0.3", window="always", defaults={"num_key_value_heads": 8}
    ),
    "MinistralForCausalLM": Architecture(  # Mistral with layer_types in config.json
        "ministral", "Ministral", "mistralai/Ministral-8B-Instruct-2410", window="always",
        defaults={"num_key_value_heads": 8},
    ),
    "Ministral3ForCausalLM": Architecture(
        "ministral3", "Ministral 3", "mistralai/Ministral-3-8B-Instruct-2512", window="always",
        reads="llama_4_scaling_beta",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None,
                  "rope_parameters": MINISTRAL3_ROPE},
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe", "Qwen3-MoE", "Qwen/Qwen3-30B-A3B", **BIASES, qk_norm=True, window="used",
        experts="moe_intermediate_size", defaults={"num_key_value_heads": 4},
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral", "Mixtral", "mistralai/Mixtral-8x7B-Instruct-v0.1", window="always", experts="intermediate_size",
        names={"mlp": "block_sparse_moe", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
        defaults={"num_key_value_heads": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
                  "rope_theta": 1e6, "sliding_window": None, "norm_topk_prob": True},
    ),
    "GraniteForCausalLM": Architecture(
        "granite", "Granite 3 (dense)", "ibm-granite/granite-3.3-8b-instruct", **LLAMA_BIASES,
        reads="embedding_multiplier residual_multiplier logits_scaling attention_multiplier",
        defaults={"attention_multiplier": 1.0},
    ),
    "CwmForCausalLM": Architecture(
        "cwm", "CWM", "facebook/cwm", window="always", full_layers=(4, 0),
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 8192,
                  "rope_parameters": {
                      "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "high_freq_factor": 4.0,
                      "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
                  }},
    ),
    "SeedOssForCausalLM": Architecture(
        "seed_oss", "Seed-OSS", "ByteDance-Seed/Seed-OSS-36B-Instruct", qkv_bias="attention_bias",
        output_bias="attention_out_bias", mlp_bias="mlp_bias",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3", "SmolLM3", "HuggingFaceTB/SmolLM3-3B", **LLAMA_BIASES, window="layers",
        reads="no_rope_layers no_rope_layer_interval",
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True, "sliding_window": None},
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3", "Phi-3, Phi-4, Phi-4-mini", "microsoft/Phi-4-mini-instruct", window="always", partial_rotary=1.0,
        longrope=True, fused_qkv=True, fused_gate_up=True, reads="partial_rotary_factor",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": None, "max_position_embeddings": 4096,
                  "original_max_position_embeddings": 4096},
    ),
    "Olmo2ForCausalLM": Architecture(
        "olmo2", "OLMo 2", "allenai/OLMo-2-1124-7B-Instruct", **OLMO, defaults={"rms_norm_eps": 1e-5}
    ),
    "Olmo3ForCausalLM": Architecture(
        "olmo3", "OLMo 3", "allenai/Olmo-3-7B-Instruct", **OLMO, window="always", full_layers=(4, 3), two_ropes=True,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    ),
    "Glm4ForCausalLM": Architecture(
        "glm4", "GLM-4-0414", "zai-org/GLM-4-9B-0414", qkv_bias="attention_bias", post_norms=True, partial_rotary=0.5,
        interleaved=True, fused_gate_up=True, reads="partial_rotary_factor",
        names={"after_attention_norm": "post_self_attn_layernorm", "after_mlp_norm": "post_mlp_layernorm"},
        defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True},
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2", "Gemma 2", "google/gemma-2-2b-it", **GEMMA, full_layers=(2, 1),
        reads="attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar",
        defaults={**SIZE_OF_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": Architecture(
        "gemma3_text", "Gemma 3 (text)", "google/gemma-3-1b-it", **GEMMA, qk_norm=True, full_layers=(6, 5),
        two_ropes=True,
        reads="final_logit_softcapping query_pre_attn_scalar rope_local_base_freq sliding_window_pattern",
        defaults={**SIZE_OF_GEMMA, "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
                  "num_hidden_layers": 26, "max_position_embeddings": 131_072, "rope_theta": 1e6},
    ),
    "Gemma4ForCausalLM": Architecture(
        "gemma4_text", "Gemma 4", "google/gemma-4-E2B-it", **GEMMA4, defaults=SIZE_OF_GEMMA4
    ),
    "Gemma4UnifiedForCausalLM": Architecture(
        "gemma4_unified_text", "Gemma 4 (unified)", "google/gemma-4-12B-it", **GEMMA4,
        defaults={**SIZE_OF_GEMMA4, "sliding_window": 1024, "max_position_embeddings": 262_144,
                  "hidden_size_per_layer_input": 0},
    ),
    "StableLmForCausalLM": Architecture(
        "stablelm", "StableLM", "stabilityai/stablelm-2-zephyr-1_6b", qkv_bias="use_qkv_bias", eps="layer_norm_eps",
        layer_norm=True, partial_rotary=0.25, reads="partial_rotary_factor", defaults={"layer_norm_eps": 1e-5},
    ),
    "Starcoder2ForCausalLM": Architecture(
        "starcoder2", "StarCoder2", "bigcode/starcoder2-7b", qkv_bias="use_bias", output_bias="use_bias",
        mlp_bias="use_bias", window="always", eps="norm_epsilon", layer_norm=True, activation="gelu", gated=False,
        names={"up_proj": "c_fc", "down_proj": "c_proj"},
        defaults={"num_key_value_heads": 2, "norm_epsilon": 1e-5, "use_bias": True, "sliding_window": None,
                  "tie_word_embeddings": True},
    ),
    "Qwen3_5ForCausalLM": Architecture(
        "qwen3_5_text", "Qwen3.5, 3.6, 3.8", "Qwen/Qwen3.5-27B", **GATED_DELTA,
        defaults={**SIZE_OF_DELTA, "num_key_value_heads": 4},
    ),
    "Qwen3_5MoeForCausalLM": Architecture(
        "qwen3_5_moe_text", "Qwen3.5-MoE, 3.6, 3.8", "Qwen/Qwen3.5-35B-A3B", **GATED_DELTA,
        experts="moe_intermediate_size",
        defaults={**SIZE_OF_DELTA, **SIZE_OF_EXPERTS, "num_experts": 256, "num_experts_per_tok": 8},
    ),
    "Qwen3NextForCausalLM": Architecture(
        "qwen3_next", "Qwen3-Next", "Qwen/Qwen3-Next-80B-A3B-Instruct", **GATED_DELTA, fused_delta=True,
        experts="moe_intermediate_size",
        defaults={**SIZE_OF_DELTA, **SIZE_OF_EXPERTS, "num_experts": 512, "num_experts_per_tok": 10},
    ),
    "GptOssForCausalLM": Architecture(
        "gpt_oss", "gpt-oss", "openai/gpt-oss-20b", **BIASES, window="always", full_layers=(2, 1),
        experts="intermediate_size", clamped=True, sinks=True, wide_norms=True, names={"gate": "router"},
        reads="swiglu_limit swiglu_alpha",
        defaults={"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 128,
                  "attention_bias": True, "num_experts_per_tok": 4, "norm_topk_prob": True,
                  "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "rope_theta": 150_000.0,
                  "rope_parameters": {
                      "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                      "original_max_position_embeddings": 4096,
                  }},
    ),
}
MODEL_TYPES = {arch.model_type: name for name, arch in ARCHITECTURES.items()}
# Models of text and images, whose text part is one of the families: its fields are in text_config.
WITH_IMAGES = {
    "Gemma3ForConditionalGeneration": "gemma3_text", "Gemma4ForConditionalGeneration": "gemma4_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified_text", "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2", "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3VLForConditionalGeneration": "qwen3", "Qwen3VLMoeForConditionalGeneration": "qwen3_moe",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text", "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}
