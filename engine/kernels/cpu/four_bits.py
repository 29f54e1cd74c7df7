"""Products with weights of 4 bits in groups.

A group is 32 or more numbers of one row of the weight. Each group has a scale, and may have an offset: a number q
stands for scale · (q - 8 + offset). Each row of f(x) is rounded to 8 bits in parts of 32 numbers, and each part has its
own scale. So a product is: integer sums over 32 numbers, times both scales, summed in float32.

Weights are stored as engine/model/four_bits.py says.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from engine.kernels.cpu.byte_products import SmallSums
from engine.kernels.cpu.emit import F32, I8, I16, I32, I64, Kernel
from engine.kernels.cpu.grouped import LANES, Call

PART = 32  # numbers of f(x) with a common scale, and the smallest group of weights
ROWS = {  # products of bytes -> rows of x in registers at a time
    "vnni": (8, 4, 2, 1), "avx512": (4, 2, 1), "avxvnni": (2, 1), "avx2": (2, 1), "dotprod": (4, 2, 1), "plain": (2, 1),
}


class FourBitForm:
    """16 rows of the weight are stored together, 8 numbers of each."""

    together = LANES

    def __init__(self, kind: str, offsets: bool) -> None:
        """kind: of the products of bytes (Features.dot); offsets: whether groups of weights have offsets."""
        self._kind, self._offsets = kind, offsets
        self.rows = ROWS[kind]

    def places(self, b: Kernel, base: Any, c: Call) -> Any:
        """Returns the addresses of the bytes [R, K], and of the scale and the sum of each part [R, K / PART]."""
        x8 = b.at(base, b.mul(c.R, c.K), F32)
        scales = b.at(x8, b.mul(c.R, c.K), I8)
        return x8, scales, b.at(scales, b.mul(c.R, b.sdiv(c.K, I64(PART))), F32)

    def round(self, b: Kernel, x: Any, places: Any, c: Call, rows: tuple[Any, Any]) -> None:
        parts, (x8, scales, sums) = b.sdiv(c.K, I64(PART)), places
        _round_parts(b, x, x8, scales, sums, (b.mul(rows[0], parts), b.mul(rows[1], parts)))

    def tile(self, b: Kernel, places: Any, c: Call, block: Any, r0: Any, rows: int) -> list[list[Any]]:
        x8, part_scales, part_sums = places
        parts = b.sdiv(c.K, I64(PART))
        half = ir.VectorType(ir.HalfType(), LANES)

        def numbers_at(base: Any, index: Any) -> Any:
            """Returns 16 numbers of a group's scales or offsets, from float16."""
            return b.fpext(b.bitcast(b.read(base, b.mul(index, I64(LANES)), I16, LANES), half), b.floats)

        begin = b.mul(block, b.mul(c.K, I64(LANES // 2)))
        first_group = b.mul(block, b.lshr(parts, c.shift))
        first_part = [b.mul(b.add(r0, I64(r)), parts) for r in range(rows)]
        x_at = [b.mul(b.add(r0, I64(r)), c.K) for r in range(rows)]
        with b.loop(I64(0), parts, **{str(r): b.all_lanes(0) for r in range(rows)}) as (part, totals):
            group = b.add(first_group, b.lshr(part, c.shift))
            scale = numbers_at(c.scales, group)
            offset = numbers_at(c.offsets, group) if self._offsets else None
            at = b.add(begin, b.mul(part, I64(PART * LANES // 2)))
            minus = [b.read(part_sums, b.add(first, part), I32) for first in first_part]
            sums = [SmallSums(b, self._kind, b.every(each, b.ints)) for each in minus]
            for step in range(PART // 8):
                both = b.load(b.at(c.weight, b.add(at, I64(step * 4 * LANES)), I8), typ=b.ints, align=1)
                mask = b.all_ints(0x0F0F0F0F)
                for high, numbers in enumerate((b.and_(both, mask), b.and_(b.lshr(both, b.all_ints(4)), mask))):
                    for r in range(rows):
                        k = b.add(b.mul(part, I64(PART)), I64(step * 8 + high * 4))
                        four = b.every(b.load(b.at(x8, b.add(x_at[r], k), I8), typ=I32, align=1), b.ints)
                        sums[r].add(numbers, four)
            for r in range(rows):
                at_part = b.add(first_part[r], part)
                total = b.sitofp(sums[r].total(), b.floats)
                if offset is not None:
                    plain = b.fmul(b.sitofp(b.read(part_sums, at_part, I32), F32), F32(-0.125))
                    total = b.fma(offset, b.all_lanes(plain), total)
                factor = b.fmul(scale, b.all_lanes(b.read(part_scales, at_part)))
                totals[str(r)] = b.fma(total, factor, totals[str(r)])
        scale = b.floats_at(c.row_scales, b.mul(block, I64(LANES)))
        return [[b.fmul(totals[str(r)], scale)] for r in range(rows)]


def _round_parts(b: Kernel, rows_at: Any, x8: Any, scales: Any, sums: Any, parts: tuple[Any, Any]) -> None:
    """Round some parts of f(x) to 8 bits. sums: -8 times the sum of each part's bytes. parts: (first, end). NaN and
    infinity reach the scale."""
    bytes_ = ir.VectorType(I8, LANES)
    with b.loop(*parts) as (part, _):
        places = [b.add(b.mul(part, I64(PART)), I64(first)) for first in range(0, PART, LANES)]
        values = [b.floats_at(rows_at, place) for place in places]
        sizes = [b.vector_op("fabs", value) for value in values]
        scale = b.fdiv(b.largest(b.vector_op("maximum", *sizes)), F32(127))
        b.write(scale, scales, part)
        least = F32(1.1754943508222875e-38)
        inverse = b.all_lanes(b.fdiv(F32(1), b.intrinsic("llvm.maximum.f32", F32, scale, least)))
        total = b.all_ints(0)
        for place, value in zip(places, values, strict=True):
            whole, _ = b.nearest(b.fmul(value, inverse))
            total = b.add(total, whole)
            b.write(b.trunc(whole, bytes_), x8, place, I8)
        total = b.intrinsic(f"llvm.vector.reduce.add.v{LANES}i32", I32, total)
        b.write(b.mul(total, I32(-8)), sums, part, I32)
