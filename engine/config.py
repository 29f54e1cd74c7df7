"""The two configurations: ModelConfig, read from a checkpoint's config.json, and EngineConfig, what the user chose.

Reading and writing them needs no torch: the process of the user interface does without.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.files import read_json, read_json_if_there
from engine.model.fields import Fields
from engine.params import POLICIES

if TYPE_CHECKING:
    import torch  # at run time only where tensors are made: a client describes an engine without loading torch

DTYPES = ("float64", "float32", "bfloat16", "float16")
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True)
class Architecture:
    """In what the supported architectures differ, as far as config.json does not say it."""

    qkv_bias: bool | None = False  # None: as the field attention_bias says, and then on the output projection too
    qk_norm: bool = False
    mlp_bias: bool = False  # True: as the field mlp_bias says
    head_dim: int | None = None  # where config.json has none; None: hidden_size / num_attention_heads
    kv_heads: int | None = None  # where config.json has no field for it (null: as many as heads)
    # "always": `sliding_window`, in the layers that layer_types names or in all; "layers": only with
    # use_sliding_window, in the layers that layer_types or max_window_layers names; "used": the same, in all layers
    window: str = "none"
    experts: bool = False  # the MLPs of some layers, or all, are mixtures of experts


ARCHITECTURES = {
    "Qwen3ForCausalLM": Architecture(qkv_bias=None, qk_norm=True, head_dim=128, kv_heads=32, window="layers"),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, kv_heads=32, window="layers"),
    "LlamaForCausalLM": Architecture(qkv_bias=None, mlp_bias=True),
    "MistralForCausalLM": Architecture(kv_heads=8, window="always"),
    "MinistralForCausalLM": Architecture(kv_heads=8, window="always"),  # Mistral with layer_types
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
    """Rotary positions: θ and how it is stretched. Fields as in Hugging Face's `rope_parameters`."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0  # the context before stretching
    attention_factor: float | None = None  # yarn; None: from factor
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class ExpertsConfig:
    """Mixtures of experts in the place of some layers' MLPs, or all."""

    count: int  # in each of those layers
    per_token: int
    inner_size: int  # of one expert
    normalised: bool  # the weights of a token's experts are scaled to sum to 1
    layers: tuple[bool, ...]  # which layers have them


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer, as its config.json describes it."""

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
    windows: tuple[int, ...] = ()  # of each layer, see `window`; empty: no layer has one
    experts: ExpertsConfig | None = None  # None: every layer's MLP is dense
    dtype: str = "bfloat16"  # the checkpoint's
    eos_ids: tuple[int, ...] = ()

    @property
    def max_context(self) -> int:
        """Positions the model is made for, stretching included."""
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_position * self.rope.factor)
        if self.rope.kind == "yarn":
            return max(self.max_position, int(self.rope.original_max_position * self.rope.factor))
        return self.max_position

    def window(self, layer: int) -> int:
        """How many keys a query of this layer sees, its own included; 0: all."""
        return self.windows[layer] if self.windows else 0

    @property
    def num_parameters(self) -> int:
        """Scalars in the checkpoint, tied embeddings counted once."""
        return self._parameters(self.experts.count if self.experts else 0)

    @property
    def active_parameters(self) -> int:
        """Of those, the ones that a token uses: all but the experts that it is not sent to."""
        return self._parameters(self.experts.per_token if self.experts else 0)

    def _parameters(self, experts: int) -> int:
        """With so many experts in each layer that has any; the router is always whole."""
        h, d = self.hidden_size, self.head_dim
        qkv = (self.num_heads + 2 * self.num_kv_heads) * d
        attention = h * qkv + self.num_heads * d * h + self.qkv_bias * qkv + self.output_bias * h
        mlp = 3 * h * self.intermediate_size + self.mlp_bias * (2 * self.intermediate_size + h)
        norms = 2 * h + self.qk_norm * 2 * d
        embeddings = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        total = self.num_layers * (attention + norms) + embeddings + h
        if self.experts is None:
            return total + self.num_layers * mlp
        mixed, mixture = sum(self.experts.layers), h * (self.experts.count + 3 * experts * self.experts.inner_size)
        return total + mixed * mixture + (self.num_layers - mixed) * mlp

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of KV cache that one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize

    @staticmethod
    def from_pretrained(directory: str | Path) -> ModelConfig:
        """Read config.json (and generation_config.json, if there) of a checkpoint; raises CheckpointError."""
        from engine.model.hf_config import ConfigReader  # which makes a ModelConfig

        path, generation = Path(directory) / "config.json", Path(directory) / "generation_config.json"
        reader = ConfigReader(Fields(path, read_json(path)))
        return reader.model_config(Fields(generation, read_json_if_there(generation)))


KV_CACHE_DTYPES = ("auto", "fp8")
SPECULATION = ("off", "prompt-lookup")
MOST_SPECULATIVE_TOKENS = 32
MOST = {  # of each size: beyond, it is a slip of the keyboard; whether the rest fits is for engine/worker/memory.py
    "block_size": 1 << 16,
    "num_blocks": (1 << 31) - 1,
    "kv_tokens": (1 << 31) - 1,
    "max_num_seqs": 1 << 16,
    "max_num_batched_tokens": 1 << 24,
    "max_model_len": (1 << 31) - 1,
    "tensor_parallel_size": 64,
    "cpu_threads": 1024,
}


@dataclass(frozen=True)
class EngineConfig:
    """How the engine is to run a model. None and "auto" are decided by `resolve`, from the model and the device."""

    model: str = ""  # a directory, or a name for engine.hub.resolve_model
    dtype: str = "auto"  # auto: float32 on a CPU; elsewhere the checkpoint's, bfloat16 for a float32 one
    quantization: str = "none"  # 8-bit matrices (engine/model/linear.py): int8 on a CPU, fp8 on a GPU
    device: str = "auto"  # auto: cuda if there is one
    block_size: int = 16  # tokens
    num_blocks: int | None = None  # KV blocks, the null block not counted; None: from kv_tokens, or from memory
    kv_tokens: int | None = None  # the same in tokens, rounded up to whole blocks
    gpu_memory_utilization: float = 0.9  # of the device's memory: weights, activations and KV cache together
    max_num_seqs: int | None = None  # requests that run at once; None: 64 on a CPU, 256 elsewhere
    max_num_batched_tokens: int | None = None  # a step's token budget; None: 512 on a CPU, 8192 elsewhere
    max_model_len: int | None = None  # tokens of prompt and reply together; None: what the model is made for
    kv_cache_dtype: str = "auto"  # fp8: 8-bit keys and values (engine/attention/kv_fp8.py); auto: the model's type
    dummy_weights: bool = False  # random weights: only config.json is read
    attention_backend: str = "auto"
    enforce_eager: bool = False  # no CUDA graphs
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"  # longest-prefix: the best cached first; static: one batch after the other
    speculation: str = "off"  # prompt-lookup: drafts from the request's own text (engine/core/speculation.py)
    speculative_tokens: int = 8  # the longest draft, with speculation
    overlap: str = "auto"  # plan step n+1 while n runs: "on", "off"; auto: where the device is not the CPU
    seed: int = 0  # of dummy weights; a request that brings none is given one at random
    tensor_parallel_size: int = 1  # ranks that share the model, each a process with a device of its own
    load_tokenizer: bool = True
    cpu_threads: int | None = None  # None: one fewer than there are cores, at least one

    def __post_init__(self) -> None:
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise EngineError(f"dtype is {self.dtype!r}: it must be auto, {', '.join(DTYPES)}")
        if self.quantization not in ("none", "int8", "fp8"):
            raise EngineError(f"quantization is {self.quantization!r}: it must be none, int8 or fp8")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise EngineError(f"kv_cache_dtype is {self.kv_cache_dtype!r}: it must be {' or '.join(KV_CACHE_DTYPES)}")
        if self.speculation not in SPECULATION:
            raise EngineError(f"speculation is {self.speculation!r}: it must be {' or '.join(SPECULATION)}")
        if not isinstance(self.speculative_tokens, int) or not 1 <= self.speculative_tokens <= MOST_SPECULATIVE_TOKENS:
            raise EngineError(
                f"speculative_tokens is {self.speculative_tokens}: it must be from 1 to {MOST_SPECULATIVE_TOKENS}"
            )
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is None and name not in ("block_size", "tensor_parallel_size"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise EngineError(f"{name} is {value!r}: it must be at least 1")
            if value > most:
                raise EngineError(f"{name} is {value:,}: it must be at most {most:,}")
        if not isinstance(self.seed, int) or not -(1 << 63) <= self.seed < 1 << 63:
            raise EngineError(f"seed is {self.seed!r}: it must be a whole number of 64 bits")
        if self.scheduling_policy not in POLICIES:
            raise EngineError(f"scheduling_policy is {self.scheduling_policy!r}: it must be {', '.join(POLICIES)}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise EngineError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}: it must be above 0 and at most 1"
            )


@dataclass(frozen=True)
class Limits:
    """EngineConfig with every "auto" decided."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the KV cache
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    notes: tuple[str, ...] = field(default=())  # what a user may want to know about the choices


