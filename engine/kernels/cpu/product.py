"""out [R, N] = f(x) [R, K] · weightᵀ for few rows: each weight is read from memory once, whatever the number of rows.

f is nothing, an RMSNorm, or silu(gate) · up. Every thread computes f for all rows, into memory of its own: for few rows
this is quicker than a barrier. Each output is one sum over k in one vector, so it does not depend on R. What torch has
instead, and why it was not taken: engine/kernels/MEASURED.md.

Integers: each row of f(x) is rounded to 8 bits. Some processors multiply unsigned by signed bytes: then 128 is added to
each weight, and 128 times the sum of the row is subtracted at the end (engine/kernels/cpu/byte_products.py). Sums of
integers are exact, so int8 products have the same bits on all processors, and are fast with any number of rows. With
AMX, tiles multiply whole groups of 16 rows (engine/kernels/cpu/tiles.py).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

from llvmlite import ir

from engine.kernels.cpu import tiles
from engine.kernels.cpu.byte_products import bias, dot
from engine.kernels.cpu.emit import BF16, F32, I8, I16, I32, I64, PTR, Kernel
from engine.kernels.cpu.features import Features

GROUPS = {  # integers, vectors that fit into registers -> (rows of x, rows of the weight) in registers at a time
    (False, 32): ((8, 2), (4, 4), (2, 4), (1, 1)), (False, 16): ((4, 2), (2, 4), (1, 4)),
    (True, 32): ((6, 4), (4, 4), (2, 4), (1, 4)), (True, 16): ((4, 2), (2, 4), (1, 4)),
}
BLOCK = 4  # rows of the weight per round of the inner loop
ROWS_AT_ONCE = 64  # rows of x per round of the outer loop: they stay in the cache
PREPARE = "_prepare"  # the name of the kernel that rounds rows is that of the product with this suffix
AHEAD = 8192  # bytes; prefetched in the order of addresses, because the hardware expects that order


class Before(IntEnum):
    """What is done with x before the product."""

    NOTHING = 0
    NORM = 1  # RMSNorm with a weight [K]
    SILU = 2  # x is [R, 2 K], gate and up: silu(gate) * up
    READY = 3  # x is what the kernel that rounds rows has written


class Call(NamedTuple):
    """The fields of a product. The kernel that rounds rows has the same ones; it writes to scratch."""

    weight: Any
    row_scales: Any  # of the weight
    x: Any
    norm: Any  # the norm's weight
    bias: Any  # [N]
    out: Any
    scratch: Any
    K: Any
    N: Any
    R: Any
    each: Any  # floats of scratch per thread
    before: Any
    add: Any  # 1: the product is added to out
    scales: Any  # of the groups of 4-bit numbers, their offsets, log2 of a group's size in parts
    offsets: Any
    shift: Any


def scratch_floats(rows: int, columns: int) -> int:
    """Returns how many floats of scratch memory each thread needs: f(x), f(x) rounded, and scales and sums. There is a
    scale and a sum per row, or per 32 numbers (engine/kernels/cpu/four_bits.py)."""
    return rows * columns + rows * columns // 2 + 2 * rows * (1 + columns // 32) + 64


def emit_product(module: ir.Module, name: str, weights: str, lanes: int, width: int, eps: float, has: Features) -> None:
    """Emit a kernel. weights: float32, bfloat16, bf16_rows or int8; width: bytes of weights per vector, for int8.

    bf16_rows: bfloat16 numbers, and f(x) is rounded to bfloat16, for the processor's products of bfloat16 pairs.

    For int8, another kernel with the same fields rounds rows, as in engine/kernels/cpu/grouped.py.

    Fields: weight, its scales, x, the norm's weight, the bias [N], out, scratch, K, N, R, floats of scratch
    per thread, Before, 1 if the product is added to out.
    """
    integers, pairs = weights == "int8", weights == "bf16_rows"
    in_tiles = integers and has.tiles and width == tiles.BYTES
    if integers:
        b = Kernel(module, name + PREPARE, lanes)
        c = call_fields(b)
        groups = tiles.groups_of_rows(b, c.N, c.R) if in_tiles else None
        _round(b, has, c, c.scratch, b.share(c.R), eps, groups)
        b.ret_void()

    b = Kernel(module, name, lanes)
    c = call_fields(b)
    weight, K, N, R = c.weight, c.K, c.N, c.R
    own = b.at(c.scratch, b.mul(b.thread(), c.each), F32)
    if integers:
        ready = b.icmp_signed("==", c.before, I64(Before.READY))
        base = b.select(ready, c.x, own)
        with b.if_then(b.not_(ready)):
            _round(b, has, c, base, (I64(0), R), eps)
        rows_at, row_scales, row_sums = _rounded(b, base, K, R)
    else:
        prepare(b, c.x, c.norm, own, K, (I64(0), R), c.before, eps)
        rows_at = b.select(b.icmp_signed("==", c.before, I64(Before.NOTHING)), c.x, own)
    if pairs:
        x16 = b.at(own, b.mul(R, K), F32)
        round_to_bf16(b, rows_at, x16, (I64(0), b.mul(R, K)))
        rows_at = x16
    bytes_each = {"float32": 4, "bfloat16": 2, "bf16_rows": 2, "int8": 1}[weights]
    step = width if integers else 2 * lanes if pairs else lanes
    kind = (I8, width) if integers else (BF16, step) if pairs else (F32, lanes)  # of a vector of f(x)
    sums = ir.VectorType(I32, width // 4) if integers else b.floats
    zero = ir.Constant(sums, [0] * sums.count)

    def weights_at(n: Any, k: Any) -> Any:
        index = b.add(b.mul(n, K), k)
        if weights == "float32":
            return b.floats_at(weight, index)
        if pairs:
            return b.read(weight, index, BF16, step)
        if weights == "bfloat16":
            wide = b.zext(b.read(weight, index, I16, lanes), b.ints)
            return b.bitcast(b.shl(wide, ir.Constant(b.ints, [16] * lanes)), b.floats)
        return b.read(weight, index, I8, width)

    def accumulate(total: Any, row: Any, w: Any) -> Any:
        if pairs:
            return multiply_pairs(b, total, w, row)
        if not integers:
            return b.fma(row, w, total)
        return dot(b, has.dot, total, w, row)

    def spread(value: Any, count: int) -> Any:
        return b.every(value, ir.VectorType(value.type, count)) if count > 1 else value

    def finish(totals: list[Any], n: Any, r: Any) -> None:
        """Write the outputs of row r from column n on."""
        if integers:
            whole = b.integer_totals(totals)
            finish_integers(b.sub(whole, spread(b.read(row_sums, r, I32), len(totals))), n, r, len(totals))
        else:
            store(b, c, b.total(totals[0]), n, r)

    def finish_integers(whole: Any, n: Any, r: Any, count: int) -> None:
        scale = spread(b.read(row_scales, r), count)
        value = b.fmul(b.fmul(b.sitofp(whole, scale.type), scale), b.read(c.row_scales, n, lanes=count))
        store(b, c, value, n, r, count)

    def tile(n0: Any, r0: Any, rows: int, columns: int) -> None:
        """Compute `rows` by `columns` outputs, from row r0 and column n0."""
        cells = [(r, n) for r in range(rows) for n in range(columns)]
        with b.loop(I64(0), K, step, **{f"{r} {n}": zero for r, n in cells}) as (k, totals):
            if columns > 1:
                begin = b.add(b.mul(b.mul(n0, K), I64(bytes_each)), b.mul(k, I64(bytes_each * columns)))
                for line in range(0, columns * step * bytes_each, 64):
                    where = b.at(weight, b.add(begin, I64(AHEAD + line)), I8)
                    b.intrinsic("llvm.prefetch.p0", ir.VoidType(), where, I32(0), I32(3), I32(1))
            ws = [weights_at(b.add(n0, I64(n)), k) for n in range(columns)]
            for r in range(rows):
                index = b.add(b.mul(b.add(r0, I64(r)), K), k)
                row = b.read(rows_at, index, *kind)
                for n in range(columns):
                    totals[f"{r} {n}"] = accumulate(totals[f"{r} {n}"], row, ws[n])
        at_once = columns if integers else 1
        for r, n in cells[::at_once]:
            finish([totals[f"{r} {n + i}"] for i in range(at_once)], b.add(n0, I64(n)), b.add(r0, I64(r)))

    def all_rows(n0: Any, columns: int, done: Any, last: Any) -> None:
        """Compute `columns` columns of the output, of the rows from `done` to `last`."""
        for rows, at_once in GROUPS[integers, has.registers]:
            at_once = min(at_once, columns)
            end = b.add(done, b.mul(b.sdiv(b.sub(last, done), I64(rows)), I64(rows)))
            with b.loop(done, end, rows) as (r0, _), b.loop(n0, b.add(n0, I64(columns)), at_once) as (n, _):
                tile(n, r0, rows, at_once)
            done = end

    blocks = b.sdiv(N, I64(BLOCK))
    first, end = (b.mul(block, I64(BLOCK)) for block in b.share(blocks))
    start: Any = I64(0)
    if in_tiles:
        groups = b.select(ready, tiles.groups_of_rows(b, N, R), I64(0))
        tiles.emit_tiles(b, weight, rows_at, K, N, groups, lambda whole, n, r: finish_integers(whole, n, r, tiles.SIDE))
        start = b.mul(groups, I64(tiles.SIDE))
    with b.loop(start, R, ROWS_AT_ONCE) as (r0, _):
        last = b.add(r0, I64(ROWS_AT_ONCE))
        last = b.select(b.icmp_signed("<", last, R), last, R)
        with b.loop(first, end, BLOCK) as (n0, _):
            all_rows(n0, BLOCK, r0, last)
        with b.if_then(b.icmp_signed("==", end, b.mul(blocks, I64(BLOCK)))), b.loop(end, N) as (n0, _):
            all_rows(n0, 1, r0, last)
    b.ret_void()


def call_fields(b: Kernel) -> Call:
    numbers = ("K", "N", "R", "each", "before", "add", "shift")
    return Call(*b.fields(**{name: I64 if name in numbers else PTR for name in Call._fields}))


def store(b: Kernel, c: Call, value: Any, n: Any, r: Any, count: int = 1) -> None:
    """Write `count` products of row r from column n on, with their bias, or add them to the output."""
    value, at = b.fadd(value, b.read(c.bias, n, lanes=count)), b.add(b.mul(r, c.N), n)
    with b.if_else(b.icmp_signed("!=", c.add, I64(0))) as (then, otherwise):
        with then:
            b.write(b.fadd(b.read(c.out, at, lanes=count), value), c.out, at)
        with otherwise:
            b.write(value, c.out, at)


def _rounded(b: Kernel, base: Any, K: Any, R: Any) -> tuple[Any, Any, Any]:
    """Returns the addresses of rounded rows [R, K], and of their scales and sums [R]. base: f(x) in float32."""
    x8 = b.at(base, b.mul(R, K), F32)
    scales = b.at(x8, b.mul(R, K), I8)
    return x8, scales, b.at(scales, R, F32)


def _round(b: Kernel, has: Features, c: Call, base: Any, rows: tuple[Any, Any], eps: float, groups: Any = None) -> None:
    """Write f(x) of some rows to `base`, then round it. rows: (first, end). groups: of rows that tiles multiply."""
    prepare(b, c.x, c.norm, base, c.K, rows, c.before, eps)
    found = b.select(b.icmp_signed("==", c.before, I64(Before.NOTHING)), c.x, base)
    _round_rows(b, found, *_rounded(b, base, c.K, c.R), c.K, rows, bias(has.dot), groups)


def prepare(b: Kernel, x: Any, norm: Any, scratch: Any, K: Any, rows: tuple[Any, Any], before: Any, eps: float) -> None:
    """Write f(x) [R, K] of some rows to scratch, unless f is nothing. rows: (first, end)."""
    with b.if_then(b.icmp_signed("==", before, I64(Before.NORM))), b.loop(*rows) as (r, _):
        start = b.mul(r, K)
        with b.loop(I64(0), K, b.lanes, square=b.all_lanes(0)) as (k, sums):
            part = b.floats_at(x, b.add(start, k))
            sums["square"] = b.fma(part, part, sums["square"])
        mean = b.fdiv(b.total(sums["square"]), b.sitofp(K, F32))
        root = b.intrinsic("llvm.sqrt.f32", F32, b.fadd(mean, F32(eps)))
        scale = b.all_lanes(b.fdiv(F32(1), root))
        with b.loop(I64(0), K, b.lanes) as (k, _):
            part = b.fmul(b.floats_at(x, b.add(start, k)), scale)
            b.write(b.fmul(part, b.floats_at(norm, k)), scratch, b.add(start, k))
    with b.if_then(b.icmp_signed("==", before, I64(Before.SILU))), b.loop(*rows) as (r, _):
        start = b.mul(r, b.mul(K, I64(2)))
        with b.loop(I64(0), K, b.lanes) as (k, _):
            gate, up = b.floats_at(x, b.add(start, k)), b.floats_at(x, b.add(start, b.add(K, k)))
            power = b.exp(b.vector_op("minimum", b.fneg(gate), b.all_lanes(87)))
            silu = b.fdiv(gate, b.fadd(b.all_lanes(1), power))
            b.write(b.fmul(silu, up), scratch, b.add(b.mul(r, K), k))


def round_to_bf16(b: Kernel, x: Any, to: Any, numbers: tuple[Any, Any]) -> None:
    """Round some numbers of x to bfloat16. numbers: (first, end)."""
    half = ir.VectorType(BF16, b.lanes)
    with b.loop(*numbers, b.lanes) as (i, _):
        rounded = b.intrinsic(f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * b.lanes}", half, b.floats_at(x, i))
        b.write(rounded, to, i, BF16)


def multiply_pairs(b: Kernel, total: Any, x: Any, y: Any) -> Any:
    """Returns total + the sum of two products of bfloat16 numbers, for each lane."""
    return b.intrinsic(f"llvm.x86.avx512bf16.dpbf16ps.{32 * b.lanes}", b.floats, total, x, y)


def _round_rows(
    b: Kernel, rows_at: Any, x8: Any, row_scales: Any, row_sums: Any, K: Any, rows: tuple[Any, Any], added: int,
    groups: Any,
) -> None:
    """Round each row to 8 bits. row_sums: `added` times the sum of a row's bytes. NaN and infinity reach the scale."""
    bytes_, lanes = ir.VectorType(I8, b.lanes), b.lanes
    with b.loop(*rows) as (r, _):
        start = b.mul(r, K)
        with b.loop(I64(0), K, lanes, most=b.all_lanes(0)) as (k, found):
            size = b.vector_op("fabs", b.floats_at(rows_at, b.add(start, k)))
            found["most"] = b.vector_op("maximum", found["most"], size)
        scale = b.fdiv(b.largest(found["most"]), F32(127))
        b.write(scale, row_scales, r)
        least = F32(1.1754943508222875e-38)
        inverse = b.all_lanes(b.fdiv(F32(1), b.intrinsic("llvm.maximum.f32", F32, scale, least)))
        row = None if groups is None else tiles.place(b, r, K, groups)
        with b.loop(I64(0), K, lanes, sum=ir.Constant(b.ints, [0] * lanes)) as (k, sums):
            whole, _ = b.nearest(b.fmul(b.floats_at(rows_at, b.add(start, k)), inverse))
            sums["sum"] = b.add(sums["sum"], whole)
            found8 = b.trunc(whole, bytes_)
            if row is None:
                b.write(found8, x8, b.add(start, k), I8)
            else:
                tiles.write(b, found8, x8, row, k)
        total = b.intrinsic(f"llvm.vector.reduce.add.v{lanes}i32", I32, sums["sum"])
        b.write(b.mul(total, I32(added)), row_sums, r, I32)
