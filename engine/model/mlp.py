"""The dense MLP of a layer, and the expert that every token uses beside a mixture."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.model import ops as torch_ops
from engine.model.config import ModelConfig
from engine.model.experts import Ops
from engine.model.linear import linear
from engine.model.matrices import Matrices
from engine.model.slots import Slot


class DenseMLP:
    """Computes down(silu(gate(x)) · up(x)), or another activation, or no gate. Experts has the same methods."""

    def __init__(self, config: ModelConfig, inner: int, prefix: str, matrices: Matrices, ops: Ops) -> None:
        hidden, width = config.hidden_size, (1 + config.gated) * inner
        dtype, device = matrices.dtype, matrices.device
        self.gated, self.silu = config.gated, config.gated and config.activation == "silu"
        # [T, width] -> [T, inner]; may overwrite its argument.
        self.activate = ops.silu_mul if self.silu else torch_ops.gelu_mul
        if not config.gated:
            self.activate = torch_ops.gelu
        self._inputs = ("gate_proj", "up_proj") if config.gated else ("up_proj",)
        self.gate_up = matrices.empty(width, hidden, prefix, self._inputs)
        self.down = matrices.empty(hidden, inner, prefix, ["down_proj"])
        self.gate_up_bias = self.down_bias = None
        if config.mlp_bias:
            self.gate_up_bias = torch.empty(width, dtype=dtype, device=device)
            self.down_bias = torch.empty(hidden, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor, live: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the output [T, H] for x [T, H]. `live` has an effect in Experts only."""
        inner = self.activate(linear(x, self.gate_up, self.gate_up_bias))
        return linear(inner, self.down, self.down_bias)

    def slots(self, prefix: str) -> Iterator[Slot]:
        names = self._inputs
        for name, view in zip(names, self.gate_up.chunk(len(names)), strict=True):
            yield Slot(f"{prefix}{name}.weight", view)
        yield Slot(f"{prefix}down_proj.weight", self.down)
        if self.gate_up_bias is not None and self.down_bias is not None:
            for name, view in zip(names, self.gate_up_bias.chunk(len(names)), strict=True):
                yield Slot(f"{prefix}{name}.bias", view)
            yield Slot(f"{prefix}down_proj.bias", self.down_bias)


class SharedExpert:
    """Computes sigmoid(gate · x) · mlp(x), which a layer adds to the output of its mixture of experts."""

    def __init__(self, config: ModelConfig, inner: int, prefix: str, matrices: Matrices, ops: Ops) -> None:
        self.mlp = DenseMLP(config, inner, f"{prefix}shared_expert.", matrices, ops)
        self.gate = torch.empty(1, config.hidden_size, dtype=matrices.dtype, device=matrices.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]"""
        return self.mlp(x) * torch.sigmoid(torch.nn.functional.linear(x, self.gate))

    def slots(self, prefix: str) -> Iterator[Slot]:
        yield from self.mlp.slots(f"{prefix}shared_expert.")
        yield Slot(f"{prefix}shared_expert_gate.weight", self.gate)
