"""ModelConfig, the description of one model. engine/model/families.py has the table of the supported families."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from engine.groups import CacheGroup, StateShape

if TYPE_CHECKING:
    import torch  # for types only: a client must not load torch

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
PROPORTIONAL = "proportional"  # Gemma 4 only: the slower pairs of the whole head are not rotated
LONGROPE = "longrope"  # Phi-3 only: a factor per frequency, with one list for short and another for long contexts
NO_ROPE = "none"  # layers without positions
LINEAR = "Linear"  # the target of compressed-tensors that matches every matrix
T = TypeVar("T")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: θ, and how they are stretched to a longer context. See `rope_parameters` in config.json."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0  # the context before stretching
    attention_factor: float | None = None  # for yarn, like the next five fields; None: computed from factor
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0  # for llama3, like the next field
    high_freq_factor: float = 4.0
    short_factors: tuple[float, ...] = ()  # for longrope, like the next field
    long_factors: tuple[float, ...] = ()
    rotary_dim: int = 0  # how many numbers of a head are rotated; 0: the whole head
    share: float = 1.0  # for proportional: the share of the pairs of a head that is rotated
    # True: the checkpoint rotates neighbouring numbers (2i, 2i + 1); False: numbers i and i + rotary_dim / 2.
    interleaved: bool = False
    # Llama 4's scaling: queries at position p are multiplied by 1 + beta · ln(1 + ⌊p / original_max_position⌋).
    query_beta: float = 0.0


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixtures of experts that replace the MLPs of some or all layers."""

    count: int  # experts in a layer
    per_token: int
    inner_size: int  # intermediate size of one expert
    normalised: bool  # True: the weights of a token's experts are scaled to sum to 1
    layers: tuple[bool, ...]  # for each layer, True if it has a mixture
    biases: bool = False  # of the router and of the experts
    limit: float = 0.0  # gpt-oss: gates and ups are clamped to this number; 0: plain silu(gate) · up
    alpha: float = 0.0  # for clamped gates: gate · sigmoid(alpha · gate) · (up + 1)
    shared_size: int = 0  # inner size of an expert that every token uses, with a gate; 0: none
    beside_mlp: bool = False  # Gemma 4: a layer has an MLP, too, and each expert's output has a factor of its own


@dataclass(frozen=True)
class DeltaConfig:
    """The layers with a gated delta rule instead of attention (engine/model/delta.py)."""

    layers: tuple[bool, ...]  # for each layer, True if it has a delta rule
    key_heads: int  # also of queries; each serves value_heads / key_heads value heads in succession
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # tokens that an output of the causal convolution depends on; at least 2

    @property
    def channels(self) -> int:
        """The width of queries, keys and values, which is that of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def parameters(self, hidden: int) -> int:
        """Returns the number of scalars of a layer's delta rule."""
        inner = self.value_heads * self.value_dim
        projections = hidden * (self.channels + 2 * inner + 2 * self.value_heads)
        return projections + self.channels * self.taps + 2 * self.value_heads + self.value_dim


@dataclass(frozen=True)
class Packing:
    """How the matrices of a quantised checkpoint are stored (engine/model/packed.py)."""

    method: str
    bits: int = 8
    group_size: int = 0  # inputs with a common scale; 0: all inputs of a row
    floats: bool = False  # True: the 8-bit numbers are e4m3, those of 4 bits e2m1; False: integers
    # A scale for each "tensor", "channel" (row), "block" or "group"; "tensor_group": and one for the matrix (NVFP4).
    strategy: str = ""  # "": the numbers are packed integers
    block: tuple[int, int] | None = None
    symmetric: bool = True
    version_2: bool = False  # of gptq
    in_order: bool = True  # a group has consecutive inputs
    # Of a checkpoint with several schemes: the scheme of the matrices that a target matches; None: plain tensors.
    schemes: tuple[tuple[str, Packing | None], ...] = ()

    def of(self, name: str) -> Packing | None:
        """Returns how the matrix `name` is stored; None: as a plain tensor."""
        return first_match(self.schemes, name) if self.schemes else self

    @property
    def each(self) -> tuple[Packing, ...]:
        """The schemes of a checkpoint with several; else this one."""
        return tuple(packing for _, packing in self.schemes if packing is not None) or (self,)


