"""The parts of Gemma 4 that no other family has: embeddings for each layer, and experts beside an MLP.

The paths that lack them refuse the model (engine/model/traits.py), so these parts are plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.model import ops as torch_ops
from engine.model.config import ExpertsConfig, ModelConfig
from engine.model.experts import Experts, Ops
from engine.model.linear import embed, linear
from engine.model.matrices import Matrices, norm_slots, norm_weight
from engine.model.slots import Slot


class PerLayerEmbedding:
    """Computes what each layer adds to the residual: an embedding of the token, and a projection of its main one."""

    def __init__(self, config: ModelConfig, matrices: Matrices, outer: Matrices) -> None:
        """`outer`: makes the embedding."""
        self._layers, self._hidden = config.num_layers, config.hidden_size
        width = config.num_layers * config.per_layer_size
        self.embedding = outer.empty(config.vocab_size, width)
        self.projection = matrices.empty(width, config.hidden_size, "model.", ["per_layer_model_projection"])
        self.norm = norm_weight(config, config.per_layer_size, matrices.dtype, matrices.device)

    def __call__(self, token_ids: torch.Tensor, embedded: torch.Tensor, eps: float) -> torch.Tensor:
        """Returns the inputs of all layers [layers, T, P] for tokens [T] with the embeddings `embedded` [T, H]."""
        shape = len(token_ids), self._layers, -1
        # The model scales the projection by 1 / √H before its norm. Only eps makes a difference to the norm.
        projected = linear(embedded, self.projection).view(shape)
        projected = torch_ops.norm(projected, self.norm, eps * self._hidden)
        return projected.add_(embed(token_ids, self.embedding).view(shape)).mul_(2**-0.5).transpose(0, 1)

    def slots(self, prefix: str) -> Iterator[Slot]:
        yield Slot(f"{prefix}embed_tokens_per_layer.weight", self.embedding)
        yield Slot(f"{prefix}per_layer_model_projection.weight", self.projection)
        yield from norm_slots(f"{prefix}per_layer_projection_norm", self.norm)


class LayerEnd:
    """The end of a layer: adds norm(project(gelu(gate(residual)) · input)), then multiplies the residual by its number.
    """

    def __init__(self, config: ModelConfig, matrices: Matrices, prefix: str) -> None:
        dtype, device = matrices.dtype, matrices.device
        hidden, size = config.hidden_size, config.per_layer_size
        self.scalar = torch.empty(1, dtype=dtype, device=device)
        self.gate = self.projection = self.norm = None
        if size:
            self.gate = matrices.empty(size, hidden, prefix, ["per_layer_input_gate"])
            self.projection = matrices.empty(hidden, size, prefix, ["per_layer_projection"])
            self.norm = norm_weight(config, hidden, dtype, device)

    def __call__(self, residual: torch.Tensor, added: torch.Tensor | None, eps: float) -> None:
        """Change the residual [T, H] in place. `added` [T, P]: the layer's part of PerLayerEmbedding's output."""
        if self.gate is not None and self.projection is not None and self.norm is not None and added is not None:
            inner = torch_ops.gelu(linear(residual, self.gate)) * added
            residual.add_(torch_ops.norm(linear(inner, self.projection), self.norm, eps))
        residual.mul_(self.scalar)

    def slots(self, prefix: str) -> Iterator[Slot]:
        if self.gate is not None and self.projection is not None:
            yield Slot(f"{prefix}per_layer_input_gate.weight", self.gate)
            yield Slot(f"{prefix}per_layer_projection.weight", self.projection)
        yield from norm_slots(f"{prefix}post_per_layer_input_norm", self.norm)
        yield Slot(f"{prefix}layer_scalar", self.scalar)


class ExpertsBeside:
    """A mixture of experts beside a layer's MLP: norm(MLP output) + norm(experts(norm(residual)))."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, matrices: Matrices, ops: Ops) -> None:
        dtype, device = matrices.dtype, matrices.device
        self.experts = Experts(experts, config.hidden_size, dtype, device, ops, gated=torch_ops.gelu_mul)
        self.experts.factors = torch.empty(experts.count, dtype=dtype, device=device)
        self.router_norm, self.before, self.after, self.after_mlp = (
            norm_weight(config, config.hidden_size, dtype, device) for _ in range(4)
        )

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, eps: float) -> torch.Tensor:
        """Returns the sum [T, H] for the MLP's output x [T, H]. `residual` [T, H]: before the norm of the MLP."""
        routed = torch_ops.norm(residual, self.router_norm, eps)
        found = self.experts.one_by_one(torch_ops.norm(residual, self.before, eps), routed)
        return torch_ops.norm(x, self.after_mlp, eps) + torch_ops.norm(found, self.after, eps)

    def slots(self, prefix: str) -> Iterator[Slot]:
        assert self.experts.factors is not None
        yield from self.experts.slots(prefix)
        yield Slot(f"{prefix}router.scale", self.router_norm)
        yield Slot(f"{prefix}router.per_expert_scale", self.experts.factors)
        yield from norm_slots(f"{prefix}post_feedforward_layernorm_1", self.after_mlp)
        yield from norm_slots(f"{prefix}pre_feedforward_layernorm_2", self.before)
        yield from norm_slots(f"{prefix}post_feedforward_layernorm_2", self.after)
