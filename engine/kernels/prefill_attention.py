"""Causal attention of chunks of queries over a paged cache (prefill, and extends after a cached prefix).

Query heads that share a key/value head are packed into one tile: BLOCK_M rows are BLOCK_M / GROUP tokens, so every
tile of keys is loaded once for all of them. Short extends over long contexts split the keys over programs (SPLITS > 1); the
program that finishes last combines, as in decode_attention.

Shapes: q [T, heads, d] with sequences laid end to end, cu_seqlens int32 [n + 1]; caches [blocks, block_size, kv_heads,
d]; block_table int32 [n, max_blocks]; seq_lens int32 [n]. Token i of a sequence sees keys 0 ... seq_len - q_len + i. The
grid is (tiles, kv_heads, splits) with tiles = T // tokens per tile + n, enough for any division of T into n
sequences; which sequence a tile belongs to is found on the device, so a captured graph serves every such batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
SPLIT_BLOCK_M = 64
MAX_SPLIT_TILES = 64
MAX_SPLITS = 8


@triton.jit
def _attend(q, m, l, acc, k_cache, v_cache, table, position, low, high, length, scale, kvh,
            TOKEN: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
            MASKED: tl.constexpr, STAGES: tl.constexpr):
    """Online softmax over keys [low, high); MASKED where a key may lie after a query or past the end."""
    d = tl.arange(0, D)
    t = tl.arange(0, TILE)
    for n0 in tl.range(low, high, TILE, num_stages=STAGES):
        token = n0 + t
        if MASKED:
            block = tl.load(table + token // BLOCK_SIZE, mask=token < length, other=0).to(tl.int64)
        else:
            block = tl.load(table + token // BLOCK_SIZE).to(tl.int64)
        offset = (block * BLOCK_SIZE + token % BLOCK_SIZE) * TOKEN + kvh * D
        k = tl.load(k_cache + offset[None, :] + d[:, None])
        scores = tl.dot(q, k)
        if MASKED:
            scores = tl.where(token[None, :] <= position[:, None], scores, -1.0e30)
        m_new = tl.maximum(m, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        v = tl.load(v_cache + offset[:, None] + d[None, :])
        if MASKED:
            # A key past the end has weight 0, but 0 * NaN is NaN: blocks nobody owns may hold anything.
            v = tl.where((token < length)[:, None], v, 0.0)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        m = m_new
    return m, l, acc


@triton.jit(do_not_specialize=["n", "first", "stride_table"])
def _prefill_kernel(
    q, k_cache, v_cache, out, partial, stats, counters, block_table, seq_lens, cu_seqlens, n, first,
    stride_q, stride_o, stride_table, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, SEQS: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    TOKEN: tl.constexpr = KV_HEADS * D
    kvh = tl.program_id(1)
    split = tl.program_id(2)
    tiles = tl.num_programs(0)
    index = tiles - 1 - tl.program_id(0)  # the longest first: later tiles of a sequence see more keys
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
    q_token = tile * BLOCK_Q + r // GROUP
    live = q_token < q_len
    head = kvh * GROUP + r % GROUP
    position = context + q_token
    row = (q_start + q_token).to(tl.int64)
    q_tile = tl.load(q + (row * stride_q + head * D)[:, None] + d[None, :], mask=live[:, None], other=0.0)
    table = block_table + seq.to(tl.int64) * stride_table

    end = tl.minimum(context + (tile + 1) * BLOCK_Q, length)  # keys this tile sees
    full = (context + tile * BLOCK_Q + 1) // TILE * TILE  # up to here every query sees every key
    low = 0
    high = end
    if SPLITS > 1:
        chunk = tl.maximum(tl.cdiv(tl.cdiv(end, SPLITS), TILE) * TILE, 128)
        active = tl.cdiv(end, chunk)
        if split >= active:
            return
        low = split * chunk
        high = tl.minimum(low + chunk, end)
    m = tl.full([BLOCK_M], -1.0e30, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    middle = tl.maximum(tl.minimum(full, high), low)
    m, l, acc = _attend(q_tile, m, l, acc, k_cache, v_cache, table, position, low, middle, length, scale, kvh,
                        TOKEN, D, BLOCK_SIZE, TILE, False, STAGES)
    m, l, acc = _attend(q_tile, m, l, acc, k_cache, v_cache, table, position, middle, high, length, scale, kvh,
                        TOKEN, D, BLOCK_SIZE, TILE, True, STAGES)
    o_at = out + (row * stride_o + head * D)[:, None] + d[None, :]
    if SPLITS == 1:
        tl.store(o_at, (acc / l[:, None]).to(out.dtype.element_ty), mask=live[:, None])
    else:
        if active == 1:
            tl.store(o_at, (acc / l[:, None]).to(out.dtype.element_ty), mask=live[:, None])
            return
        cell = (index * KV_HEADS + kvh) * SPLITS
        tl.store(partial + (cell + split).to(tl.int64) * BLOCK_M * D + r[:, None] * D + d[None, :], acc)
        tl.store(stats + (cell + split) * 2 * BLOCK_M + r, m)
        tl.store(stats + (cell + split) * 2 * BLOCK_M + BLOCK_M + r, l)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + index * KV_HEADS + kvh, 1, sem="acq_rel")
        if arrived == active - 1:
            tl.debug_barrier()
            tl.store(counters + index * KV_HEADS + kvh, 0)
            top = tl.full([BLOCK_M], -1.0e30, tl.float32)
            for i in range(active):
                top = tl.maximum(top, tl.load(stats + (cell + i) * 2 * BLOCK_M + r, volatile=True))
            acc = tl.zeros([BLOCK_M, D], tl.float32)
            l = tl.zeros([BLOCK_M], tl.float32)
            for i in range(active):
                weight = tl.exp2(tl.load(stats + (cell + i) * 2 * BLOCK_M + r, volatile=True) - top)
                l += weight * tl.load(stats + (cell + i) * 2 * BLOCK_M + BLOCK_M + r, volatile=True)
                a = tl.load(partial + (cell + i).to(tl.int64) * BLOCK_M * D + r[:, None] * D + d[None, :], volatile=True)
                acc += weight[:, None] * a
            tl.store(o_at, (acc / l[:, None]).to(out.dtype.element_ty), mask=live[:, None])


class PrefillWorkspace:
    """Scratch for splits, allocated once. Counters start and end at 0."""

    def __init__(self, kv_heads: int, head_dim: int, device: torch.device) -> None:
        self.max_parts = MAX_SPLIT_TILES * kv_heads * MAX_SPLITS
        self.partial = torch.empty(self.max_parts * SPLIT_BLOCK_M * head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(self.max_parts * SPLIT_BLOCK_M * 2, dtype=torch.float32, device=device)
        self.counters = torch.zeros(MAX_SPLIT_TILES * kv_heads, dtype=torch.int32, device=device)


def prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor, workspace: PrefillWorkspace,
    block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens: torch.Tensor, scale: float, *,
    first: int = 0, tokens: int | None = None, max_seq_len: int, splits: int | None = None, block_m: int | None = None,
    tile: int | None = None, warps: int | None = None, stages: int | None = None,
) -> None:  # fmt: skip
    """Write attention of sequences `first` ... n - 1 to their tokens of `out` [T, heads * d]; `tokens` is how many (default T).

    max_seq_len decides, with the number of tiles, whether keys are split.
    """
    block_size, kv_heads, head_dim = k_cache.shape[1:]
    group = q.shape[1] // kv_heads
    n = seq_lens.shape[0] - first
    tokens = q.shape[0] if tokens is None else tokens
    tiles = tokens // max(1, SPLIT_BLOCK_M // group) + n
    if splits is None:
        splits = 1
        if tiles <= MAX_SPLIT_TILES and max_seq_len >= 512:
            while splits < MAX_SPLITS and tiles * kv_heads * splits < 256:
                splits *= 2
    split = splits > 1
    block_m = block_m or (SPLIT_BLOCK_M if split else 128)
    _prefill_kernel[(tokens // max(1, block_m // group) + n, kv_heads, splits)](
        q, k_cache, v_cache, out, workspace.partial, workspace.stats, workspace.counters, block_table, seq_lens,
        cu_seqlens, n, first, q.stride(0), out.stride(0), block_table.stride(0), scale * LOG2E,
        KV_HEADS=kv_heads, GROUP=group, D=head_dim, BLOCK_SIZE=block_size, BLOCK_M=block_m,
        TILE=tile or (64 if split or head_dim > 128 else 128), SPLITS=splits, SEQS=triton.next_power_of_2(max(n, 256)),
        STAGES=stages or (3 if split else 2), num_warps=warps or (4 if split else 8),
    )  # fmt: skip
