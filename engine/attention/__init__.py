"""Paged attention behind one small interface: planned once per step, run once per layer."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.config import ModelConfig
from engine.errors import EngineError
from engine.forward import ForwardMeta


class AttentionBackend(Protocol):
    """Causal grouped-query attention over the paged KV cache."""

    name: str

    def plan(self, meta: ForwardMeta) -> None:
        """Prepare what all layers of this step share."""

    def run(self, layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, D], caches [num_blocks, block_size, Hkv, D] -> [T, Hq · D].

        Token i of a sequence attends to its keys 0 … seq_len − q_len + i, or to the last `window` of those. What lies
        in other slots, NaN included, has no influence.
        """


def choose_attention(
    name: str, config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device, max_rows: int,
    max_model_len: int = 8192,
) -> AttentionBackend:  # fmt: skip
    """The backend called `name`; "auto": the fastest there is for the device and the model."""
    from engine.attention.torch_backend import TorchAttention

    if name in ("auto", "triton"):
        why_not = "it needs a CUDA device" if device.type != "cuda" else ""
        if not why_not:
            try:
                from engine.attention.triton_backend import TritonAttention, supports
            except ImportError as error:
                why_not = f"triton is not installed ({error})"
            else:
                why_not = supports(config, dtype)
                if not why_not:
                    return TritonAttention(config, max_rows, max_model_len, device)
        if name == "triton":
            raise EngineError(f"attention_backend triton cannot be used: {why_not}; leave it at auto")
    if name in ("auto", "torch"):
        return TorchAttention(config, block_size, dtype, device)
    raise EngineError(f"attention_backend is {name!r}: on {device} it can be auto, torch or triton")
