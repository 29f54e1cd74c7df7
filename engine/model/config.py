"""ModelConfig, the description of one model. engine/model/families.py has the table of the supported families."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch  # for types only: a client must not load torch

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
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
    """Returns the value of the first target of compressed-tensors that matches the matrix `name`; None: none does.

    A target is a name, a regular expression after "re:", or the class of all matrices. Models with images have other
    names in transformers than in this engine.
    """
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
    experts: ExpertsConfig | None = None  # None: every layer's MLP is dense
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
        """The largest number of positions without a choice of the user.

        It is smaller than max_context for longrope: a longer context takes other frequencies for all positions.
        """
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

    def rope_of(self, layer: int) -> RopeConfig:
        """Returns the rotary positions of a layer."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    def window(self, layer: int) -> int:
        """The number of keys that a query of this layer sees, including its own; 0: all keys."""
        return self.windows[layer] if self.windows else 0

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers with a recurrent state instead of keys and values."""
        return ()

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Returns the number of key/value heads of a layer, and the size of its heads."""
        return self.layer_heads[layer] if self.layer_heads else (self.num_kv_heads, self.head_dim)

    def source_of(self, layer: int) -> int:
        """Returns the layer whose keys and values this layer reads: itself, or an earlier layer."""
        return self.kv_source[layer] if self.kv_source else layer

    @property
    def num_parameters(self) -> int:
        """The number of scalars in the checkpoint. Tied embeddings are counted once."""
        return self._parameters(self.experts.count if self.experts else 0)

    @property
    def active_parameters(self) -> int:
        """The number of parameters that one token uses. Only the experts that the router selects for it are counted."""
        return self._parameters(self.experts.per_token if self.experts else 0)

    def _parameters(self, experts: int) -> int:
        """Returns the number of scalars. Of each mixture, `experts` experts and the whole router are counted."""
        h, d = self.hidden_size, self.head_dim
        qkv = (self.num_heads + 2 * self.num_kv_heads) * d
        attention = h * qkv + self.num_heads * d * h + self.qkv_bias * qkv + self.output_bias * h
        attention += self.sinks * self.num_heads
        mlp = h * (self.mlp_width + self.intermediate_size) + self.mlp_bias * (self.mlp_width + h)
        norm = h * (1 + self.layer_norm)
        norms = 2 * norm * (self.pre_norms + self.post_norms) + self.qk_norm * 2 * d
        norms += self.full_qk_norm * (self.num_heads + self.num_kv_heads) * d
        embeddings = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        total = self.num_layers * (attention + norms) + embeddings + norm
        if self.experts is None:
            return total + self.num_layers * mlp
        size, biases = self.experts.inner_size, self.experts.biases
        mixture = self.experts.count * (h + biases) + experts * (3 * h * size + biases * (2 * size + h))
        mixtures = sum(self.experts.layers)
        return total + mixtures * mixture + (self.num_layers - mixtures) * mlp

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Returns the bytes that one token takes in the KV caches of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize
