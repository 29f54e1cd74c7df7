"""The architectures that the decoder supports, and ModelConfig, the description of one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # for types only: a client must not load torch

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True)
class Architecture:
    """The properties of an architecture that config.json does not contain."""

    qkv_bias: bool | None = False  # None: attention_bias in config.json decides, also about output_bias
    qk_norm: bool = False
    mlp_bias: bool = False  # True: mlp_bias in config.json decides; False: no bias
    head_dim: int | None = None  # the default for a missing head_dim; None: hidden_size / num_attention_heads
    # The default for a missing num_key_value_heads; None: num_attention_heads. A null always means num_attention_heads.
    kv_heads: int | None = None
    # The layers with a sliding window:
    #   "none"    no layer
    #   "always"  the layers that layer_types marks; without layer_types, all layers
    #   "layers"  if use_sliding_window is true: the layers that layer_types marks; without layer_types, the layers from
    #             max_window_layers on
    #   "used"    if use_sliding_window is true: all layers
    window: str = "none"
    experts: bool = False  # the MLPs of some or all layers are mixtures of experts


ARCHITECTURES = {
    "Qwen3ForCausalLM": Architecture(qkv_bias=None, qk_norm=True, head_dim=128, kv_heads=32, window="layers"),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, kv_heads=32, window="layers"),
    "LlamaForCausalLM": Architecture(qkv_bias=None, mlp_bias=True),
    "MistralForCausalLM": Architecture(kv_heads=8, window="always"),
    "MinistralForCausalLM": Architecture(kv_heads=8, window="always"),  # Mistral with layer_types in config.json
    "Qwen3MoeForCausalLM": Architecture(qkv_bias=None, qk_norm=True, kv_heads=4, window="used", experts=True),
}
MODEL_TYPES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


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


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixtures of experts that replace the MLPs of some or all layers."""

    count: int  # experts in a layer
    per_token: int
    inner_size: int  # intermediate size of one expert
    normalised: bool  # True: the weights of a token's experts are scaled to sum to 1
    layers: tuple[bool, ...]  # for each layer, True if it has a mixture


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
    windows: tuple[int, ...] = ()  # `window` of each layer; empty: no windows
    experts: ExpertsConfig | None = None  # None: every layer's MLP is dense
    dtype: str = "bfloat16"  # of the checkpoint

    @property
    def max_context(self) -> int:
        """The number of positions that the model supports, with stretching."""
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_position * self.rope.factor)
        if self.rope.kind == "yarn":
            return max(self.max_position, int(self.rope.original_max_position * self.rope.factor))
        return self.max_position

    def window(self, layer: int) -> int:
        """The number of keys that a query of this layer sees, including its own; 0: all keys."""
        return self.windows[layer] if self.windows else 0

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
        mlp = 3 * h * self.intermediate_size + self.mlp_bias * (2 * self.intermediate_size + h)
        norms = 2 * h + self.qk_norm * 2 * d
        embeddings = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        total = self.num_layers * (attention + norms) + embeddings + h
        if self.experts is None:
            return total + self.num_layers * mlp
        mixture = h * (self.experts.count + 3 * experts * self.experts.inner_size)
        mixtures = sum(self.experts.layers)
        return total + mixtures * mixture + (self.num_layers - mixtures) * mlp

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Returns the bytes that one token takes in the KV caches of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize
