"""Rounds float32 matrices to 4-bit numbers in groups, in the order that engine/kernels/cpu/four_bits.py reads.

torch takes minutes for a model of some billion numbers, because each operation is a pass over memory.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from engine.kernels.cpu.emit import F32, I8, I32, I64, PTR, Kernel
from engine.kernels.cpu.four_bits import PART
from engine.kernels.cpu.grouped import LANES
from engine.kernels.four_bit_rounding import QUOTIENTS


def emit_rounding(module: ir.Module, name: str) -> None:
    """Emit the kernel. A number q of the result stands for scale · (q - 8).

    The scale of a group is the one of len(QUOTIENTS) candidates with the smallest sum of squared errors.

    Fields: x [N, K], values (bytes [N / 16, K / 8, 64]), scales float32 [N, K / group], K, N, parts of 32 in a group.
    """
    b = Kernel(module, name, LANES)
    x, values, scales, K, N, length = b.fields(x=PTR, values=PTR, scales=PTR, K=I64, N=I64, length=I64)
    groups = b.sdiv(K, b.mul(length, I64(PART)))
    zero, halves = b.all_lanes(0), range(0, PART, LANES)

    def steps(number: Any, inverse: Any) -> Any:
        """Returns the numbers from -8 to 7 as floats."""
        whole = b.vector_op("rint", b.fmul(number, inverse))
        return b.vector_op("maximum", b.vector_op("minimum", whole, b.all_lanes(7)), b.all_lanes(-8))

    first, end = (b.mul(block, I64(LANES)) for block in b.share(b.sdiv(N, I64(LANES))))
    with b.loop(first, end) as (row, _), b.loop(I64(0), groups) as (group, _):
        begin = b.mul(group, b.mul(length, I64(PART)))
        at = b.at(x, b.add(b.mul(row, K), begin), F32)
        with b.loop(I64(0), b.mul(length, I64(PART)), LANES, high=zero, low=zero) as (k, ends):
            part = b.floats_at(at, k)
            ends["high"] = b.vector_op("maximum", ends["high"], part)
            ends["low"] = b.vector_op("maximum", ends["low"], b.fneg(part))
        high, low = b.largest(ends["high"]), b.largest(ends["low"])
        extreme = b.select(b.fcmp_ordered(">", high, low), high, b.fneg(low))
        candidates = [b.fdiv(extreme, F32(-quotient)) for quotient in QUOTIENTS]
        inverses = [_inverse(b, scale) for scale in candidates]
        errors = {str(i): zero for i in range(len(candidates))}
        with b.loop(I64(0), b.mul(length, I64(PART)), LANES, **errors) as (k, errors):
            part = b.floats_at(at, k)
            for i, (scale, inverse) in enumerate(zip(candidates, inverses, strict=True)):
                error = b.fsub(b.fmul(steps(part, b.all_lanes(inverse)), b.all_lanes(scale)), part)
                errors[str(i)] = b.fma(error, error, errors[str(i)])
        best, inverse, least = candidates[0], inverses[0], b.total(errors["0"])
        for i in range(1, len(candidates)):  # a scale that is not finite is in all candidates
            error = b.total(errors[str(i)])
            better = b.fcmp_ordered("<", error, least)
            best, least = b.select(better, candidates[i], best), b.select(better, error, least)
            inverse = b.select(better, inverses[i], inverse)
        b.write(best, scales, b.add(b.mul(row, groups), group))
        block, lane = b.sdiv(row, I64(LANES)), b.srem(row, I64(LANES))
        to = b.at(values, b.mul(block, b.mul(K, I64(LANES // 2))), I8)
        with b.loop(I64(0), b.mul(length, I64(PART)), PART) as (k, _):
            for half in halves:
                found = steps(b.floats_at(at, b.add(k, I64(half))), b.all_lanes(inverse))
                whole = b.intrinsic(f"llvm.fptosi.sat.v{LANES}i32.v{LANES}f32", b.ints, found)
                bytes_ = b.trunc(b.add(whole, b.all_ints(8)), ir.VectorType(I8, LANES))
                words = b.bitcast(bytes_, ir.VectorType(I32, LANES // 4))  # 4 numbers in each
                for pair in range(0, LANES // 4, 2):
                    lower, upper = (b.extract_element(words, I32(pair + i)) for i in range(2))
                    both = b.or_(lower, b.shl(upper, I32(4)))
                    eight = b.sdiv(b.add(b.add(begin, k), I64(half + pair * 4)), I64(8))
                    b.write(both, to, b.add(b.mul(eight, I64(LANES)), lane), I32)
    b.ret_void()


def _inverse(b: Kernel, scale: Any) -> Any:
    """Returns 1 / scale, or 0 for a group of zeros."""
    return b.select(b.fcmp_ordered("==", scale, F32(0)), F32(0), b.fdiv(F32(1), scale))
