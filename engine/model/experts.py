"""Mixture of experts: for each token, a router chooses a few of many small MLPs.

This readable form is the specification of engine/kernels/moe.py. Tokens are sorted by expert, so the weights of
each chosen expert are read once. The host waits for the number of tokens of each expert, so a CUDA graph cannot contain
this form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from engine.model.config import ExpertsConfig
from engine.model.weights import Slot


class Ops(Protocol):
    """The decoder's small operations. engine/model/ops.py specifies them; engine/worker/fused_ops.py fuses them."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, /) -> torch.Tensor: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, /
    ) -> torch.Tensor: ...

    def rope_rows(self, table: torch.Tensor, positions: torch.Tensor, /) -> Any: ...

    def qk_norm_rope_store(
        self, qkv: torch.Tensor, qk_weight: torch.Tensor | None, eps: float, rope: Any, k_cache: torch.Tensor,
        v_cache: torch.Tensor, slot_mapping: torch.Tensor, kv_scales: torch.Tensor | None, /,
    ) -> torch.Tensor: ...  # fmt: skip

    def silu_mul(self, gate_up: torch.Tensor, /) -> torch.Tensor: ...

    def experts(self, x: torch.Tensor, mixture: Experts, live: torch.Tensor | None, /) -> torch.Tensor: ...


class Experts:
    """Computes the weighted sum of down_e(silu(gate_e(x)) · up_e(x)) over the chosen experts e of a token.

    It takes the place of a DenseMLP. Shapes: T tokens of hidden size H; E experts of inner size I; K chosen experts for
    each token.
    """

    def __init__(self, config: ExpertsConfig, hidden: int, dtype: torch.dtype, device: torch.device, ops: Ops) -> None:
        self._ops = ops
        self.config = config
        self.router = torch.empty(config.count, hidden, dtype=dtype, device=device)
        self.gate_up = torch.empty(config.count, 2 * config.inner_size, hidden, dtype=dtype, device=device)
        self.down = torch.empty(config.count, hidden, config.inner_size, dtype=dtype, device=device)
        # The number of tokens of each expert since the last call of Decoder.take_expert_load.
        self.load = torch.zeros(config.count, dtype=torch.int64, device=device)

    def __call__(self, x: torch.Tensor, live: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, H] -> [T, H]. `live` int32 [1]: the number of tokens before the padding; the padding becomes zeros."""
        return self._ops.experts(x, self, live)

    def one_by_one(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H], computed one expert after another."""
        weights, chosen = self.route(x)
        per_token = self.config.per_token
        counts = chosen.view(-1).bincount(minlength=self.config.count)
        self.load += counts
        order = chosen.view(-1).argsort(stable=True)  # [T·K] indices into the flat `chosen`, sorted by expert
        outputs = x.new_empty(len(order), x.shape[1])
        for expert, pairs in enumerate(order.split(counts.tolist())):
            if len(pairs):
                rows = x.index_select(0, pairs // per_token)
                inner = self._ops.silu_mul(F.linear(rows, self.gate_up[expert]))
                outputs.index_copy_(0, pairs, F.linear(inner, self.down[expert]))
        return torch.bmm(weights[:, None], outputs.view(len(x), per_token, x.shape[1]))[:, 0]

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights [T, K] and the indices int64 [T, K] of the experts chosen for each token of x [T, H].

        The weights are probabilities over all experts, computed in fp32 (float64 in a float64 model). With
        config.normalised, the weights of the chosen experts are scaled to sum to 1.
        """
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        probabilities = F.linear(x, self.router).softmax(-1, dtype=wide)
        weights, chosen = probabilities.topk(self.config.per_token)
        if self.config.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen

    @property
    def nbytes(self) -> int:
        """Bytes of all experts, without the router."""
        return self.gate_up.nbytes + self.down.nbytes

    def slots(self, prefix: str) -> Iterator[Slot]:
        gate, up = self.gate_up.chunk(2, 1)
        names = [f"{prefix}experts.{expert}." for expert in range(self.config.count)]
        yield Slot(f"{prefix}gate.weight", self.router)
        yield Slot(
            f"{prefix}experts.gate_up_proj",
            self.gate_up,
            parts=(
                *(Slot(f"{name}gate_proj.weight", view) for name, view in zip(names, gate, strict=True)),
                *(Slot(f"{name}up_proj.weight", view) for name, view in zip(names, up, strict=True)),
            ),
        )
        yield Slot(
            f"{prefix}experts.down_proj",
            self.down,
            parts=tuple(Slot(f"{name}down_proj.weight", view) for name, view in zip(names, self.down, strict=True)),
        )
