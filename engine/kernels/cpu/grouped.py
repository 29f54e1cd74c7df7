"""out [R, N] = f(x) [R, K] · weightᵀ for matrices whose rows are stored in groups, one row per lane of the sums.

So no sum goes over lanes, weights are read in the order of addresses, and a row's result has the same bits for every R.
f(x) is rounded before the product. For few rows every thread rounds all of them, into memory of its own: this is faster
than a barrier. For many rows a kernel of its own does this before the product, and each thread rounds its part.
"""

from __future__ import annotations

from typing import Any, Protocol

from llvmlite import ir

from engine.kernels.cpu.emit import F32, I64, Kernel
from engine.kernels.cpu.product import PREPARE, Before, Call, call_fields, prepare, store

LANES = 16  # numbers in a vector of sums


class Form(Protocol):
    """How numbers are stored, rounded and multiplied."""

    @property
    def together(self) -> int:
        """Rows of the weight that are stored together."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Numbers of rows of x in registers at a time, the largest first; the last is 1."""

    def places(self, b: Kernel, base: Any, c: Call) -> Any:
        """Returns the addresses of rounded rows. base: f(x) [R, K] before its rounding; the rounded rows follow it."""

    def round(self, b: Kernel, x: Any, places: Any, c: Call, rows: tuple[Any, Any]) -> None:
        """Round some rows of x [R, K]. rows: (first, end)."""

    def tile(self, b: Kernel, places: Any, c: Call, block: Any, r0: Any, rows: int) -> list[list[Any]]:
        """Returns `rows` by `together` sums as vectors, from row r0 on. block: number of the stored group of rows."""


def emit_grouped(module: ir.Module, name: str, form: Form, eps: float) -> None:
    """Emit the product, and the kernel that rounds rows for it."""
    b = Kernel(module, name + PREPARE, LANES)
    c = call_fields(b)
    _round(b, form, c, c.scratch, b.share(c.R), eps)
    b.ret_void()

    b = Kernel(module, name, LANES)
    c = call_fields(b)
    ready = b.icmp_signed("==", c.before, I64(Before.READY))
    base = b.select(ready, c.x, b.at(c.scratch, b.mul(b.thread(), c.each), F32))
    with b.if_then(b.not_(ready)):
        _round(b, form, c, base, (I64(0), c.R), eps)
    places = form.places(b, base, c)
    first, end = b.share(b.sdiv(c.N, I64(form.together)))
    with b.loop(first, end) as (block, _):
        done: Any = I64(0)
        for rows in form.rows:
            stop = b.add(done, b.mul(b.sdiv(b.sub(c.R, done), I64(rows)), I64(rows)))
            with b.loop(done, stop, rows) as (r0, _):
                for r, sums in enumerate(form.tile(b, places, c, block, r0, rows)):
                    for i, found in enumerate(sums):
                        n = b.add(b.mul(block, I64(form.together)), I64(i * LANES))
                        store(b, c, found, n, b.add(r0, I64(r)), LANES)
            done = stop
    b.ret_void()


def _round(b: Kernel, form: Form, c: Call, base: Any, rows: tuple[Any, Any], eps: float) -> None:
    prepare(b, c.x, c.norm, base, c.K, rows, c.before, eps)
    found = b.select(b.icmp_signed("==", c.before, I64(Before.NOTHING)), c.x, base)
    form.round(b, found, form.places(b, base, c), c, rows)
