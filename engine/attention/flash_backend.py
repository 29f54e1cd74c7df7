"""FlashAttention (Dao et al. 2022-2026) as a backend: version 4 on Hopper and Blackwell, version 2 on older GPUs.

Neither version is installed by default: `pip install '.[flash]'`. Both versions read the paged cache through the block
table.

On an H200, FlashAttention-4 is faster than our Triton kernel for all but the shortest chunks: 2 chunks of 2,048 tokens
after 2,048 cached tokens take 348 us per layer; with Triton they take 495 us. But a call of FlashAttention-4 takes
87 us of host time, and a call of our Triton kernel 36 us. So short steps use Triton. Steps captured as CUDA graphs use
Triton too. "auto" uses FlashAttention-4 for prompts if it is installed (engine/kernels/MEASURED.md).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.attention.base import AttentionShape, ForwardMeta
from engine.errors import EngineError, how_to_install, not_installed

logger = logging.getLogger("engine")

FLASH_4_TILE = 64  # keys; FlashAttention-4 always reads blocks of this size or larger as a whole
MEASURED_HEAD_DIM = 128  # the head size for which FlashAttention-4 was measured to be faster
FLASH_2_BLOCK = 256  # tokens; FlashAttention-2 needs blocks of a multiple of this size


class FlashAttention:
    """Calls FlashAttention once per layer: `run` for all sequences of a step, `chunks` from a given sequence on."""

    name = "flash"

    def __init__(
        self, config: AttentionShape, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
    ) -> None:
        """Import the library. Raises EngineError if the library is not installed or does not support the arguments. The
        import takes a few seconds. The first call of each variant of the kernel also takes a few seconds, because the
        library then compiles this variant."""
        self._scale = config.scale
        self._windows = [config.window(i) for i in range(config.num_layers)]
        if dtype not in (torch.bfloat16, torch.float16):
            raise EngineError(
                f"attention_backend flash computes in half precision, but this model runs in "
                f"{str(dtype).removeprefix('torch.')}: choose triton or torch, or --dtype bfloat16"
            )
        if config.softcap or config.sinks:
            raise EngineError(
                f"attention_backend flash lacks {'soft caps' if config.softcap else 'attention sinks'}, which this "
                "model has: choose auto"
            )
        if kv_dtype != dtype:
            raise EngineError(
                "attention_backend flash reads keys and values of the model's type, but the KV cache is fp8: "
                "choose --attention-backend triton, or leave --kv-cache-dtype at auto"
            )
        self._attend = _library(device, block_size)
        self._meta: ForwardMeta | None = None

    def plan(self, meta: ForwardMeta) -> None:
        self._meta = meta

    def run(
        self, layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert self._meta is not None, "call plan() before run()"
        return self.chunks(self._meta, 0, layer, q, k_cache, v_cache)

    def chunks(
        self, meta: ForwardMeta, first: int, layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """Returns the output [T, Hq · D]. Only the rows of the sequences from index `first` on are defined."""
        window = self._windows[layer]
        out = self._attend(
            q, k_cache, v_cache, meta.cu_seqlens_q[first:], (meta.max_q_len, meta.max_seq_len), meta.seq_lens[first:],
            meta.block_table[first:], softmax_scale=self._scale, causal=True,
            window=(window - 1, 0) if window else None,
        )
        return out.flatten(1)

    def warm_up(self, keys: torch.Tensor, values: torch.Tensor, heads: int, dtype: torch.dtype) -> None:
        """Compile both variants of the kernel: for chunks that fill a tile of queries, and for shorter chunks."""
        device, size = keys.device, keys.shape[1]
        with warnings.catch_warnings():  # the kernel's compiler warns about arguments that it sets itself
            warnings.simplefilter("ignore", UserWarning)
            for tokens in (1, 512):
                bounds = torch.tensor([0, tokens], dtype=torch.int32, device=device)
                blocks = torch.zeros(1, -(-tokens // size), dtype=torch.int32, device=device)
                q = torch.zeros(tokens, heads, keys.shape[3], dtype=dtype, device=device)
                self._attend(
                    q, keys, values, bounds, (tokens, tokens), bounds[1:], blocks,
                    softmax_scale=self._scale, causal=True, window=None,
                )


def installed_for(
    config: AttentionShape, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> FlashAttention | None:
    """Returns FlashAttention-4 if it is installed and the model has the head size for which it is faster; else None."""
    if config.head_dim != MEASURED_HEAD_DIM or importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        return FlashAttention(config, block_size, dtype, kv_dtype, device)
    except EngineError as error:
        logger.info("prompts use the Triton attention kernel: %s", error)
        return None


Call = Callable[..., torch.Tensor]


def _library(device: torch.device, block_size: int) -> Call:
    """Returns the attention function of the FlashAttention version for this device."""
    if device.type != "cuda":
        raise EngineError(f"attention_backend flash needs an NVIDIA GPU, and the device is {device}: choose auto")
    major, minor = torch.cuda.get_device_capability(device)
    if major >= 9:
        return _flash_4(block_size)
    if major < 8:
        raise EngineError(
            f"attention_backend flash needs a GPU of compute capability 8.0 or more, and this GPU has {major}.{minor}: "
            "choose auto"
        )
    return _flash_2(block_size)


def _flash_4(block_size: int) -> Call:
    if block_size >= FLASH_4_TILE:
        raise EngineError(
            f"FlashAttention-4 reads blocks of {FLASH_4_TILE} or more tokens as a whole, and the block size is "
            f"{block_size}: a NaN that another request left in a sequence's last block would reach the sequence's "
            "output; use --block-size 16, or leave --attention-backend at auto"
        )
    # The first variable makes the library cache compiled kernels on disk. The second sets the cache's folder, which is
    # in /tmp by default. The library reads both variables at its import.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    folder = Path.home() / ".cache" / "flash_attention_cute_dsl"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
    try:
        from flash_attn.cute import flash_attn_varlen_func as attend
    except ImportError as error:
        raise EngineError(
            f"{not_installed('attention_backend flash', error, 'flash')} (FlashAttention-4), or choose auto, "
            "which uses Triton"
        ) from None
    except Exception as error:  # the library's dependencies may not fit this machine
        raise EngineError(
            f"attention_backend flash: FlashAttention-4 is installed, but its import failed "
            f"({type(error).__name__}: {error}): install it again ({how_to_install('flash')}), or choose auto, "
            "which then uses Triton"
        ) from error

    def paged(q: Any, k: Any, v: Any, bounds: Any, longest: Any, lengths: Any, table: Any, **options: Any) -> Any:
        window = options.pop("window") or (None, None)
        return attend(
            q, k, v, cu_seqlens_q=bounds, max_seqlen_q=longest[0], max_seqlen_k=longest[1], seqused_k=lengths,
            page_table=table, window_size=window, **options,
        )[0]

    return paged


def _flash_2(block_size: int) -> Call:
    if block_size % FLASH_2_BLOCK:
        raise EngineError(
            f"FlashAttention-2, the version for this GPU, needs blocks of a multiple of {FLASH_2_BLOCK} tokens, and "
            f"the block size is {block_size}: add --block-size {FLASH_2_BLOCK}, or leave --attention-backend at auto"
        )
    try:
        from flash_attn import flash_attn_varlen_func as attend
    except ImportError as error:
        raise EngineError(
            f"attention_backend flash needs FlashAttention-2 on this GPU, but it cannot be imported ({error}): pip "
            "install flash-attn, or choose auto, which uses Triton"
        ) from None

    def paged(q: Any, k: Any, v: Any, bounds: Any, longest: Any, lengths: Any, table: Any, **options: Any) -> Any:
        window = options.pop("window") or (-1, -1)
        keys = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return attend(
            q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=keys, max_seqlen_q=longest[0], max_seqlen_k=longest[1],
            block_table=table, window_size=window, **options,
        )

    return paged
