"""Causal attention of prefill chunks over a paged cache, with or without a cached prefix.

Query heads that share a key/value head are packed into one tile: BLOCK_M rows hold BLOCK_M / GROUP tokens, and each
tile of keys is loaded once for all these rows. For short chunks after long contexts the keys are split over programs;
the program that finishes last combines the splits, as in decode_attention.

The bulk tensor copy engine reads the chunk's own keys and values, in whole tiles, from the output of the projection.
Only the cached context is read through the block table. Steps without cached context use a variant of the kernel
without the loops over the cache.

Shapes: q [T, heads, d] with one sequence after another, cu_seqlens int32 [n + 1]; caches [blocks, block_size, kv_heads,
d]; block_table int32 [n, max_blocks]; seq_lens int32 [n]. Token i of a sequence sees keys 0 ... seq_len - q_len + i.
The grid is (kv_heads, tiles, splits) with tiles = T // (tokens per tile) + n, which is enough for any division of T
into n sequences. The kernel finds the sequence of each tile, so one captured graph serves all these divisions.

On an H200, 4 prompts of 4,096 tokens run at 502 TFLOP/s (MEASURED.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.card import OVERLAP, card, fitting
from engine.kernels.decode_attention import capped

LOG2E = 1.4426950408889634
BLOCK_M = 64  # rows of a tile: tokens times the query heads that share a key head
PROGRAMS = 256  # keep a GPU busy
MAX_SPLIT_TILES, MAX_SPLITS = 64, 32
MAX_PARTS = 512  # parts of BLOCK_M rows, for each key head, that fit into the scratch memory: tiles * splits


@triton.jit
def _softmax_step(q, k, v, seen, m, mass, acc, scale, CAP: tl.constexpr, MASKED: tl.constexpr):
    """Add one tile of keys [TILE, D] to the running softmax; `seen` [BLOCK_M, TILE]: which query sees which key."""
    k = k.to(q.dtype)  # changes k and v only if they have 8 bits
    v = v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k))
    if CAP > 0:
        scores = capped(scores * scale, CAP)
        scale = 1.0
    if MASKED:
        scores = tl.where(seen, scores, -1.0e30)
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - m_new[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)  # for a query that sees no key, the fused multiply-add above can overflow exp2
    alpha = tl.exp2(m - m_new)
    mass = mass * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return m_new, mass, acc


@triton.jit
def _over_cache(q, m, mass, acc, k_cache, v_cache, table, position, low, high, end, scale, kvh,
                window, TOKEN: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
                WINDOWED: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
                STAGES: tl.constexpr):
    """Add keys [low, high) of the cache to the running softmax. MASKED: some queries must not see some keys."""
    d = tl.arange(0, D)
    t = tl.arange(0, TILE)
    for n0 in tl.range(low, high, TILE, num_stages=STAGES):
        token = n0 + t
        if MASKED:
            block = tl.load(table + token // BLOCK_SIZE, mask=token < end, other=0).to(tl.int64)
        else:
            block = tl.load(table + token // BLOCK_SIZE).to(tl.int64)
        offset = (block * BLOCK_SIZE + token % BLOCK_SIZE) * TOKEN + kvh * D
        k = tl.load(k_cache + offset[:, None] + d[None, :])
        v = tl.load(v_cache + offset[:, None] + d[None, :])
        if MASKED:
            # A key at or after `end` has weight 0, but 0 * NaN is NaN, and free blocks may hold NaN.
            v = tl.where((token < end)[:, None], v, 0.0)
        seen = (token[None, :] <= position[:, None]) & (token < end)[None, :]
        if WINDOWED:
            seen = seen & (token[None, :] > position[:, None] - window)
        m, mass, acc = _softmax_step(q, k, v, seen, m, mass, acc, scale, CAP, MASKED)
    return m, mass, acc


@triton.jit
def _over_chunk(q, m, mass, acc, keys, values, first, query, low, high, count, scale, kvh, window, D: tl.constexpr,
                TILE: tl.constexpr, WINDOWED: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
                STAGES: tl.constexpr):
    """Add keys [low, high) of the chunk to the running softmax. The rows of the chunk's sequence begin at `first`."""
    t = tl.arange(0, TILE)
    for n0 in tl.range(low, high, TILE, num_stages=STAGES):
        k = keys.load([first + n0, kvh * D])
        v = values.load([first + n0, kvh * D])
        token = n0 + t
        if MASKED:
            v = tl.where((token < count)[:, None], v, 0.0)  # other rows are the next sequence's, and may hold NaN
        seen = (token[None, :] <= query[:, None]) & (token < count)[None, :]
        if WINDOWED:
            seen = seen & (token[None, :] > query[:, None] - window)
        m, mass, acc = _softmax_step(q, k, v, seen, m, mass, acc, scale, CAP, MASKED)
    return m, mass, acc


