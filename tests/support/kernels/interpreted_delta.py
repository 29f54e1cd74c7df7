"""Runs the kernels of the gated delta rule in Triton's interpreter, on the CPU, and prints how far each case is off.

    TRITON_INTERPRET=1 python -m tests.support.kernels.interpreted_delta

prints one line of JSON: {case: {"conv", "out", "state": relative errors, "wrong": what else is wrong}}. In float32: the
interpreter cannot multiply bfloat16.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch.testing import assert_close

from engine.kernels import delta_ends
from engine.model import ops
from engine.worker.graphs.extend_graphs import Size
from tests.support.delta_steps import Case, Heads, Segments, error, in_a_graph, make

assert os.environ.get("TRITON_INTERPRET") == "1", "Triton reads it when it is imported"

SMALL: Heads = (1, 1, 16, 16)
STEPS: dict[str, tuple[Segments, Heads, int]] = {
    "everything": ([[1], [1, 1, 1], [66, 5, 1], [3]], (1, 2, 16, 16), 4),
    "decodes": ([[1]] * 3, (1, 1, 16, 32), 3),
    "drafts": ([[1], [1, 1, 1], [1, 1]], SMALL, 3),
    "wide": ([[7, 1]], (1, 1, 256, 128), 2),
}
CAPTURED: dict[str, tuple[Segments, Size]] = {
    "extend 16": ([[5], [1], [1, 3]], Size(16, 0)),
    "extend 32 with 16": ([[1]] * 9 + [[8, 5, 1]], Size(32, 16)),
}


def results() -> dict[str, Any]:
    """Returns what is printed."""
    found = {name: _compare(_make(*step)) for name, step in STEPS.items()}
    for name, (lengths, size) in CAPTURED.items():
        case = _make(lengths, SMALL, 3, size.tokens - sum(map(sum, lengths)))
        found[name] = _compare(in_a_graph(case, size.draws, size.segments), graph=True)
    drafts = _make([[1, 1, 1], [1]], SMALL, 4, padding=4)
    found["verify 8"] = _compare(in_a_graph(drafts, 5, 8), graph=True)
    found["ends"] = _ends()
    return found


def _make(lengths: Segments, heads: Heads, taps: int, padding: int = 0) -> Case:
    return make(lengths, heads, torch.float32, padding, taps, "cpu")


def _compare(case: Case, graph: bool = False) -> dict[str, Any]:
    (y, conv, out, recurrent), (y_, conv_, out_, recurrent_) = case.run(graph), case.wanted()
    live, wrong = case.rows[-1][1], []
    if not out.isfinite().all():
        wrong.append("tokens of padding are not finite")
    if not all(torch.equal(conv[slot].double(), conv_[slot]) for slot in case.written):
        wrong.append("the last inputs are not copies")
    others = [slot for slot in range(len(conv)) if slot not in case.written]
    for before, after in ((case.conv, conv), (case.recurrent, recurrent)):
        if not torch.equal(before[others].nan_to_num(), after[others].nan_to_num()):
            wrong.append("a slot was written that is no target")
    state = max(error(recurrent[slot], recurrent_[slot]) for slot in case.written)
    return {"conv": error(y[:live], y_[:live]), "out": error(out[:live], out_[:live]), "state": state, "wrong": wrong}


def _ends() -> dict[str, Any]:
    """The kernels before and after the rule."""
    torch.manual_seed(0)
    rates, decay, bias = torch.randn(5, 6), -torch.rand(3), torch.randn(3)
    g, beta = delta_ends.delta_gates(rates, decay, bias)
    g_, beta_ = ops.delta_gates(rates.double(), decay.double(), bias.double())
    x, z, weight = torch.randn(5, 3, 16), torch.randn(5, 48), torch.randn(16)
    normed, normed_ = delta_ends.gated_norm(x, z, weight, 1e-6), ops.gated_norm(x, z, weight, 1e-6)
    assert_close(normed, normed_)
    return {"conv": error(g, g_), "out": error(beta, beta_), "state": error(normed, normed_.double()), "wrong": []}


if __name__ == "__main__":
    print(json.dumps(results()))
