"""The kernels on cards that are not there: each form is compiled for the card, fits into its shared memory, keeps its
numbers in registers, and loads tiles of matrices ahead.

Needs triton, not a GPU. All forms of Qwen3-8B, Qwen3-0.6B and Qwen3-30B-A3B are compiled with ALL_FORMS=1, in half an
hour of processor time; without it, a few of them.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.timeout(900)

from engine.kernels import (  # noqa: E402
    batch_state,
    delta,
    delta_ends,
    eight_bits,
    eight_bits_many,
    four_bits,
    gemv,
    moe,
    moe_one,
    moe_tiles,
    norms,
    sample,
    split_linear,
)
from engine.kernels.decode_attention import DecodeWorkspace, decode_attention  # noqa: E402
from engine.kernels.prefill_attention import PrefillWorkspace, prefill_attention  # noqa: E402
from engine.kernels.row_settings import NUM_SETTINGS  # noqa: E402
from engine.model.four_bits import Int4Tiles  # noqa: E402
from tests.support.kernels.cards import CARDS  # noqa: E402
from tests.support.kernels.compile_kernels import compiling_for  # noqa: E402

ROPE = torch.empty(100, 128)
CPU = torch.device("cpu")
# Bytes of a thread that are not in registers in some form on some card, with Triton 3.6 or 3.9.
SPILLED = {
    "_few_kernel": 96, "_prefill_kernel": 104, "_gate_up_kernel": 360, "_down_kernel": 848, "_split_linear_kernel": 64,
    "_router_kernel": 16, "_group_kernel": 8, "_one_kernel": 8, "_scan_kernel": 728, "_product_kernel": 48,
    "gemv_kernel": 176,
    "_chunk_kernel": 11_168,  # on an A100, where prompts of a delta rule must be slow; 608 on an RTX 4090
}
# With descriptors, these would load single numbers below Hopper, and wait for each load.
LOADED_AHEAD = {"_split_linear_kernel", "_few_kernel", "_skinny_kernel", "_product_kernel"}


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def longs(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def attention(kv_dtype: torch.dtype = torch.bfloat16) -> None:
    kv_heads, dim, scales = 8, 128, None if kv_dtype == torch.bfloat16 else torch.ones(2, 8)
    pool = torch.empty(4, 16, kv_heads, dim, dtype=kv_dtype)
    for heads in (32, 16):
        workspace = DecodeWorkspace(256, kv_heads, heads // kv_heads, dim, CPU, 32768)
        for n in (1, 16, 64, 256):
            for fused in (None, (half(heads + kv_heads, dim), ROPE, 1e-6)):
                decode_attention(
                    half(n, (heads + 2 * kv_heads) * dim), pool, pool, half(n, heads * dim), workspace, ints(256, 9),
                    ints(n), ints(n), 0.1, heads // kv_heads, fused=fused, kv_scales=scales,
                )
    qkv = half(100, 48, dim)
    for splits, fresh in ((1, True), (4, False)):
        prefill_attention(
            qkv[:, :32], pool, pool, half(100, 32 * dim), PrefillWorkspace(kv_heads, dim, CPU),
            ints(3, 9), ints(3), ints(4), 0.1, max_seq_len=900, dense=(qkv[:, 32:40], qkv[:, 40:]), splits=splits,
            fresh=fresh, kv_scales=scales,
        )


def layers() -> None:
    for hidden in (4096, 1024):
        norms.rms_norm(half(8, hidden), half(hidden), 1e-6, half(8, hidden))
        norms.silu_mul(half(8, 6 * hidden))
        for n, k in ((6 * hidden, hidden), (hidden, hidden), (hidden, 3 * hidden)):
            gemv.gemv(half(1, k), half(n, k), residual=half(1, n))
            for tokens in (2, 16, 64, 100, 240):
                if form := split_linear.form_for(tokens, n, k):
                    split_linear.split_linear(half(tokens, k), half(n, k), form)
        gemv.gemv(half(1, hidden), half(6 * hidden, hidden), norm=(half(hidden), 1e-6), gate_up=True)
    cache = half(4, 16, 8, 128)
    norms.qk_norm_rope_store(half(8, 48 * 128), half(40, 128), 1e-6, (ROPE, longs(8)), cache, cache, longs(8))


def mixture() -> None:
    hidden, inner = 2048, 768
    router, gate_up, down, load = half(128, hidden), half(128, 2 * inner, hidden), half(128, hidden, inner), longs(128)
    for tokens in moe_tiles.forms(4096, hidden, 128, 8):
        moe.total(moe.each_expert(half(tokens, hidden), router, gate_up, down, 8, True, load, ints(1)))
    moe_one.one_token(half(1, hidden), (half(hidden), 1e-6), half(1, 128), gate_up, down, 8, True, load, ints(1))


def experts_in_eight_bits() -> None:
    hidden, inner, count, load = 2048, 768, 128, longs(128)
    for block in (0, 128):
        gate_up, down = (scaled(count * n, k, block) for n, k in ((2 * inner, hidden), (hidden, inner)))
        for tokens in moe_tiles.forms(4096, hidden, count, 8, 8):
            moe.each_expert(half(tokens, hidden), half(count, hidden), gate_up, down, 8, True, load, ints(1))
        one = half(1, hidden), (half(hidden), 1e-6), half(1, count)
        moe_one.one_token(*one, gate_up, down, 8, True, load, ints(1))


def experts_in_four_bits() -> None:
    hidden, inner, count, load = 2048, 768, 128, longs(128)
    for group, offsets in ((128, False), (64, True)):
        kind = type("Kind", (Int4Tiles,), {"__slots__": (), "group": group, "with_offsets": offsets})
        gate_up, down = (kind.empty(count * n, k, CPU) for n, k in ((2 * inner, hidden), (hidden, inner)))
        for tokens in moe_tiles.forms(4096, hidden, count, 8, 4):
            moe.each_expert(half(tokens, hidden), half(count, hidden), gate_up, down, 8, True, load, ints(1))


def scaled(n: int, k: int, block: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Any:
    """A matrix of 8-bit numbers with a scale per block, or per row (0)."""
    scale = torch.empty(n // block, k // block) if block else torch.empty(n)
    values = torch.empty(n, k, dtype=torch.uint8).view(dtype)
    return SimpleNamespace(values=values, scale=scale, shape=torch.Size((n, k)))


def sampling() -> None:
    n, vocabulary = 16, 151_936
    workspace = sample.SampleWorkspace(n, vocabulary, CPU)
    for noisy, truncated in ((False, False), (True, False), (True, True)):
        sample.draw(
            half(n, vocabulary), ints(n), ints(n), torch.zeros(256, NUM_SETTINGS), ints(256), ints(256, 2), longs(n),
            longs(256), workspace, noisy=noisy, truncated=truncated,
        )
    batch_state.prepare(ints(4096), ints(256, 9), longs(256), longs(n), ints(n), ints(n), n, 256, 100)


def delta_rules() -> None:
    """Of Qwen3.5's layers: 16 key heads and 32 value heads of 128; and the smallest and the largest heads."""
    for dim in (128, 16, 256):
        delta_rule(dim)


