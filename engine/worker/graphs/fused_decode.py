"""The model's layers with fused kernels, for CUDA graphs.

Computes the same as Decoder.forward (engine/model/decoder.py).

    one sequence     5 kernels per layer; each reads weights or keys and includes small operations:
                     norm + qkv | q/k norm + rope + store + attention | output + residual
                     norm + gate/up + silu | down + residual
                     (with experts: norm + router | choice | norm + experts' gate/up + silu | experts' down + residual)
    several          8 kernels per layer: cuBLAS for the matrix products, separate kernels for norms and activations
                     (with a delta rule in the place of attention: gates | convolution | delta rule | gated norm)

If several ranks share the model (engine/parallel/), the projections to the hidden size are summed over the ranks before
the next norm. The path for one sequence cannot do this, so one sequence also takes the path for several. That path
still uses gemv, the kernel for one token, where possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention.base import AttentionBackend, ForwardMeta, StateMeta
from engine.attention.grouped import backends_of
from engine.attention.kv_pool import KVPool
from engine.attention.triton_backend import TritonAttention
from engine.groups import group_of_layers
from engine.kernels import eight_bits, four_bits, norms
from engine.kernels.decode_attention import decode_attention
from engine.kernels.gemv import gemv
from engine.kernels.moe_one import MOST_EXPERTS, one_token
from engine.kernels.split_linear import form_for, split_linear
from engine.model.decoder import Decoder, Layer
from engine.model.delta_mixer import DeltaMixer
from engine.model.four_bits import Int4Tiles
from engine.model.group import Group
from engine.model.linear import GpuWeight, Matrix, linear
from engine.model.mlp import DenseMLP
from engine.model.traits import lacking
from engine.worker.graphs import fused_ops

SPLIT_TOKENS = 64  # up to this number of tokens, a projection spends most of its time reading weights
Attend = Callable[[int, Layer, torch.Tensor], torch.Tensor]  # (index of the layer, the layer, qkv) -> attention


class DecodeLayers:
    """The model's layers, with the KV cache and the block tables."""

    def __init__(
        self, model: Decoder, attention: AttentionBackend, pool: KVPool, block_tables: Sequence[torch.Tensor],
        group: Group,
    ) -> None:
        """`block_tables`: of each cache group with pages, as Batch.tables."""
        config = model.config
        self._model = model
        self._group = group
        self._pool = pool
        self._block_tables = block_tables
        self.attention = [backend for backend in backends_of(attention) if isinstance(backend, TritonAttention)]
        self._group_of = group_of_layers(config)
        # True: the norm after a projection adds the projection to the residual, so it may also sum the parts.
        self._norms_add = not (config.post_norms or config.layer_norm or config.wide_norms)
        one_token = self._norms_add and not lacking(config, "one_token")
        self._plain = one_token and group.size == 1 and all(_is_plain(layer) for layer in model.layers)

    def logits(
        self, tokens: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, live: torch.Tensor, out: torch.Tensor,
        states: StateMeta | None = None,
    ) -> None:
        """Write the logits of one token per sequence to out [n, V]; V: tokens in this rank's piece of the vocabulary.

        tokens int64 [n]; rows int32 [n]: rows of the block table; seq_lens int32 [n]: include this token; live int32
        [1]: the number of real entries. They come first; the others are padding and have a seq_len of 0. Also stores
        the keys and values of the real tokens.
        """
        residual = self._group.embed(tokens, self._model.embedding)
        if len(tokens) == 1 and self._plain:
            self._one(residual, rows, seq_lens, live, out)
        else:
            x = self._several(residual, lambda i, layer, qkv: self._attend(i, layer, qkv, rows, seq_lens), states, live)
            self._head(x, out)

    def logits_of_chunks(self, tokens: torch.Tensor, meta: ForwardMeta, out: torch.Tensor) -> None:
        """Write logits to out: [s, V] for the s tokens at meta.logit_rows, or [T, V] for all tokens if it is None.
        tokens int64 [T]: chunks of sequences, as `meta` describes them. The caller has planned the attention of each
        group with its part of meta.by_group()."""
        metas = meta.by_group()
        hidden = self._several(
            self._group.embed(tokens, self._model.embedding),
            lambda i, layer, qkv: self._attend_chunks(i, layer, qkv, metas), meta.states, meta.live, meta.logit_rows,
            meta.live_rows,
        )
        self._head(hidden, out)

    def _head(self, x: torch.Tensor, out: torch.Tensor) -> None:
        head = self._model.head
        if isinstance(head, GpuWeight):
            head.product(x, out)
        elif len(x) == 1:
            _gemv(x, head, out=out)
        else:
            torch.mm(x, head.t(), out=out)
        self._cap(out)

    def _cap(self, logits: torch.Tensor) -> None:
        """Apply the soft cap of the logits in place, if the model has one."""
        if softcap := self._model.config.logit_softcap:
            logits.div_(softcap).tanh_().mul_(softcap)

    def _one(
        self, x: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, live: torch.Tensor, out: torch.Tensor
    ) -> None:
        model, eps = self._model, self._model.config.rms_norm_eps
        for i, layer in enumerate(model.layers):
            mlp, norm = layer.mlp, (layer.post_norm, eps)
            qkv = _gemv(x, layer.qkv, norm=(layer.input_norm, eps))
            attended = self._attend(i, layer, qkv, rows, seq_lens)
            x = _gemv(attended, layer.output, residual=x)
            if isinstance(mlp, DenseMLP):
                x = _gemv(_gemv(x, mlp.gate_up, norm=norm, gate_up=True), mlp.down, residual=x)
            else:
                logits, each, normalised = _gemv(x, mlp.router, norm=norm), mlp.config.per_token, mlp.config.normalised
                x = one_token(x, norm, logits, mlp.gate_up, mlp.down, each, normalised, mlp.load, live)
        _gemv(x, model.head, norm=(model.norm, eps), out=out)
        self._cap(out)

    def _several(
        self, residual: torch.Tensor, attend: Attend, states: StateMeta | None, live: torch.Tensor | None,
        wanted: torch.Tensor | None = None, live_wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the final hidden states, after the last norm, of the tokens `wanted` (None: of all tokens). The first
        `live` tokens, and the first `live_wanted` wanted tokens, are not padding."""
        model, eps, group = self._model, self._model.config.rms_norm_eps, self._group
        layers = model.layers
        in_parts = group.direct(len(residual)) and self._norms_add
        x = residual if layers[0].input_norm is None else fused_ops.norm(residual, layers[0].input_norm, eps)
        for i, layer in enumerate(layers):
            if layer.delta is not None:
                attended = self._delta(i, layer.delta, x, states)
            else:
                qkv = _linear(x, layer.qkv, layer.qkv_bias)
                if layer.full_qk_norm is not None:
                    qkv = layer.normalise_qkv(qkv, eps)
                attended = attend(i, layer, qkv)
                if layer.gate is not None:
                    attended *= torch.sigmoid(_linear(x, layer.gate, None))
            if wanted is not None and i + 1 == len(layers):  # the operations below need only the wanted tokens
                attended, residual = attended.index_select(0, wanted), residual.index_select(0, wanted)
                live = live_wanted
            x = _back_to_hidden(attended, layer.output, layer.output_bias, in_parts)
            x = model.add(x, residual, layer.after_attention, layer.post_norm)
            mlp = layer.mlp
            if isinstance(mlp, DenseMLP):
                x = _mlp(x, mlp, in_parts)
            else:
                x = mlp(x, live)
            following = layers[i + 1].input_norm if i + 1 < len(layers) else model.norm
            x = model.add(x, residual, layer.after_mlp, following)
        return x

    def _delta(self, i: int, mixer: DeltaMixer, x: torch.Tensor, states: StateMeta | None) -> torch.Tensor:
        state, eps = self._pool.states[i], self._model.config.rms_norm_eps
        assert state is not None and states is not None
        projected, rates = _linear(x, mixer.inputs, None), _linear(x, mixer.rates, None)
        return mixer.mix(projected, rates, eps, state, states)

    def _attend(
        self, i: int, layer: Layer, qkv: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor
    ) -> torch.Tensor:
        config, group = self._model.config, self._group_of[i]
        attention = self.attention[group]
        out = torch.empty(len(qkv), config.num_heads * attention.head_dim, dtype=qkv.dtype, device=qkv.device)
        decode_attention(
            qkv, self._pool.keys[i], self._pool.values[i], out, attention.workspace, self._block_tables[group], rows,
            seq_lens, attention.scale, attention.group,
            fused=(layer.qk_norm, self._model.rope_tables[i], config.rms_norm_eps), kv_scales=self._pool.scales[i],
            **attention.features[i],
        )
        return out

    def _attend_chunks(self, i: int, layer: Layer, qkv: torch.Tensor, metas: list[ForwardMeta]) -> torch.Tensor:
        keys, values, eps = self._pool.keys[i], self._pool.values[i], self._model.config.rms_norm_eps
        meta, scales = metas[self._group_of[i]], self._pool.scales[i]
        rope = self._model.rope_tables[i], meta.positions
        q = norms.qk_norm_rope_store(qkv, layer.qk_norm, eps, rope, keys, values, meta.slot_mapping, scales)
        return self.attention[self._group_of[i]].run(i, q, keys, values, scales)


def _linear(x: torch.Tensor, w: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] -> [T, N]. Uses our kernels for one token, and for few tokens if K is small; otherwise cuBLAS."""
    if isinstance(w, GpuWeight):
        return linear(x, w, bias)
    if bias is None and len(x) == 1:
        return _gemv(x, w)
    form = form_for(len(x), *w.shape) if bias is None and len(x) <= SPLIT_TOKENS and w.shape[1] <= 2048 else None
    return F.linear(x, w, bias) if form is None else split_linear(x, w, form._replace(parts=1, stages=5), x.dtype)[0]


def _inner(x: torch.Tensor, mlp: DenseMLP) -> torch.Tensor:
    """x [T, H] -> silu(gate) * up [T, I], or another activation."""
    if len(x) == 1 and mlp.gate_up_bias is None and mlp.silu:
        return _gemv(x, mlp.gate_up, gate_up=True)
    return mlp.activate(_linear(x, mlp.gate_up, mlp.gate_up_bias))


def _mlp(x: torch.Tensor, mlp: DenseMLP, in_parts: bool) -> torch.Tensor:
    """x [T, H] -> the MLP's output, in one of the shapes that _back_to_hidden returns."""
    if isinstance(mlp.down, GpuWeight) and len(x) > 1 and mlp.down_bias is None and mlp.silu:
        inner = linear(x, mlp.gate_up, mlp.gate_up_bias)
        return _quantised(inner, mlp.down, silu=True, in_parts=in_parts)
    return _back_to_hidden(_inner(x, mlp), mlp.down, mlp.down_bias, in_parts)


def _back_to_hidden(x: torch.Tensor, w: Matrix, bias: torch.Tensor | None, in_parts: bool) -> torch.Tensor:
    """x [T, K] -> [T, H]. If `in_parts`, the result may be fp32 [parts, T, H]: the next norm sums the parts."""
    if bias is None and len(x) == 1:
        return _gemv(x, w)
    if isinstance(w, GpuWeight):
        return _quantised(x, w, silu=False, in_parts=in_parts) if bias is None else linear(x, w, bias)
    form = form_for(len(x), *w.shape) if bias is None and in_parts else None
    return F.linear(x, w, bias) if form is None or form.parts == 1 else split_linear(x, w, form)


def _gemv(x: torch.Tensor, w: Matrix, **fused: Any) -> torch.Tensor:
    """The product with one token. `fused`: as in engine.kernels.gemv.gemv."""
    return (four_bits.one if isinstance(w, Int4Tiles) else gemv)(x, w, **fused)


def _quantised(x: torch.Tensor, w: Matrix, *, silu: bool, in_parts: bool) -> torch.Tensor:
    kernels = four_bits.back_to_hidden if isinstance(w, Int4Tiles) else eight_bits.back_to_hidden
    return kernels(x, w, silu=silu, in_parts=in_parts)


def _is_plain(layer: Layer) -> bool:
    """Returns True if the one-token kernels support the layer: no biases, not too many experts, none in 4 bits."""
    mlp = layer.mlp
    if isinstance(mlp, DenseMLP):
        plain = mlp.down_bias is None
    else:
        plain = mlp.config.count <= MOST_EXPERTS and not isinstance(mlp.down, Int4Tiles)
    return plain and layer.qkv_bias is None and layer.output_bias is None
