"""Which fast path supports which trait of a family. The decoder with the torch backend (the specification) has all.

A path that lacks a trait is not chosen, or refuses the model with a sentence; no path ignores a trait.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.groups import paged_groups
from engine.model.config import ModelConfig

TRAITS: dict[str, tuple[str, Callable[[ModelConfig], bool]]] = {  # name -> in words, whether a model has it
    "experts": ("experts", lambda c: c.experts is not None),
    "layer_norm": ("LayerNorm", lambda c: c.layer_norm),
    "no_pre_norms": ("no norms before attention", lambda c: not c.pre_norms),
    "post_norms": ("norms after attention", lambda c: c.post_norms),
    "full_qk_norm": ("norms over all heads", lambda c: c.full_qk_norm),
    "gelu": ("GELU", lambda c: c.activation == "gelu"),
    "no_gate": ("MLPs without gates", lambda c: not c.gated),
    "clamped": ("clamped experts with biases", lambda c: c.experts is not None and c.experts.biases),
    "softcap": ("soft caps of attention scores", lambda c: c.softcap > 0),
    "sinks": ("attention sinks", lambda c: c.sinks),
    "windows": ("sliding windows", lambda c: any(c.windows)),
    "logit_softcap": ("soft caps of logits", lambda c: c.logit_softcap > 0),
    "several_ropes": ("layers with different rotary positions", lambda c: len(set(c.layer_ropes)) > 1),
    "query_scales": ("queries scaled by their positions", lambda c: c.rope.query_beta > 0),
    "head_shapes": ("layers with different heads", lambda c: len(set(c.layer_heads)) > 1),
    "shared_kv": ("layers that share keys and values", lambda c: any(c.source_of(i) != i for i in range(c.num_layers))),
    "groups": ("several groups of layers with a block table each", lambda c: len(paged_groups(c)) > 1),
    "value_norm": ("normalised values", lambda c: c.value_norm),
    "mlp_widths": ("MLPs of different widths", lambda c: len(set(c.layer_widths)) > 1),
    "per_layer_inputs": ("embeddings for each layer", lambda c: c.per_layer_size > 0),
    "layer_scalars": ("factors of the residual", lambda c: c.layer_scalars),
    "beside_mlp": ("experts beside an MLP", lambda c: c.experts is not None and c.experts.beside_mlp),
    "delta": ("layers with a recurrent state", lambda c: c.delta is not None),
    "output_gate": ("gates of the attention output", lambda c: c.output_gate),
    "shared_expert": ("an expert for every token", lambda c: c.experts is not None and c.experts.shared_size > 0),
}
GATED_DELTA = {"delta", "output_gate", "shared_expert"}
UNEVEN = {"head_shapes", "shared_kv", "value_norm", "mlp_widths", "per_layer_inputs", "layer_scalars", "beside_mlp"}
SUPPORTED: dict[str, frozenset[str]] = {
    "compiled": frozenset({"windows", "several_ropes", "groups"}),  # engine/worker/cpu/compiled_decoder.py
    # engine/worker/graphs/cuda_graphs.py and fused_decode.py
    "graphs": frozenset(TRAITS) - {"query_scales"} - UNEVEN,
    # The kernels for one token in engine/worker/graphs/fused_decode.py. They need no norms in float32 either.
    "one_token": frozenset({"experts", "softcap", "sinks", "windows", "logit_softcap", "several_ropes", "groups"}),
    "ranks": frozenset(TRAITS) - {"full_qk_norm"} - UNEVEN - GATED_DELTA,  # engine/parallel/shards.py
    # The bounds of engine/model/kv_scales.py assume an RMSNorm before the projections.
    "fp8_cache": frozenset(TRAITS) - {"layer_norm", "no_pre_norms", "full_qk_norm"} - UNEVEN - GATED_DELTA,
}


def traits(config: ModelConfig) -> frozenset[str]:
    """Returns the traits by which a model differs from Llama in a way that a fast path may lack. The traits that
    weights absorb (multipliers, the offset of norms, other pairs of rotary positions) are not among them, and neither
    are those that every path has (biases, norms of heads)."""
    return frozenset(name for name, (_, has_it) in TRAITS.items() if has_it(config))


def lacking(config: ModelConfig, path: str) -> str:
    """Returns the traits of the model that a path lacks, in words; "" if the path supports the model."""
    lacks = traits(config) - SUPPORTED[path]
    return ", ".join(words for name, (words, _) in TRAITS.items() if name in lacks)
