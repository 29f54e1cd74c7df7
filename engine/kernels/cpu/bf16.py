"""Products with bfloat16 weights by the processor's products of bfloat16 pairs (AVX-512 BF16).

f(x) is rounded to bfloat16, as a bfloat16 model on a GPU does; sums are float32. Weights are stored as
engine/model/linear.py says.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from engine.kernels.cpu.emit import BF16, F32, I32, I64, Kernel
from engine.kernels.cpu.grouped import LANES, Call
from engine.kernels.cpu.product import multiply_pairs, round_to_bf16

PAIRS = ir.VectorType(BF16, 2 * LANES)
VECTORS = 2


class Bf16Form:
    """32 rows of the weight are stored together, two numbers of each."""

    together = VECTORS * LANES
    rows = (8, 4, 2, 1)

    def places(self, b: Kernel, base: Any, c: Call) -> Any:
        return b.at(base, b.mul(c.R, c.K), F32)

    def round(self, b: Kernel, x: Any, places: Any, c: Call, rows: tuple[Any, Any]) -> None:
        first, end = (b.mul(row, c.K) for row in rows)
        round_to_bf16(b, x, places, (first, end))

    def tile(self, b: Kernel, places: Any, c: Call, block: Any, r0: Any, rows: int) -> list[list[Any]]:
        begin = b.at(c.weight, b.mul(block, b.mul(c.K, I64(self.together))), BF16)
        x_at = [b.at(places, b.mul(b.add(r0, I64(r)), c.K), BF16) for r in range(rows)]
        cells = [f"{r} {v}" for r in range(rows) for v in range(VECTORS)]
        with b.loop(I64(0), b.sdiv(c.K, I64(2)), **{cell: b.all_lanes(0) for cell in cells}) as (pair, totals):
            at = b.at(begin, b.mul(pair, I64(2 * self.together)), BF16)
            weights = [b.load(b.at(at, I64(v * 2 * LANES), BF16), typ=PAIRS, align=2) for v in range(VECTORS)]
            for r in range(rows):
                both = b.bitcast(b.every(b.read(x_at[r], pair, I32), b.ints), PAIRS)
                for v, found in enumerate(weights):
                    totals[f"{r} {v}"] = multiply_pairs(b, totals[f"{r} {v}"], found, both)
        return [[totals[f"{r} {v}"] for v in range(VECTORS)] for r in range(rows)]
