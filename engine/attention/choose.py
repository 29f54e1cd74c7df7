"""Chooses the attention backends for a device and a model."""

from __future__ import annotations

from typing import Any

import torch

from engine.attention.base import AttentionBackend, AttentionShape, Sinks
from engine.attention.grouped import GroupedAttention, TwoBackends
from engine.errors import EngineError
from engine.groups import group_of_layers, paged_groups

BACKENDS = ("auto", "torch", "triton", "flash")


def backend_names(name: str) -> tuple[str, str]:
    """Returns the names of the prefill and the decode backend in `name`, such as "flash,triton".

    A single name is used for both, except "flash": then the decode backend is "auto", because FlashAttention is slower
    for decodes. It does not split the keys of a sequence: on an H200, a decode step of 64 sequences of 1,024 tokens
    takes 179 us with FlashAttention and 76 us with Triton.
    """
    prefill, comma, decode = (part.strip() for part in name.partition(","))
    if not comma:
        decode = "auto" if prefill == "flash" else prefill
    for part in (prefill, decode):
        if part not in BACKENDS:
            raise EngineError(
                f"attention_backend is {name!r}: it must be one of {', '.join(BACKENDS)}, or two of them for prefill "
                "and decode, as in flash,triton"
            )
    return prefill, decode


def choose_attention(
    name: str, config: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device, max_rows: int,
    max_model_len: int = 8192, kv_dtype: torch.dtype | None = None, sinks: Sinks = None,
) -> AttentionBackend:
    """Returns the backend for `name` (see `backend_names`). "auto" picks the fastest for the device and the model.

    A model with several cache groups gets a backend for each. Raises EngineError if the device or the model does not
    support the backend. `kv_dtype`: the type of the KV cache; None means the model's type. `sinks`: of each layer;
    None: the model has none.
    """
    groups = paged_groups(config)
    shapes = [config] if len(groups) == 1 else [config.of_group(group) for group in groups]
    backends = [
        choose_backend(name, shape, block_size, dtype, device, max_rows, max_model_len, kv_dtype, sinks)
        for shape in shapes
    ]
    return backends[0] if len(backends) == 1 else GroupedAttention(backends, group_of_layers(config))


def choose_backend(
    name: str, config: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device, max_rows: int,
    max_model_len: int, kv_dtype: torch.dtype | None, sinks: Sinks,
) -> AttentionBackend:
    """Returns the backend of one cache group. See choose_attention."""
    from engine.attention.torch_backend import TorchAttention

    prefill, decode = backend_names(name)
    why_not = why_not_triton(config, dtype, device, kv_dtype)
    if why_not and "triton" in (prefill, decode):
        raise EngineError(f"attention_backend triton cannot be used: {why_not}; choose auto")
    best = "torch" if why_not else "triton"
    decode = best if decode == "auto" else decode

    def make(name: str, flash: Any = None) -> AttentionBackend:
        if name == "triton":
            from engine.attention.triton_backend import TritonAttention

            return TritonAttention(config, max_rows, max_model_len, device, flash, sinks)
        if name == "flash":
            from engine.attention.flash_backend import FlashAttention

            return FlashAttention(config, block_size, dtype, kv_dtype or dtype, device)
        return TorchAttention(config, block_size, dtype, device, sinks)

    if (prefill, decode) == ("auto", "triton"):
        from engine.attention.flash_backend import installed_for

        return make("triton", installed_for(config, block_size, dtype, kv_dtype or dtype, device))
    prefill = best if prefill == "auto" else prefill
    if prefill == decode:
        return make(prefill)
    if (prefill, decode) == ("flash", "triton"):
        return make("triton", make("flash"))
    return TwoBackends(make(prefill), make(decode))


def why_not_triton(
    config: AttentionShape, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None = None
) -> str:
    """Returns the reason why our Triton kernels cannot run this model on this device; "" if they can. kv_dtype: as in
    choose_attention."""
    if device.type != "cuda":
        return "our Triton kernels need a CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return (
            f"our Triton kernels are for GPUs of compute capability 8.0 (Ampere) and later, and "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
        )
    if kv_dtype is not None and kv_dtype.itemsize == 1 and (major, minor) < (8, 9):
        return (
            f"our Triton kernels read an 8-bit cache on GPUs of compute capability 8.9 and later, and "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
        )
    try:
        from engine.attention.triton_backend import why_unsupported
    except ImportError as error:
        return f"triton is not installed ({error})"
    return why_unsupported(config, dtype)
