"""Runs the kernels of 4-bit weights in Triton's interpreter, on the CPU, and prints how far each product is off.

    TRITON_INTERPRET=1 python -m tests.support.kernels.interpreted_four_bits

prints one line of JSON: {case: {product: relative error}}. The interpreter cannot multiply bfloat16, so activations of
several tokens are float32. It cuts numbers off when it makes bfloat16, so "norm" and "expand" are off by 0.01.
"""

from __future__ import annotations

import json
import os

import torch
import torch.nn.functional as F

from engine.kernels import four_bits, four_bits_one, moe_int4, norms
from engine.kernels.four_bits import Form
from engine.kernels.moe_route import Routes
from engine.kernels.moe_tiles import Tile, Tiles
from engine.model import ops
from engine.model.config import ExpertsConfig
from engine.model.experts import Experts
from engine.model.four_bits import Int4Tiles

assert os.environ.get("TRITON_INTERPRET") == "1", "Triton reads it when it is imported"

ROWS = 256
EXPERTS = [(256, 128, 128, False), (384, 256, 64, True)]  # hidden, inner, numbers of a group, offsets
CASES = [(384, 32, False), (512, 128, True)]  # columns, numbers of a group, offsets


def errors(columns: int, group: int, offsets: bool) -> dict[str, float]:
    """Returns the relative errors of all products with a random matrix. Its row 3 is small, its row 4 is 0, factors of
    rows 5 and 6 are far apart and 0."""
    kind = type("Kind", (Int4Tiles,), {"__slots__": (), "group": group, "with_offsets": offsets})
    w = kind.empty(ROWS, columns, torch.device("cpu"))
    scales = torch.rand(ROWS, columns // group) + 0.1
    scales[3], scales[4] = 1e-6, 0
    scales[5:7] = torch.logspace(-10, 0, columns // group)
    scales[5, -1], scales[6, 1::2] = 0, 0
    moved = torch.randint(-8, 9, scales.shape) if offsets else None
    w.store(0, torch.randint(0, 16, (ROWS, columns), dtype=torch.uint8), scales, moved)
    wide = w.dense()
    x, residual, several = torch.randn(1, columns).bfloat16(), torch.randn(1, ROWS), torch.randn(5, columns)
    gain = torch.rand(columns).bfloat16() + 0.5
    normed = (gain * F.rms_norm(x.float(), (columns,), None, 1e-6).bfloat16()).double()
    gate, up = (normed @ wide.T).chunk(2, -1)

    def error(found: torch.Tensor, exact: torch.Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    def error_of_rows(found: torch.Tensor) -> float:
        exact = several.double() @ wide.T
        return float(((found.double() - exact).norm(dim=0) / exact.norm(dim=0).clamp(1e-6)).max())

    def out(n: int) -> torch.Tensor:
        return torch.full((1, n), torch.nan)

    one = four_bits.one(x, w, residual=residual, out=out(ROWS))
    fused = four_bits.one(x, w, norm=(gain, 1e-6), gate_up=True, out=out(ROWS // 2))
    found = {
        "one": error(one, x.double() @ wide.T + residual.double()), "norm": error(fused, F.silu(gate) * up),
        "expand": error(four_bits.expand(w), wide),
    }
    width = w.values.shape[-1]
    for form in (
        Form(16, 128, width, 4, 2), Form(16, 128, 32, 4, 2, parts=columns // (4 * width)),
        Form(16, 128, 32, 4, 2, programs=2, described=True),
    ):
        found[f"few, {form}"] = error_of_rows(four_bits.few(several, w, form).sum(0))
    four_bits.SHARED = 128  # two programs share each tile of these few columns
    for form in (Form(16, 64, 32, 4, 2), Form(16, 64, 32, 4, 2, described=True)):
        twice = [four_bits.few(several, w, form) for _ in range(2)]
        found[f"shared, {form}"] = error_of_rows(twice[1][0])
        assert torch.equal(*twice) and not four_bits._counters(several.device).any()
    four_bits.SHARED = 1 << 20
    return found


def errors_of_experts(hidden: int, inner: int, group: int, offsets: bool) -> dict[str, float]:
    """Returns the relative errors of a mixture of three experts, of which each token has two."""
    kind = type("Kind", (Int4Tiles,), {"__slots__": (), "group": group, "with_offsets": offsets})
    experts = Experts(ExpertsConfig(3, 2, inner, True, (True,)), hidden, torch.float32, torch.device("cpu"), ops, kind)
    for w in (experts.gate_up, experts.down):
        scales = (torch.rand(w.shape[0], w.shape[1] // group) + 0.1) / 64
        moved = torch.randint(-8, 9, scales.shape) if offsets else None
        w.store(0, torch.randint(0, 16, w.shape, dtype=torch.uint8), scales, moved)
    experts.router.normal_()
    x, found = torch.randn(7, hidden), {}
    exact = experts.one_by_one(x)
    for rows in (16, 64):
        tiles = Tiles(rows, True, Tile(64, 64, 4, 2), Tile(128, 32, 4, 2))
        weights, chosen = experts.route(x)
        order = chosen.view(-1).argsort(stable=True).int()
        counts = chosen.view(-1).bincount(minlength=3).tolist()
        first = [sum(counts[:i]) for i in range(3)]
        table = torch.tensor([[i, first[i], counts[i], 3 * (i == 0)] for i in range(3)], dtype=torch.int32)
        each = moe_int4.products(x, experts.gate_up, experts.down, Routes(weights, order, table), tiles)
        found[f"experts, {rows}"] = float((each.sum(1) - exact).norm() / exact.norm())
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    norms.overlap = four_bits.overlap = four_bits_one.overlap = moe_int4.overlap = lambda: {"PDL": False}  # type: ignore[assignment]
    # Several chunks of these few columns; few programs, which the interpreter runs in turn.
    four_bits_one.one_form = lambda gate_up, large: (128, 256, 4)  # type: ignore[assignment]
    of_experts = {f"{case}": errors_of_experts(*case) for case in EXPERTS}
    print(json.dumps({f"{case}": errors(*case) for case in CASES} | of_experts))
