"""The table of the architectures of GGUF: which family each belongs to, and what llama.cpp's converter changes in it.

Names and layouts: https://github.com/ggml-org/llama.cpp/tree/master/conversion
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.fields import shown
from engine.gguf.header import Header
from engine.model.families import ARCHITECTURES, Architecture

NAMES = {  # name of a module in GGUF -> name in the decoder; of a layer's modules, without the layer
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_sinks": "self_attn.sinks", "post_attention_norm": "after_attention_norm",
    "ffn_norm": "post_attention_layernorm", "post_ffw_norm": "after_mlp_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
SECOND_NORM = {"post_attention_norm": "post_attention_layernorm"}  # the norm before the MLP has this name in two files
DELTA = SECOND_NORM | {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_a": "linear_attn.A_log",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_dt": "linear_attn.dt_bias", "ssm_norm": "linear_attn.norm",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a", "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",  # with the converter's option --fuse-gate-up-exps
}
GEMMA4 = {
    "per_layer_token_embd": "model.embed_tokens_per_layer", "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm", "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm", "layer_output_scale": "layer_scalar",
    "ffn_gate_inp": "gate", "ffn_gate_up_exps": "experts.gate_up_proj", "ffn_down_exps": "experts.down_proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


@dataclass(frozen=True)
class Family:
    """What differs between the architectures of GGUF."""

    architecture: str  # a name of engine/model/families.py
    pairs: bool = False  # the rows of q and k are in the order that rotates neighbouring numbers
    names: Mapping[str, str] = field(default_factory=dict)  # replace those of NAMES
    # The number of layers of the model whose queries are divided by √(hidden size / heads) instead of √head_dim.
    wide_queries: int = 0
    half_range: bool = True  # False: activations are too large for float16

    @property
    def arch(self) -> Architecture:
        return ARCHITECTURES[self.architecture]


FAMILIES = {
    "llama": Family("LlamaForCausalLM", pairs=True),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen3moe": Family("Qwen3MoeForCausalLM"),
    "qwen35": Family("Qwen3_5ForCausalLM", names=DELTA),
    "qwen35moe": Family("Qwen3_5MoeForCausalLM", names=DELTA),
    "qwen3next": Family("Qwen3NextForCausalLM", names=DELTA | {"ssm_ba": "linear_attn.in_proj_ba"}),
    "mistral3": Family("Ministral3ForCausalLM", pairs=True),
    "granite": Family("GraniteForCausalLM", pairs=True),
    "seed_oss": Family("SeedOssForCausalLM", names=SECOND_NORM),
    "smollm3": Family("SmolLM3ForCausalLM", pairs=True),
    "phi3": Family("Phi3ForCausalLM", names=FUSED),
    "olmo2": Family("Olmo2ForCausalLM"),
    "glm4": Family("Glm4ForCausalLM", names={"ffn_up": FUSED["ffn_up"]}),
    "gemma2": Family("Gemma2ForCausalLM", wide_queries=46, half_range=False),
    "gemma3": Family("Gemma3ForCausalLM", wide_queries=62, half_range=False),
    "gemma4": Family("Gemma4ForCausalLM", names=GEMMA4, half_range=False),
    "stablelm": Family("StableLmForCausalLM"),
    "starcoder2": Family("Starcoder2ForCausalLM"),
    "gpt-oss": Family("GptOssForCausalLM", names=SECOND_NORM, half_range=False),
}
OTHER_KINDS = {  # the values of general.type for files without a language model
    "adapter": "a LoRA adapter without its model (llama-export-lora of llama.cpp merges both)",
    "mmproj": "only the part of a model that reads images", "imatrix": "statistics for quantising a model",
}
MIXTRAL = Family("MixtralForCausalLM", pairs=True)  # "llama" with experts
OLMO3 = Family("Olmo3ForCausalLM")  # "olmo2" with windows


def family_of(header: Header) -> Family:
    """Returns the family of a file. Raises CheckpointError if it is not supported."""
    other = header.metadata.get("general.type")
    if isinstance(other, str) and other in OTHER_KINDS:
        raise header.error(f"holds {OTHER_KINDS[other]}: give the GGUF file of the language model")
    kind = header.get("general.architecture", str)
    if kind not in FAMILIES:
        nearest = max(FAMILIES, key=lambda name: _common(name, kind))
        hint = f", and the nearest is {nearest}" if _common(nearest, kind) > 2 else ""
        raise header.error(
            f"has the architecture {shown(kind)}{hint}: supported in GGUF are {', '.join(FAMILIES)}; use a model of "
            "these, or its checkpoint in safetensors"
        )
    if kind == "llama" and header.get("llama.expert_count", int, 0):
        return MIXTRAL
    if kind == "olmo2" and header.get("olmo2.attention.sliding_window", int, 0):
        return OLMO3
    return FAMILIES[kind]


def _common(name: str, other: str) -> int:
    """Returns how many characters at the beginning of both names are equal."""
    pairs = zip(name, other.lower(), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
