"""The kinds of weights (engine/model/linear.py), the choice among them, and the check that a model supports a kind."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.model.config import ModelConfig
from engine.model.linear import Bf16Weight, ByteWeight, Fp8Weight, Int8Weight
from engine.worker.few_rows import FewRows

KINDS: dict[str, type[ByteWeight] | None] = {"none": None, "bf16": Bf16Weight, "int8": Int8Weight, "fp8": Fp8Weight}

ON_CPU = ("bf16", "int8")
BESIDE_WEIGHTS = 2 << 30  # bytes of memory that `choose` leaves to the KV cache, activations and the application


def itemsize(kind: str, dtype: torch.dtype) -> int:
    """Returns the bytes of a number in a matrix."""
    weights = KINDS[kind]
    return (dtype if weights is None else weights.dtype).itemsize


def choose(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: str) -> tuple[str, str]:
    """Returns (kind of weights, a sentence for the user or ""). Raises EngineError if the kind in `config` cannot run.

    For "auto" on a CPU: bf16 if the checkpoint has this type, because it is exact then and takes half the memory and
    time of float32; int8 if the others do not fit into the free memory.
    """
    if config.quantization != "auto":
        if config.quantization != "none":
            check(config, model, device, dtype)
        return config.quantization, ""
    if device.type != "cpu" or config.dtype != "auto":
        return "none", ""
    kind = "none"
    exact = model.dtype == "bfloat16" and model.packing is None
    if exact and config.tensor_parallel_size == 1 and config.kv_cache_dtype == "auto":
        kind = "none" if FewRows.why_not(model, "bf16", config.block_size) else "bf16"
    free, numbers = free_memory(), model.num_parameters
    if numbers * itemsize(kind, torch.float32) + BESIDE_WEIGHTS <= free:
        return kind, ""
    try:
        check(replace(config, quantization="int8"), model, device, dtype)
    except EngineError:
        return kind, ""
    sizes = f"{numbers * itemsize(kind, torch.float32) / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    return "int8", f"the weights are rounded to 8 bits (int8): otherwise they would take {sizes}"


def free_memory() -> int:
    """Returns the bytes of memory that this process can take without swapping; where unknown, all memory."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: str) -> None:
    """Raise EngineError if the model cannot use the 8-bit weights of `config` with this device and dtype."""
    kind, cpu = config.quantization, device.type == "cpu"
    if kind in ON_CPU and not cpu:
        raise EngineError(
            f"{kind} weights run on a CPU only, but the device is {device}: use --quantization fp8, or add --device cpu"
        )
    if kind == "fp8" and cpu:
        raise EngineError("fp8 weights run on a GPU only, but the device is cpu: use --quantization int8")
    wanted = "float32" if kind in ON_CPU else "bfloat16"
    if dtype != wanted:
        raise EngineError(f"{kind} weights need {wanted} activations, but the dtype is {dtype}: use {wanted}")
    if config.tensor_parallel_size > 1:
        raise EngineError(
            f"{kind} weights support only one rank, but tensor_parallel_size is {config.tensor_parallel_size}: use 1"
        )
    if model.experts is not None:
        raise EngineError(
            f"{kind} weights support only dense models, but {model.architecture} has experts: use --quantization none"
        )
    if kind in ON_CPU:
        return
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:  # 8.9 has fp8 arithmetic, but lacks launch instructions that our kernels use
        raise EngineError(
            f"fp8 weights need a GPU of compute capability 9.0 or more, but {torch.cuda.get_device_name(device)} has "
            f"{major}.{minor}: use --quantization none"
        )
    if importlib.util.find_spec("triton") is None:
        raise EngineError(
            "fp8 weights need triton, which is not installed: pip install triton, or use --quantization none"
        )
    inner = model.num_heads * model.head_dim
    for name, size in ("hidden_size", model.hidden_size), ("heads times head_dim", inner), (
        "intermediate_size", model.intermediate_size,
    ):  # fmt: skip
        if size % 128:
            raise EngineError(
                f"fp8 weights need {name} to be a multiple of 128, but it is {size}: use --quantization none"
            )
    if model.vocab_size % 16:
        raise EngineError(
            f"fp8 weights need vocab_size to be a multiple of 16, but it is {model.vocab_size:,}: "
            "use --quantization none"
        )
