"""The product of a wide matrix of 4-bit numbers in groups of 128 with 129 to 256 tokens, on Hopper.

While the tensor cores multiply a quarter of the columns of a tile, the next quarter is unpacked. Triton waits for each
product before it unpacks, so this kernel is written in Gluon, which leaves the waiting to us. A program computes 128
rows for all tokens: each number is unpacked once. gate and up of Qwen3-8B take 87 us on an H200, 107 with four_bits.py.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.kernels.card import card
from engine.kernels.four_bits_one import FourBitMatrix

TOKENS, ROWS = 256, 128  # of a tile
AHEAD, WORDS_AHEAD = 5, 3  # quarters of activations, and tiles of words, that are loaded ahead


@gluon.jit
def _numbers(words, Q: gl.constexpr):
    """Returns q - 8, where q are the bits 4 Q to 4 Q + 3 of each 16-bit word (four_bits.py)."""
    return gl.inline_asm_elementwise(
        f"""
        {{
            .reg .b32 t, one, less;
            mov.b32 one, 0x3F803F80;
            mov.b32 less, 0xC308C308;
            shr.u32 t, $1, {4 * Q};
            lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, t, one, less;
        }}
        """,
        "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2,
    )


@gluon.jit
def _load(matrix, row, column, buffers, bars, slot, BYTES: gl.constexpr):
    mbarrier.expect(bars.index(slot), BYTES)
    tma.async_copy_global_to_shared(matrix, [row, column], bars.index(slot), buffers.index(slot))


@gluon.jit(do_not_specialize=["M", "WHOLE"])
def _many_kernel(
    x, w, groups, scale, y, halves, counters, M, N, WHOLE, K: gl.constexpr, BM: gl.constexpr, XS: gl.constexpr,
    WS: gl.constexpr, num_warps: gl.constexpr,
):
    """From program WHOLE on, two programs share a tile: each multiplies half of the columns."""
    T: gl.constexpr = K // 256
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BM, 16]
    )
    dot: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    tile = gl.program_id(0)
    half = 0
    first = 0
    end = T
    shared = tile >= WHOLE
    if shared:
        half = (tile - WHOLE) % 2
        tile = WHOLE + (tile - WHOLE) // 2
        first = T * half // 2
        end = T * (half + 1) // 2
    xs = gl.allocate_shared_memory(gl.bfloat16, [XS, BM, 64], x.layout)
    ws = gl.allocate_shared_memory(gl.int16, [WS, 128, 64], w.layout)
    x_bars = gl.allocate_shared_memory(gl.int64, [XS, 1], mbarrier.MBarrierLayout())
    w_bars = gl.allocate_shared_memory(gl.int64, [WS, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(XS):
        mbarrier.init(x_bars.index(j), count=1)
    for j in gl.static_range(WS):
        mbarrier.init(w_bars.index(j), count=1)
    at = groups + tile * (2 * T * 128) + gl.arange(0, 128, layout=gl.SliceLayout(1, dot))
    for j in gl.static_range(WS):
        if first + j < end:
            _load(w, (tile * T + first + j) * 128, 0, ws, w_bars, j, 128 * 128)
    for j in gl.static_range(XS):
        if 4 * first + j < 4 * end:
            _load(x, 0, (4 * first + j) * 64, xs, x_bars, j, BM * 128)
    factors = gl.load(at + 2 * first * 128)
    factors2 = gl.load(at + (2 * first + 1) * 128)
    acc = gl.zeros([128, BM], gl.float32, mma)
    before = gl.zeros([128, 64], gl.bfloat16, dot)
    for t in range(end - first):
        slot = t % WS
        mbarrier.wait(w_bars.index(slot), (t // WS) & 1)
        words = ws.index(slot).load(dot)
        by = gl.expand_dims(factors.to(gl.bfloat16), 1)
        by2 = gl.expand_dims(factors2.to(gl.bfloat16), 1)
        following = gl.minimum(first + t + 1, end - 1)
        factors = gl.load(at + 2 * following * 128)
        factors2 = gl.load(at + (2 * following + 1) * 128)
        for q in gl.static_range(4):
            i = 4 * t + q
            if q < 2:
                a = _numbers(words, q) * by
            else:
                a = _numbers(words, q) * by2
            mbarrier.wait(x_bars.index(i % XS), (i // XS) & 1)
            acc = warpgroup_mma(a, xs.index(i % XS).permute((1, 0)), acc, is_async=True)
            acc, before = warpgroup_mma_wait(1, deps=[acc, before])  # the product before this one has ended
            before = a
            gl.thread_barrier()
            if q == 0:  # noqa: SIM102 (a condition at compile time)
                if t + WS < end - first:
                    _load(w, (tile * T + first + t + WS) * 128, 0, ws, w_bars, slot, 128 * 128)
            if (i > 0) & (i - 1 + XS < 4 * (end - first)):
                _load(x, 0, (4 * first + i - 1 + XS) * 64, xs, x_bars, (i - 1) % XS, BM * 128)
    acc, before = warpgroup_mma_wait(0, deps=[acc, before])
    for j in gl.static_range(XS):
        mbarrier.invalidate(x_bars.index(j))
    for j in gl.static_range(WS):
        mbarrier.invalidate(w_bars.index(j))
    n = tile * 128 + gl.arange(0, 128, layout=gl.SliceLayout(1, mma))
    acc = acc * gl.expand_dims(gl.load(scale + n), 1)
    last = 1
    if shared:
        cell = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, mma)), 1) * BM + gl.expand_dims(
            gl.arange(0, BM, layout=gl.SliceLayout(0, mma)), 0
        )
        both = halves + (tile - WHOLE) * (2 * 128 * BM) + cell
        gl.store(both + half * (128 * BM), acc)
        gl.thread_barrier()  # all threads must write their sums before the counter increases
        last = gl.atomic_add(counters + tile - WHOLE, 1, sem="acq_rel")
        if last == 1:
            gl.thread_barrier()
            gl.store(counters + tile - WHOLE, 0)
            acc += gl.load(both + (1 - half) * (128 * BM), cache_modifier=".cg")
    if last == 1:
        out: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, num_warps], [0, 1])
        row = gl.expand_dims(tile * 128 + gl.arange(0, 128, layout=gl.SliceLayout(1, out)), 1)
        token = gl.expand_dims(gl.arange(0, BM, layout=gl.SliceLayout(0, out)), 0)
        to = token * N + row
        inside = (token < M) & (row >= 0)
        gl.store(y + to, gl.convert_layout(acc.to(y.dtype.element_ty), out), mask=inside)


def has(w: FourBitMatrix) -> bool:
    """Returns True if this kernel computes products with the matrix."""
    return w.offsets is None and w.values.shape[-1] == 64 and w.groups.shape[1] * 128 == w.shape[1]


def product(x: torch.Tensor, w: FourBitMatrix, counters: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes x W^T to out [M, N] and returns it, for x [M, K] with M at most 256. counters: zeros, also afterwards."""
    (m, k), n = x.shape, w.shape[0]
    left = n // ROWS % card().processors
    left = left if 2 * left <= card().processors else 0
    halves = torch.empty(2 * left * TOKENS * ROWS, dtype=torch.float32, device=x.device)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    _many_kernel[(n // ROWS + left,)](
        TensorDescriptor.from_tensor(x, [TOKENS, 64], layout),
        TensorDescriptor.from_tensor(w.values.view(-1, 64), [ROWS, 64], layout), w.groups, w.scale, out, halves,
        counters, m, n, n // ROWS - left, K=k, BM=TOKENS, XS=AHEAD, WS=WORDS_AHEAD, num_warps=8,
    )
    return out
