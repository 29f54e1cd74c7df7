"""Mixture of experts: for each token, a router chooses a few of many small MLPs.

This readable form is the specification of engine/kernels/moe.py. Tokens are sorted by expert, so the weights of
each chosen expert are read once. The host waits for the number of tokens of each expert, so a CUDA graph cannot contain
this form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from engine.attention.base import StateMeta
from engine.model.config import ExpertsConfig
from engine.model.linear import ByteWeight, Matrix, linear
from engine.model.slots import Slot


class Ops(Protocol):
    """The decoder's small operations. engine/model/ops.py specifies them; worker/graphs/fused_ops.py fuses them."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, /) -> torch.Tensor: ...

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, /
    ) -> torch.Tensor: ...

    def rope_rows(self, table: torch.Tensor, positions: torch.Tensor, /) -> Any: ...

    def qk_norm_rope_store(
        self, qkv: torch.Tensor, qk_weight: torch.Tensor | None, eps: float, rope: Any, k_cache: torch.Tensor,
        v_cache: torch.Tensor, slot_mapping: torch.Tensor | None, kv_scales: torch.Tensor | None, /,
    ) -> torch.Tensor: ...

    def silu_mul(self, gate_up: torch.Tensor, /) -> torch.Tensor: ...

    def experts(self, x: torch.Tensor, mixture: Experts, live: torch.Tensor | None, /) -> torch.Tensor: ...

    def causal_conv(
        self, x: torch.Tensor, weight: torch.Tensor, conv: torch.Tensor, states: StateMeta, /
    ) -> torch.Tensor: ...

    def delta_rule(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        recurrent: torch.Tensor, states: StateMeta, /,
    ) -> torch.Tensor: ...

    def delta_gates(
        self, rates: torch.Tensor, decay: torch.Tensor, bias: torch.Tensor, /
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def gated_norm(self, x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, /) -> torch.Tensor: ...


class Experts:
    """Computes the weighted sum of down_e(silu(gate_e(x)) · up_e(x)) over the chosen experts e of a token.

    gpt-oss has biases, and clamps gates and ups. An Experts object takes the place of a DenseMLP. Shapes: T tokens of
    hidden size H; E experts of inner size I; K chosen experts for each token.

    The weights are tensors gate_up [E, 2·I, H] and down [E, H, I]. 8-bit numbers are matrices [E·2·I, H] and [E·H, I]:
    the experts' rows follow each other.
    """

    def __init__(
        self, config: ExpertsConfig, hidden: int, dtype: torch.dtype, device: torch.device, ops: Ops,
        kind: type[ByteWeight] | None = None, gated: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """`kind`: the class of the weights; None: tensors of `dtype`. `gated`: replaces ops.silu_mul."""
        self._gated = gated or ops.silu_mul
        self._ops = ops
        self.config = config
        self.router = torch.empty(config.count, hidden, dtype=dtype, device=device)
        self.gate_up = _stack(config.count, 2 * config.inner_size, hidden, dtype, device, kind)
        self.down = _stack(config.count, hidden, config.inner_size, dtype, device, kind)
        self.router_bias = self.gate_up_bias = self.down_bias = None
        # What every token adds to the output of its experts (engine/model/mlp.py, SharedExpert).
        self.shared: Any = None
        self.factors: torch.Tensor | None = None  # [E]: each expert's output is multiplied by its number
        if config.biases:
            self.router_bias = torch.empty(config.count, dtype=dtype, device=device)
            self.gate_up_bias = torch.empty(config.count, 2 * config.inner_size, dtype=dtype, device=device)
            self.down_bias = torch.empty(config.count, hidden, dtype=dtype, device=device)
        # The number of tokens of each expert since the last call of Decoder.take_expert_load.
        self.load = torch.zeros(config.count, dtype=torch.int64, device=device)

    def __call__(self, x: torch.Tensor, live: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, H] -> [T, H]. `live` int32 [1]: the number of tokens before the padding, which gets no experts."""
        out = self._ops.experts(x, self, live)
        return out if self.shared is None else out + self.shared(x)

    def one_by_one(self, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, H] -> [T, H], computed one expert after another. `routed`: the router's input; None: x."""
        weights, chosen = self.route(x if routed is None else routed)
        per_token = self.config.per_token
        counts = chosen.view(-1).bincount(minlength=self.config.count)
        self.load += counts
        order = chosen.view(-1).argsort(stable=True)  # [T·K] indices into the flat `chosen`, sorted by expert
        outputs = x.new_empty(len(order), x.shape[1])
        gate_ups, downs = self._each(self.gate_up), self._each(self.down)
        for expert, pairs in enumerate(order.split(counts.tolist())):
            if len(pairs):
                rows = x.index_select(0, pairs // per_token)
                inner = self._activate(linear(rows, gate_ups[expert], _of(self.gate_up_bias, expert)))
                outputs.index_copy_(0, pairs, linear(inner, downs[expert], _of(self.down_bias, expert)))
        return torch.bmm(weights[:, None], outputs.view(len(x), per_token, x.shape[1]))[:, 0]

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not self.config.limit:
            return self._gated(gate_up)
        gate, up = gate_up.chunk(2, -1)
        gate, up = gate.clamp(max=self.config.limit), up.clamp(-self.config.limit, self.config.limit)
        return gate * torch.sigmoid(gate * self.config.alpha) * (up + 1)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights [T, K] and the indices int64 [T, K] of the experts chosen for each token of x [T, H]. The
        weights are probabilities over all experts, computed in fp32 (float64 in a float64 model). With
        config.normalised, the weights of the chosen experts are scaled to sum to 1."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        probabilities = F.linear(x, self.router, self.router_bias).softmax(-1, dtype=wide)
        weights, chosen = probabilities.topk(self.config.per_token)
        if self.config.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.factors is not None:
            weights = weights * self.factors[chosen]
        return weights.to(x.dtype), chosen

    @property
    def nbytes(self) -> int:
        """Bytes of all experts, without the router."""
        return self.gate_up.nbytes + self.down.nbytes

    def slots(self, prefix: str) -> Iterator[Slot]:
        names = [f"{prefix}experts.{expert}." for expert in range(self.config.count)]
        yield Slot(f"{prefix}gate.weight", self.router)
        if self.shared is not None:
            yield from self.shared.slots(prefix)
        if self.router_bias is not None and self.gate_up_bias is not None and self.down_bias is not None:
            yield Slot(f"{prefix}gate.bias", self.router_bias)
            yield Slot(f"{prefix}experts.gate_up_proj_bias", self.gate_up_bias)
            yield Slot(f"{prefix}experts.down_proj_bias", self.down_bias)
        gates, ups = zip(*(each.chunk(2) for each in self._each(self.gate_up)), strict=True)
        several = [
            tuple(Slot(f"{name}{leaf}.weight", view) for name, view in zip(names, views, strict=True))
            for leaf, views in (("gate_proj", gates), ("up_proj", ups), ("down_proj", self._each(self.down)))
        ]
        count, size, hidden = self.config.count, self.config.inner_size, self.router.shape[1]
        shapes = (count, 2 * size, hidden), (count, hidden, size)
        yield Slot(f"{prefix}experts.gate_up_proj", self.gate_up, parts=several[0] + several[1], stored=shapes[0])
        yield Slot(f"{prefix}experts.down_proj", self.down, parts=several[2], stored=shapes[1])

    def _each(self, weights: Matrix) -> Sequence[Matrix]:
        """Returns a view of each expert's matrix."""
        return weights.chunk(self.config.count) if isinstance(weights, ByteWeight) else weights.unbind()


def _stack(
    count: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device, kind: type[ByteWeight] | None
) -> Matrix:
    if kind is not None:
        return kind.empty(count * rows, columns, device)
    return torch.empty(count, rows, columns, dtype=dtype, device=device)


def _of(biases: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if biases is None else biases[expert]
