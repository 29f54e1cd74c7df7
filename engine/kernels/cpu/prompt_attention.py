"""Attention of several tokens of one sequence, for prompts and for drafts: softmax(q · keysᵀ) · values, causal.

A tile has two vectors of queries: some consecutive tokens, and the query heads that share a key head. Each lane is one
query, so no sum goes over lanes, and each number of a key or value is read once for all queries of the tile. Scores of
all keys are kept until the sum of their powers is known.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from engine.kernels.cpu.emit import F32, I64, PTR, Kernel

VECTORS = 2  # of queries in a tile
TILE_FIELDS = 4  # first token in q, tokens, row of the block table, position of the first token


def tokens_per_tile(lanes: int, heads: tuple[int, int]) -> int:
    """Returns how many tokens a tile has. heads: (of queries, of keys). 0: too many query heads share a key head."""
    return VECTORS * lanes // (heads[0] // heads[1])


def tile_scratch_floats(lanes: int, dim: int, length: int) -> int:
    """Returns how many floats of scratch memory each thread needs for sequences of at most `length` keys."""
    keys = length + 8
    return VECTORS * lanes * (dim + 1 + keys) + dim * keys + 64


def emit_attend_tiles(
    module: ir.Module, name: str, lanes: int, heads: tuple[int, int], dim: int, factor: float, block_size: int
) -> None:
    """Emit the kernel; factor: of query · key. A thread computes whole pairs of (tile, key head). Fields: q [R, Hq D],
    keys, values [slots, Hkv, D], block table int64 [n, C], tiles int64 [T, TILE_FIELDS], out [R, Hq D], scratch, C, T,
    window (0: none), floats of scratch per thread."""
    b = Kernel(module, name, lanes)
    q, keys, values, table, tiles, out, scratch, columns, T, window, each = b.fields(
        q=PTR, keys=PTR, values=PTR, table=PTR, tiles=PTR, out=PTR, scratch=PTR, columns=I64, T=I64, window=I64,
        each=I64,
    )
    queries, kv = heads
    group, width = queries // kv, VECTORS * lanes
    at_once, depth = (8 if lanes == 16 else 4), math.gcd(8, dim)  # keys of scores, and numbers of values, at a time
    columns_of_q = b.at(scratch, b.mul(b.thread(), each), F32)  # [D, width]; later the output
    last_seen = b.at(columns_of_q, I64(dim * width), F32)  # the position of each lane's token, as a float
    scores = b.at(last_seen, I64(width), F32)  # [keys, width]
    vectors, part = range(VECTORS), math.gcd(lanes, dim)
    infinity = b.all_lanes(-math.inf)

    def lane_at(lane: Any, head: Any, first: Any, count: Any) -> tuple[Any, Any]:
        """Returns (index in q and out, token in the tile) of a lane. Lanes without a query repeat the last token."""
        token = b.sdiv(lane, I64(group))
        token = b.select(b.icmp_signed("<", token, count), token, b.sub(count, I64(1)))
        row = b.mul(b.add(first, token), I64(queries))
        return b.mul(b.add(row, b.add(b.mul(head, I64(group)), b.srem(lane, I64(group)))), I64(dim)), token

    threads = b.threads()
    with b.loop(b.thread(), b.mul(T, I64(kv)), threads) as (item, _):  # later tiles see more keys, so threads alternate
        tile, head = b.at(tiles, b.mul(b.sdiv(item, I64(kv)), I64(TILE_FIELDS)), I64), b.srem(item, I64(kv))
        first, count, row, start = (b.read(tile, I64(i), I64) for i in range(TILE_FIELDS))
        blocks = b.at(table, b.mul(row, columns), I64)
        length = b.add(start, count)
        with b.loop(I64(0), I64(width)) as (lane, _):
            index, token = lane_at(lane, head, first, count)
            b.write(b.sitofp(b.add(start, token), F32), last_seen, lane)
            with b.loop(I64(0), I64(dim)) as (d, _):
                number = b.fmul(b.read(q, b.add(index, d)), F32(factor))
                b.write(number, columns_of_q, b.add(b.mul(d, I64(width)), lane))
        seen = [b.floats_at(last_seen, I64(v * lanes)) for v in vectors]
        windowed = b.icmp_signed(">", window, I64(0))
        begin = b.add(b.sub(start, b.select(windowed, window, b.add(start, I64(1)))), I64(1))
        begin = b.select(b.icmp_signed("<", begin, I64(0)), I64(0), begin)
        reach = b.all_lanes(b.sitofp(b.select(windowed, window, I64(1 << 40)), F32))
        oldest = [b.fsub(each_seen, reach) for each_seen in seen]  # keys up to here are outside the window
        total = b.sub(length, begin)
        total = b.mul(b.sdiv(b.add(total, I64(at_once - 1)), I64(at_once)), I64(at_once))
        copied = b.at(scores, b.mul(total, I64(width)), F32)  # the values [keys, D] without gaps: cached better

        with b.loop(I64(0), total, at_once, **{str(v): infinity for v in vectors}) as (i0, most):
            found = []
            for i in range(at_once):
                key = b.add(begin, b.add(i0, I64(i)))
                key = b.select(b.icmp_signed("<", key, length), key, b.sub(length, I64(1)))
                block = b.read(blocks, b.udiv(key, I64(block_size)), I64)
                slot = b.add(b.mul(block, I64(block_size)), b.urem(key, I64(block_size)))
                place = b.add(b.mul(slot, I64(kv * dim)), b.mul(head, I64(dim)))
                found.append(b.at(keys, place, F32))
                for d in range(0, dim, part):
                    number = b.read(values, b.add(place, I64(d)), F32, part)
                    b.write(number, copied, b.add(b.mul(b.add(i0, I64(i)), I64(dim)), I64(d)))
            cells = {f"{i} {v}": b.all_lanes(0) for i in range(at_once) for v in vectors}
            with b.loop(I64(0), I64(dim), **cells) as (d, sums):
                at = b.at(columns_of_q, b.mul(d, I64(width)), F32)
                parts = [b.floats_at(at, I64(v * lanes)) for v in vectors]
                for i, key in enumerate(found):
                    number = b.all_lanes(b.read(key, d))
                    for v in vectors:
                        sums[f"{i} {v}"] = b.fma(number, parts[v], sums[f"{i} {v}"])
            for i in range(at_once):
                position = b.all_lanes(b.sitofp(b.add(begin, b.add(i0, I64(i))), F32))
                for v in vectors:
                    inside = b.and_(b.fcmp_ordered("<=", position, seen[v]), b.fcmp_ordered(">", position, oldest[v]))
                    score = b.select(inside, sums[f"{i} {v}"], infinity)
                    b.write(score, scores, b.add(b.mul(b.add(i0, I64(i)), I64(width)), I64(v * lanes)))
                    most[str(v)] = b.vector_op("maximum", most[str(v)], score)

        largest = [most[str(v)] for v in vectors]
        with b.loop(I64(0), total, **{str(v): b.all_lanes(0) for v in vectors}) as (i, powers):
            for v in vectors:
                at = b.add(b.mul(i, I64(width)), I64(v * lanes))
                score = b.floats_at(scores, at)
                power = b.exp(b.fsub(score, largest[v]))
                power = b.select(b.fcmp_ordered("==", score, infinity), b.all_lanes(0), power)
                b.write(power, scores, at)
                powers[str(v)] = b.fadd(powers[str(v)], power)
        inverse = [b.fdiv(b.all_lanes(1), powers[str(v)]) for v in vectors]

        with b.loop(I64(0), I64(dim), depth) as (d0, _):
            cells = {f"{d} {v}": b.all_lanes(0) for d in range(depth) for v in vectors}
            with b.loop(I64(0), total, **cells) as (i, sums):
                value = b.at(copied, b.add(b.mul(i, I64(dim)), d0), F32)
                at = b.at(scores, b.mul(i, I64(width)), F32)
                parts = [b.floats_at(at, I64(v * lanes)) for v in vectors]
                for d in range(depth):
                    number = b.all_lanes(b.read(value, I64(d)))
                    for v in vectors:
                        sums[f"{d} {v}"] = b.fma(number, parts[v], sums[f"{d} {v}"])
            for d in range(depth):
                for v in vectors:
                    at = b.add(b.mul(b.add(d0, I64(d)), I64(width)), I64(v * lanes))
                    b.write(b.fmul(sums[f"{d} {v}"], inverse[v]), columns_of_q, at)
        with b.loop(I64(0), b.mul(count, I64(group))) as (lane, _):
            index, _token = lane_at(lane, head, first, count)
            with b.loop(I64(0), I64(dim)) as (d, _):
                number = b.read(columns_of_q, b.add(b.mul(d, I64(width)), lane))
                b.write(number, out, b.add(index, d))
    b.ret_void()
