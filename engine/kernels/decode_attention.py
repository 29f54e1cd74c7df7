"""Paged attention of one query token per sequence (decode), with grouped queries and the keys split over programs.

One kernel fuses q/k RMSNorm, RoPE, the store of the new key and value, the gather through the block table, attention,
and the combination of the splits. So a decode layer has one kernel between the qkv projection and the output
projection. With `fused=None` the kernel computes only attention.

Shapes: caches [blocks, block_size, kv_heads, d]; block_table int32 [rows, max_blocks]; seq_lens int32 [n], each
including the token that is decoded (0: a padding row, whose output is zeros); rows int32 [n]: the row of each sequence
in the block table. The grid is (kv_heads, n, splits). The grid does not depend on the lengths, because the kernel reads
the lengths from memory. So one captured graph serves all batches of n sequences. In the fused form, the key and value
of the newest token come from the projection, not from the cache.

For each sequence and kv head, the program that finishes last combines the splits. An atomic counter shows which program
is the last, so no second launch is needed. The splits follow FlashDecoding (Dao et al. 2023), and the reduction follows
stream-K (Osama et al. 2023).

On an H200, 64 sequences of 1,024 tokens take 76 us (3.5 TB/s), and 42 us with an 8-bit cache (MEASURED.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.card import after_previous, overlap

LOG2E = 1.4426950408889634
MAX_SPLITS = 32
PROGRAMS = 1024  # that keep a GPU busy


@triton.jit
def norm_rope(base, weight, rope, position, head, row_mask, EPS: tl.constexpr, HAS_NORM: tl.constexpr, D: tl.constexpr):
    """Returns heads `head` [R] of the qkv row at `base`, RMS-normalised and rotated (half-split): [R, D]. Intermediate
    results are rounded as in engine/model/ops.py."""
    d = tl.arange(0, D)
    half = D // 2
    other = (d + half) % D
    mask = row_mask[:, None]
    x = tl.load(base + head[:, None] * D + d[None, :], mask=mask, other=0.0)
    y = tl.load(base + head[:, None] * D + other[None, :], mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / D + EPS)[:, None]
        wx = tl.load(weight + head[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        wy = tl.load(weight + head[:, None] * D + other[None, :], mask=mask, other=0.0).to(tl.float32)
        # A weight in fp32 is multiplied before the only rounding.
        x = ((x * rstd).to(weight.dtype.element_ty).to(tl.float32) * wx).to(dtype).to(tl.float32)
        y = ((y * rstd).to(weight.dtype.element_ty).to(tl.float32) * wy).to(dtype).to(tl.float32)
    c = tl.load(rope + position * D + d % half)[None, :]
    s = tl.load(rope + position * D + half + d % half)[None, :]
    s = tl.where(d[None, :] < half, -s, s)
    return (x * c + y * s).to(dtype)


@triton.jit
def _load_tile(cache, table, token, inside, kvh, BLOCK_SIZE: tl.constexpr, TOKEN: tl.constexpr, D: tl.constexpr):
    """Returns a tile [TILE, D] of keys or values; rows that are not `inside` are zeros."""
    d = tl.arange(0, D)
    block = tl.load(table + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    offset = (block * BLOCK_SIZE + token % BLOCK_SIZE) * TOKEN + kvh * D
    return tl.load(cache + offset[:, None] + d[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """Returns CAP · tanh(scores / CAP); the scores themselves if CAP is 0."""
    if CAP > 0:
        scores = CAP * (2.0 * tl.sigmoid(scores * (2.0 / CAP)) - 1.0)
    return scores


@triton.jit
def _weights(q_tile, k, inside, m, mass, scale, CAP: tl.constexpr):
    """Add a tile of keys to the running softmax: maximum `m`, sum of weights `mass`. Returns both, the keys' weights,
    and the factor of what the values of earlier keys add up to."""
    scores = tl.where(inside[None, :], capped(tl.dot(q_tile, tl.trans(k)) * scale, CAP), -1.0e30)
    m_new = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp2(scores - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    return m_new, mass * alpha + tl.sum(p, 1), p, alpha[:, None]


@triton.jit
def _online(q_tile, k, v, inside, m, mass, acc, scale, CAP: tl.constexpr):
    """Add one tile of keys and values to the running softmax and the weighted sum of values `acc`."""
    m, mass, p, alpha = _weights(q_tile, k, inside, m, mass, scale, CAP)
    return m, mass, tl.dot(p.to(v.dtype), v, acc * alpha)


@triton.jit
def fp8_pairs(v):
    """Convert pairs of 8-bit floats (16 bits a pair) to float16; return the first, then the second number of each pair.

    The values must be transposed on their way from shared memory to a matrix product. There is an instruction that
    transposes pairs of bytes, but none for single bytes. With single bytes, the loop over the tiles had 2,257
    instructions per tile; with pairs it has 1,312.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;
        cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""",
        "=r,=r,r", [v], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )


@triton.jit
def _online_fp8(q_tile, k, v, inside, m, mass, even, odd, CAP: tl.constexpr):
    """`_online` for 8-bit keys [TILE, D] and pairs of values [TILE, D / 2]; sums even and odd columns separately."""
    m, mass, p, alpha = _weights(q_tile, k.to(tl.float16), inside, m, mass, 1.0, CAP)
    p = p.to(tl.float16)
    v_even, v_odd = fp8_pairs(v)
    return m, mass, tl.dot(p, v_even, even * alpha), tl.dot(p, v_odd, odd * alpha)


@triton.jit(
    do_not_specialize=["stride_table", "window"],
    do_not_specialize_on_alignment=["block_table", "rows", "seq_lens"],
)
def _decode_kernel(
    q, k_cache, v_cache, out, partial, stats, counters, block_table, rows, seq_lens, qk_weight, rope, kv_scales, sinks,
    stride_q, stride_o, stride_table, window, scale, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, MIN_CHUNK: tl.constexpr,
    FUSED: tl.constexpr, HAS_NORM: tl.constexpr, EPS: tl.constexpr, WINDOWED: tl.constexpr, CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PEEL: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):
    kvh = tl.program_id(0)
    i = tl.program_id(1)
    split = tl.program_id(2)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    TOKEN: tl.constexpr = KV_HEADS * D  # elements per token of one cache
    FP8: tl.constexpr = k_cache.dtype.element_ty == tl.float8e4nv
    v_scale = 1.0
    if FP8:
        k_scale = tl.load(kv_scales + kvh)
        v_scale = tl.load(kv_scales + KV_HEADS + kvh)
        v_pairs = v_cache.to(tl.pointer_type(tl.int16))

    # Lengths, tables and older keys were written at least two kernels ago, so they are read before the wait.
    length = tl.load(seq_lens + i)
    first_key = 0
    if WINDOWED:
        first_key = tl.maximum(length - window, 0)
    if not FUSED:
        length += 1  # the newest token is in the cache too
    old = length - 1  # tokens in the cache
    chunk = tl.maximum(tl.cdiv(tl.cdiv(old - first_key, SPLITS), TILE) * TILE, MIN_CHUNK)
    active = tl.maximum(tl.cdiv(old - first_key, chunk), 1)
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, D)
    h_mask = h < GROUP
    out_at = out + i * stride_o + (kvh * GROUP + h)[:, None] * D + d[None, :]
    if split >= active:
        return  # no wait: the program of split 0 waits for the previous kernel
    if old < (0 if FUSED else 1):
        after_previous(PDL)
        tl.store(out_at, tl.zeros([BLOCK_H, D], out.dtype.element_ty), mask=h_mask[:, None])
        return
    start = first_key + split * chunk
    end = tl.minimum(start + chunk, old)
    table = block_table + tl.load(rows + i).to(tl.int64) * stride_table
    t = tl.arange(0, TILE)
    token0 = start + t
    if PEEL:
        k0 = _load_tile(k_cache, table, token0, token0 < end, kvh, BLOCK_SIZE, TOKEN, D)
        if FP8:
            v0 = _load_tile(v_pairs, table, token0, token0 < end, kvh, BLOCK_SIZE, TOKEN // 2, D // 2)
        else:
            v0 = _load_tile(v_cache, table, token0, token0 < end, kvh, BLOCK_SIZE, TOKEN, D)
    after_previous(PDL, NEXT=PEEL)  # few programs let the next kernel start early; of many, it would take the room
    q_row = q + i.to(tl.int64) * stride_q
    m = tl.full([BLOCK_H], -1.0e30, tl.float32)
    mass = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, D], tl.float32)
    if FUSED:
        position = old.to(tl.int64)
        q_tile = norm_rope(q_row, qk_weight, rope, position, kvh * GROUP + h, h_mask, EPS, HAS_NORM, D)
        if split == 0:
            one = tl.arange(0, 1)
            k_new = norm_rope(q_row, qk_weight, rope, position, HEADS + kvh + one, one < 1, EPS, HAS_NORM, D)
            v_new = tl.load(q_row + (HEADS + KV_HEADS + kvh) * D + d)
            if FP8:
                k_new = (k_new.to(tl.float32) * tl.div_rn(1.0, k_scale)).to(tl.float8e4nv)
                v_new = (v_new.to(tl.float32) * tl.div_rn(1.0, v_scale)).to(tl.float8e4nv)
            block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
            slot = (block * BLOCK_SIZE + position % BLOCK_SIZE) * TOKEN + kvh * D
            tl.store(k_cache + slot + one[:, None] * D + d[None, :], k_new)
            tl.store(v_cache + slot + d, v_new)
            m = tl.sum(q_tile.to(tl.float32) * k_new.to(tl.float32), 1) * (scale * k_scale if FP8 else scale)
            m = capped(m, CAP)
            mass = tl.full([BLOCK_H], 1.0, tl.float32)
            acc = tl.zeros([BLOCK_H, D], tl.float32) + v_new.to(tl.float32)[None, :]
    else:
        q_tile = tl.load(q_row + (kvh * GROUP + h)[:, None] * D + d[None, :], mask=h_mask[:, None], other=0.0)
    if HAS_SINKS:  # noqa: SIM102 (a condition at compile time)
        if split == 0:  # the sink of a query head is one more score, without a value
            sink = tl.load(sinks + kvh * GROUP + h, mask=h_mask, other=0.0).to(tl.float32) * 1.4426950408889634
            top = tl.maximum(m, sink)
            kept = tl.exp2(m - top)
            mass = mass * kept + tl.exp2(sink - top)
            acc = acc * kept[:, None]
            m = top
    if FP8:
        # float16 holds e4m3 numbers exactly, and the conversion is one instruction. The scaled query fits float16.
        q_tile = (q_tile.to(tl.float32) * (scale * k_scale)).to(tl.float16)
        scale = 1.0

    if FP8:
        first, newest = m, acc
        even = tl.zeros([BLOCK_H, D // 2], tl.float32)
        odd = tl.zeros([BLOCK_H, D // 2], tl.float32)
        if PEEL:
            m, mass, even, odd = _online_fp8(q_tile, k0, v0, token0 < end, m, mass, even, odd, CAP)
            start += TILE
        for n0 in tl.range(start, end, TILE, num_stages=STAGES):
            token = n0 + t
            inside = token < end
            k = _load_tile(k_cache, table, token, inside, kvh, BLOCK_SIZE, TOKEN, D)
            v = _load_tile(v_pairs, table, token, inside, kvh, BLOCK_SIZE, TOKEN // 2, D // 2)
            m, mass, even, odd = _online_fp8(q_tile, k, v, inside, m, mass, even, odd, CAP)
        acc = tl.interleave(even, odd) + newest * tl.exp2(first - m)[:, None]
    else:
        if PEEL:
            m, mass, acc = _online(q_tile, k0, v0, token0 < end, m, mass, acc, scale, CAP)
            start += TILE
        for n0 in tl.range(start, end, TILE, num_stages=STAGES):
            token = n0 + t
            inside = token < end
            k = _load_tile(k_cache, table, token, inside, kvh, BLOCK_SIZE, TOKEN, D)
            v = _load_tile(v_cache, table, token, inside, kvh, BLOCK_SIZE, TOKEN, D)
            m, mass, acc = _online(q_tile, k, v, inside, m, mass, acc, scale, CAP)

    if active == 1:
        tl.store(out_at, (acc / mass[:, None] * v_scale).to(out.dtype.element_ty), mask=h_mask[:, None])
        return
    pair = i * KV_HEADS + kvh
    base = (pair * SPLITS).to(tl.int64)
    tl.store(partial + (base + split) * GROUP * D + h[:, None] * D + d[None, :], acc, mask=h_mask[:, None])
    tl.store(stats + (base + split) * 2 * GROUP + h, m, mask=h_mask)
    tl.store(stats + (base + split) * 2 * GROUP + GROUP + h, mass, mask=h_mask)
    tl.debug_barrier()  # all threads must write their parts before the counter is incremented
    arrived = tl.atomic_add(counters + pair, 1, sem="acq_rel")
    if arrived == active - 1:
        tl.debug_barrier()
        tl.store(counters + pair, 0)
        s = tl.arange(0, SPLITS)
        live = s < active
        for g in tl.static_range(GROUP):
            at = stats + (base + s) * 2 * GROUP + g
            m_s = tl.load(at, mask=live, other=-1.0e30, volatile=True)
            mass_s = tl.load(at + GROUP, mask=live, other=0.0, volatile=True)
            weight = tl.exp2(m_s - tl.max(m_s, 0))
            a = tl.load(
                partial + (base + s)[:, None] * GROUP * D + g * D + d[None, :], mask=live[:, None], other=0.0,
                volatile=True,
            )
            result = tl.sum(a * weight[:, None], 0) / tl.sum(mass_s * weight, 0)
            tl.store(out + i * stride_o + (kvh * GROUP + g) * D + d, (result * v_scale).to(out.dtype.element_ty))


class DecodeWorkspace:
    """Scratch memory for the splits, allocated once: graphs need fixed addresses. A launch resets the counters to 0."""

    def __init__(
        self, max_rows: int, kv_heads: int, group: int, head_dim: int, device: torch.device, longest: int = 8192
    ) -> None:
        """`longest`: the number of keys of the longest possible sequence."""
        self.longest = longest
        parts = max(n * kv_heads * num_splits(n, kv_heads, longest) for n in range(1, max_rows + 1))
        self.partial = torch.empty(parts * group * head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(parts * group * 2, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_rows * kv_heads, dtype=torch.int32, device=device)


def num_splits(n: int, kv_heads: int, longest: int) -> int:
    """Returns the number of splits per (sequence, kv head), a power of two. With too many splits, some programs have no
    keys. Such programs cost time too: 6 of 58 us at 64 sequences of 900 tokens. With too few splits, one long sequence
    among many short sequences is read by too few programs."""
    least = 2 if longest <= 8192 else 4
    return max(least, min(MAX_SPLITS, 1 << (max(1, PROGRAMS // (n * kv_heads)).bit_length() - 1)))


class Form(NamedTuple):
    """The compile-time parameters of a launch. They depend on the number of sequences, not on lengths."""

    tile: int  # keys in a tile
    warps: int
    stages: int
    min_chunk: int  # the fewest keys of a split
    splits: int
    peel: bool  # True: load the first tile before the previous kernel has ended


def form_for(n: int, kv_heads: int, longest: int) -> Form:
    """Returns the form that was fastest for n sequences in measured steps of Qwen3-8B, at the GPU's sustained clock."""
    pairs, splits = n * kv_heads, num_splits(n, kv_heads, longest)
    if pairs <= 64:  # latency matters: load the first tile before the previous kernel has ended
        return Form(64, 4, 3, 64, splits, True)
    if pairs >= 1792:  # many programs: small ones keep all multiprocessors busy until the end
        return Form(32, 1, 4, 1024, splits, False)
    return Form(64, 2, 4, 256 if pairs < 512 else 1024, splits, False)


