"""Checks, before any allocation, that a model and its tables fit into the device's memory."""

from __future__ import annotations

import os
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.fields import INT32_MAX
from engine.model.config import ModelConfig
from engine.worker.limits import Limits


def check_memory(
    model: ModelConfig, config: EngineConfig, limits: Limits, directory: Path | None = None, total: int | None = None
) -> None:
    """Raise EngineError, with the sizes, if the model needs more memory than the device has. Counts the weights, the KV
    cache and the tables, but no activations. `directory`: the checkpoint; None: random weights. `total`: bytes of the
    device's memory; None: as the system reports it."""
    blocks = config.num_blocks or -(-(config.kv_tokens or 1) // config.block_size)
    if max(blocks * config.block_size, limits.max_model_len) > INT32_MAX:
        raise EngineError(
            f"{blocks:,} KV blocks of {config.block_size:,} tokens and a max_model_len of {limits.max_model_len:,} are "
            f"too many: at most {INT32_MAX:,} tokens can be addressed; lower --kv-blocks, --block-size or "
            "--max-model-len"
        )
    ranks = config.tensor_parallel_size
    from engine.worker.weights.quantised import weight_bytes  # needs torch

    columns = -(-limits.max_model_len // config.block_size)
    parts = {
        "weights": weight_bytes(limits.quantization, model, limits.dtype, directory=directory) // ranks,
        f"a KV cache of {blocks:,} blocks": blocks
        * config.block_size
        * model.kv_bytes_per_token(limits.kv_dtype)
        // ranks,
        "the block table (max_num_seqs by max_model_len)": 4 * limits.max_num_seqs * columns,
        "the rope table": 4 * limits.max_model_len * model.head_dim,
    }
    total = _device_bytes(limits) if total is None else total
    if sum(parts.values()) > total:
        sizes = ", ".join(f"{name} {size / 1e9:,.2f} GB" for name, size in parts.items())
        raise EngineError(
            f"there is not enough memory for this model: {sizes}, and {limits.device} has {total / 1e9:,.2f} GB: use a "
            "smaller model, fewer --kv-blocks, or a lower --max-num-seqs or --max-model-len"
        )


def _device_bytes(limits: Limits) -> int:
    if limits.device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(limits.device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
