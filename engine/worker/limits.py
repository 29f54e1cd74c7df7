"""Chooses a value for every setting of an EngineConfig that is "auto" or None, for one model on one device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.errors import EngineError

if TYPE_CHECKING:
    import torch  # only for types: a client can describe an engine without loading torch
from engine.config import EngineConfig
from engine.model.config import ModelConfig
from engine.model.traits import lacking


@dataclass(frozen=True)
class Limits:
    """The values that `resolve` chose for the settings of an EngineConfig."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the KV cache
    quantization: str  # none, or a kind of engine/worker/weights/quantised.py
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    notes: tuple[str, ...] = field(default=())  # sentences for the user about the choices


SMALL_CARD = 16 << 30  # bytes; with less memory, shorter steps leave more of it to the KV cache


def step_limits(config: EngineConfig, memory: int | None) -> tuple[int, int]:
    """Returns max_num_seqs and max_num_batched_tokens. `memory`: bytes of the GPU; None: a CPU. There, a smaller token
    budget gives shorter steps and a later first token; on a GPU it hardly matters (engine/kernels/MEASURED.md)."""
    sequences = config.max_num_seqs or (64 if memory is None else 256)
    budget = 512 if memory is None else 2048 if memory < SMALL_CARD else 8192
    return sequences, config.max_num_batched_tokens or max(budget, sequences)


def memory_of(device: torch.device) -> int | None:
    """Returns the bytes of a GPU's memory; None for a CPU."""
    import torch

    return None if device.type == "cpu" else torch.cuda.get_device_properties(device).total_memory


def graph_bytes(memory: int) -> int:
    """Returns how many bytes of a GPU's memory the KV cache leaves free for CUDA graphs."""
    return min(1 << 30, memory // 16)


def resolve(config: EngineConfig, model: ModelConfig) -> Limits:
    """Choose a value for every setting of `config` that is "auto" or None. Raises EngineError if the device or the
    model does not support `config`."""
    import torch

    from engine.worker.weights.quantised import KEPT, choose, refusal

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device != "auto":
        try:
            device = torch.device(config.device)
        except RuntimeError:
            raise EngineError(f"device is {config.device!r}: it must be auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(f"device is {config.device!r}, but torch {torch.__version__} sees no GPU: use cpu")
    cpu = device.type == "cpu"
    name = config.dtype
    if name == "auto":
        name = "float32" if cpu else model.dtype
        if not cpu and (name == "float32" or model.packing is not None or config.quantization in ("fp8", "int4", KEPT)):
            name = "bfloat16"  # kernels for 8 and 4 bits need this type

    quantization, why_quantised = choose(config, model, device, name)
    if config.kv_cache_dtype == "fp8" and (lacks := lacking(model, "fp8_cache")):
        raise EngineError(
            f"kv_cache_dtype is fp8, but this {model.architecture} has {lacks}, so the range of its keys and values is "
            "not known from the weights: leave --kv-cache-dtype at auto"
        )
    length = config.max_model_len or model.default_context
    if length > model.max_context:
        raise EngineError(
            f"max_model_len is {length:,}, but this {model.architecture} has {model.max_context:,} positions: "
            "lower max_model_len, or set a rope scaling in the model's config.json"
        )
    sequences, budget = step_limits(config, memory_of(device))
    notes: tuple[str, ...] = (why_quantised,) if why_quantised else ()
    if model.default_context < model.max_context:
        short = length <= model.default_context
        notes += (
            f"this model has two lists of rotary factors, for up to {model.default_context:,} positions and for up to "
            f"{model.max_context:,}: max_model_len is {length:,}, so all positions use the "
            f"{'first' if short else 'second'} one",
        )
    if (packing := model.packing) is not None and quantization == "none" and not why_quantised:
        smaller = "int8" if cpu else "fp8"
        refused = refusal(replace(config, quantization=smaller), model, device, name)
        keep = "" if refused else f"; --quantization {smaller} takes 8 bits for each"
        notes += (f"the checkpoint's {packing.method} weights are expanded to {name}{keep}",)
    if config.tensor_parallel_size > 1:
        how = "gloo between processes on the CPU" if cpu else "NCCL between GPUs"
        notes += (f"the model is split over {config.tensor_parallel_size} ranks: {how}",)
    dtype = getattr(torch, name)
    kv_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else dtype
    return Limits(device, dtype, kv_dtype, quantization, sequences, budget, length, notes)
