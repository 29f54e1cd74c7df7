"""FlashAttention (Dao et al. 2022-2026) as a backend: FlashAttention-4 on Hopper and Blackwell, 2 on older GPUs.

Neither is installed by default: `pip install '.[flash]'`. Both read the paged cache through the block table.

Measured on an H200 (flash-attn-4 4.0.0b36, bf16, blocks of 16, 32 query heads and 8 of keys of 128, NaN wherever nobody
has written), microseconds a layer against our Triton kernel in the same run, relative error 2e-3 to 2.3e-3 for both:

    4 prompts of 4,096         1,048 of 1,189      64 decode + 3 x 700            47 of 50
    1 of 2,112                    86 of 97         64 decode + 1,024 on 1,024 + 900  74 of 93
    1 of 8,192                   974 of 1,099      8 x 64 on 2,048                40 of 61
    16 of 512                    153 of 165        2 x 2,048 on 2,048            348 of 495
    1 of 64                      7.8 of 6.9        1,024 on 7,168                211 of 337

So it is the better one for every chunk but the shortest, most where there is much context. A call takes the host 87 us
(ours 36), which counts in steps that are shorter than their launches: those, and what is captured, stay with Triton.

Whole runs of Qwen3-8B, with it and without in one process: 16 prompts of 4,096 41,369 of 40,744 tok/s; a first token
behind 6,000 cached and 1,000 new 33.6 of 38.3 ms, behind 2,112 new 52.0 of 52.8; 256 of mixed lengths 9,855 of 9,844
tok/s. So "auto" takes it for prompts where it is installed. It makes a start 4 s longer, for its import; 9 s the first
time, when it compiles for the cache that is kept on disk.

Not taken: the chunks' own keys and values from where the projection left them, 10 % faster for prompts from their
beginning (4 x 4,096: 924 us), and blocks as large as a tile of keys, which are read whole (8 x 64 on 2,048: 35 us).
Both let a NaN of one request into the output of another.
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
from engine.attention.kv_pool import KVPool
from engine.errors import EngineError, how_to_install, not_installed

logger = logging.getLogger("engine")

FLASH_4_TILE = 64  # keys in the smallest of FlashAttention-4's tiles; a block as large as a tile is read as one
MEASURED_HEAD_DIM = 128
FLASH_2_BLOCK = 256  # FlashAttention-2 pages: multiples of so many tokens


class FlashAttention:
    """Every token of a step through one call of FlashAttention per layer; `chunks` leaves out those that decode."""

    name = "flash"

    def __init__(
        self, config: AttentionShape, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
    ) -> None:
        """Imports the library (a few seconds, and each form of its kernels compiles for as long when it is first used);
        EngineError if it is not there, or cannot do what is asked."""
        self._scale = config.head_dim**-0.5
        self._windows = [config.window(i) for i in range(config.num_layers)]
        if dtype not in (torch.bfloat16, torch.float16):
            raise EngineError(
                f"attention_backend flash computes in half precision, and this model runs in "
                f"{str(dtype).removeprefix('torch.')}: choose triton or torch, or --dtype bfloat16"
            )
        if kv_dtype != dtype:
            raise EngineError(
                "attention_backend flash reads keys and values of the model's own type, and the KV cache is fp8: "
                "choose --attention-backend triton, or leave --kv-cache-dtype at auto"
            )
        self._attend = _library(device, block_size)
        self._meta: ForwardMeta | None = None

    def plan(self, meta: ForwardMeta) -> None:
        self._meta = meta

    def run(
        self, layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        assert self._meta is not None, "plan() comes before run()"
        return self.chunks(self._meta, 0, layer, q, k_cache, v_cache)

    def chunks(
        self, meta: ForwardMeta, first: int, layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """[T, Hq · D], of which the tokens of the sequences before `first` are undefined."""
        window = self._windows[layer]
        out = self._attend(
            q, k_cache, v_cache, meta.cu_seqlens_q[first:], (meta.max_q_len, meta.max_seq_len), meta.seq_lens[first:],
            meta.block_table[first:], softmax_scale=self._scale, causal=True,
            window=(window - 1, 0) if window else None,
        )  # fmt: skip
        return out.flatten(1)

    def warm_up(self, pool: KVPool, heads: int, dtype: torch.dtype) -> None:
        """Compile what chunks may need: one form for those that fill a tile of queries, and one for shorter ones."""
        device, size = pool.keys[0].device, pool.block_size
        with warnings.catch_warnings():  # its compiler's, about its own arguments
            warnings.simplefilter("ignore", UserWarning)
            for tokens in (1, 512):
                bounds = torch.tensor([0, tokens], dtype=torch.int32, device=device)
                blocks = torch.zeros(1, -(-tokens // size), dtype=torch.int32, device=device)
                q = torch.zeros(tokens, heads, pool.keys[0].shape[3], dtype=dtype, device=device)
                self._attend(
                    q, pool.keys[0], pool.values[0], bounds, (tokens, tokens), bounds[1:], blocks,
                    softmax_scale=self._scale, causal=True, window=None,
                )  # fmt: skip


def installed_for(
    config: AttentionShape, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> FlashAttention | None:
    """FlashAttention-4, if it is installed and is known to be the faster for the prompts of this model, else None."""
    if config.head_dim != MEASURED_HEAD_DIM or importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        return FlashAttention(config, block_size, dtype, kv_dtype, device)
    except EngineError as error:
        logger.info("attention of prompts stays with Triton: %s", error)
        return None


Call = Callable[..., torch.Tensor]


def _library(device: torch.device, block_size: int) -> Call:
    """Attention over the paged cache, by whichever FlashAttention is made for this device."""
    if device.type != "cuda":
        raise EngineError(f"attention_backend flash needs an NVIDIA GPU, and the device is {device}: leave it at auto")
    major, minor = torch.cuda.get_device_capability(device)
    if major >= 9:
        return _flash_4(block_size)
    if major < 8:
        raise EngineError(
            f"attention_backend flash needs a GPU of compute capability 8.0 or more, and this one has {major}.{minor}: "
            "leave it at auto"
        )
    return _flash_2(block_size)


def _flash_4(block_size: int) -> Call:
    if block_size >= FLASH_4_TILE:
        raise EngineError(
            f"FlashAttention-4 reads blocks of {FLASH_4_TILE} tokens and more whole, and they have {block_size}: a NaN "
            "that another request left behind a sequence's end would reach its output; use --block-size 16, or leave "
            "--attention-backend at auto"
        )
    # Its own cache of compiled kernels, which is off and in /tmp unless it is told otherwise before it is imported.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    kept = Path.home() / ".cache" / "flash_attention_cute_dsl"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(kept))
    try:
        from flash_attn.cute import flash_attn_varlen_func as attend
    except ImportError as error:
        raise EngineError(
            f"{not_installed('attention_backend flash', error, 'flash')} (FlashAttention-4), or leave it at auto, "
            "which uses Triton"
        ) from None
    except Exception as error:  # it loads libraries of its own, which may not suit this machine's
        raise EngineError(
            f"attention_backend flash: FlashAttention-4 is installed, and failed as it was imported "
            f"({type(error).__name__}: {error}): install it anew ({how_to_install('flash')}), or leave it at auto, "
            "which uses Triton then"
        ) from error

    def paged(q: Any, k: Any, v: Any, bounds: Any, longest: Any, lengths: Any, table: Any, **options: Any) -> Any:
        window = options.pop("window") or (None, None)
        return attend(
            q, k, v, cu_seqlens_q=bounds, max_seqlen_q=longest[0], max_seqlen_k=longest[1], seqused_k=lengths,
            page_table=table, window_size=window, **options,
        )[0]  # fmt: skip

    return paged


def _flash_2(block_size: int) -> Call:
    if block_size % FLASH_2_BLOCK:
        raise EngineError(
            f"FlashAttention-2, which is what runs on this GPU, reads blocks of a multiple of {FLASH_2_BLOCK} tokens, "
            f"and they have {block_size}: add --block-size {FLASH_2_BLOCK}, or leave --attention-backend at auto"
        )
    try:
        from flash_attn import flash_attn_varlen_func as attend
    except ImportError as error:
        raise EngineError(
            f"attention_backend flash needs FlashAttention-2 on this GPU, and it cannot be imported ({error}): pip "
            "install flash-attn, or leave it at auto, which uses Triton"
        ) from None

    def paged(q: Any, k: Any, v: Any, bounds: Any, longest: Any, lengths: Any, table: Any, **options: Any) -> Any:
        window = options.pop("window") or (-1, -1)
        keys = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return attend(
            q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=keys, max_seqlen_q=longest[0], max_seqlen_k=longest[1],
            block_table=table, window_size=window, **options,
        )  # fmt: skip

    return paged