def delta_rule(dim: int) -> None:
    tokens, heads, slots = 200, 32, 9
    x = half(tokens, 2 * heads * dim)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in x.split([16 * dim, 16 * dim, heads * dim], 1))
    g = torch.empty(tokens, heads)
    for segments in (tokens, 9):
        states = SimpleNamespace(segments=ints(segments, 4), cu_segments=ints(segments + 1), host=None)
        delta.causal_conv(x, half(x.shape[1], 4), half(slots, x.shape[1], 3), states)
        delta.delta_rule(q, k, v, g, g, torch.empty(slots, heads, dim, dim), states)
    delta_ends.delta_gates(half(tokens, 2 * heads), torch.empty(heads), torch.empty(heads))
    delta_ends.gated_norm(half(tokens, heads, dim), half(tokens, heads * dim), half(dim), 1e-6)


def cache_of_eight_bits() -> None:
    attention(torch.float8_e4m3fn)


def matrices_of_eight_bits() -> None:
    for n, k in ((12288, 4096), (4096, 12288)):
        by_row, by_block = scaled(n, k, 0), scaled(n, k, 128)
        for matrix in (by_row, by_block):
            few_tokens(matrix)
        for tokens in (100, 3000):
            eight_bits_many.tiled(*eight_bits_many.round_groups(half(tokens, 2 * k), silu=True), by_block)
    gemv.gemv(half(1, 4096), scaled(24576, 4096, 128), norm=(half(4096), 1e-6), gate_up=True)