def form_for_fp8(n: int, kv_heads: int, longest: int) -> Form:
    """Like `form_for`, for 8-bit keys and values: the same number of bytes holds twice as many tokens."""
    pairs, splits = n * kv_heads, num_splits(n, kv_heads, longest)
    if pairs <= 64:
        return Form(64, 2, 3, 64, splits, True)
    if pairs >= 1792:
        return Form(32, 1, 6, 1024, splits, False)
    return Form(32, 1, 4, 256, splits, False) if pairs < 512 else Form(128, 2, 3, 1024, splits, False)


def decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor, workspace: DecodeWorkspace,
    block_table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, scale: float, group: int, *,
    fused: tuple[torch.Tensor | None, torch.Tensor, float] | None = None, kv_scales: torch.Tensor | None = None,
    window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None,
) -> None:
    """Write the output of attention to `out` [n, heads * d].

    q: [n, heads * d] (any row stride); or, with `fused` = (qk_weight [heads + kv_heads, d] or None, rope table fp32
    [positions, d], eps), the result [n, (heads + 2 kv_heads) * d] of the qkv projection. With `fused` the kernel starts
    before the previous kernel has ended, so the previous kernel must not write lengths or cache entries.
    kv_scales: fp32 [2, kv_heads], the scales of an 8-bit cache (engine/attention/kv_fp8.py). window: only the last
    `window` keys of a sequence are read; 0: all. softcap, sinks [heads]: as in engine/attention/torch_backend.py.
    """
    n = seq_lens.shape[0]
    block_size, kv_heads, head_dim = k_cache.shape[1:]
    form = (form_for if kv_scales is None else form_for_fp8)(n, kv_heads, workspace.longest)
    qk_weight, rope, eps = fused or (None, None, 0.0)
    early = overlap()["PDL"] and fused is not None
    _decode_kernel[(kv_heads, n, form.splits)](
        q, k_cache, v_cache, out, workspace.partial, workspace.stats, workspace.counters, block_table, rows, seq_lens,
        qk_weight, rope, kv_scales, sinks, q.stride(0), out.stride(0), block_table.stride(0), window, scale * LOG2E,
        KV_HEADS=kv_heads, GROUP=group, D=head_dim, BLOCK_SIZE=block_size,
        BLOCK_H=max(16, triton.next_power_of_2(group)), TILE=form.tile, SPLITS=form.splits, MIN_CHUNK=form.min_chunk,
        FUSED=fused is not None, HAS_NORM=qk_weight is not None, EPS=eps, WINDOWED=window > 0, CAP=softcap * LOG2E,
        HAS_SINKS=sinks is not None,
        PEEL=form.peel, STAGES=form.stages, PDL=early, num_warps=form.warps, launch_pdl=early,
    )