def resolve(config: EngineConfig, model: ModelConfig) -> Limits:
    """Decide what `config` leaves open; EngineError for what cannot be had."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device != "auto":
        try:
            device = torch.device(config.device)
        except RuntimeError:
            raise EngineError(f"device is {config.device!r}: it must be auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(f"device {config.device!r} was asked for, but torch {torch.__version__} sees no GPU: use cpu")
    cpu = device.type == "cpu"
    name = config.dtype
    if name == "auto":
        name = "float32" if cpu else {"float32": "bfloat16"}.get(model.dtype, model.dtype)
    if config.quantization != "none":
        from engine.worker.limits import check

        check(config, model, device, name)
    length = config.max_model_len or model.max_context
    if length > model.max_context:
        raise EngineError(
            f"max_model_len is {length:,}, but {model.architecture} here is made for {model.max_context:,} positions: "
            "lower it, or set a rope scaling in config.json"
        )
    sequences = config.max_num_seqs or (64 if cpu else 256)
    # Not chosen by measurement: on a CPU a smaller budget shortens what others wait for a mixed step and lengthens the
    # prompt's own time in like measure. Bundled model, four decoding, a prompt of 1,500 tokens, one thread: a budget of
    # 512 gives mixed steps of 126 ms and the first token after 384; 256, 83 and 520; 128, 47 and 618; 32, 21 and 1,187.
    # On an H200 it hardly matters: Qwen3-8B, 16 prompts of 4,096 tokens, budgets of 2,048, 4,096, 8,192 and 16,384:
    # 39,750, 40,410, 40,730 and 40,780 tok/s; 256 requests of mixed lengths 9,714, 9,773, 9,834 and 9,786.
    budget = config.max_num_batched_tokens or max(512 if cpu else 8192, sequences)
    notes: tuple[str, ...] = ()
    if config.tensor_parallel_size > 1:
        how = "gloo between processes on the CPU" if cpu else "NCCL between GPUs"
        notes = (f"the model is cut over {config.tensor_parallel_size} ranks: {how}",)
    dtype = getattr(torch, name)
    kv_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else dtype
    return Limits(device, dtype, kv_dtype, sequences, budget, length, notes)