@triton.jit(
    do_not_specialize=["n", "first", "stride_table", "window", "splits"],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "cu_seqlens"],
)
def _prefill_kernel(
    q, keys, values, k_cache, v_cache, out, partial, stats, counters, block_table, seq_lens, cu_seqlens, kv_scales,
    sinks, n, first, stride_q, stride_o, stride_table, window, splits, scale, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    MOST_SPLITS: tl.constexpr, SEQS: tl.constexpr, DENSE: tl.constexpr, CONTEXT: tl.constexpr, WINDOWED: tl.constexpr,
    CAP: tl.constexpr, HAS_SINKS: tl.constexpr, STAGES: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    TOKEN: tl.constexpr = KV_HEADS * D
    FP8: tl.constexpr = k_cache.dtype.element_ty == tl.float8e4nv
    kvh = tl.program_id(0)
    index = tl.num_programs(1) - 1 - tl.program_id(1)  # long tiles first: later tiles of a sequence see more keys
    split = tl.program_id(2)
    s = tl.arange(0, SEQS)
    begins = tl.load(cu_seqlens + first + s, mask=s < n, other=0)
    base = tl.load(cu_seqlens + first)
    tile_of = tl.where(s < n, (begins - base) // BLOCK_Q + s, 1 << 30)
    seq = tl.sum((tile_of <= index).to(tl.int32), 0) - 1 + first
    q_start = tl.load(cu_seqlens + seq)
    q_len = tl.load(cu_seqlens + seq + 1) - q_start
    tile = index - ((q_start - base) // BLOCK_Q + seq - first)
    if tile * BLOCK_Q >= q_len:
        return
    length = tl.load(seq_lens + seq)
    context = length - q_len

    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    query = tile * BLOCK_Q + r // GROUP
    live = (query < q_len) & (r < BLOCK_Q * GROUP)  # if GROUP does not divide BLOCK_M, some rows are unused
    head = kvh * GROUP + r % GROUP
    row = (q_start + query).to(tl.int64)
    q_tile = tl.load(q + (row * stride_q + head * D)[:, None] + d[None, :], mask=live[:, None], other=0.0)
    table = block_table + seq.to(tl.int64) * stride_table

    end = tl.minimum(context + (tile + 1) * BLOCK_Q, length)  # this tile sees keys 0 ... end - 1
    low = 0
    if WINDOWED:
        low = tl.maximum(context + tile * BLOCK_Q - window + 1, 0)
    high = end
    if MOST_SPLITS > 1:
        # With more than 8 splits, each has at least 512 keys, so what is combined stays small beside what is read.
        chunk = tl.maximum(tl.cdiv(end - low, splits), tl.minimum(tl.cdiv(end - low, 8), 512))
        chunk = tl.maximum(tl.cdiv(chunk, TILE) * TILE, 128)
        active = tl.cdiv(end - low, chunk)
        if split >= active:
            return
        low += split * chunk
        high = tl.minimum(low + chunk, end)
    m = tl.full([BLOCK_M], -1.0e30, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    if HAS_SINKS:  # noqa: SIM102 (a condition at compile time)
        if split == 0:  # the sink of a query head is one more score, without a value
            m = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
            mass = tl.full([BLOCK_M], 1.0, tl.float32)
    position = context + query
    q_cache = q_tile
    scale_cache = scale
    if FP8:  # as in decode_attention: the query is multiplied by the keys' scale, the sum by the values' scale
        q_cache = (q_tile.to(tl.float32) * (scale * tl.load(kv_scales + kvh))).to(tl.float16)
        scale_cache = 1.0
    if DENSE:
        # Add the context from the cache, then the chunk itself from the output of the projection.
        if CONTEXT:
            cached = tl.minimum(high, context)
            whole = tl.maximum(low + (cached - low) // TILE * TILE, low)
            m, mass, acc = _over_cache(
                q_cache, m, mass, acc, k_cache, v_cache, table, position, low, whole, context, scale_cache, kvh, window,
                TOKEN, D, BLOCK_SIZE, TILE, WINDOWED, CAP, WINDOWED, STAGES,
            )
            m, mass, acc = _over_cache(
                q_cache, m, mass, acc, k_cache, v_cache, table, position, whole, cached, cached, scale_cache, kvh,
                window, TOKEN, D, BLOCK_SIZE, TILE, WINDOWED, CAP, True, 1,
            )
            if FP8:
                acc *= tl.load(kv_scales + KV_HEADS + kvh)
        begin = tl.maximum(low - context, 0)
        stop = high - context
        diagonal = tl.maximum(begin + (tl.minimum(tile * BLOCK_Q + 1, stop) - begin) // TILE * TILE, begin)
        m, mass, acc = _over_chunk(
            q_tile, m, mass, acc, keys, values, q_start, query, begin, diagonal, stop, scale, kvh, window, D, TILE,
            WINDOWED, CAP, WINDOWED, STAGES,
        )
        m, mass, acc = _over_chunk(
            q_tile, m, mass, acc, keys, values, q_start, query, diagonal, stop, stop, scale, kvh, window, D, TILE,
            WINDOWED, CAP, True, 1,
        )
    else:
        unmasked = tl.minimum(context + tile * BLOCK_Q + 1, high)
        whole = tl.maximum(low + (unmasked - low) // TILE * TILE, low)
        m, mass, acc = _over_cache(
            q_cache, m, mass, acc, k_cache, v_cache, table, position, low, whole, high, scale_cache, kvh, window, TOKEN,
            D, BLOCK_SIZE, TILE, WINDOWED, CAP, WINDOWED, STAGES,
        )
        m, mass, acc = _over_cache(
            q_cache, m, mass, acc, k_cache, v_cache, table, position, whole, high, high, scale_cache, kvh, window,
            TOKEN, D, BLOCK_SIZE, TILE, WINDOWED, CAP, True, 1,
        )
        if FP8:
            acc *= tl.load(kv_scales + KV_HEADS + kvh)
    o_at = out + (row * stride_o + head * D)[:, None] + d[None, :]
    if MOST_SPLITS == 1:
        tl.store(o_at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=live[:, None])
    else:
        if active == 1:
            tl.store(o_at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=live[:, None])
            return
        cell = (index * KV_HEADS + kvh) * splits
        tl.store(partial + (cell + split).to(tl.int64) * BLOCK_M * D + r[:, None] * D + d[None, :], acc)
        tl.store(stats + (cell + split) * 2 * BLOCK_M + r, m)
        tl.store(stats + (cell + split) * 2 * BLOCK_M + BLOCK_M + r, mass)
        tl.debug_barrier()  # all threads must write their parts before the counter increases
        arrived = tl.atomic_add(counters + index * KV_HEADS + kvh, 1, sem="acq_rel")
        if arrived == active - 1:
            tl.debug_barrier()
            tl.store(counters + index * KV_HEADS + kvh, 0)
            i = tl.arange(0, MOST_SPLITS)[:, None]
            at_stats = stats + (cell + i) * 2 * BLOCK_M + r[None, :]
            there = (i < active) & (r >= 0)[None, :]
            tops = tl.load(at_stats, mask=there, other=-1.0e30, volatile=True)
            masses = tl.load(at_stats + BLOCK_M, mask=there, other=0.0, volatile=True)
            top = tl.max(tops, 0)
            mass = tl.sum(tl.exp2(tops - top[None, :]) * masses, 0)
            acc = tl.zeros([BLOCK_M, D], tl.float32)
            for k0 in tl.range(0, active, 4):
                for j in tl.static_range(4):  # unrolled: the loads of several splits are on their way together
                    k = k0 + j
                    here = (r >= 0) & (k < active)
                    weight = tl.exp2(tl.load(stats + (cell + k) * 2 * BLOCK_M + r, mask=here, other=-1.0e30) - top)
                    at = partial + (cell + k).to(tl.int64) * BLOCK_M * D + r[:, None] * D + d[None, :]
                    acc += weight[:, None] * tl.load(at, mask=here[:, None], other=0.0)
            tl.store(o_at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=live[:, None])


class PrefillWorkspace:
    """Scratch memory for the splits, allocated once. The counters are 0 before and after each launch."""

    def __init__(self, kv_heads: int, head_dim: int, device: torch.device) -> None:
        rows = kv_heads * MAX_PARTS * BLOCK_M
        self.partial = torch.empty(rows * head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(rows * 2, dtype=torch.float32, device=device)
        self.counters = torch.zeros(MAX_SPLIT_TILES * kv_heads, dtype=torch.int32, device=device)


def num_splits(tiles: int, kv_heads: int) -> int:
    """Returns the largest number of programs that share the keys of a tile: a power of two."""
    splits = 1
    while splits < MAX_SPLITS and tiles * kv_heads * splits < PROGRAMS:
        splits *= 2
    return splits


def prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor, workspace: PrefillWorkspace,
    block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens: torch.Tensor, scale: float, *,
    first: int = 0, max_seq_len: int, dense: tuple[torch.Tensor, torch.Tensor] | None = None, splits: int | None = None,
    kv_scales: torch.Tensor | None = None, fresh: bool = False, window: int = 0, softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write attention of sequences `first` ... n - 1 to the rows of their tokens in `out` [T, heads * d].

    The sequences before `first` have at most one token each. Without `splits`, max_seq_len and the number of tiles
    decide whether keys are split. dense: this step's rotated keys and values [T, kv_heads, d], views of the
    projection's output; None: the kernel reads them from the cache. kv_scales: fp32 [2, kv_heads] of an 8-bit cache
    (engine/attention/kv_fp8.py); `dense` must then hold the rounded values, as the cache does. fresh: no chunk follows
    a cached context; with `dense`, the cache is not read. window, softcap, sinks: as in decode_attention.
    """
    block_size, kv_heads, head_dim = k_cache.shape[1:]
    group = q.shape[1] // kv_heads
    n, tokens = seq_lens.shape[0] - first, q.shape[0]
    block_m = max(BLOCK_M, triton.next_power_of_2(group))
    tiles = tokens // (block_m // group) + n
    if tiles > MAX_SPLIT_TILES:
        splits = 1  # this many tiles are enough programs; their splits would not fit into the workspace
    elif splits is None:
        splits = num_splits(tiles, kv_heads) if max_seq_len >= 512 else 1
    splits = max(1, min(splits, MAX_PARTS * BLOCK_M // (tiles * block_m)))
    tile = 64 if head_dim <= 128 else 32
    # A stage holds a tile of keys and one of values; the queries stay in shared memory, too.
    stages = fitting(3, 2 * tile * head_dim * k_cache.dtype.itemsize, block_m * head_dim * q.dtype.itemsize)
    keys = values = None
    if card().capability < OVERLAP:
        dense = None  # Triton would make loads of single numbers from descriptors
    if dense is not None:
        keys, values = (
            TensorDescriptor(x, [x.shape[0], kv_heads * head_dim], [x.stride(0), 1], [tile, head_dim]) for x in dense
        )
    _prefill_kernel[(kv_heads, tiles, splits)](
        q, keys, values, k_cache, v_cache, out, workspace.partial, workspace.stats, workspace.counters, block_table,
        seq_lens, cu_seqlens, kv_scales, sinks, n, first, q.stride(0), out.stride(0), block_table.stride(0), window,
        splits, scale * LOG2E,
        KV_HEADS=kv_heads, GROUP=group, D=head_dim, BLOCK_SIZE=block_size, BLOCK_M=block_m, TILE=tile,
        MOST_SPLITS=MAX_SPLITS if splits > 1 else 1, SEQS=triton.next_power_of_2(max(n, 256)),
        DENSE=dense is not None, CONTEXT=not fresh, WINDOWED=window > 0, CAP=softcap * LOG2E,
        HAS_SINKS=sinks is not None, STAGES=stages, num_warps=4,
    )
