"""The gated delta rule and its causal convolution, over the segments of a step (engine/model/delta.py specifies both).

A head keeps a state S [Dk, Dv]. A token with key k, query q, value v, log decay g and rate b changes it and reads it:

    S = exp(g) S;   S = S + k (b (v - S^T k))^T;   o = S^T q

Decodes and drafts, entries whose segments have one token each, run token by token: each program keeps a slice of the
state in registers (`_step_kernel`), reads it once and writes it at the end of each segment. Other entries run in chunks
of 64 tokens (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" and "Gated
Delta Networks"). With G the sum of g from the chunk's first token to token i, the values that a chunk writes,
d = b (v - S^T k), solve a triangular system:

    (I + A) d = b v - b exp(G) k S;   A[i, j] = b[i] exp(G[i] - G[j]) k[i].k[j] for j < i

What does not depend on S is computed for all chunks at the same time: `_solve_kernel` inverts I + A, `_chunk_kernel`
computes U = (I + A)^-1 b v and W = (I + A)^-1 b exp(G) k, the scores of the chunk's queries and keys, and the scaled
queries and keys. `_scan_kernel` goes through the chunks of an entry with d = U - W S. A chunk ends where its segment
ends. So an entry that begins at a checkpoint computes the same numbers as one that passed it.

The kernels find the segment of each chunk themselves, and an entry's result depends on this entry alone: one captured
graph serves all divisions of a step into entries.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.card import fitting

CHUNK = 64  # tokens; also the number of rows of the tiles
BLOCK = 8  # rows of the diagonal blocks of I + A that are inverted row by row
# Columns of a state in one program, and its warps; of the scan also the stages.
STEP_COLUMNS, STEP_WARPS = 8, 1
SCAN_COLUMNS, SCAN_WARPS, SCAN_STAGES = 64, 4, 3
SOLVE_WARPS, CHUNK_WARPS = 4, 4
# Keys of 16 beside values of 128: with four warps, which multiply by wgmma, Triton 3.6 computed a wrong W on an H200.
NARROW_WARPS = 2  # of _chunk_kernel, if keys or values have fewer than 64 numbers
CONV_TOKENS, CONV_CHANNELS = 16, 128  # in one program
FAR = tl.constexpr(1 << 30)  # behind all tokens


@triton.jit(do_not_specialize=["n", "m"], do_not_specialize_on_alignment=["segments", "cu_segments"])
def _conv_kernel(
    x, weight, conv, out, segments, cu_segments, n, m, stride_x, C, K: tl.constexpr, KEPT: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, N: tl.constexpr,
):
    tile = tl.program_id(0)
    entry = tile
    if TOKENS > 1:
        e = tl.arange(0, N)
        begins = tl.load(cu_segments + e, mask=e < n, other=FAR)
        firsts = tl.load(segments + 4 * begins, mask=begins < m, other=FAR)
        entry = tl.sum(((e < n) & (firsts // TOKENS + e <= tile)).to(tl.int32), 0) - 1
    low = tl.load(cu_segments + entry)
    high = tl.load(cu_segments + entry + 1)
    if low < high:
        first = tl.load(segments + 4 * low)
        source = tl.load(segments + 4 * low + 2).to(tl.int64)
        count = tl.load(segments + 4 * high - 3) - first
        begin = 0
        if TOKENS > 1:
            begin = (tile - first // TOKENS - entry) * TOKENS
        if begin < count:
            c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
            t = begin + tl.arange(0, TOKENS)
            x += first.to(tl.int64) * stride_x
            before = conv + source * C * (K - 1) + c * (K - 1) + (K - 1)
            inside = (t < count)[:, None] & (c < C)[None, :]
            total = tl.zeros([TOKENS, CHANNELS], dtype=tl.float32)
            if begin == 0:  # first the inputs before the entry: so sums have the same order in all tiles
                for tap in tl.static_range(K - 1):
                    at = t - (K - 1) + tap
                    old = tl.load(before[None, :] + at[:, None], mask=inside & (at < 0)[:, None], other=0.0)
                    w = tl.load(weight + c * K + tap, mask=c < C, other=0.0).to(tl.float32)
                    total += old.to(tl.float32) * w[None, :]
            for tap in tl.static_range(K):
                at = t - (K - 1) + tap
                new = tl.load(x + at[:, None] * stride_x + c[None, :], mask=inside & (at >= 0)[:, None], other=0.0)
                w = tl.load(weight + c * K + tap, mask=c < C, other=0.0).to(tl.float32)
                total += new.to(tl.float32) * w[None, :]
            total = total.to(out.dtype.element_ty).to(tl.float32)
            y = total * tl.sigmoid(total)
            tl.store(out + (first + t).to(tl.int64)[:, None] * C + c[None, :], y, mask=inside)
            if begin == 0:
                # The program that reads the source writes all targets: one of them may be the source.
                j = tl.arange(0, KEPT)
                kept = (c < C)[:, None] & (j < K - 1)[None, :]
                last = tl.load(conv + source * C * (K - 1) + c[:, None] * (K - 1) + j[None, :], mask=kept, other=0.0)
                tl.debug_barrier()
                for s in range(low, high):
                    end = tl.load(segments + 4 * s + 1) - first
                    target = tl.load(segments + 4 * s + 3).to(tl.int64)
                    past = end - (K - 1) + j
                    rows = kept & (past >= 0)[None, :]
                    tail = tl.load(x + past[None, :] * stride_x + c[:, None], mask=rows, other=0.0)
                    for tap in tl.static_range(K - 1):  # inputs before the entry's first token
                        earlier = tl.sum(tl.where((j == tap)[None, :], last, 0.0), 1)
                        tail = tl.where((past == tap - (K - 1))[None, :], earlier[:, None].to(tail.dtype), tail)
                    place = conv + target * C * (K - 1) + c[:, None] * (K - 1) + j[None, :]
                    if target > 0:
                        tl.store(place, tail, mask=kept)


def causal_conv(x: torch.Tensor, weight: torch.Tensor, conv: torch.Tensor, states: Any) -> torch.Tensor:
    """Returns silu of the causal convolution of x [T, C] with weight [C, K]; engine/model/delta.py specifies it. conv
    [slots, C, K - 1]: the last inputs before each segment's source, written for each segment's target."""
    tokens, channels = x.shape
    taps = weight.shape[1]
    n, m = len(states.cu_segments) - 1, len(states.segments)
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    rows = 1 if tokens == n == m else CONV_TOKENS
    tiles = n if rows == 1 else tokens // rows + n
    _conv_kernel[(tiles, triton.cdiv(channels, CONV_CHANNELS))](
        x, weight, conv, out, states.segments, states.cu_segments, n, m, x.stride(0), channels, K=taps,
        KEPT=triton.next_power_of_2(taps - 1), TOKENS=rows, CHANNELS=CONV_CHANNELS,
        N=triton.next_power_of_2(max(n, 32)), num_warps=4,
    )
    return out


@triton.jit
def _unit(x, EPS: tl.constexpr):
    """Returns the rows of x [rows, D], or a vector [D], with length 1."""
    return x * tl.rsqrt(tl.sum(x * x, len(x.shape) - 1, keep_dims=True) + EPS)


@triton.jit(do_not_specialize_on_alignment=["segments", "cu_segments"])
def _step_kernel(
    q, k, v, g, beta, out, pool, segments, cu_segments, stride_q, stride_k, stride_v, SCALE: tl.constexpr,
    EPS: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    PARTS: tl.constexpr = DV // COLUMNS
    head = tl.program_id(0) // PARTS
    entry = tl.program_id(1)
    low = tl.load(cu_segments + entry)
    high = tl.load(cu_segments + entry + 1)
    tokens = 0
    if low < high:
        tokens = tl.load(segments + 4 * high - 3) - tl.load(segments + 4 * low)
    if (low < high) & (tokens == high - low):  # others: _scan_kernel
        i = tl.arange(0, DK)
        j = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
        cell = head * DK * DV + j[:, None] * DK + i[None, :]
        source = tl.load(segments + 4 * low + 2).to(tl.int64)
        state = tl.load(pool + source * (HEADS * DK * DV) + cell)
        key_at = head // (HEADS // KEY_HEADS) * DK + i
        for s in range(low, high):
            t = tl.load(segments + 4 * s).to(tl.int64)
            target = tl.load(segments + 4 * s + 3).to(tl.int64)
            key = _unit(tl.load(k + t * stride_k + key_at).to(tl.float32), EPS)
            query = _unit(tl.load(q + t * stride_q + key_at).to(tl.float32), EPS) * SCALE
            value = tl.load(v + t * stride_v + head * DV + j).to(tl.float32)
            state *= tl.exp(tl.load(g + t * HEADS + head))
            change = (value - tl.sum(state * key[None, :], 1)) * tl.load(beta + t * HEADS + head)
            state += change[:, None] * key[None, :]
            tl.store(out + (t * HEADS + head) * DV + j, tl.sum(state * query[None, :], 1))
            if target > 0:
                tl.store(pool + target * (HEADS * DK * DV) + cell, state)


@triton.jit
def _inverse(a, ROWS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Returns (I + a)^-1 for a strictly lower triangular `a` [ROWS, ROWS]. The diagonal blocks T of the inverse come
    row by row, all blocks at the same time. With N = T times the part of `a` left of these blocks, N^BLOCKS is 0, so
    the inverse is T - N T + N N T - ..."""
    BLOCKS: tl.constexpr = ROWS // BLOCK
    r = tl.arange(0, ROWS)
    own = (r // BLOCK)[:, None, None] == tl.arange(0, BLOCKS)[None, :, None]
    diagonal = tl.sum(tl.where(own, tl.reshape(a, [ROWS, BLOCKS, BLOCK]), 0.0), 1)
    diagonal = tl.reshape(diagonal, [BLOCKS, BLOCK, BLOCK])
    i = tl.arange(0, BLOCK)
    inverse = tl.zeros([BLOCKS, BLOCK, BLOCK], dtype=tl.float32)
    inverse += tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :]
    for row in range(1, BLOCK):
        here = (i == row)[None, :, None]
        factors = tl.sum(tl.where(here, diagonal, 0.0), 1)
        found = tl.sum(factors[:, :, None] * inverse, 1)
        inverse -= tl.where(here, found[:, None, :], 0.0)
    spread = tl.where(own, tl.reshape(inverse, [ROWS, 1, BLOCK]), 0.0)
    spread = tl.reshape(spread, [ROWS, ROWS])
    left = tl.where((r // BLOCK)[:, None] > (r // BLOCK)[None, :], a, 0.0)
    step = -tl.dot(spread, left, input_precision=PRECISION)
    inverse = spread
    for _ in tl.static_range(BLOCKS - 1):
        inverse = tl.dot(step, inverse, spread, input_precision=PRECISION)
    return inverse


@triton.jit
def _chunk_of(chunk, segments, cu_segments, n, m, CHUNK: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Returns (first token, end) of a chunk; end <= first if there is no such chunk, or _step_kernel computes it."""
    s = tl.arange(0, M)
    firsts = tl.load(segments + 4 * s, mask=s < m, other=FAR)
    segment = tl.sum(((s < m) & (firsts // CHUNK + s <= chunk)).to(tl.int32), 0) - 1
    first = tl.load(segments + 4 * segment)
    end = tl.load(segments + 4 * segment + 1)
    begin = first + (chunk - first // CHUNK - segment) * CHUNK
    if end - first == 1:
        e = tl.arange(0, N)
        begins = tl.load(cu_segments + e, mask=e < n, other=FAR)
        entry = tl.sum((begins <= segment).to(tl.int32), 0) - 1
        low = tl.load(cu_segments + entry)
        high = tl.load(cu_segments + entry + 1)
        if tl.load(segments + 4 * high - 3) - tl.load(segments + 4 * low) == high - low:
            end = first
    return begin, end


@triton.jit(do_not_specialize=["n", "m"], do_not_specialize_on_alignment=["segments", "cu_segments"])
def _solve_kernel(
    k, g, beta, scores, segments, cu_segments, n, m, stride_k, EPS: tl.constexpr, KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr, DK: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    EXACT: tl.constexpr,
):
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    begin, end = _chunk_of(chunk, segments, cu_segments, n, m, CHUNK, M, N)
    if begin < end:
        i = tl.arange(0, CHUNK)
        t = (begin + i).to(tl.int64)
        live = begin + i < end
        at = k + t[:, None] * stride_k + (head // (HEADS // KEY_HEADS) * DK + tl.arange(0, DK))[None, :]
        key = _unit(tl.load(at, mask=live[:, None], other=0.0).to(tl.float32), EPS).to(k.dtype.element_ty)
        rate = tl.load(beta + t * HEADS + head, mask=live, other=0.0)
        sums = tl.cumsum(tl.load(g + t * HEADS + head, mask=live, other=0.0), 0)
        a = tl.dot(key, tl.trans(key), input_precision="ieee" if EXACT else None) * rate[:, None]
        a *= tl.exp(tl.where(i[:, None] > i[None, :], sums[:, None] - sums[None, :], float("-inf")))
        inverse = _inverse(a, CHUNK, BLOCK, "ieee" if EXACT else "tf32") * rate[None, :]
        tile = (chunk * HEADS + head).to(tl.int64)
        at_scores = scores + tile * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
        tl.store(at_scores, inverse.to(scores.dtype.element_ty))


@triton.jit(do_not_specialize=["n", "m"], do_not_specialize_on_alignment=["segments", "cu_segments"])
def _chunk_kernel(
    q, k, v, g, written, erased, queries, keys, scores, decays, segments, cu_segments, n, m, stride_q, stride_k,
    stride_v, SCALE: tl.constexpr, EPS: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, CHUNK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr,
):
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    begin, end = _chunk_of(chunk, segments, cu_segments, n, m, CHUNK, M, N)
    if begin < end:
        dtype: tl.constexpr = q.dtype.element_ty
        PRECISION: tl.constexpr = "ieee" if EXACT else None
        i = tl.arange(0, CHUNK)
        d = tl.arange(0, DK)
        c = tl.arange(0, DV)
        t = (begin + i).to(tl.int64)
        live = begin + i < end
        tile = (chunk * HEADS + head).to(tl.int64)
        at_scores = scores + tile * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
        inverse = tl.load(at_scores)
        log_decay = tl.load(g + t * HEADS + head, mask=live, other=0.0)
        sums = tl.cumsum(log_decay, 0)
        total = tl.sum(log_decay, 0)
        value = tl.load(v + t[:, None] * stride_v + head * DV + c[None, :], mask=live[:, None], other=0.0)
        u = tl.dot(inverse, value, input_precision=PRECISION)
        tl.store(written + tile * CHUNK * DV + c[None, :] * CHUNK + i[:, None], u.to(dtype))
        key_at = head // (HEADS // KEY_HEADS) * DK + d
        cells = tile * CHUNK * DK + i[:, None] * DK + d[None, :]
        key = tl.load(k + t[:, None] * stride_k + key_at[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        key = _unit(key, EPS)
        tl.store(keys + cells, (key * tl.exp(total - sums)[:, None]).to(dtype))
        w = tl.dot(inverse, (key * tl.exp(sums)[:, None]).to(dtype), input_precision=PRECISION)
        tl.store(erased + cells, (-w).to(dtype))
        query = tl.load(q + t[:, None] * stride_q + key_at[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        query = _unit(query, EPS) * SCALE
        p = tl.dot(query.to(dtype), tl.trans(key.to(dtype)), input_precision=PRECISION)
        p *= tl.exp(tl.where(i[:, None] >= i[None, :], sums[:, None] - sums[None, :], float("-inf")))
        tl.debug_barrier()  # all threads have read the inverse
        tl.store(at_scores, p.to(dtype))
        tl.store(queries + cells, (query * tl.exp(sums)[:, None]).to(dtype))
        tl.store(decays + tile, tl.exp(total))


@triton.jit(do_not_specialize_on_alignment=["segments", "cu_segments"])
def _scan_kernel(
    written, erased, queries, keys, scores, decays, out, pool, segments, cu_segments, HEADS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    PARTS: tl.constexpr = DV // COLUMNS
    PRECISION: tl.constexpr = "ieee" if EXACT else None
    head = tl.program_id(0) // PARTS
    entry = tl.program_id(1)
    low = tl.load(cu_segments + entry)
    high = tl.load(cu_segments + entry + 1)
    tokens = 0
    if low < high:
        tokens = tl.load(segments + 4 * high - 3) - tl.load(segments + 4 * low)
    if tokens > high - low:  # others: _step_kernel
        dtype: tl.constexpr = written.dtype.element_ty
        i = tl.arange(0, CHUNK)
        d = tl.arange(0, DK)
        c = tl.program_id(0) % PARTS * COLUMNS + tl.arange(0, COLUMNS)
        by_key = i[:, None] * DK + d[None, :]
        cell = head * DK * DV + c[:, None] * DK + d[None, :]
        source = tl.load(segments + 4 * low + 2).to(tl.int64)
        # Transposed, so that states and changes go from one product to the next in registers.
        state = tl.load(pool + source * (HEADS * DK * DV) + cell)
        for s in range(low, high):
            first = tl.load(segments + 4 * s)
            end = tl.load(segments + 4 * s + 1)
            target = tl.load(segments + 4 * s + 3).to(tl.int64)
            base = first // CHUNK + s
            for j in tl.range(0, tl.cdiv(end - first, CHUNK), num_stages=STAGES):
                tile = ((base + j) * HEADS + head).to(tl.int64)
                w = tl.load(erased + tile * CHUNK * DK + by_key)
                query = tl.load(queries + tile * CHUNK * DK + by_key)
                key = tl.load(keys + tile * CHUNK * DK + by_key)
                score = tl.load(scores + tile * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :])
                u = tl.load(written + tile * CHUNK * DV + c[:, None] * CHUNK + i[None, :])
                small = state.to(dtype)
                change = tl.dot(small, tl.trans(w), u.to(tl.float32), input_precision=PRECISION).to(dtype)
                o = tl.dot(small, tl.trans(query), input_precision=PRECISION)
                o = tl.dot(change, tl.trans(score), o, input_precision=PRECISION)
                state = tl.dot(change, key, state * tl.load(decays + tile), input_precision=PRECISION)
                t = first + j * CHUNK + i
                at = (t.to(tl.int64)[:, None] * HEADS + head) * DV + c[None, :]
                tl.store(out + at, tl.trans(o.to(dtype)), mask=(t < end)[:, None])
            if target > 0:
                tl.store(pool + target * (HEADS * DK * DV) + cell, state)


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, recurrent: torch.Tensor,
    states: Any, eps: float = 1e-6,
) -> torch.Tensor:
    """Returns the output [T, Hv, Dv] of the gated delta rule; engine/model/delta.py specifies it. q, k [T, Hk, Dk] and
    v [T, Hv, Dv], in rows of any stride; g, beta fp32 [T, Hv]; recurrent fp32 [slots, Hv, Dk, Dv], with contiguous
    columns, read at each entry's source and written at the target of each segment. Dk and Dv are 16, 32 … 256."""
    tokens, key_heads, dk = q.shape
    heads, dv = v.shape[1:]
    n, m = len(states.cu_segments) - 1, len(states.segments)
    captured = states.host is None
    # In a captured graph, tokens of padding may belong to no sequence: they must not be NaN.
    make = torch.zeros if captured and tokens > n else torch.empty
    out = make(tokens, heads, dv, dtype=v.dtype, device=v.device)
    shape = {"HEADS": heads, "DK": dk, "DV": dv}
    norm = {"SCALE": dk**-0.5, "EPS": eps, "KEY_HEADS": key_heads}
    strides = q.stride(0), k.stride(0), v.stride(0)
    rows = states.segments, states.cu_segments
    if captured or any(end == first + 1 for first, end, *_ in states.host):
        columns = min(dv, STEP_COLUMNS)
        _step_kernel[(dv // columns * heads, n)](
            q, k, v, g, beta, out, recurrent, *rows, *strides, **norm, **shape, COLUMNS=columns, num_warps=STEP_WARPS
        )
    if tokens != m:  # else each segment has one token, by StateMeta's contract also in a captured graph
        chunks, exact = tokens // CHUNK + m, q.dtype == torch.float32
        erased, queries, keys = q.new_empty(3, chunks, heads, CHUNK, dk)
        written, scores = q.new_empty(chunks, heads, CHUNK, dv), q.new_empty(chunks, heads, CHUNK, CHUNK)
        decays = torch.empty(chunks, heads, dtype=torch.float32, device=q.device)
        parts = written, erased, queries, keys, scores, decays
        of_chunks = {
            "CHUNK": CHUNK, "M": triton.next_power_of_2(max(m, 32)), "N": triton.next_power_of_2(max(n, 32)),
            "EXACT": exact,
        }
        _solve_kernel[(heads, chunks)](
            k, g, beta, scores, *rows, n, m, k.stride(0), EPS=eps, KEY_HEADS=key_heads, HEADS=heads, DK=dk,
            BLOCK=BLOCK, **of_chunks, num_warps=SOLVE_WARPS,
        )
        _chunk_kernel[(heads, chunks)](
            q, k, v, g, *parts, *rows, n, m, *strides, **norm, **shape, **of_chunks,
            num_warps=CHUNK_WARPS if min(dk, dv) >= 64 else NARROW_WARPS,
        )
        columns = min(dv, SCAN_COLUMNS)
        tile = CHUNK * (3 * dk + columns + CHUNK) * q.element_size()
        _scan_kernel[(dv // columns * heads, n)](
            *parts, out, recurrent, *rows, **shape, CHUNK=CHUNK, COLUMNS=columns, EXACT=exact,
            STAGES=fitting(SCAN_STAGES, tile, (dk + CHUNK) * columns * q.element_size()), num_warps=SCAN_WARPS,
        )
    return out