def first_match(targets: Iterable[tuple[str, T]], name: str) -> T | None:
    """Returns the value of the first target of compressed-tensors that matches the matrix `name`; None: none does. A
    target is a name, a regular expression after "re:", or the class of all matrices. Models with images have other
    names in transformers than in this engine."""
    module = name.removesuffix(".weight")
    names = (module, f"language_model.{module}", f"model.language_model.{module.removeprefix('model.')}")

    def matches(target: str) -> bool:
        if target.startswith("re:"):
            return any(re.match(target[3:], each) for each in names)
        return target == LINEAR or target in names

    return next((value for target, value in targets if matches(target)), None)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer, as described by its config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    full_qk_norm: bool = False  # one norm over all query heads and one over all key heads, instead of one per head
    layer_norm: bool = False  # LayerNorm with biases instead of RMSNorm
    wide_norms: bool = False  # norm weights are float32, and a norm is rounded once, after the weight
    pre_norms: bool = True  # norms before attention and before the MLP
    post_norms: bool = False  # norms of the outputs of attention and MLP, before they are added to the residual
    activation: str = "silu"  # or "gelu", in its tanh form
    gated: bool = True  # False: the MLP is down(activation(up(x)))
    attention_scale: float = 0.0  # the factor of query · key; 0: 1 / √head_dim
    softcap: float = 0.0  # scores become softcap · tanh(score / softcap); 0: scores stay
    sinks: bool = False  # each query head has one more score, which takes part in the softmax and has no value
    logit_softcap: float = 0.0  # like softcap, for the logits
    # Factors that are multiplied into the weights when they are loaded (engine/model/checkpoint.py).
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of the outputs of attention and MLP
    logit_scale: float = 1.0
    layer_ropes: tuple[RopeConfig, ...] = ()  # of each layer, if layers differ; empty: `rope` in every layer
    windows: tuple[int, ...] = ()  # `window` of each layer; empty: no windows
    # (kv heads, head dimension) of each layer, if layers differ; empty: num_kv_heads and head_dim in every layer.
    layer_heads: tuple[tuple[int, int], ...] = ()
    kv_source: tuple[int, ...] = ()  # the layer whose keys and values each layer reads; empty: its own
    keys_as_values: bool = False  # in layers without a window, values are the projected keys
    value_norm: bool = False  # values are normalised, without a weight
    layer_widths: tuple[int, ...] = ()  # intermediate_size of each layer, if layers differ
    per_layer_size: int = 0  # size of the token embeddings that each layer adds to the residual; 0: none
    layer_scalars: bool = False  # the residual is multiplied by a number at the end of each layer
    experts: ExpertsConfig | None = None  # None: every layer's MLP is dense
    delta: DeltaConfig | None = None  # None: every layer has attention
    output_gate: bool = False  # the output of attention is multiplied by sigmoid(gate · x)
    next_layers: int = 0  # of the head that predicts the token after the next (decoder.NextToken); 0: it is not loaded
    dtype: str = "bfloat16"  # of the checkpoint
    packing: Packing | None = None  # None: the checkpoint's matrices are plain tensors

    @property
    def max_context(self) -> int:
        """The number of positions that the model supports, with stretching."""
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_position * self.rope.factor)
        if self.rope.kind == "yarn":
            return max(self.max_position, int(self.rope.original_max_position * self.rope.factor))
        return self.max_position

    @property
    def default_context(self) -> int:
        """The largest number of positions without a choice of the user. It is smaller than max_context for longrope: a
        longer context takes other frequencies for all positions."""
        original = self.rope.original_max_position if self.rope.kind == LONGROPE else 0
        return min(self.max_context, original or self.max_context)

    @property
    def scale(self) -> float:
        """The factor of query · key."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def mlp_width(self) -> int:
        """The rows of the matrix before the MLP's activation."""
        return (1 + self.gated) * self.intermediate_size

    def inner_size_of(self, layer: int) -> int:
        """Returns the inner size of a layer's MLP."""
        return self.layer_widths[layer] if self.layer_widths else self.intermediate_size

    def projects_values(self, layer: int) -> bool:
        """Returns whether a layer has a projection of its own for values."""
        return self.source_of(layer) == layer and not (self.keys_as_values and not self.window(layer))

    def rope_of(self, layer: int) -> RopeConfig:
        """Returns the rotary positions of a layer."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    def window(self, layer: int) -> int:
        """The number of keys that a query of this layer sees, including its own; 0: all keys."""
        return self.windows[layer] if self.windows else 0

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers with a recurrent state instead of keys and values."""
        return () if self.delta is None else tuple(i for i, has_it in enumerate(self.delta.layers) if has_it)

    @property
    def state_shape(self) -> StateShape | None:
        """The shape of the state of each of these layers."""
        d = self.delta
        return None if d is None else StateShape((d.channels, d.taps - 1), (d.value_heads, d.key_dim, d.value_dim))

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Returns the number of key/value heads of a layer, and the size of its heads."""
        return self.layer_heads[layer] if self.layer_heads else (self.num_kv_heads, self.head_dim)

    def of_group(self, group: CacheGroup) -> ModelConfig:
        """Returns the configuration whose layers all have the heads and the window of a cache group."""
        return replace(
            self, num_kv_heads=group.num_kv_heads, head_dim=group.head_dim, attention_scale=self.scale,
            windows=(group.window,) * self.num_layers, layer_heads=(),
        )

    def source_of(self, layer: int) -> int:
        """Returns the layer whose keys and values this layer reads: itself, or an earlier layer."""
        return self.kv_source[layer] if self.kv_source else layer

    @property
    def num_parameters(self) -> int:
        """The number of scalars in the checkpoint. Tied embeddings are counted once."""
        per_layer = self.num_layers * self.per_layer_size * self.vocab_size
        return per_layer + self._parameters(self.experts.count if self.experts else 0)

    @property
    def active_parameters(self) -> int:
        """The number of parameters that one token uses. Only the experts that the router selects for it are counted,
        and no embeddings of layers (per_layer_size)."""
        return self._parameters(self.experts.per_token if self.experts else 0)

    def _parameters(self, experts: int) -> int:
        """Returns the number of scalars. Of each mixture, `experts` experts and the whole router are counted."""
        h = self.hidden_size
        norm = h * (1 + self.layer_norm)
        embeddings = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        every_layer = (h * self.num_layers + 1) * self.per_layer_size  # the projection for all layers, and its norm
        return embeddings + norm + every_layer + sum(
            self._attention_parameters(layer) + self._mlp_parameters(layer, experts) for layer in range(self.num_layers)
        )

    def _attention_parameters(self, layer: int) -> int:
        """Returns the number of scalars of a layer's attention, or of its delta rule, and of all its norms."""
        h, heads, (kv_heads, d) = self.hidden_size, self.num_heads, self.heads_of(layer)
        keys = kv_heads if self.source_of(layer) == layer else 0
        qkv = (heads + keys + keys * self.projects_values(layer)) * d
        attention = h * qkv + heads * d * h + self.qkv_bias * qkv + self.output_bias * h + self.sinks * heads
        attention += self.output_gate * heads * d * h
        norms = 2 * h * (1 + self.layer_norm) * (self.pre_norms + self.post_norms)
        if layer in self.state_layers:
            assert self.delta is not None
            return norms + self.delta.parameters(h)
        norms += self.qk_norm * (1 + (keys > 0)) * d
        return attention + norms + self.full_qk_norm * (heads + keys) * d

    def _mlp_parameters(self, layer: int, experts: int) -> int:
        """Returns the number of scalars of a layer's MLP, mixture and embedding, with `experts` experts."""
        h, e, inner = self.hidden_size, self.experts, self.inner_size_of(layer)
        width = (1 + self.gated) * inner
        per_layer = (2 * self.per_layer_size + 1) * h if self.per_layer_size else 0
        mlp = h * (width + inner) + self.mlp_bias * (width + h) + per_layer
        if e is None or not e.layers[layer]:
            return mlp
        shared = (3 * e.shared_size + 1) * h if e.shared_size else 0
        mixture = e.count * (h + e.biases) + experts * (3 * h * e.inner_size + e.biases * (2 * e.inner_size + h))
        return mixture + shared + (mlp + 4 * h + e.count if e.beside_mlp else 0)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Returns the bytes that one token takes in the KV caches of all layers."""
        states = self.state_layers
        held = (self.heads_of(i) for i in range(self.num_layers) if self.source_of(i) == i and i not in states)
        return 2 * sum(kv_heads * head_dim for kv_heads, head_dim in held) * dtype.itemsize
