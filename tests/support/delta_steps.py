"""Steps of a layer with the gated delta rule: what engine/kernels/delta.py computes, and what it should compute. The
kernels run on a GPU, or in Triton's interpreter (tests/support/kernels/interpreted_delta.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.attention.base import StateMeta
from engine.kernels import delta
from engine.model import delta as reference

Segments = list[list[int]]  # the lengths of the segments of each entry
Heads = tuple[int, int, int, int]  # key heads, value heads, Dk, Dv
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class Case:
    """The inputs of one layer in one step. Slots that no segment reads are NaN, as are tokens of padding."""

    x: torch.Tensor  # [T, C]: queries, keys and values
    g: torch.Tensor
    beta: torch.Tensor
    weight: torch.Tensor
    conv: torch.Tensor
    recurrent: torch.Tensor
    states: StateMeta
    rows: list[tuple[int, int, int, int]]
    bounds: list[int]
    heads: Heads

    def split(self, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
        key_heads, heads, dk, dv = self.heads
        x = self.x if dtype is None else self.x.to(dtype)
        q, k, v = x.split([key_heads * dk, key_heads * dk, heads * dv], 1)
        return q.unflatten(1, (key_heads, dk)), k.unflatten(1, (key_heads, dk)), v.unflatten(1, (heads, dv))

    def run(self, graph: bool = False) -> Results:
        """Returns (convolution, its states, output, states) of the kernels."""
        states = replace(self.states, host=None) if graph else self.states
        conv, recurrent = self.conv.clone(), self.recurrent.clone()
        y = delta.causal_conv(self.x, self.weight, conv, states)
        return y, conv, delta.delta_rule(*self.split(), self.g, self.beta, recurrent, states), recurrent

    def wanted(self) -> Results:
        """Returns what `run` does, by the specification in float64."""
        conv, recurrent, wide = self.conv.double(), self.recurrent.double(), torch.float64
        y = reference.causal_conv(self.x.double(), self.weight.double(), conv, self.states)
        g, beta = self.g.double(), self.beta.double()
        return y, conv, reference.delta_rule(*self.split(wide), g, beta, recurrent, self.states), recurrent

    @property
    def written(self) -> list[int]:
        """The slots that the step writes, each once."""
        return sorted({target for *_, target in self.rows if target})


def make(
    lengths: Segments, heads: Heads, dtype: torch.dtype = torch.bfloat16, padding: int = 0, taps: int = 4,
    device: str = "cuda",
) -> Case:
    """Every second entry begins with a state, and an entry of one segment writes its state in place."""
    torch.manual_seed(sum(map(sum, lengths)))
    rows: list[tuple[int, int, int, int]] = []
    bounds, at, slot, read = [0], 0, 1, [0]
    for entry, parts in enumerate(lengths):
        source = slot if entry % 2 else 0
        slot += source > 0
        read.append(source)
        for part in parts:
            target = source if source and len(parts) == 1 else slot
            slot += target == slot
            rows.append((at, at + part, source, target))
            at, source = at + part, target
        bounds.append(len(rows))
    key_heads, value_heads, dk, dv = heads
    tokens, channels = at + padding, 2 * key_heads * dk + value_heads * dv

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    x, conv = normal(tokens, channels), normal(slot, channels, taps - 1)
    recurrent = normal(slot, value_heads, dv, dk).transpose(2, 3)  # as in the pool
    unread = [i for i in range(slot) if i not in read]
    conv[unread], recurrent[unread], x[at:] = float("nan"), float("nan"), float("nan")
    conv[0], recurrent[0] = 0, 0
    padded = rows + [(at, at, 0, 0)] * (3 if padding else 0)
    decodes = next((i for i, parts in enumerate(lengths) if parts != [1]), len(lengths))
    states = StateMeta(
        torch.tensor(padded, dtype=torch.int32, device=device), torch.tensor(bounds, dtype=torch.int32, device=device),
        rows, decodes,
    )
    g, beta = -2 * torch.rand(tokens, value_heads, device=device), torch.rand(tokens, value_heads, device=device)
    weight = normal(channels, taps)
    return Case(x.to(dtype), g, beta, weight.to(dtype), conv.to(dtype), recurrent, states, rows, bounds, heads)


def in_a_graph(case: Case, sequences: int, segments: int) -> Case:
    """Returns the case with the numbers that a captured step has for so many sequences and segments."""
    at = case.rows[-1][1]
    rows = case.rows + [(at, at, 0, 0)] * (segments - len(case.rows))
    bounds = case.bounds + [len(case.rows)] * (sequences + 1 - len(case.bounds))
    device = case.x.device
    states = StateMeta(
        torch.tensor(rows, dtype=torch.int32, device=device), torch.tensor(bounds, dtype=torch.int32, device=device),
        case.rows, 0,
    )
    return replace(case, states=states)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """||got - wanted|| / ||wanted||; NaN is infinite."""
    distance = ((got.double() - wanted).norm() / wanted.norm()).item()
    return distance if distance == distance else float("inf")
