"""One decoder for Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE.

A layer has two parts, each after a norm: grouped-query attention, then a gated MLP or a mixture of experts
(engine/model/experts.py). The architectures differ only in their configuration (engine/model/config.py).
Decoder.forward computes the model; the rest of this file defines the parameters and their names in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.attention.base import AttentionBackend, ForwardMeta
from engine.attention.kv_pool import KVPool
from engine.model import ops as torch_ops
from engine.model.config import ModelConfig
from engine.model.experts import Experts, Ops
from engine.model.group import ALONE, Group
from engine.model.linear import ByteWeight, Matrix, linear
from engine.model.rope import rope_table
from engine.model.weights import Slot

Quantised = type[ByteWeight] | None  # the class of 8-bit matrices; None: matrices are plain tensors


def empty_matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device, quantised: Quantised) -> Matrix:
    """Returns an uninitialised parameter [rows, columns]."""
    if quantised is not None:
        return quantised.empty(rows, columns, device)
    return torch.empty(rows, columns, dtype=dtype, device=device)


class DenseMLP:
    """Computes down(silu(gate(x)) · up(x)). Experts has the same methods."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, ops: Ops,
        quantised: Quantised = None,
    ) -> None:  # fmt: skip
        hidden, inner = config.hidden_size, config.intermediate_size
        self._ops = ops
        self.gate_up = empty_matrix(2 * inner, hidden, dtype, device, quantised)
        self.down = empty_matrix(hidden, inner, dtype, device, quantised)
        self.gate_up_bias = self.down_bias = None
        if config.mlp_bias:
            self.gate_up_bias = torch.empty(2 * inner, dtype=dtype, device=device)
            self.down_bias = torch.empty(hidden, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor, live: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the output [T, H] for x [T, H]. `live` has an effect in Experts only."""
        inner = self._ops.silu_mul(linear(x, self.gate_up, self.gate_up_bias))
        return linear(inner, self.down, self.down_bias)

    def slots(self, prefix: str) -> Iterator[Slot]:
        gate, up = self.gate_up.chunk(2)
        yield Slot(f"{prefix}gate_proj.weight", gate)
        yield Slot(f"{prefix}up_proj.weight", up)
        yield Slot(f"{prefix}down_proj.weight", self.down)
        if self.gate_up_bias is not None and self.down_bias is not None:
            gate, up = self.gate_up_bias.chunk(2)
            yield Slot(f"{prefix}gate_proj.bias", gate)
            yield Slot(f"{prefix}up_proj.bias", up)
            yield Slot(f"{prefix}down_proj.bias", self.down_bias)


class Layer:
    """The weights of one layer, with q/k/v in one matrix and gate/up in another."""

    def __init__(
        self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device, ops: Ops,
        quantised: Quantised,
    ) -> None:  # fmt: skip
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        hidden, dim = config.hidden_size, config.head_dim
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self._dim = dim
        width = sum(self._heads) * dim
        self.input_norm = empty(hidden)
        self.qkv = empty_matrix(width, hidden, dtype, device, quantised)
        self.qkv_bias = empty(width) if config.qkv_bias else None
        # One row per head, so that one kernel normalises queries and keys together.
        self.qk_norm = empty(config.num_heads + config.num_kv_heads, dim) if config.qk_norm else None
        self.output = empty_matrix(hidden, config.num_heads * dim, dtype, device, quantised)
        self.output_bias = empty(hidden) if config.output_bias else None
        self.post_norm = empty(hidden)
        self.mlp: DenseMLP | Experts
        if config.experts is not None and config.experts.layers[index]:
            self.mlp = Experts(config.experts, hidden, dtype, device, ops)
        else:
            self.mlp = DenseMLP(config, dtype, device, ops, quantised)

    def slots(self, prefix: str) -> Iterator[Slot]:
        sizes = [heads * self._dim for heads in self._heads]
        yield Slot(f"{prefix}input_layernorm.weight", self.input_norm)
        for name, view in zip("qkv", self.qkv.split(sizes), strict=True):
            yield Slot(f"{prefix}self_attn.{name}_proj.weight", view)
        if self.qkv_bias is not None:
            for name, view in zip("qkv", self.qkv_bias.split(sizes), strict=True):
                yield Slot(f"{prefix}self_attn.{name}_proj.bias", view)
        if self.qk_norm is not None:
            for name, view in zip("qk", self.qk_norm.split(self._heads[:2]), strict=True):
                yield Slot(f"{prefix}self_attn.{name}_norm.weight", view, repeated=True)
        yield Slot(f"{prefix}self_attn.o_proj.weight", self.output)
        if self.output_bias is not None:
            yield Slot(f"{prefix}self_attn.o_proj.bias", self.output_bias)
        yield Slot(f"{prefix}post_attention_layernorm.weight", self.post_norm)
        yield from self.mlp.slots(f"{prefix}mlp.")


class Decoder:
    """The model: its parameters, which engine/model/weights.py fills, and its forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        ops: Ops = torch_ops,
        quantised: Quantised = None,
        group: Group = ALONE,
    ) -> None:
        """`max_positions`: rows of the table of cos and sin. `ops`: norms, RoPE and activation functions. `quantised`:
        the class of 8-bit matrices; all other parameters have `dtype`. `group`: the ranks that share the model. With
        several ranks, `config` describes this rank's shard (engine/parallel/)."""
        self.config = config
        self._ops = ops
        self._group = group
        vocabulary = (config.vocab_size, config.hidden_size, dtype, device, quantised)
        self.embedding = empty_matrix(*vocabulary)
        self.layers = [Layer(config, i, dtype, device, ops, quantised) for i in range(config.num_layers)]
        self.norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.head = self.embedding if config.tie_word_embeddings else empty_matrix(*vocabulary)
        table = rope_table(config.rope, config.head_dim, max_positions, config.max_position)
        self.rope_table = table.to(device, torch.float64 if dtype == torch.float64 else torch.float32)

    def forward(
        self, token_ids: torch.Tensor, meta: ForwardMeta, attention: AttentionBackend, pool: KVPool
    ) -> torch.Tensor:
        """Returns the final hidden states [s, H] of the tokens in meta.logit_rows (None: all T). token_ids: int64 [T].

        Writes the keys and values of all T tokens to the pool. Call `attention.plan(meta)` first.
        """
        ops, eps, group = self._ops, self.config.rms_norm_eps, self._group
        rope = ops.rope_rows(self.rope_table, meta.positions)
        residual = group.embed(token_ids, self.embedding)
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            keys, values, scales = pool.keys[i], pool.values[i], pool.scales[i]
            qkv = linear(x, layer.qkv, layer.qkv_bias)
            q = ops.qk_norm_rope_store(qkv, layer.qk_norm, eps, rope, keys, values, meta.slot_mapping, scales)
            x = attention.run(i, q, keys, values, scales)
            live = meta.live
            if i == last and meta.logit_rows is not None:  # from here on, only the tokens in logit_rows are needed
                live = meta.live_rows
                x, residual = x.index_select(0, meta.logit_rows), residual.index_select(0, meta.logit_rows)
            x = linear(x, layer.output, layer.output_bias)
            x = layer.mlp(group.add_norm(ops, x, residual, layer.post_norm, eps), live)
            x = group.add_norm(ops, x, residual, self.norm if i == last else self.layers[i + 1].input_norm, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits [s, V] of hidden [s, H]."""
        return self._group.gather(linear(hidden, self.head))

    def slots(self) -> Iterator[Slot]:
        """Yields a Slot for every tensor that a checkpoint of this model contains."""
        yield Slot("model.embed_tokens.weight", self.embedding)
        for i, layer in enumerate(self.layers):
            yield from layer.slots(f"model.layers.{i}.")
        yield Slot("model.norm.weight", self.norm)
        if not self.config.tie_word_embeddings:
            yield Slot("lm_head.weight", self.head)

    def take_expert_load(self) -> tuple[list[int], torch.Tensor]:
        """Returns the indices of the layers with experts, and the token counts of each expert since the last call.

        The counts are int64 [layers, E]. At least one layer must have experts. The last layer counts only tokens whose
        logits were needed.
        """
        loads = {i: layer.mlp.load for i, layer in enumerate(self.layers) if isinstance(layer.mlp, Experts)}
        taken = torch.stack(list(loads.values()))
        torch._foreach_zero_(list(loads.values()))
        return list(loads), taken

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(slot.view.nbytes for slot in self.slots())

    @property
    def nbytes_per_token(self) -> int:
        """Bytes of the weights that one token needs: all weights except idle experts and the embedding.

        If the embedding is also the head, the head is not counted either.
        """
        experts = [layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)]
        idle = sum(mlp.nbytes * (mlp.config.count - mlp.config.per_token) // mlp.config.count for mlp in experts)
        return self.nbytes - self.embedding.nbytes - idle
