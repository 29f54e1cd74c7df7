"""One decoder for all supported families, from Llama to Gemma and gpt-oss.

A layer has two parts: grouped-query attention, then an MLP or a mixture of experts (engine/model/experts.py). Each part
has a norm before it, after it, or both. Layers of Gemma 4 have a third part (engine/model/gemma4.py), and layers of
Qwen3.5 may have a gated delta rule in the place of attention (engine/model/delta_mixer.py). The families differ only
in their configuration (engine/model/families.py), and much of what differs is multiplied into the weights when they are
loaded (engine/model/checkpoint.py).
Decoder.forward computes the model; the rest of this file defines the parameters and their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from engine.attention.base import AttentionBackend, ForwardMeta
from engine.attention.kv_pool import KVPool
from engine.groups import group_of_layers
from engine.model import ops as torch_ops
from engine.model.config import ModelConfig
from engine.model.delta_mixer import DeltaMixer
from engine.model.experts import Experts, Ops
from engine.model.gemma4 import ExpertsBeside, LayerEnd, PerLayerEmbedding
from engine.model.group import ALONE, Group
from engine.model.linear import linear
from engine.model.matrices import Kept, Matrices, Quantised, norm_slots, norm_weight
from engine.model.mlp import DenseMLP, SharedExpert
from engine.model.rope import query_scales, rope_table
from engine.model.slots import Slot


class Layer:
    """The weights of one layer, with q/k/v in one matrix and gate/up in another. None: the model does not have it."""

    def __init__(self, config: ModelConfig, index: int, matrices: Matrices, ops: Ops, root: str = "model.") -> None:
        hidden, prefix = config.hidden_size, f"{root}layers.{index}."

        def norm(has_it: bool) -> torch.Tensor | None:
            return norm_weight(config, hidden, matrices.dtype, matrices.device) if has_it else None

        # None without pre_norms. The fast paths refuse such models, so the types leave the None out.
        self.input_norm: Any = norm(config.pre_norms)
        self.delta: DeltaMixer | None = None  # in the place of attention
        self.sinks: torch.Tensor | None = None
        self.output_bias: torch.Tensor | None = None
        if config.delta is not None and config.delta.layers[index]:
            self.delta = DeltaMixer(config.delta, hidden, f"{prefix}linear_attn.", matrices, ops)
            self.output = self.delta.output
        else:
            self._make_attention(config, index, f"{prefix}self_attn.", matrices)
        self.after_attention = norm(config.post_norms)
        self.post_norm: Any = norm(config.pre_norms)  # before the MLP
        self.mlp: DenseMLP | Experts
        self.beside: ExpertsBeside | None = None
        if config.experts is not None and config.experts.beside_mlp:
            self.beside = ExpertsBeside(config, config.experts, matrices, ops)
        if config.experts is not None and config.experts.layers[index] and self.beside is None:
            experts, leaves = range(config.experts.count), ("gate_proj", "up_proj", "down_proj")
            names = [f"{expert}.{leaf}" for expert in experts for leaf in leaves]
            kind = matrices.kept_kind(f"{prefix}mlp.experts.", names) or matrices.quantised
            self.mlp = Experts(config.experts, hidden, matrices.dtype, matrices.device, ops, kind)
            if inner := config.experts.shared_size:
                self.mlp.shared = SharedExpert(config, inner, f"{prefix}mlp.", matrices, ops)
        else:
            self.mlp = DenseMLP(config, config.inner_size_of(index), f"{prefix}mlp.", matrices, ops)
        self.after_mlp = norm(config.post_norms)
        self.end = LayerEnd(config, matrices, prefix) if config.layer_scalars else None

    def _make_attention(self, config: ModelConfig, index: int, prefix: str, matrices: Matrices) -> None:
        dtype, device = matrices.dtype, matrices.device

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def norm(has_it: bool, size: int) -> torch.Tensor | None:
            return norm_weight(config, size, dtype, device) if has_it else None

        hidden, (kv_heads, dim) = config.hidden_size, config.heads_of(index)
        self.holds_kv = config.source_of(index) == index  # False: it reads the keys and values of another layer
        kv_heads = kv_heads if self.holds_kv else 0
        self._heads = [config.num_heads, kv_heads, kv_heads]
        self._dim = dim
        self._projects_values = config.projects_values(index)
        self.value_norm = config.value_norm and self.holds_kv
        width, normed = sum(self._heads) * dim, sum(self._heads[:2]) * dim
        self.qkv = matrices.empty(width, hidden, prefix, dict.fromkeys(self._projections))
        self.qkv_bias = empty(width) if config.qkv_bias else None
        # The output of attention is multiplied by sigmoid(gate · x).
        self.gate = matrices.empty(config.num_heads * dim, hidden, prefix, ["q_gate"]) if config.output_gate else None
        # One row per head, so that one kernel normalises queries and keys together.
        head_norm = norm(config.qk_norm, normed)
        self.qk_norm = None if head_norm is None else head_norm.view(-1, dim)
        self.full_qk_norm = norm(config.full_qk_norm, normed)  # the weight of all queries, then that of all keys
        self.sinks = empty(config.num_heads) if config.sinks else None
        self.output = matrices.empty(hidden, config.num_heads * dim, prefix, ["o_proj"])
        self.output_bias = empty(hidden) if config.output_bias else None

    @property
    def experts(self) -> Experts | None:
        """The layer's mixture of experts, in the place of its MLP or beside it."""
        return self.beside.experts if self.beside is not None else self.mlp if isinstance(self.mlp, Experts) else None

    @property
    def _projections(self) -> tuple[str, ...]:
        """The names of the matrices of queries, keys and values in the checkpoint."""
        if not self.holds_kv:
            return ("q_proj",)
        return ("q_proj", "k_proj", "v_proj" if self._projects_values else "k_proj")

    def normalise_qkv(self, qkv: torch.Tensor, eps: float) -> torch.Tensor:
        """Returns qkv [T, (Hq + 2·Hkv)·D] with the norms of all queries, of all keys, or of the values. It may
        overwrite qkv. Norms of single heads of queries and keys follow in ops.qk_norm_rope_store."""
        sizes = [heads * self._dim for heads in self._heads]
        if self.value_norm:
            values = qkv.split(sizes, -1)[2].unflatten(-1, (-1, self._dim))
            values.copy_(torch_ops.plain_norm(values, eps))
        if self.full_qk_norm is None:
            return qkv
        q, k, v = qkv.split(sizes, -1)
        weights = self.full_qk_norm.split(sizes[:2])
        return torch.cat((torch_ops.norm(q, weights[0], eps), torch_ops.norm(k, weights[1], eps), v), -1)

    def slots(self, prefix: str) -> Iterator[Slot]:
        yield from norm_slots(f"{prefix}input_layernorm", self.input_norm)
        if self.delta is not None:
            yield from self.delta.slots(f"{prefix}linear_attn.")
        else:
            yield from self._attention_slots(f"{prefix}self_attn.")
        yield from norm_slots(f"{prefix}after_attention_norm", self.after_attention)
        yield from norm_slots(f"{prefix}post_attention_layernorm", self.post_norm)
        yield from self.mlp.slots(f"{prefix}mlp.")
        if self.beside is not None:
            yield from self.beside.slots(prefix)
        yield from norm_slots(f"{prefix}after_mlp_norm", self.after_mlp)
        if self.end is not None:
            yield from self.end.slots(prefix)

    def _attention_slots(self, prefix: str) -> Iterator[Slot]:
        sizes = [heads * self._dim for heads in self._heads]
        for name, view in zip(self._projections, self.qkv.split(sizes), strict=False):
            yield Slot(f"{prefix}{name}.weight", view)
        if self.qkv_bias is not None:
            for name, view in zip(self._projections, self.qkv_bias.split(sizes), strict=False):
                yield Slot(f"{prefix}{name}.bias", view)
        if self.gate is not None:
            yield Slot(f"{prefix}q_gate.weight", self.gate)
        if self.qk_norm is not None:
            for name, view in zip("qk" if self.holds_kv else "q", self.qk_norm.split(self._heads[:2]), strict=False):
                yield Slot(f"{prefix}{name}_norm.weight", view, repeated=True)
        if self.full_qk_norm is not None:
            for name, view in zip("qk", self.full_qk_norm.split(sizes[:2]), strict=True):
                yield Slot(f"{prefix}{name}_norm.weight", view)
        if self.sinks is not None:
            yield Slot(f"{prefix}sinks", self.sinks)
        yield Slot(f"{prefix}o_proj.weight", self.output)
        if self.output_bias is not None:
            yield Slot(f"{prefix}o_proj.bias", self.output_bias)


