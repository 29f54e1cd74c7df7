"""Products of bytes, with the instructions of each kind of processor (Features.dot)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from engine.kernels.cpu.emit import I8, I16, I32, Kernel

VECTORS = {  # bytes that one instruction multiplies
    "vnni": 64, "avx512": 64, "avxvnni": 32, "avx2": 32, "dotprod": 16, "plain": 16,
}
UNSIGNED = ("vnni", "avxvnni")  # kinds whose instruction multiplies four unsigned by four signed bytes
PAIRS = ("avx512", "avx2")  # kinds whose instruction sums two products of unsigned by signed bytes in 16 bits


def bias(kind: str) -> int:
    """Returns what `dot` adds to each signed weight."""
    return 128 if kind in UNSIGNED else 0


def dot(b: Kernel, kind: str, sums: Any, weights: Any, x: Any) -> Any:
    """Adds to each lane of `sums`, 32-bit integers, four products of bytes of `weights` and of `x`. weights, x: vectors
    of as many bits as `sums`, from -127 to 127; `bias` is added to each weight. No sum saturates."""
    found, both = [], (_split(b, kind, vector) for vector in (weights, x))
    for total, w, y in zip(_split(b, kind, sums, I32), *both, strict=True):
        size = w.type.count
        if kind in UNSIGNED:
            found.append(_fours(b, total, b.xor(w, ir.Constant(w.type, [0x80] * size)), y))
        elif kind in PAIRS and size >= VECTORS["avx2"]:  # at most 2 · 128 · 127, so the unsigned factor is |weight|
            size_of_w = b.intrinsic(f"llvm.abs.v{size}i8", w.type, w, ir.Constant(ir.IntType(1), 0))
            found.append(_sum_of_pairs(b, total, _pairs(b, size_of_w, _signed(b, y, w))))
        elif kind == "dotprod":
            found.append(b.intrinsic("llvm.aarch64.neon.sdot.v4i32.v16i8", total.type, total, w, y))
        else:
            found.append(_plain(b, total, b.bitcast(w, total.type), b.bitcast(y, total.type)))
    return _joined(b, found)


class SmallSums:
    """Like up to 8 calls of `dot` one after the other, for weights from 0 to 15, to which no bias is added. So sums of
    pairs stay in 16 bits until the end: they are 16 · 15 · 127 at most."""

    def __init__(self, b: Kernel, kind: str, start: Any) -> None:
        self._b, self._kind, self._sums = b, kind, _split(b, kind, start, I32)
        self._words: list[Any] = []

    def add(self, weights: Any, x: Any) -> None:
        b, kind = self._b, self._kind
        both = list(zip(*(_split(b, kind, vector) for vector in (weights, x)), strict=True))
        if kind in PAIRS:
            words = [_pairs(b, *each) for each in both]
            self._words = [b.add(*each) for each in zip(self._words, words, strict=True)] if self._words else words
        elif kind in UNSIGNED:
            self._sums = [_fours(b, total, *each) for total, each in zip(self._sums, both, strict=True)]
        else:
            self._sums = [dot(b, kind, total, *each) for total, each in zip(self._sums, both, strict=True)]

    def total(self) -> Any:
        for i, words in enumerate(self._words):
            self._sums[i] = _sum_of_pairs(self._b, self._sums[i], words)
        return _joined(self._b, self._sums)


def _split(b: Kernel, kind: str, vector: Any, parts: ir.Type = I8) -> list[Any]:
    """Returns a vector as vectors of `parts` that fit into the instruction."""
    whole = b.bitcast(vector, ir.VectorType(I8, vector.type.count * vector.type.element.width // 8))
    size = min(VECTORS[kind], whole.type.count)
    found = []
    for first in range(0, whole.type.count, size):
        chosen = ir.Constant(ir.VectorType(I32, size), list(range(first, first + size)))
        part = whole if size == whole.type.count else b.shuffle_vector(whole, whole, chosen)
        found.append(b.bitcast(part, ir.VectorType(parts, size * 8 // parts.width)))
    return found


def _joined(b: Kernel, parts: list[Any]) -> Any:
    while len(parts) > 1:
        count = parts[0].type.count * 2
        order = ir.Constant(ir.VectorType(I32, count), list(range(count)))
        parts = [b.shuffle_vector(low, high, order) for low, high in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _fours(b: Kernel, sums: Any, weights: Any, x: Any) -> Any:
    return b.intrinsic(f"llvm.x86.avx512.vpdpbusd.{8 * x.type.count}", sums.type, sums, weights, x)


def _signed(b: Kernel, x: Any, weights: Any) -> Any:
    """Returns x with the signs of the weights; a product with a weight of 0 is 0 with any x."""
    if x.type.count == VECTORS["avx2"]:
        return b.intrinsic("llvm.x86.avx2.psign.b", x.type, x, weights)
    zero = ir.Constant(x.type, [0] * x.type.count)
    return b.select(b.icmp_signed("<", weights, zero), b.sub(zero, x), x)


def _pairs(b: Kernel, weights: Any, x: Any) -> Any:
    """Returns sums of two products of unsigned by signed bytes, in 16 bits."""
    size = x.type.count
    name = "avx512.pmaddubs.w.512" if size == 64 else "avx2.pmadd.ub.sw"
    return b.intrinsic(f"llvm.x86.{name}", ir.VectorType(I16, size // 2), weights, x)


def _sum_of_pairs(b: Kernel, sums: Any, words: Any) -> Any:
    name = "avx512.pmaddw.d.512" if words.type.count == 32 else "avx2.pmadd.wd"
    ones = ir.Constant(words.type, [1] * words.type.count)
    return b.add(sums, b.intrinsic(f"llvm.x86.{name}", sums.type, words, ones))


def _plain(b: Kernel, sums: Any, weights: Any, x: Any) -> Any:
    """For processors without such instructions."""
    top = ir.Constant(sums.type, [24] * sums.type.count)
    for i in range(4):
        up = ir.Constant(sums.type, [24 - 8 * i] * sums.type.count)
        one, other = (b.ashr(b.shl(vector, up), top) for vector in (weights, x))
        sums = b.add(sums, b.mul(one, other))
    return sums
