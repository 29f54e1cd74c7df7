"""The executor for steps on a CPU. compiled_decoder.py computes all of them; CpuDecode decodes in float32.

Two things make small steps slow on a CPU. First, calling a small operation takes longer than its arithmetic, because
reading the weights evicts the call's code and data from the caches. So the small operations use numpy, whose calls are
cheaper than torch's, and write to reused buffers. Second, MKL multiplies weight · columns up to twice as fast as
rows · weightᵀ. So all activations here are columns, [features, n] for n sequences.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import AttentionBackend
from engine.attention.grouped import backends_of
from engine.attention.kv_pool import KVPool
from engine.attention.torch_backend import TorchAttention
from engine.core.request import Grammar
from engine.core.step import StepPlan
from engine.model.decoder import Decoder, DenseMLP
from engine.model.linear import ByteWeight, Matrix
from engine.model.traits import lacking
from engine.progress import Progress
from engine.worker.cpu.compiled_decoder import CompiledDecoder
from engine.worker.eager import Eager
from engine.worker.inputs import Draws
from engine.worker.launch import LaunchedStep
from engine.worker.loaded import LoadedModel
from engine.worker.runner import Executor

MOST_TOKENS = 48  # in larger steps arithmetic dominates call overhead


class CPUSteps(Executor):
    """Runs steps of float32 models with dense MLPs. Draws the same tokens as Eager, but faster. The kernels of
    CompiledDecoder are faster than CPUDecode, but they need llvmlite and a processor that they support."""

    def __init__(self, loaded: LoadedModel, on_progress: Progress | None = None) -> None:
        self._loaded, self._batch = loaded, loaded.batch
        model, kind, size = loaded.model, loaded.quantization, loaded.block_size
        self._compiled: CompiledDecoder | None = None
        self._prompts: Eager | None = None
        self._decode: CPUDecode | None = None
        if loaded.dtype == loaded.kv_dtype == torch.float32:
            if not CompiledDecoder.why_not(model.config, kind, size):
                self._compiled = CompiledDecoder(model, loaded.pool, kind, size, loaded.max_model_len)
                self._prompts = Eager(loaded, model=self._compiled)
            elif CPUDecode.supports(model):
                self._decode = CPUDecode(model, loaded.pool)
        self._attention = loaded.attention

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> LaunchedStep | None:
        """Run a step. Returns None for models without support, and for steps in which Eager is as fast."""
        if self._decode is None and self._compiled is None:
            return None
        if plan.num_decoding < len(plan.rows) or plan.num_tokens > MOST_TOKENS:
            if self._compiled is None or self._prompts is None or plan.num_tokens > self._compiled.most_rows:
                return None
            return self._prompts.launch(plan, grammars)
        started = time.perf_counter()
        self._batch.apply(plan)
        logits, draws = self.decode(plan)
        drawn = self._loaded.sample(draws, logits, grammars)
        return self._loaded.launched(plan, draws, drawn, {}, started, None)

    def decode(self, plan: StepPlan) -> tuple[torch.Tensor, Draws]:
        """Returns the logits [T, V] and the draws of a plan that only decodes. Each draft token is computed as if it
        were another sequence. Only the attention of CPUDecode treats a token and its drafts as one sequence."""
        batch = self._batch
        size, tokens, rows, positions = batch.block_size, plan.token_ids, plan.rows, plan.starts
        entries, bounds = batch.indices[: len(rows)], batch.indices
        lengths = plan.starts + plan.q_lens
        columns = -(-int(lengths.max()) // size)
        tables = [table[rows, :columns] for table in batch.host_tables]
        if plan.num_drafted:
            bounds = np.concatenate((bounds[:1], np.cumsum(plan.q_lens)))
            entries = np.repeat(entries, plan.q_lens)
        if self._decode is not None:
            for attention, table in zip(backends_of(self._attention), tables, strict=True):
                assert isinstance(attention, TorchAttention), "a CPU has no other attention backend"
                attention.plan_arrays(table, lengths, bounds, plan.num_decodes)
        if plan.num_drafted:
            rows, positions = rows[entries], (lengths - bounds[1:])[entries] + np.arange(len(tokens))
            tables, lengths = [table[entries] for table in tables], positions + 1
        slots = batch.slots(rows, positions)
        if (tokens < 0).any():
            tokens = np.where(tokens < 0, batch.last_token.numpy()[rows], tokens)
        if self._compiled is not None:
            logits = self._compiled.step(tokens, positions, slots, tables)
        else:
            assert self._decode is not None
            logits = self._decode.logits(tokens, positions, slots, self._attention)
        device_rows, device_positions = (torch.from_numpy(part.astype(np.int64)) for part in (rows, lengths))
        return logits, Draws(entries, rows, lengths, device_rows, device_positions)


KEPT_SIZES = 8  # buffers are kept for at most this many different numbers of sequences


class Columns:
    """Buffers for n sequences: torch tensors, whose names end in an underscore, and numpy arrays of the same memory.
    Their shape is [features, n], or [features] for a single sequence, which is cheaper in both libraries."""

    def __init__(self, decoder: Decoder, n: int) -> None:
        config = decoder.config
        dim, half, inner = config.head_dim, config.head_dim // 2, config.intermediate_size
        normed, heads = config.num_heads + config.num_kv_heads, config.num_heads + 2 * config.num_kv_heads
        columns = (n,) if n > 1 else ()

        def pair(*shape: int) -> tuple[torch.Tensor, np.ndarray]:
            tensor = torch.empty((*shape, *columns), dtype=torch.float32)
            return tensor, tensor.numpy()

        def by_sequence(array: np.ndarray) -> np.ndarray:
            return array.transpose(2, 0, 1) if n > 1 else array[None]

        self.n = n
        self.residual_, self.residual = pair(config.hidden_size)
        self.x_, self.x = pair(config.hidden_size)
        self.qkv_, _ = pair(heads * dim)
        by_head = self.qkv_.view(heads, dim, *columns).numpy()
        self.qk, self.v = by_head[:normed], by_sequence(by_head[normed:])  # v: [n, Hkv, D]
        self.halves = self.qk.reshape(normed, 2, half, *columns)
        rotated_, rotated = pair(normed, dim)
        self.rotated = rotated.reshape(self.halves.shape)
        self.scratch = np.empty_like(self.rotated)
        self.rotated_q, self.rotated_k = np.split(by_sequence(rotated), [config.num_heads], 1)  # [n, heads, D]
        self.q_ = torch.empty(n, config.num_heads, dim) if n > 1 else rotated_[None, : config.num_heads]
        self.q = self.q_.numpy()
        self.gate_up_, gate_up = pair(2 * inner)
        self.gate_, self.gate, self.up = self.gate_up_[:inner], gate_up[:inner], gate_up[inner:]
        self.attended_, self.attended = pair(config.num_heads * dim)


class CPUDecode:
    """Runs decode steps of a Decoder with dense MLPs, in float32 and on a CPU."""

    def __init__(self, decoder: Decoder, pool: KVPool) -> None:
        self._decoder = decoder
        self._pool = pool
        shape = (-1, decoder.config.num_kv_heads, decoder.config.head_dim)
        self._caches = [
            (keys.numpy().reshape(shape), values.numpy().reshape(shape))
            for keys, values in zip(pool.keys, pool.values, strict=True)
        ]
        self._norms = [layer.input_norm.numpy() for layer in decoder.layers] + [decoder.norm.numpy()]
        self._post_norms = [layer.post_norm.numpy() for layer in decoder.layers]
        self._qk_norms = [None if layer.qk_norm is None else layer.qk_norm.numpy() for layer in decoder.layers]
        self._embed, self._table = _lookup(decoder.embedding), decoder.rope_tables[0].numpy()
        self._columns: dict[int, Columns] = {}

    @staticmethod
    def supports(decoder: Decoder) -> bool:
        """Returns True if the class can run the model with float32 activations and keys."""
        if lacking(decoder.config, "cpu_decode"):
            return False
        return isinstance(decoder.layers[0].qkv, (torch.Tensor, ByteWeight))

    def logits(
        self, tokens: np.ndarray, positions: np.ndarray, slots: list[np.ndarray], attention: AttentionBackend
    ) -> torch.Tensor:
        """Returns the same logits [n, V] as Decoder.forward and Decoder.logits. tokens, positions: [n]. slots [n]: of
        each cache group. Stores each token's keys and values. Before the call, `attention` must be planned for these
        sequences."""
        decoder, eps, n = self._decoder, self._decoder.config.rms_norm_eps, len(tokens)
        c = self._columns.get(n)
        if c is None:
            if len(self._columns) == KEPT_SIZES:
                self._columns.pop(next(iter(self._columns)))
            c = self._columns[n] = Columns(decoder, n)
        if n == 1:
            tokens, positions, slots = tokens[0], positions[0], [each[0] for each in slots]
        c.residual[:] = self._embed(tokens).T
        cos, sin = np.split(self._table[positions].T, 2)  # [D / 2, n] each
        cos, sin = np.stack((cos, cos)), np.stack((-sin, sin))
        for i, layer in enumerate(decoder.layers):
            keys, values = self._caches[i]
            _norm(c.residual, self._norms[i], eps, c.x)
            _multiply(layer.qkv, layer.qkv_bias, c.x_, c.qkv_)
            _rotate(c, self._qk_norms[i], eps, cos, sin)
            where = slots[decoder.group_of[i]]
            keys[where], values[where] = c.rotated_k, c.v
            if n > 1:
                np.copyto(c.q, c.rotated_q)
            attended = attention.run(i, c.q_, self._pool.keys[i], self._pool.values[i])
            if n > 1:
                np.copyto(c.attended, attended.numpy().T)
            _add_product(c.residual_, layer.output, layer.output_bias, c.attended_ if n > 1 else attended.view(-1))
            _norm(c.residual, self._post_norms[i], eps, c.x)
            assert isinstance(layer.mlp, DenseMLP)
            _mlp(c, layer.mlp)
        _norm(c.residual, self._norms[-1], eps, c.x)
        if isinstance(decoder.head, ByteWeight):
            return decoder.head.product(_rows(c.x_))
        return torch.mm(decoder.head, c.x_).t().contiguous() if n > 1 else torch.mv(decoder.head, c.x_)[None]


def _norm(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> None:
    """Write the RMSNorm of each column of x [H, n], or of x [H], to `out`; weight [H]."""
    if x.ndim == 1:
        np.multiply(x, 1 / math.sqrt(float(np.dot(x, x)) / len(x) + eps), out=out)
        np.multiply(out, weight, out=out)
        return
    square = np.einsum("hn,hn->n", x, x)
    square /= len(x)
    square += eps
    np.divide(x, np.sqrt(square, out=square), out=out)
    np.multiply(out, weight[:, None], out=out)


def _rotate(c: Columns, weight: np.ndarray | None, eps: float, cos: np.ndarray, sin: np.ndarray) -> None:
    """Normalise queries and keys if there is a weight, and rotate them by their positions (RoPE). weight [heads, D];
    cos and sin [2, D / 2, n]; the sines of the first half are negated."""
    if weight is not None:
        square = np.einsum("hd...,hd...->h...", c.qk, c.qk)
        square /= weight.shape[1]
        square += eps
        np.divide(c.qk, np.sqrt(square, out=square)[:, None], out=c.qk)
        np.multiply(c.qk, weight[..., None] if c.n > 1 else weight, out=c.qk)
    np.multiply(c.halves, cos, out=c.rotated)
    c.rotated += np.multiply(c.halves[:, ::-1], sin, out=c.scratch)


def _mlp(c: Columns, mlp: DenseMLP) -> None:
    _multiply(mlp.gate_up, mlp.gate_up_bias, c.x_, c.gate_up_)
    F.silu(c.gate_, inplace=True)
    c.gate *= c.up
    _add_product(c.residual_, mlp.down, mlp.down_bias, c.gate_)


def _lookup(embedding: Matrix) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function: ids [n] -> rows [n, H] of the embedding; one id -> its row [H]."""
    if not isinstance(embedding, ByteWeight):
        return embedding.numpy().__getitem__
    return lambda ids: embedding.rows(torch.as_tensor(ids)).numpy()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Returns [n, features] of x [features, n], or [1, features] of x [features]."""
    return x.t() if x.dim() > 1 else x[None]


def _multiply(weight: Matrix, bias: torch.Tensor | None, x: torch.Tensor, out: torch.Tensor) -> None:
    """out = weight [out, in] · x [in, n] + bias, or weight · x [in] + bias."""
    if isinstance(weight, ByteWeight):
        _rows(out).copy_(weight.product(_rows(x)))
    elif x.dim() == 1:
        torch.mv(weight, x, out=out)
    else:
        torch.mm(weight, x, out=out)
    if bias is not None:
        out += bias[:, None] if x.dim() > 1 else bias


def _add_product(total: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, x: torch.Tensor) -> None:
    """total += weight [out, in] · x [in, n] + bias, or weight · x [in] + bias."""
    if isinstance(weight, ByteWeight):
        _rows(total).add_(weight.product(_rows(x)))
    elif x.dim() == 1:
        total.addmv_(weight, x)
    else:
        total.addmm_(weight, x)
    if bias is not None:
        total += bias[:, None] if x.dim() > 1 else bias
