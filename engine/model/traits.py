"""Which fast path supports which trait of a family. The decoder with the torch backend (the specification) has all.

A path that lacks a trait is not chosen, or refuses the model with a sentence; no path ignores a trait.
"""

from __future__ import annotations

from engine.groups import paged_groups
from engine.model.config import ModelConfig

WORDS = {
    "experts": "experts",
    "layer_norm": "LayerNorm",
    "no_pre_norms": "no norms before attention",
    "post_norms": "norms after attention",
    "full_qk_norm": "norms over all heads",
    "gelu": "GELU",
    "no_gate": "MLPs without gates",
    "clamped": "clamped experts with biases",
    "softcap": "soft caps of attention scores",
    "sinks": "attention sinks",
    "windows": "sliding windows",
    "logit_softcap": "soft caps of logits",
    "several_ropes": "layers with different rotary positions",
    "query_scales": "queries scaled by their positions",
    "head_shapes": "layers with different heads",
    "shared_kv": "layers that share keys and values",
    "groups": "several groups of layers with a block table each",
    "value_norm": "normalised values",
    "mlp_widths": "MLPs of different widths",
    "per_layer_inputs": "embeddings for each layer",
    "layer_scalars": "factors of the residual",
    "beside_mlp": "experts beside an MLP",
    "delta": "layers with a recurrent state",
    "output_gate": "gates of the attention output",
    "shared_expert": "an expert for every token",
}
GATED_DELTA = {"delta", "output_gate", "shared_expert"}
UNEVEN = {
    "head_shapes", "shared_kv", "value_norm", "mlp_widths", "per_layer_inputs", "layer_scalars", "beside_mlp",
}
SUPPORTED: dict[str, frozenset[str]] = {
    "cpu_decode": frozenset({"softcap", "sinks", "windows", "groups"}),  # engine/worker/cpu/executor.py
    "compiled": frozenset({"windows", "several_ropes", "groups"}),  # engine/worker/cpu/compiled_decoder.py
    # engine/worker/graphs/cuda_graphs.py and fused_decode.py
    "graphs": frozenset(WORDS) - {"query_scales"} - UNEVEN,
    # The kernels for one token in engine/worker/graphs/fused_decode.py. They need no norms in float32 either.
    "one_token": frozenset({"experts", "softcap", "sinks", "windows", "logit_softcap", "several_ropes", "groups"}),
    "ranks": frozenset(WORDS) - {"full_qk_norm"} - UNEVEN - GATED_DELTA,  # engine/parallel/shards.py
    # The bounds of engine/model/kv_scales.py assume an RMSNorm before the projections.
    "fp8_cache": frozenset(WORDS) - {"layer_norm", "no_pre_norms", "full_qk_norm"} - UNEVEN - GATED_DELTA,
}


def traits(config: ModelConfig) -> frozenset[str]:
    """Returns the traits by which a model differs from Llama in a way that a fast path may lack.

    The traits that weights absorb (multipliers, the offset of norms, other pairs of rotary positions) are not among
    them, and neither are those that every path has (biases, norms of heads).
    """
    has = {
        "experts": config.experts is not None,
        "layer_norm": config.layer_norm,
        "no_pre_norms": not config.pre_norms,
        "post_norms": config.post_norms,
        "full_qk_norm": config.full_qk_norm,
        "gelu": config.activation == "gelu",
        "no_gate": not config.gated,
        "clamped": config.experts is not None and config.experts.biases,
        "softcap": config.softcap > 0,
        "sinks": config.sinks,
        "windows": any(config.windows),
        "logit_softcap": config.logit_softcap > 0,
        "several_ropes": len(set(config.layer_ropes)) > 1,
        "query_scales": config.rope.query_beta > 0,
        "head_shapes": len(set(config.layer_heads)) > 1,
        "shared_kv": any(config.source_of(layer) != layer for layer in range(config.num_layers)),
        "groups": len(paged_groups(config)) > 1,
        "value_norm": config.value_norm,
        "mlp_widths": len(set(config.layer_widths)) > 1,
        "per_layer_inputs": config.per_layer_size > 0,
        "layer_scalars": config.layer_scalars,
        "delta": config.delta is not None,
        "output_gate": config.output_gate,
        "shared_expert": config.experts is not None and config.experts.shared_size > 0,
        "beside_mlp": config.experts is not None and config.experts.beside_mlp,
    }
    return frozenset(name for name, it_has in has.items() if it_has)


def lacking(config: ModelConfig, path: str) -> str:
    """Returns the traits of the model that a path lacks, in words; "" if the path supports the model."""
    lacks = traits(config) - SUPPORTED[path]
    return ", ".join(words for name, words in WORDS.items() if name in lacks)