def matrices_of_whole_numbers() -> None:
    for n, k in ((12288, 4096), (4096, 12288), (32000, 4096)):
        matrix = scaled(n, k, 0, torch.int8)
        few_tokens(matrix)
        for tokens in (100, 3000):
            eight_bits.byte_linear(half(tokens, k), matrix)


def few_tokens(matrix: Any) -> None:
    gemv.gemv(half(1, matrix.shape[1]), matrix)
    for tokens in (2, 64):
        for in_parts in (False, True):
            eight_bits.back_to_hidden(half(tokens, matrix.shape[1]), matrix, in_parts=in_parts)


def matrices_of_four_bits() -> None:
    for n, k, group, offsets in ((4096, 4096, 128, False), (4096, 12288, 64, True), (1024, 1152, 32, False)):
        kind = type("Kind", (Int4Tiles,), {"__slots__": (), "group": group, "with_offsets": offsets})
        matrix = kind.empty(n, k, CPU)
        four_bits.one(half(1, k), matrix, norm=(half(k), 1e-6), gate_up=True)
        four_bits.one(half(1, k), matrix, residual=half(1, n))
        four_bits.expand(matrix)
        for tokens in (16, 64, 128, 256):
            for in_parts in (False, True):
                four_bits.few(half(tokens, k), matrix, four_bits.few_form(tokens, matrix, in_parts))
    four_bits.product(half(200, 4096), Int4Tiles.empty(24576, 4096, CPU))  # a kernel of its own on Hopper


PARTS = [
    attention, layers, mixture, sampling, delta_rules, cache_of_eight_bits, matrices_of_eight_bits,
    matrices_of_whole_numbers, experts_in_eight_bits, matrices_of_four_bits, experts_in_four_bits,
]


def some_forms() -> None:
    layer = half(4096, 4096)
    gemv.gemv(half(1, 4096), layer, residual=half(1, 4096))
    form = split_linear.form_for(64, *layer.shape)
    assert form is not None
    split_linear.split_linear(half(64, 4096), layer, form)
    matrix = Int4Tiles.empty(4096, 4096, CPU)
    four_bits.one(half(1, 4096), matrix, residual=half(1, 4096))
    four_bits.few(half(64, 4096), matrix, four_bits.few_form(64, matrix, True))
    for tokens in (64, 100):
        eight_bits.byte_linear(half(tokens, 4096), scaled(4096, 4096, 0, torch.int8))
    if eight_bits.card().capability >= (8, 9):
        eight_bits.back_to_hidden(half(64, 4096), scaled(4096, 4096, 0))


@pytest.mark.parametrize("part", PARTS if os.environ.get("ALL_FORMS") else [some_forms])
@pytest.mark.parametrize("name", CARDS)
def test_every_form_is_compiled_and_fits(name: str, part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = CARDS[name]
    least = dict.fromkeys((cache_of_eight_bits, matrices_of_eight_bits, experts_in_eight_bits), (8, 9))
    if wanted.capability < least.get(part, (8, 0)):
        pytest.skip("the engine refuses 8-bit floats on this card")
    with compiling_for(wanted, monkeypatch) as found:
        part()
    assert found
    for kernel, size in found.items():
        assert size.shared <= wanted.shared, (kernel, size)
        assert size.local <= SPILLED.get(kernel, 0), (kernel, size)
        assert size.ahead or kernel not in LOADED_AHEAD, f"{kernel} waits for each load"
