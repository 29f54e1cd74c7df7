"""Products of bytes, with the instructions of each kind of processor (Features.dot)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from engine.kernels.cpu.emit import I8, I16, I32, Kernel

VECTORS = {"vnni": 64, "avx512": 64, "avx2": 32, "dotprod": 16, "plain": 16}  # bytes that one instruction multiplies
VNNI = {64: "512", 32: "256", 16: "128"}  # bytes per vector -> suffix of the instruction


def bias(kind: str) -> int:
    """Returns what `dot` adds to each signed weight."""
    return 128 if kind == "vnni" else 0


def dot(b: Kernel, kind: str, sums: Any, weights: Any, x: Any, *, signed: bool) -> Any:
    """Adds to each lane of `sums`, 32-bit integers, four products of bytes of `weights` and of `x`. weights, x: vectors
    of as many bits as `sums`. x: from -127 to 127. weights: the same and `bias` is added to each (signed), or from 0 to
    15 and nothing is added. No sum saturates."""
    size = 4 * sums.type.count
    if kind == "vnni":
        bytes_ = ir.VectorType(I8, size)
        weights, x = b.bitcast(weights, bytes_), b.bitcast(x, bytes_)
        if signed:  # the instruction multiplies unsigned by signed bytes
            weights = b.xor(weights, ir.Constant(bytes_, [0x80] * size))
        return b.intrinsic(f"llvm.x86.avx512.vpdpbusd.{VNNI[size]}", sums.type, sums, weights, x)
    lanes = VECTORS[kind] // 4
    if kind == "plain" or sums.type.count % lanes:
        return _plain(b, sums, b.bitcast(weights, sums.type), b.bitcast(x, sums.type))
    found, whole = [], ir.VectorType(I32, sums.type.count)
    for first in range(0, sums.type.count, lanes):
        chosen = ir.Constant(ir.VectorType(I32, lanes), list(range(first, first + lanes)))
        parts = (b.bitcast(vector, whole) for vector in (sums, weights, x))
        total, *both = (b.shuffle_vector(vector, vector, chosen) for vector in parts)
        w8, x8 = (b.bitcast(vector, ir.VectorType(I8, 4 * lanes)) for vector in both)
        found.append(_sdot(b, total, w8, x8) if kind == "dotprod" else _pairs(b, total, w8, x8, signed))
    while len(found) > 1:
        count = found[0].type.count * 2
        order = ir.Constant(ir.VectorType(I32, count), list(range(count)))
        found = [b.shuffle_vector(low, high, order) for low, high in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def _pairs(b: Kernel, sums: Any, weights: Any, x: Any, signed: bool) -> Any:
    """Unsigned by signed bytes, summed in pairs in 16 bits: at most 2 · 128 · 127, so the first factor is |weight|."""
    size = weights.type.count
    words = ir.VectorType(I16, size // 2)
    wide = size == 64
    if signed:
        if wide:
            zero = ir.Constant(x.type, [0] * size)
            x = b.select(b.icmp_signed("<", weights, zero), b.sub(zero, x), x)
        else:
            x = b.intrinsic("llvm.x86.avx2.psign.b", x.type, x, weights)
        weights = b.intrinsic(f"llvm.abs.v{size}i8", weights.type, weights, ir.Constant(ir.IntType(1), 0))
    names = ("avx512.pmaddubs.w.512", "avx512.pmaddw.d.512") if wide else ("avx2.pmadd.ub.sw", "avx2.pmadd.wd")
    twos = b.intrinsic(f"llvm.x86.{names[0]}", words, weights, x)
    fours = b.intrinsic(f"llvm.x86.{names[1]}", sums.type, twos, ir.Constant(words, [1] * words.count))
    return b.add(sums, fours)


def _sdot(b: Kernel, sums: Any, weights: Any, x: Any) -> Any:
    return b.intrinsic("llvm.aarch64.neon.sdot.v4i32.v16i8", sums.type, sums, weights, x)


def _plain(b: Kernel, sums: Any, weights: Any, x: Any) -> Any:
    """For processors without such instructions."""
    top = ir.Constant(sums.type, [24] * sums.type.count)
    for i in range(4):
        up = ir.Constant(sums.type, [24 - 8 * i] * sums.type.count)
        one, other = (b.ashr(b.shl(vector, up), top) for vector in (weights, x))
        sums = b.add(sums, b.mul(one, other))
    return sums
