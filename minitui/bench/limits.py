"""The least time that a step can take: the limits of this machine, measured with random data (copying and reading
memory, multiplying matrices), the shapes of models, and the minimum work of their steps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from engine.model.config import ModelConfig

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8,
    "vocab_size": 151_936, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000,
    "attention_bias": False, "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 151_645,
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
#                 hidden inner   layers heads tied
SIZES = {
    "0.6B": (1_024, 3_072, 28, 16, True),
    "1.7B": (2_048, 6_144, 28, 16, True),
    "4B": (2_560, 9_728, 36, 32, True),
    "8B": (4_096, 12_288, 36, 32, False),
    "14B": (5_120, 17_408, 40, 40, False),
    "32B": (5_120, 25_600, 64, 64, False),
    "30B-A3B": (2_048, 6_144, 48, 32, False),
}
MEASURED = ("0.6B", "8B")  # the sizes measured by default
NUMBERS, CPU_NUMBERS = 1 << 29, 1 << 26  # float32 numbers to copy and read: many times the size of the caches
REPEATS = 10
SUSTAINED_SECONDS = 1.5


@dataclass(frozen=True)
class Limits:
    """The limits in bytes per second (a copied byte counts twice: read and written) and operations per second."""

    copy: float
    read: float
    matmul: float
    dtype: str
    sustained: float | None = None  # on a GPU: matmul over 1.5 s, when power and heat lower the clock

    def lines(self) -> list[str]:
        return [
            f"copy    {self.copy / 1e9:10,.0f} GB/s  (read + written)",
            f"read    {self.read / 1e9:10,.0f} GB/s",
            f"matmul  {self.matmul / 1e9:10,.0f} GFLOP/s  ({self.dtype})",
            *([f"        {self.sustained / 1e9:10,.0f} GFLOP/s  sustained"] if self.sustained else []),
        ]


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Measures each limit as the median of several runs, but `sustained` in one long run."""
    copy, read = _memory(device, NUMBERS if device.type == "cuda" else CPU_NUMBERS)
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.empty(n, n, device=device).normal_().to(dtype) for _ in range(2))
    if dtype == torch.int8:
        product: Callable[[], object] = partial(torch._int_mm, a, b.t())
    else:
        c = torch.empty(n, n, device=device, dtype=torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype)
        product = partial(torch.mm, a, b, out=c)
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        product = partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=c.dtype, out=c)
    once = _seconds(product, device)
    matmul, sustained = 2 * n**3 / once, None
    if device.type == "cuda":
        times = max(1, int(SUSTAINED_SECONDS / once))
        sustained = 2 * n**3 * times / _seconds(lambda: [product() for _ in range(times)], device, 1, 0)
    # Sometimes a copy reads faster than a reduction: the limit is the higher of the two rates.
    return Limits(copy, max(read, copy / 2), matmul, str(dtype).removeprefix("torch."), sustained)


def cpu_read_speed() -> float:
    """Returns how many bytes of memory the CPU reads per second."""
    copy, read = _memory(torch.device("cpu"), CPU_NUMBERS)
    return max(read, copy / 2)


def _memory(device: torch.device, count: int) -> tuple[float, float]:
    """Returns the bytes per second of copying and of reading `count` float32 numbers. Frees the buffers on return."""
    source = torch.empty(count, device=device).normal_()
    target = torch.empty_like(source)
    rows = source.view(-1, 1 << 20)
    copy = _seconds(lambda: target.copy_(source), device)
    return 2 * source.nbytes / copy, source.nbytes / _seconds(lambda: rows.sum(1), device)


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = REPEATS, warm_up: int = 3) -> float:
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
    return median(times)


