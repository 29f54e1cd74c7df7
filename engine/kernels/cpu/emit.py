"""Emits LLVM instructions for the kernels of this folder: loops, vectors, and arguments in an array of 64-bit numbers.

A kernel is a function of one pointer. Several threads call it with the same pointer, and each computes its own part.
The pointer leads to an array with one 64-bit number per field: an address or a whole number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, PTR = ir.FloatType(), ir.PointerType()


class _BFloat(ir.Type):
    """bfloat16, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BF16 = _BFloat()
ANY_ORDER = ("reassoc",)
ROUND, ROUND_BITS = 1.5 * 2**23, 0x4B400000  # a float, and its bits
EXP = (1.0, 1.0, 0.5, 1.6666667e-1, 4.1666646e-2, 8.3334519e-3, 1.3930436e-3)  # exp(r) for |r| <= ln(2) / 2


class Kernel(ir.IRBuilder):
    """The body of one kernel. Each float vector has `lanes` numbers."""

    def __init__(self, module: ir.Module, name: str, lanes: int) -> None:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [PTR]), name)
        super().__init__(function.append_basic_block())
        self.lanes = lanes
        self.floats, self.ints = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        self._fields = function.args[0]

    def field(self, index: int, kind: ir.Type = PTR) -> Any:
        """Returns a field of the kernel's argument: a pointer, or I64."""
        return self.load(self.gep(self._fields, [I64(index)], source_etype=I64), typ=kind)

    def fields(self, **kinds: ir.Type) -> list[Any]:
        """Returns the first fields of the argument, in order. The names are for the reader."""
        return [self.field(index, kind) for index, kind in enumerate(kinds.values())]

    def intrinsic(self, name: str, result: ir.Type, *args: Any) -> Any:
        """Call a function that LLVM or the process defines."""
        found = self.module.globals.get(name)
        if found is None:
            found = ir.Function(self.module, ir.FunctionType(result, [arg.type for arg in args]), name)
        return self.call(found, args)

    def thread(self) -> Any:
        """Returns the number of the calling thread."""
        return self.sext(self.intrinsic("omp_get_thread_num", I32), I64)

    def threads(self) -> Any:
        """Returns how many threads call the kernel."""
        return self.sext(self.intrinsic("omp_get_num_threads", I32), I64)

    def share(self, count: Any) -> tuple[Any, Any]:
        """Returns (first, end) of the items, out of `count`, that the calling thread computes."""
        threads, thread = self.threads(), self.thread()
        first, end = (self.sdiv(self.mul(count, at), threads) for at in (thread, self.add(thread, I64(1))))
        return first, end

    @contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1, **carried: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
        """`for i in range(start, stop, step)`. Yields i and the values carried from one round to the next. The body
        replaces entries of the dict; after the loop, the dict has the final values."""
        before = self.block
        head, body, done = (self.append_basic_block() for _ in range(3))
        self.branch(head)
        self.position_at_end(head)
        i = self.phi(I64)
        i.add_incoming(start, before)
        phis = {name: self.phi(value.type) for name, value in carried.items()}
        for name, value in carried.items():
            phis[name].add_incoming(value, before)
        self.cbranch(self.icmp_signed("<", i, stop), body, done)
        self.position_at_end(body)
        state = dict(phis)
        yield i, state
        i.add_incoming(self.add(i, I64(step) if isinstance(step, int) else step), self.block)
        for name, phi in phis.items():
            phi.add_incoming(state[name], self.block)
        self.branch(head)
        self.position_at_end(done)
        state.update(phis)

    def at(self, base: Any, index: Any, kind: ir.Type) -> Any:
        """Returns the address of element `index` of an array."""
        return self.gep(base, [index], source_etype=kind)

    def read(self, base: Any, index: Any, kind: ir.Type = F32, lanes: int = 1) -> Any:
        """Returns element `index` of an array, or a vector of the `lanes` elements from there."""
        wide = kind if lanes == 1 else ir.VectorType(kind, lanes)
        return self.load(self.at(base, index, kind), typ=wide, align=_bytes(kind))

    def write(self, value: Any, base: Any, index: Any, kind: ir.Type = F32) -> None:
        self.store(value, self.at(base, index, kind), align=_bytes(kind))

    def floats_at(self, base: Any, index: Any) -> Any:
        """Returns a vector of floats."""
        return self.read(base, index, F32, self.lanes)

    def all_lanes(self, value: Any) -> Any:
        """Returns a vector with `value` (a float or a Python number) in every lane."""
        if isinstance(value, (int, float)):
            return ir.Constant(self.floats, [float(value)] * self.lanes)
        return self.every(value, self.floats)

    def every(self, value: Any, vector: ir.Type) -> Any:
        """Returns a vector of this type with `value` in every lane."""
        undefined = ir.Constant(vector, ir.Undefined)
        one = self.insert_element(undefined, value, I32(0))
        return self.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count))

    def all_ints(self, value: int) -> Any:
        """Returns a vector of 32-bit integers with `value` in every lane."""
        return ir.Constant(self.ints, [value] * self.lanes)

    def vector_op(self, name: str, *args: Any) -> Any:
        """Call an LLVM intrinsic on float vectors, such as fma."""
        return self.intrinsic(f"llvm.{name}.v{self.lanes}f32", self.floats, *args)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.vector_op("fma", a, b, c)

    def total(self, vector: Any) -> Any:
        """Returns the sum of the lanes. The order depends on the number of lanes only."""
        found = self.module.globals.get(name := f"llvm.vector.reduce.fadd.v{self.lanes}f32")
        if found is None:
            found = ir.Function(self.module, ir.FunctionType(F32, [F32, self.floats]), name)
        return self.call(found, [F32(-0.0), vector], fastmath=ANY_ORDER)

    def integer_totals(self, vectors: list[Any]) -> Any:
        """Returns the sum of the lanes of each vector, as a vector; of one vector, as a number."""
        lanes = vectors[0].type.count
        if len(vectors) == 1:
            return self.intrinsic(f"llvm.vector.reduce.add.v{lanes}i32", I32, vectors[0])

        def half(one: Any, other: Any, first: int, step: int, count: int) -> Any:
            order = [first + step * i for i in range(count)]
            return self.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, count), order))

        while lanes > len(vectors):
            lanes //= 2
            vectors = [self.add(half(each, each, 0, 1, lanes), half(each, each, lanes, 1, lanes)) for each in vectors]
        while len(vectors) > 1:
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [self.add(half(*pair, 0, 2, lanes), half(*pair, 1, 2, lanes)) for pair in pairs]
        return vectors[0]

    def largest(self, vector: Any) -> Any:
        """Returns the largest lane, or NaN if there is one."""
        return self.intrinsic(f"llvm.vector.reduce.fmaximum.v{self.lanes}f32", F32, vector)

    def nearest(self, x: Any) -> tuple[Any, Any]:
        """Returns the whole number nearest to each lane, as integers and as floats; ties to even. x: below 2 ** 22. The
        sum with ROUND has no bits for a fraction. LLVM's conversion that saturates is five times as slow on x86."""
        shifted = self.fadd(x, self.all_lanes(ROUND))
        bits = self.sub(self.bitcast(shifted, self.ints), self.all_ints(ROUND_BITS))
        return bits, self.fsub(shifted, self.all_lanes(ROUND))

    def exp(self, x: Any) -> Any:
        """Returns exp of each lane, off by 2 units in the last place at most. x: at most 88; NaN stays NaN."""
        x = self.vector_op("maximum", x, self.all_lanes(-87.0))
        whole, n = self.nearest(self.fmul(x, self.all_lanes(1.44269504)))
        r = self.fma(n, self.all_lanes(-0.693359375), x)
        r = self.fma(n, self.all_lanes(2.12194440e-4), r)
        value = self.all_lanes(EXP[-1])
        for factor in reversed(EXP[:-1]):
            value = self.fma(value, r, self.all_lanes(factor))
        power = self.shl(self.add(whole, self.all_ints(127)), self.all_ints(23))
        return self.fmul(value, self.bitcast(power, self.floats))


def _bytes(kind: ir.Type) -> int:
    if kind in (F32, PTR):
        return 4 if kind == F32 else 8
    return 2 if kind == BF16 else kind.width // 8
