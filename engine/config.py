"""EngineConfig: the user's settings of an engine. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError
from engine.trace.eviction import EVICTION_POLICIES

DTYPES = ("float64", "float32", "bfloat16", "float16")
POLICIES = ("fcfs", "longest-prefix", "priority", "static")  # the values of scheduling_policy
CHOICES = {
    "dtype": ("auto", *DTYPES),
    "quantization": ("auto", "none", "bf16", "int8", "int4", "fp8", "checkpoint"),
    "kv_cache_dtype": ("auto", "fp8"),
    "scheduling_policy": POLICIES,
    "eviction_policy": tuple(EVICTION_POLICIES),
    "speculation": ("off", "prompt-lookup"),
    "logprobs_mode": ("raw_logprobs", "processed_logprobs"),
    "overlap": ("auto", "on", "off"),
}
MOST_SPECULATIVE_TOKENS = 32
# The largest value of each setting; a larger value must be a typo. worker/weights/memory.py checks whether smaller
# values fit in memory.
MOST = {
    "block_size": 1 << 16,
    "num_blocks": (1 << 31) - 1,
    "kv_tokens": (1 << 31) - 1,
    "window_blocks": (1 << 31) - 1,
    "state_slots": (1 << 31) - 1,
    "checkpoint_interval": 1 << 24,
    "max_num_seqs": 1 << 16,
    "max_num_batched_tokens": 1 << 24,
    "max_model_len": (1 << 31) - 1,
    "tensor_parallel_size": 64,
    "cpu_threads": 1024,
}
MOST_GAP_MS = 1_000_000


@dataclass(frozen=True)
class EngineConfig:
    """The settings of an engine. `resolve` (engine/worker/limits.py) replaces None and "auto" with values."""

    model: str = ""  # a directory, or the name of a model on the Hugging Face hub
    hf_overrides: dict[str, Any] | None = None  # values that replace those of config.json
    # auto: float32 on a CPU; on a GPU the checkpoint's type, or bfloat16 if that is float32 or `quantization` needs it.
    dtype: str = "auto"
    # The type of the weight matrices. none: `dtype`; int4; bf16 or int8: on a CPU; fp8: on a GPU; checkpoint: on a GPU,
    # the 8-bit floats of a quantised checkpoint, unchanged; auto: what is fast and fits (worker/weights/quantised.py).
    quantization: str = "auto"
    device: str = "auto"  # auto: cuda if there is a GPU
    block_size: int = 16  # tokens
    num_blocks: int | None = None  # KV blocks, without the null block; None: computed from kv_tokens or free memory
    # For models with several kinds of memory: pages of each group with a window, and slots for recurrent states; None:
    # chosen from the KV blocks (worker/loaded.py). A long prompt has a checkpoint of its states at each interval.
    window_blocks: int | None = None
    state_slots: int | None = None
    checkpoint_interval: int = 1024  # tokens
    kv_tokens: int | None = None  # tokens in the KV cache, rounded up to whole blocks; None: see num_blocks
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory for weights, activations and KV cache
    max_num_seqs: int | None = None  # requests that run at the same time; None: 64 on a CPU, 256 on a GPU
    max_num_batched_tokens: int | None = None  # token budget of a step; None: 512 on a CPU, 2048 or 8192 on a GPU
    # Target for the time between two tokens of a reply, in ms: while replies run, prompts get as many tokens as fit
    # into it, as measured (engine/core/gap_target.py). None: the whole budget.
    max_gap_ms: float | None = None
    max_model_len: int | None = None  # tokens of prompt and reply together; None: the model's context
    kv_cache_dtype: str = "auto"  # fp8: 8-bit keys and values (engine/attention/kv_fp8.py); auto: the same as `dtype`
    dummy_weights: bool = False  # random weights; only config.json of the checkpoint is read
    attention_backend: str = "auto"  # one name, or two as "prefill,decode" (engine/attention/choose.py)
    enforce_eager: bool = False  # True: no CUDA graphs
    # True: an engine process captures all CUDA graphs before the first request, as LLM and several ranks always do, not
    # while no request runs. Steps without a graph round differently in half precision.
    graphs_at_start: bool = False
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"  # how waiting requests are sorted; the help of --scheduling-policy explains each
    eviction_policy: str = "lru"  # which cached text is evicted first (engine/trace/eviction.py)
    speculation: str = "off"  # prompt-lookup: drafts from the request's own text (engine/core/speculation.py)
    speculative_tokens: int = 8  # the most draft tokens of a request in a step, if speculation is on
    # The logprobs of sampled tokens: of the model's own distribution, or of the distribution after grammar, bias,
    # penalties, temperature and cuts (−inf: a token that was cut). Prompt logprobs are always raw.
    logprobs_mode: str = "raw_logprobs"
    overlap: str = "auto"  # on: plan step n+1 while step n runs; off: after step n; auto: on only on a GPU
    seed: int = 0  # for dummy weights; a request without a seed gets a random seed
    tensor_parallel_size: int = 1  # ranks that share the model, each a process with its own device
    load_tokenizer: bool = True
    keep_weights: bool = True  # weights rounded for a CPU stay on disk for later starts (worker/weights/load_model.py)
    cpu_threads: int | None = None  # None: one fewer than the number of physical cores, but at least 1

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise EngineError(f"{name} is {value!r}: it must be {', '.join(choices[:-1])} or {choices[-1]}")
        if not isinstance(self.speculative_tokens, int) or not 1 <= self.speculative_tokens <= MOST_SPECULATIVE_TOKENS:
            raise EngineError(
                f"speculative_tokens is {self.speculative_tokens}: it must be from 1 to {MOST_SPECULATIVE_TOKENS}"
            )
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is None and getattr(type(self), name, None) is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise EngineError(f"{name} is {value!r}: it must be a whole number, at least 1")
            if value > most:
                raise EngineError(f"{name} is {value:,}: it must be at most {most:,}")
        if not isinstance(self.seed, int) or not -(1 << 63) <= self.seed < 1 << 63:
            raise EngineError(f"seed is {self.seed!r}: it must be a whole number that fits in a signed 64-bit integer")
        if not isinstance(self.hf_overrides, dict | None):
            raise EngineError(f"hf_overrides is {self.hf_overrides!r:.80}: it must be a dict of values for config.json")
        gap = self.max_gap_ms
        if gap is not None and not (isinstance(gap, int | float) and 0 < gap <= MOST_GAP_MS):
            raise EngineError(f"max_gap_ms is {gap!r}: it must be above 0 and at most {MOST_GAP_MS:,} ms")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise EngineError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}: it must be above 0 and at most 1"
            )
