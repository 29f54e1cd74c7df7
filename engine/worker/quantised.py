"""The kinds of 8-bit weights (engine/model/linear.py), and the check that a configuration supports them."""

from __future__ import annotations

import importlib.util

import torch

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.model.config import ModelConfig
from engine.model.linear import Bf16Weight, ByteWeight, Fp8Weight, Int8Weight

KINDS: dict[str, type[ByteWeight] | None] = {"none": None, "bf16": Bf16Weight, "int8": Int8Weight, "fp8": Fp8Weight}

ON_CPU = ("bf16", "int8")


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
