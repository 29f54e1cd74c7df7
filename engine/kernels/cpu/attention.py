"""Two kernels of a step: q/k norm + RoPE + store in the KV cache, and attention of one token per row.

Every row is one token, with its own position and its own row of the block table. A token's drafts are further rows with
the same block table: the first kernel stores the keys of all rows before the second kernel begins.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from engine.kernels.cpu.emit import F32, I64, PTR, Kernel


def emit_rotate(
    module: ir.Module, name: str, lanes: int, heads: tuple[int, int], dim: int, eps: float, normed: bool
) -> None:
    """Emit the kernel that rotates queries and keys. heads: (of queries, of keys). Fields: qkv [R, (Hq + 2 Hkv) D], the
    norms' weights [Hq + Hkv, D], the table of cos and sin [positions, D], q (out) [R, Hq D], keys, values [slots, Hkv,
    D], positions and slots int64 [R], R."""
    b = Kernel(module, name, lanes)
    qkv, norms, table, q, keys, values, positions, slots, R = b.fields(
        qkv=PTR, norms=PTR, table=PTR, q=PTR, keys=PTR, values=PTR, positions=PTR, slots=PTR, R=I64
    )
    queries, kv = heads
    every, half = queries + 2 * kv, dim // 2
    first, end = b.share(b.mul(R, I64(every)))
    with b.loop(first, end) as (item, _):
        r, head = b.sdiv(item, I64(every)), b.srem(item, I64(every))
        source = b.at(qkv, b.mul(item, I64(dim)), F32)
        slot = b.mul(b.read(slots, r, I64), I64(kv * dim))
        with b.if_else(b.icmp_signed(">=", head, I64(queries + kv))) as (copied, rotated):
            with copied:
                to = b.at(values, b.add(slot, b.mul(b.sub(head, I64(queries + kv)), I64(dim))), F32)
                for d in range(0, dim, lanes):
                    b.write(b.floats_at(source, I64(d)), to, I64(d))
            with rotated:
                at_query = b.at(q, b.mul(b.add(b.mul(r, I64(queries)), head), I64(dim)), F32)
                at_key = b.at(keys, b.add(slot, b.mul(b.sub(head, I64(queries)), I64(dim))), F32)
                to = b.select(b.icmp_signed("<", head, I64(queries)), at_query, at_key)
                parts = [b.floats_at(source, I64(d)) for d in range(0, dim, lanes)]
                if normed:
                    square = b.all_lanes(0)
                    for part in parts:
                        square = b.fma(part, part, square)
                    mean = b.fdiv(b.total(square), F32(dim))
                    root = b.all_lanes(b.fdiv(F32(1), b.intrinsic("llvm.sqrt.f32", F32, b.fadd(mean, F32(eps)))))
                    weight = b.at(norms, b.mul(head, I64(dim)), F32)
                    parts = [
                        b.fmul(b.fmul(part, root), b.floats_at(weight, I64(i * lanes))) for i, part in enumerate(parts)
                    ]
                angles = b.at(table, b.mul(b.read(positions, r, I64), I64(dim)), F32)
                for i in range(half // lanes):
                    low, high = parts[i], parts[i + half // lanes]
                    cos, sin = (b.floats_at(angles, I64(i * lanes + begin)) for begin in (0, half))
                    b.write(b.fsub(b.fmul(low, cos), b.fmul(high, sin)), to, I64(i * lanes))
                    b.write(b.fadd(b.fmul(high, cos), b.fmul(low, sin)), to, I64(i * lanes + half))
    b.ret_void()


def emit_attend(
    module: ir.Module, name: str, lanes: int, heads: tuple[int, int], dim: int, factor: float, block_size: int
) -> None:
    """Emit the attention kernel; factor: of query · key. A thread computes whole pairs of (row, query head). Fields: q
    [R, Hq D], keys, values [slots, Hkv, D], block table int64 [R, C], lengths int64 [R] (with this token), out [R, Hq
    D], scores (scratch), C, R, window (0: none), floats of scratch per thread."""
    b = Kernel(module, name, lanes)
    q, keys, values, table, lengths, out, scores, columns, R, window, each = b.fields(
        q=PTR, keys=PTR, values=PTR, table=PTR, lengths=PTR, out=PTR, scores=PTR, columns=I64, R=I64, window=I64,
        each=I64,
    )
    scores = b.at(scores, b.mul(b.thread(), each), F32)
    queries, kv = heads
    vectors = range(0, dim, lanes)
    first, end = b.share(b.mul(R, I64(queries)))
    with b.loop(first, end) as (item, _):
        r, head = b.sdiv(item, I64(queries)), b.srem(item, I64(queries))
        blocks = b.at(table, b.mul(r, columns), I64)
        length = b.read(lengths, r, I64)
        begin = b.sub(length, b.select(b.icmp_signed(">", window, I64(0)), window, length))
        begin = b.select(b.icmp_signed("<", begin, I64(0)), I64(0), begin)
        seen = b.sub(length, begin)
        head_at = b.mul(b.sdiv(head, I64(queries // kv)), I64(dim))

        def slot_at(position: Any, blocks: Any = blocks, head_at: Any = head_at) -> Any:
            block = b.read(blocks, b.udiv(position, I64(block_size)), I64)
            slot = b.add(b.mul(block, I64(block_size)), b.urem(position, I64(block_size)))
            return b.add(b.mul(slot, I64(kv * dim)), head_at)

        scale = b.all_lanes(factor)
        source = b.at(q, b.mul(item, I64(dim)), F32)
        query = [b.fmul(b.floats_at(source, I64(d)), scale) for d in vectors]
        with b.loop(I64(0), seen, most=F32(-math.inf)) as (i, found):
            key = b.at(keys, slot_at(b.add(begin, i)), F32)
            score = b.all_lanes(0)
            for d, part in zip(vectors, query, strict=True):
                score = b.fma(part, b.floats_at(key, I64(d)), score)
            value = b.total(score)
            b.write(value, scores, i)
            found["most"] = b.intrinsic("llvm.maximum.f32", F32, found["most"], value)
        for lane in range(lanes):  # the last vector may end after the last score
            b.write(F32(-math.inf), scores, b.add(seen, I64(lane)))
        most = b.all_lanes(found["most"])
        with b.loop(I64(0), seen, lanes, sum=b.all_lanes(0)) as (i, sums):
            weight = b.exp(b.fsub(b.floats_at(scores, i), most))
            b.write(weight, scores, i)
            sums["sum"] = b.fadd(sums["sum"], weight)
        inverse = b.all_lanes(b.fdiv(F32(1), b.total(sums["sum"])))
        with b.loop(I64(0), seen, **{str(d): b.all_lanes(0) for d in vectors}) as (i, totals):
            value = b.at(values, slot_at(b.add(begin, i)), F32)
            weight = b.all_lanes(b.read(scores, i))
            for d in vectors:
                totals[str(d)] = b.fma(weight, b.floats_at(value, I64(d)), totals[str(d)])
        to = b.at(out, b.mul(item, I64(dim)), F32)
        for d in vectors:
            b.write(b.fmul(totals[str(d)], inverse), to, I64(d))
    b.ret_void()