class Decoder:
    """The model: its parameters, which engine/model/weights.py fills, and its forward pass."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, max_positions: int, ops: Ops = torch_ops,
        quantised: Quantised = None, group: Group = ALONE, kept: Kept | None = None,
    ) -> None:
        """`max_positions`: rows of the table of cos and sin. `ops`: norms, RoPE and activation functions. `quantised`:
        the class of rounded matrices, except for those that are `kept`; all other parameters have `dtype`. `group`: the
        ranks that share the model. With several ranks, `config` describes this rank's shard (engine/parallel/)."""
        self.config = config
        self._ops = ops
        self._group = group
        matrices = Matrices(dtype, device, quantised, kept or {})
        alone = group.size == 1  # several ranks have pieces of the vocabulary, which remain tensors
        outer = Matrices(dtype, device, quantised.vocabulary() if quantised is not None and alone else None, {})
        size = config.vocab_size, config.hidden_size
        self.embedding = outer.empty(*size)
        self.per_layer = PerLayerEmbedding(config, matrices, outer) if config.per_layer_size else None
        self.layers = [Layer(config, i, matrices, ops) for i in range(config.num_layers)]
        self.norm = norm_weight(config, config.hidden_size, dtype, device)
        self.head = self.embedding if config.tie_word_embeddings else outer.empty(*size)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        kinds = [(config.rope_of(i), config.heads_of(i)[1]) for i in range(config.num_layers)]
        tables = {
            (rope, dim): torch.empty(max_positions, dim, dtype=exact, device=device) if device.type == "meta"
            else rope_table(rope, dim, max_positions, config.max_position).to(device, exact)
            for rope, dim in set(kinds)
        }
        self.rope_tables = [tables[kind] for kind in kinds]  # of each layer
        self.group_of = group_of_layers(config)  # the index of each layer's cache group
        scales = query_scales(config.rope, max_positions)
        self.query_scales = None if scales is None else scales.to(device, dtype)
        self.next_token = NextToken(self, matrices) if config.next_layers else None

    def forward(
        self, token_ids: torch.Tensor, meta: ForwardMeta, attention: AttentionBackend, pool: KVPool
    ) -> torch.Tensor:
        """Returns the final hidden states [s, H] of the tokens in meta.logit_rows (None: all T). token_ids: int64 [T].
        Writes the keys and values of all T tokens to the pool. Call `attention.plan(meta)` first."""
        residual = self._group.embed(token_ids, self.embedding)
        added = None if self.per_layer is None else self.per_layer(token_ids, residual, self.config.rms_norm_eps)
        return self._run(residual, added, meta, attention, pool)

    def _run(
        self, residual: torch.Tensor, added: torch.Tensor | None, meta: ForwardMeta, attention: AttentionBackend,
        pool: KVPool,
    ) -> torch.Tensor:
        """Returns what `forward` returns. residual [T, H]: the embeddings of tokens; added: those of each layer."""
        ops, eps = self._ops, self.config.rms_norm_eps
        slots = [meta.slot_mapping, *(side.slot_mapping for side in meta.groups)]
        ropes = {id(table): ops.rope_rows(table, meta.positions) for table in self.rope_tables}
        before = self.layers[0].input_norm
        x = residual if before is None else ops.norm(residual, before, eps)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            if layer.delta is not None:
                state = pool.states[i]
                assert state is not None and meta.states is not None
                x = layer.delta(x, eps, state, meta.states)
            else:
                where = slots[self.group_of[i]] if layer.holds_kv else None
                x = self._attend(i, x, ropes[id(self.rope_tables[i])], where, meta, attention, pool)
            live = meta.live
            if i == last and meta.logit_rows is not None:  # from here on, only the tokens in logit_rows are needed
                live = meta.live_rows
                x, residual = x.index_select(0, meta.logit_rows), residual.index_select(0, meta.logit_rows)
                added = None if added is None else added.index_select(1, meta.logit_rows)
            x = linear(x, layer.output, layer.output_bias)
            x = self.add(x, residual, layer.after_attention, layer.post_norm)
            following = self.norm if i == last else self.layers[i + 1].input_norm
            x = layer.mlp(x, live)
            if layer.beside is not None:
                x = layer.beside(x, residual, eps)
            x = self.add(x, residual, layer.after_mlp, following if layer.end is None else None)
            if layer.end is not None:
                layer.end(residual, None if added is None else added[i], eps)
                x = residual if following is None else ops.norm(residual, following, eps)
        return x

    def _attend(
        self, i: int, x: torch.Tensor, rope: Any, where: torch.Tensor | None, meta: ForwardMeta,
        attention: AttentionBackend, pool: KVPool,
    ) -> torch.Tensor:
        """Returns the attention output [T, Hq · D] of layer i, before the output projection, for x [T, H]."""
        layer, eps = self.layers[i], self.config.rms_norm_eps
        keys, values, scales = pool.keys[i], pool.values[i], pool.scales[i]
        qkv = linear(x, layer.qkv, layer.qkv_bias)
        if layer.full_qk_norm is not None or layer.value_norm:
            qkv = layer.normalise_qkv(qkv, eps)
        q = self._ops.qk_norm_rope_store(qkv, layer.qk_norm, eps, rope, keys, values, where, scales)
        if self.query_scales is not None:
            q = q * self.query_scales[meta.positions][:, None, None]
        out = attention.run(i, q, keys, values, scales)
        return out if layer.gate is None else out * torch.sigmoid(linear(x, layer.gate))

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, after: torch.Tensor | None, before: torch.Tensor | None
    ) -> torch.Tensor:
        """Add x, or its norm with the weight `after`, to the residual; return the residual, or its norm `before`."""
        ops, eps, group = self._ops, self.config.rms_norm_eps, self._group
        if after is None and before is not None:
            return group.add_norm(ops, x, residual, before, eps)
        x = group.sum(x)
        if after is not None:
            x = ops.norm(x, after, eps)
        return residual.add_(x) if before is None else ops.add_norm(x, residual, before, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits [s, V] of hidden [s, H]."""
        return torch_ops.cap(self._group.gather(linear(hidden, self.head)), self.config.logit_softcap)

    def slots(self) -> Iterator[Slot]:
        """Yields a Slot for every parameter, with the name that a Llama checkpoint gives it."""
        yield Slot("model.embed_tokens.weight", self.embedding)
        if self.per_layer is not None:
            yield from self.per_layer.slots("model.")
        for i, layer in enumerate(self.layers):
            yield from layer.slots(f"model.layers.{i}.")
        yield from norm_slots("model.norm", self.norm)
        if not self.config.tie_word_embeddings:
            yield Slot("lm_head.weight", self.head)
        if self.next_token is not None:
            yield from self.next_token.slots()

    @property
    def sinks(self) -> list[torch.Tensor] | None:
        """The attention sinks of each layer; None if the model has none."""
        found = [layer.sinks for layer in self.layers if layer.sinks is not None]
        return found or None

    def take_expert_load(self) -> tuple[list[int], torch.Tensor]:
        """Returns the indices of the layers with experts, and the token counts of each expert since the last call. The
        counts are int64 [layers, E]. At least one layer must have experts. The last layer counts only tokens whose
        logits were needed."""
        loads = {i: layer.experts.load for i, layer in enumerate(self.layers) if layer.experts is not None}
        taken = torch.stack(list(loads.values()))
        torch._foreach_zero_(list(loads.values()))
        return list(loads), taken

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(slot.view.nbytes for slot in self.slots())

    @property
    def nbytes_per_token(self) -> int:
        """Bytes of the weights that one token needs: all weights except idle experts and embeddings. If the embedding
        is also the head, the head is not counted either."""
        experts = [layer.experts for layer in self.layers if layer.experts is not None]
        idle = sum(mlp.nbytes * (mlp.config.count - mlp.config.per_token) // mlp.config.count for mlp in experts)
        per_layer = 0 if self.per_layer is None else self.per_layer.embedding.nbytes
        head = 0 if self.next_token is None else self.next_token.nbytes
        return self.nbytes - self.embedding.nbytes - per_layer - idle - head


class NextToken(Decoder):
    """Predicts the token after the next from a token's final hidden state and the next token ("mtp"). Qwen3-Next and
    Qwen3.5 have such a head for speculation: a projection of both, then layers of full attention. Their keys and values
    are layers 0 … of a pool of its own. It has the embedding and the output matrix of its model."""

    def __init__(self, model: Decoder, matrices: Matrices) -> None:
        whole, hidden, n = model.config, model.config.hidden_size, model.config.next_layers
        experts = None if whole.experts is None else replace(whole.experts, layers=(True,) * n)
        self.config = config = replace(whole, num_layers=n, delta=None, experts=experts, next_layers=0)
        self._ops, self._group, self.embedding, self.head = model._ops, model._group, model.embedding, model.head
        self.per_layer, self.query_scales, self.next_token = None, model.query_scales, None
        self.group_of, self.rope_tables = [0] * n, model.rope_tables[:1] * n
        self._norms = [norm_weight(config, hidden, matrices.dtype, matrices.device) for _ in range(3)]
        self.projection = matrices.empty(hidden, 2 * hidden, "mtp.", ["fc"])
        self.layers = [Layer(config, i, matrices, self._ops, "mtp.") for i in range(n)]
        self.norm = self._norms[2]

    def after(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, meta: ForwardMeta, attention: AttentionBackend,
        pool: KVPool,
    ) -> torch.Tensor:
        """Returns the hidden states of `hidden` [T, H], what Decoder.forward returned for the tokens of `meta`.
        token_ids int64 [T]: the token after each of them. `logits` of the result predict the token after that."""
        eps, embedded = self.config.rms_norm_eps, self._group.embed(token_ids, self.embedding)
        both = zip((embedded, hidden), self._norms, strict=False)
        x = torch.cat([self._ops.norm(part, weight, eps) for part, weight in both], -1)
        return self._run(linear(x, self.projection), None, meta, attention, pool)

    def slots(self) -> Iterator[Slot]:
        """Yields a Slot for every parameter that the model does not have."""
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        for name, weight in zip(names, self._norms, strict=True):
            yield Slot(f"mtp.{name}.weight", weight)
        yield Slot("mtp.fc.weight", self.projection)
        for i, layer in enumerate(self.layers):
            yield from layer.slots(f"mtp.layers.{i}.")