def write_config(size: str, directory: Path) -> Path:
    """Writes the config.json of a Qwen3 model of this size; returns its directory. A model with random weights needs no
    other file."""
    hidden, inner, layers, heads, tied = SIZES[size]
    config = QWEN3 | {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }
    if size == "30B-A3B":
        config |= MOE
    path = directory / f"Qwen3-{size}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Work:
    """The minimum bytes and operations of a model's steps: every weight, key and value is read once, and a recurrent
    state is read and written once."""

    body: int  # number of weights in all layers' matrices, without experts
    head: int  # number of weights in the output matrix
    kv_bytes: int  # bytes of one token's keys and values, all layers
    attention: int  # operations for one query and one key, all layers
    states: int  # bytes of one sequence's recurrent states, all layers
    delta: int  # operations of the delta rules for one token, all layers
    itemsize: float  # bytes of a weight
    head_itemsize: float  # bytes of a weight of the output matrix
    expert_layers: int = 0  # number of layers with experts
    experts: int = 0  # number of experts in each of these layers
    experts_per_token: int = 0
    expert: int = 0  # number of weights in one expert

    @staticmethod
    def of(config: ModelConfig, itemsize: int, weights: tuple[float, float] | None = None) -> Work:
        """Returns the work of a model. `itemsize`: bytes of a number in the KV cache. `weights`: bytes of a weight of
        the layers, and of the output matrix; None: `itemsize`."""
        c, d, e = config, config.head_dim, config.experts
        each, head_each = weights or (itemsize, itemsize)
        expert_layers = sum(e.layers) if e else 0
        attention = c.hidden_size * ((2 + c.output_gate) * c.num_heads + 2 * c.num_kv_heads) * d
        num_deltas = len(c.state_layers)
        num_attentions = c.num_layers - num_deltas
        projections = states = delta = 0
        if c.delta is not None:
            inner, kept = c.delta.value_heads * c.delta.value_dim, c.delta.channels * (c.delta.taps - 1)
            projections = c.hidden_size * (c.delta.channels + 2 * inner + 2 * c.delta.value_heads)
            states = num_deltas * (4 * inner * c.delta.key_dim + itemsize * kept)
            delta = num_deltas * 6 * inner * c.delta.key_dim  # S^T k, k d^T and S^T q
        mlps = (c.num_layers - expert_layers) * 3 * c.hidden_size * c.intermediate_size
        routers = expert_layers * c.hidden_size * (e.count + 3 * e.shared_size) if e else 0
        body = num_attentions * attention + num_deltas * projections + mlps + routers
        return Work(
            body=body, head=c.vocab_size * c.hidden_size,
            expert_layers=expert_layers, experts=e.count if e else 0, experts_per_token=e.per_token if e else 0,
            expert=3 * c.hidden_size * e.inner_size if e else 0,
            kv_bytes=2 * num_attentions * c.num_kv_heads * d * itemsize,
            attention=4 * num_attentions * c.num_heads * d, states=states, delta=delta, itemsize=each,
            head_itemsize=head_each,
        )

    def prefill(self, limits: Limits, lengths: list[int], cached: int = 0) -> float:
        """Returns the minimum seconds to compute prompts of these lengths, and to draw one token for each prompt.
        `cached`: tokens of each prompt that are in the cache."""
        tokens = sum(lengths) - cached * len(lengths)
        pairs = sum((n - cached) * (n + cached + 1) / 2 for n in lengths)
        return self._seconds(limits, tokens, len(lengths), cached * len(lengths), pairs)

    def decode(self, limits: Limits, contexts: list[int]) -> float:
        """Returns the minimum seconds of a step that decodes one token of each sequence."""
        return self._seconds(limits, len(contexts), len(contexts), sum(contexts), sum(contexts))

    def replies(self, limits: Limits, prompts: list[int], outputs: list[int]) -> float:
        """Returns the minimum seconds to serve requests that arrive together: the prefill, then decode steps."""
        total = self.prefill(limits, prompts)
        for step in range(1, max(outputs)):
            total += self.decode(limits, [p + step for p, o in zip(prompts, outputs, strict=True) if o > step])
        return total

    def experts_used(self, tokens: int) -> float:
        """Returns the mean number of experts that `tokens` tokens use in a layer, if the router spreads them evenly."""
        return self.experts * (1 - (1 - self.experts_per_token / self.experts) ** tokens) if self.experts else 0.0

    def _seconds(self, limits: Limits, tokens: int, drawn: int, keys: int, pairs: float) -> float:
        weights = self.body + self.expert_layers * self.experts_used(tokens) * self.expert
        read = weights * self.itemsize + self.head * self.head_itemsize + keys * self.kv_bytes + 2 * drawn * self.states
        used = self.body + self.expert_layers * self.experts_per_token * self.expert
        operations = (2 * used + self.delta) * tokens + 2 * self.head * drawn + self.attention * pairs
        return max(read / limits.read, operations / limits.matmul)
