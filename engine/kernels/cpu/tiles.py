"""Products of bytes in the processor's tiles (AMX): 16 rows of the weight by 16 rows of x, 64 bytes of each at a time.

Both are signed, and sums are exact, so the whole numbers are those of `dot` (engine/kernels/cpu/byte_products.py).
A tile of x has 4 consecutive bytes of 16 rows in a line, so whole groups of 16 rounded rows are stored in this order,
in the place where they would be row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from engine.kernels.cpu.emit import I8, I32, I64, Kernel

SIDE, BYTES = 16, 64  # rows of a tile, and bytes in one
GROUPS_AT_ONCE = 4  # groups of rows of x per round of the outer loop: they stay in the cache
CONFIG = bytes([1, *[0] * 15, *[BYTES, 0] * 8, *[0] * 16, *[SIDE] * 8, *[0] * 8])  # palette 1: 8 tiles of full size
SUMS, WEIGHTS, X = (0, 1, 2, 3), (4, 5), (6, 7)  # numbers of tiles


def groups_of_rows(b: Kernel, N: Any, R: Any) -> Any:
    """Returns how many groups of 16 rows tiles multiply."""
    whole = b.icmp_signed("==", b.srem(N, I64(SIDE)), I64(0))
    return b.select(whole, b.sdiv(R, I64(SIDE)), I64(0))


def place(b: Kernel, r: Any, K: Any, groups: Any) -> tuple[Any, Any]:
    """Returns where row r begins among the rounded rows, and the distance of its 4 consecutive bytes from the next."""
    group, line = b.sdiv(r, I64(SIDE)), b.srem(r, I64(SIDE))
    in_tiles = b.icmp_signed("<", group, groups)
    start = b.add(b.mul(group, b.mul(K, I64(SIDE))), b.mul(line, I64(4)))
    return b.select(in_tiles, start, b.mul(r, K)), b.select(in_tiles, I64(BYTES), I64(4))


def write(b: Kernel, part: Any, x8: Any, row: tuple[Any, Any], k: Any) -> None:
    """Write bytes of a row from k on. row: its place."""
    fours = b.bitcast(part, ir.VectorType(I32, part.type.count // 4))
    for i in range(fours.type.count):
        at = b.add(row[0], b.mul(b.add(b.sdiv(k, I64(4)), I64(i)), row[1]))
        b.store(b.extract_element(fours, I32(i)), b.at(x8, at, I8), align=4)


def emit_tiles(
    b: Kernel, weight: Any, x8: Any, K: Any, N: Any, groups: Any, finish: Callable[[Any, Any, Any], None]
) -> None:
    """Multiply some groups of rows. finish: takes 16 sums of a row of x, the first row of the weight, the row of x."""
    config = ir.GlobalVariable(b.module, ir.ArrayType(I8, len(CONFIG)), b.module.get_unique_name("tiles"))
    config.global_constant, config.linkage = True, "internal"
    config.initializer = ir.Constant(config.value_type, bytearray(CONFIG))
    room = b.alloca(I8, SIDE * BYTES)
    room.align = BYTES
    nothing, lines = ir.VoidType(), ir.VectorType(I32, SIDE)

    def load(tile: int, base: Any, index: Any, stride: Any) -> None:
        b.intrinsic("llvm.x86.tileloadd64", nothing, I8(tile), b.at(base, index, I8), stride)

    def block(n0: Any, g0: Any, high: int, wide: int) -> None:
        """Compute `high` by `wide` tiles of sums, from group n0 of the weight's rows and group g0 of x."""
        cells = [(i, j) for i in range(high) for j in range(wide)]
        for i, j in cells:
            b.intrinsic("llvm.x86.tilezero", nothing, I8(SUMS[2 * i + j]))
        group = b.mul(K, I64(SIDE))
        with b.loop(I64(0), K, BYTES) as (k, _):
            for i in range(high):
                load(WEIGHTS[i], weight, b.add(b.mul(b.add(n0, I64(i)), group), k), K)
            for j in range(wide):
                start = b.add(b.mul(b.add(g0, I64(j)), group), b.mul(k, I64(SIDE)))
                load(X[j], x8, start, I64(BYTES))
            for i, j in cells:
                b.intrinsic("llvm.x86.tdpbssd", nothing, I8(SUMS[2 * i + j]), I8(WEIGHTS[i]), I8(X[j]))
        for i, j in cells:
            b.intrinsic("llvm.x86.tilestored64", nothing, I8(SUMS[2 * i + j]), room, I64(BYTES))
            rows = transposed(b, [b.read(room, I64(SIDE * line), I32, SIDE) for line in range(SIDE)], lines)
            n, r = (b.mul(b.add(at, I64(more)), I64(SIDE)) for at, more in ((n0, i), (g0, j)))
            for line, sums in enumerate(rows):
                finish(sums, n, b.add(r, I64(line)))

    def in_pairs(first: Any, end: Any, body: Callable[[Any, int], None]) -> None:
        """Call body with 2 items at a time, then with the last one if their number is odd."""
        whole = b.add(first, b.and_(b.sub(end, first), I64(-2)))
        with b.loop(first, whole, 2) as (at, _):
            body(at, 2)
        with b.loop(whole, end) as (at, _):
            body(at, 1)

    with b.if_then(b.icmp_signed(">", groups, I64(0))):
        b.intrinsic("llvm.x86.ldtilecfg", nothing, config)
        first, end = b.share(b.sdiv(N, I64(SIDE)))
        with b.loop(I64(0), groups, GROUPS_AT_ONCE) as (g0, _):
            last = b.add(g0, I64(GROUPS_AT_ONCE))
            last = b.select(b.icmp_signed("<", last, groups), last, groups)
            in_pairs(first, end, lambda n, high: in_pairs(g0, last, lambda g, wide: block(n, g, high, wide)))
        b.intrinsic("llvm.x86.tilerelease", nothing)


def transposed(b: Kernel, rows: list[Any], kind: ir.VectorType) -> list[Any]:
    """Returns the columns of a square matrix. rows: vectors of this type."""
    size = kind.count
    step = size // 2
    while step:
        for i in (i for i in range(size) if not i & step):
            low = [j if not j & step else size + j - step for j in range(size)]
            high = [j + step if not j & step else size + j for j in range(size)]
            orders = (ir.Constant(ir.VectorType(I32, size), order) for order in (low, high))
            rows[i], rows[i + step] = [b.shuffle_vector(rows[i], rows[i + step], order) for order in orders]
        step //= 2
    return rows
